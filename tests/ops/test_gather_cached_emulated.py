"""The kernel of ``gather_cached`` in the emulator, against torch's own indexing, bit by bit."""

from __future__ import annotations

import ctypes

import pytest
import torch

from pyg_scale.errors import DeviceError
from pyg_scale.ops import fused, mapped_rows
from pyg_scale.ops.gather_cached import gather_cached
from pyg_scale.ops.mapped_rows import MappedRows
from tests.ops import emulated
from tests.ops.gathers import DTYPES, SHAPES, Rows, rows


@pytest.fixture(autouse=True)
def device():
    emulated.load()


def emulated_gather(made: Rows) -> list[torch.Tensor]:
    op = torch.ops.pyg_scale_emulated.gather_cached
    staged, place = made.staged()
    return [
        op(made.cached, made.table, made.index, made.slot_of),
        op(made.cached, made.table, made.index.int(), made.slot_of),
        op(made.cached, staged, place, None),
    ]


@pytest.mark.parametrize("order", ["forward", "backward"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_kind(dtype, shape, order, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_EMULATOR_ORDER", order)
    made = rows(dtype, shape, count=40)
    for found in emulated_gather(made):
        assert found.dtype == dtype
        assert torch.equal(found, made.expected)


@pytest.mark.parametrize(("num_rows", "num_slots", "count"), [(0, 0, 0), (9, 0, 5), (9, 9, 700)])
def test_nothing_all_and_more_than_a_block(num_rows, num_slots, count):
    made = rows(torch.float32, (5,), num_rows, num_slots, count)
    for found in emulated_gather(made):
        assert torch.equal(found, made.expected)


def test_layouts():
    made = rows(torch.float32, (12,))
    op = torch.ops.pyg_scale_emulated.gather_cached
    wide = torch.randn(50, 20)
    wide[:, 3:15] = made.table
    for table in (wide[:, 3:15], made.table.t().contiguous().t()):
        assert torch.equal(op(made.cached, table, made.index, made.slot_of), made.expected)
    shifted = torch.cat([torch.zeros(1), made.table.flatten()])[1:].view(50, 12)
    assert torch.equal(op(made.cached, shifted, made.index, made.slot_of), made.expected)


@pytest.mark.parametrize("shift", [0, 1, 4, 13])
@pytest.mark.parametrize("width", [1, 3, 4, 32, 33, 100, 256])
def test_rows_of_the_host_that_are_mapped(width, shift):
    made = rows(torch.float32, (width,))
    table = torch.cat([torch.zeros(shift), made.table.flatten()])[shift:].view(50, width)
    with emulated.instead_of():
        torch.ops.pyg_scale.map_rows(table, 0)
        try:
            found = gather_cached(made.cached, table, made.index, made.slot_of)
        finally:
            torch.ops.pyg_scale.unmap_rows(table, 0)
    assert torch.equal(found, made.expected)


CUDA = torch.device("cuda", 0)


@pytest.fixture
def mappable(monkeypatch):
    """Rows of the host can be mapped; none are left mapped."""
    monkeypatch.setattr(mapped_rows, "why_not_mapped", lambda tensor, device: "")
    monkeypatch.setattr(fused, "usable", lambda tensor: True)
    with emulated.instead_of():
        yield
    assert not mapped_rows._locked and not mapped_rows._to_unlock


def test_memory_is_locked_as_long_as_somebody_wants_it(mappable):
    x = torch.rand(6, 4)
    first, second = MappedRows(x, CUDA), MappedRows(x, CUDA)
    found = gather_cached(x[:0], first, -1 - torch.tensor([4, 1]))
    assert torch.equal(found, x[[4, 1]])
    del first
    with pytest.raises(RuntimeError, match="registered already"):
        torch.ops.pyg_scale.map_rows(x, 0)
    del second
    torch.ops.pyg_scale.map_rows(x, 0)
    assert torch.ops.pyg_scale.unmap_rows(x, 0)
    with pytest.raises(RuntimeError, match="cuMemHostUnregister: it is not registered"):
        torch.ops.pyg_scale.unmap_rows(x, 0)


def pinned(monkeypatch, holds):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: holds)


def test_who_wants_a_part_of_what_is_locked_shares_it(mappable, monkeypatch):
    x = torch.rand(12, 4)
    whole = MappedRows(x[:8], CUDA)
    pinned(monkeypatch, True)  # to torch it is, whoever registered it
    part = MappedRows(x[2:4], CUDA)
    with pytest.raises(DeviceError, match="64 bytes .* cannot be locked .*registered already"):
        MappedRows(x[6:10], CUDA)
    del whole
    found = gather_cached(x[:0], part, -1 - torch.tensor([1, 0]))
    assert torch.equal(found, x[[3, 2]])
    del part
    pinned(monkeypatch, False)
    MappedRows(x[6:10], CUDA)


def test_what_torch_pinned_is_not_locked_again(mappable, monkeypatch):
    x = torch.rand(12, 4)
    pinned(monkeypatch, True)
    torch.ops.pyg_scale.map_rows(x, 0)  # as torch does
    found = gather_cached(x[:0], MappedRows(x[2:], CUDA), -1 - torch.tensor([1]))
    assert torch.equal(found, x[[3]])
    assert torch.ops.pyg_scale.unmap_rows(x, 0)


def test_while_a_graph_is_recorded_nothing_is_unlocked_but_later(mappable, monkeypatch):
    x, y = torch.rand(6, 4), torch.rand(5, 4)
    rows = MappedRows(x, CUDA)
    monkeypatch.setenv("PYG_SCALE_EMULATOR_CAPTURES", "1")
    del rows
    pinned(monkeypatch, True)
    with pytest.raises(DeviceError, match="registered already"):
        MappedRows(x[2:4], CUDA)
    address = x.data_ptr()
    del x
    (left,) = mapped_rows._to_unlock
    assert left[0].data_ptr() == address, "the memory lives on"
    del left
    monkeypatch.delenv("PYG_SCALE_EMULATOR_CAPTURES")
    pinned(monkeypatch, False)
    MappedRows(y, CUDA)


@pytest.mark.parametrize(
    ("index", "looked_up"), [([0, 50], True), ([-1], True), ([17], False), ([-51], False)]
)
def test_a_number_that_is_no_row_ends_the_kernel(index, looked_up):
    made = rows(torch.float32, (3,))
    op = torch.ops.pyg_scale_emulated.gather_cached
    with pytest.raises(RuntimeError, match="gather_cached failed: the kernel trapped"):
        op(made.cached, made.table, torch.tensor(index), made.slot_of if looked_up else None)


def test_what_is_not_alike_is_refused():
    made = rows(torch.float32, (3,))
    op = torch.ops.pyg_scale_emulated.gather_cached
    for rest in (made.table[:, :2], made.table.double(), made.table[0]):
        with pytest.raises((RuntimeError, ValueError), match="rest must have rows like"):
            op(made.cached, rest, made.index, None)
    with pytest.raises((RuntimeError, ValueError), match="slot_of"):
        op(made.cached, made.table, made.index, made.slot_of[:-1])


FAULTS = {
    "PYG_SCALE_FAULT_WHOLE_LINES": "AddressSanitizer: heap-",
    "PYG_SCALE_FAULT_NO_CHECKS": "AddressSanitizer: ",
}


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_alone_under_sanitizers_and_with_faults(fault):
    program = emulated.program(
        "check_gather.cpp", ["gather_cached"], fault=fault, of="gather_cached"
    )
    done = emulated.run(program)
    if fault:
        assert done.returncode != 0
        assert FAULTS[fault] in done.stdout + done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "0 failures\n"), done.stdout + done.stderr


class Gather(ctypes.Structure):
    """``GatherCached`` of ``csrc/cuda/loading.h``."""

    _fields_ = tuple(
        [(name, ctypes.c_int64) for name in ("cached", "slots", "cached_stride")]
        + [(name, ctypes.c_int64) for name in ("rest", "rows", "rest_stride", "index")]
        + [("wide", ctypes.c_bool), ("slot_of", ctypes.c_void_p)]
        + [(name, ctypes.c_int64) for name in ("count", "row_bytes")]
        + [("over_the_bus", ctypes.c_bool), ("out", ctypes.c_int64)]
    )


@pytest.mark.parametrize("shift", [0, 4, 8])
def test_words_that_are_not_aligned_end_the_kernel(shift):
    """Processors of hosts read them all the same, a GPU does not."""
    driver = ctypes.CDLL(str(emulated.libcuda()))
    context, module, kernel, text = (ctypes.c_void_p() for _ in range(4))
    mode, lanes = ctypes.c_int(2), ctypes.c_int(1)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1)
    driver.cuCtxPushCurrent_v2(context)
    try:
        assert driver.cuModuleLoadData(ctypes.byref(module), b"emulated") == 0
        assert driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"gather_cached_16") == 0
        table, index = torch.arange(12.0), torch.tensor([1])
        out = torch.zeros(4)
        at = table.data_ptr() + shift
        rest = (0, 0, 0, index.data_ptr(), True, None, 1, 16, False, out.data_ptr())
        given = Gather(at, 2, 16, *rest)
        pointers = (ctypes.c_void_p * 2)(ctypes.addressof(given), ctypes.addressof(lanes))
        stream = ctypes.c_void_p(0x5717)
        code = driver.cuLaunchKernel(kernel, 1, 1, 1, 256, 1, 1, 0, stream, pointers, None)
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if shift == 0:
        assert (code, out.tolist()) == (0, [4.0, 5.0, 6.0, 7.0])
        return
    assert code == 719
    driver.cuGetErrorString(code, ctypes.byref(text))
    assert b"is not a multiple of" in ctypes.string_at(text.value)
