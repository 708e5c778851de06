"""edge_formula on CUDA: generated kernels in the emulator, and as nvcc and NVRTC compile them."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch

from pyg_scale.errors import KernelsError
from pyg_scale.ops import build as building
from pyg_scale.ops import cuda_modules, fused, library, nvcc, nvrtc, sources
from pyg_scale.ops import edge_formula as ops
from pyg_scale.ops.adjacency import Adjacency
from pyg_scale.ops.edge_formula import EDGE, NEIGHBOR, OWN, Formula, Reduction, reduce_formula
from pyg_scale.ops.edge_formula_source import takes_number
from tests.ops import emulated
from tests.ops.test_cuda_machine_code import disassembler, in_flight, operations
from tests.ops.test_edge_formula import (
    DESTINATIONS,
    SOURCES,
    TOLERANCE,
    everything,
    graph,
    grown,
    numbers,
)

needs_nvrtc = pytest.mark.skipif(nvrtc.find() is None, reason=f"needs NVRTC: {nvrtc.FIX}")


@pytest.fixture
def generated(monkeypatch):
    """Formulas on CPU tensors run as on CUDA; fresh memory is NaN."""
    monkeypatch.setattr(ops, "_run_interpreted", ops._run_generated)
    monkeypatch.setattr(fused, "why_not_generated", lambda device: "")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    with emulated.instead_of():
        yield
    torch.use_deterministic_algorithms(before)


def near(found, wanted, dtype):
    difference = (found.double() - wanted.double()).detach().norm()
    return float(difference) <= TOLERANCE[dtype] * float(wanted.detach().double().norm())


def compared(edges, f, inputs, width, reduced, how="sum", kept=()):
    found = ops.run_formula(edges, f, inputs, width, reduced, how, kept)
    wide = [x.double() for x in inputs]
    wanted = ops.run_formula_plain(edges, f, wide, width, reduced, how, kept)
    for mine, right in zip(found, wanted, strict=True):
        assert mine.dtype == inputs[0].dtype and mine.shape == right.shape
        assert near(mine, right, mine.dtype)
    return found


WIDTHS = {  # and the columns that are kept
    1: (1,),
    8: (1, 4, 8),
    47: (1, 47),
    64: (1, 8, 64),
    100: (1, 2, 25, 100),
    128: (1, 16, 128),
    192: (64, 192),  # seven tiles of 30 columns, with whole sums of 3
    256: (8, 16, 256),  # two tiles of 128 columns
    264: (24, 33),  # no tile has whole sums of 11 and of 8
    516: (1, 2),  # sums go on in the next tile
}


@pytest.mark.matrix(3)
@pytest.mark.usefixtures("generated")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", WIDTHS)
def test_reduced_and_kept_are_what_plain_torch_computes(width, dtype):
    f, slot, inputs = everything(width, dtype)
    kept = [(slot, columns) for columns in WIDTHS[width]]
    compared(graph(), f, inputs, width, [slot, slot - 3], kept=kept)


@pytest.mark.usefixtures("generated")
@pytest.mark.parametrize("how", ["max", "min"])
@pytest.mark.parametrize(("width", "dtype"), [(100, torch.float32), (8, torch.float64)])
def test_extremes(width, dtype, how):
    f, slot, inputs = everything(width, dtype)
    compared(graph(), f, inputs, width, [slot, slot - 3], how)


@pytest.mark.usefixtures("generated")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("how", ["sum", "max", "softmax", "edge"])
def test_gradients_are_those_of_torch(how, dtype):
    """They have the other instructions: ``equal``, ``gate``, ``sign``, ``leaky_gate``."""
    edges, width = graph(), 24
    f, slot, inputs = everything(width, dtype)
    reduction = Reduction(f, slot, how, width, 0.7, 3)
    found = grown(lambda given: reduce_formula(edges, reduction, given), inputs)
    right = grown(
        lambda given: ops._forward(edges, reduction, given, ops.run_formula_plain)[0], inputs
    )
    for mine, plain in zip(found, right, strict=True):
        assert near(mine, plain, dtype)


def test_every_instruction_has_an_expression():
    from pyg_scale.ops.edge_formula_source import _STEPS

    assert set(_STEPS) == set(ops.CODES)
    numbered = {code for code in ops.CODES if takes_number(code)}
    assert numbered == {"add_number", "mul_number", "leaky", "leaky_gate"}


@pytest.mark.usefixtures("generated")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_special_numbers(dtype):
    x = torch.cat([torch.linspace(-100, 100, 401), torch.linspace(-1, 1, 401)]).to(dtype)
    x = torch.cat([x, torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0]).to(dtype)])
    y = x.flip(0).clone()
    edges = Adjacency(torch.tensor([0, x.numel()]), torch.zeros(x.numel()).long(), 1)
    f = Formula([EDGE, EDGE])
    slots = [f.add(code, 0, 1, 0.25) for code in ops.CODES]
    given = [x.view(-1, 1), y.view(-1, 1)]
    for at in range(0, len(slots), 11):  # as many as a kernel keeps
        some = slots[at : at + 11]
        found = ops.run_formula(edges, f, given, 1, [], kept=[(slot, 1) for slot in some])
        for code, mine in zip(ops.CODES[at:], found):
            right = ops._PLAIN[code](x.double(), y.double(), 0.25).to(dtype)
            torch.testing.assert_close(
                mine.view(-1), right, rtol=1e-14 if dtype == torch.float64 else 1e-6, atol=1e-37,
                equal_nan=True, msg=lambda text, code=code: f"{code}: {text}",
            )  # fmt: skip


@pytest.mark.usefixtures("generated")
@pytest.mark.parametrize(("num_edges", "hub"), [(5000, 4500), (1, 0)])
@pytest.mark.parametrize("how", ["sum", "max"])
def test_rows_that_are_cut_and_edges_that_are_not_there(how, num_edges, hub):
    edges, width = graph(num_edges, hub), 8
    f, slot, inputs = everything(width, torch.float64, num_edges)
    kept = [(slot, 1), (slot, 4), (slot, 8)] if how == "sum" else []
    compared(edges, f, inputs, width, [slot, slot - 3], how, kept)


@pytest.mark.usefixtures("generated")
def test_the_same_bits_in_any_order_of_threads(monkeypatch):
    edges, width, seen = graph(5000, 4500), 8, []
    f, slot, inputs = everything(width, torch.float32, 5000)
    for order in ("forward", "backward"):
        monkeypatch.setenv("PYG_SCALE_EMULATOR_ORDER", order)
        kept = [(slot, 1), (slot, 4), (slot, 8)]
        seen.append(ops.run_formula(edges, f, inputs, width, [slot, slot - 3], "sum", kept))
    assert all(map(torch.equal, *seen))


def gated(ends=(OWN, NEIGHBOR, NEIGHBOR)):
    """``sigmoid(k_i + q_j) * v_j``."""
    f = Formula(ends)
    return f, f.add("mul", f.add("sigmoid", f.add("add", 0, 1)), 2)


LAYOUTS = {  # and the bytes of a load
    "whole": (lambda x: x, 16),
    "one number on": (lambda x: torch.cat([x[:, :1], x], 1)[:, 1:], 4),
    "every other row": (lambda x: x.repeat_interleave(2, 0)[::2], 16),
    "eight bytes on": (lambda x: torch.cat([x[:, :2], x, x[:, :2]], 1)[:, 2:-2], 8),
    "columns apart": (lambda x: x.t().contiguous().t(), 16),
    "one row": (lambda x: x[:1].expand_as(x), 16),
}


@pytest.mark.usefixtures("generated")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_are_read_in_the_widest_loads_that_fit(layout):
    view, bytes_of_load = LAYOUTS[layout]
    f, slot = gated()
    q, v = (view(numbers(SOURCES, 24, torch.float32, k)) for k in (1, 2))
    k = numbers(DESTINATIONS, 24, torch.float32, 3)
    edges = graph(304)  # those of a row are read by fours
    emulated.counts()
    compared(edges, f, [k, q, v], 24, [slot])
    loads, read, _ = emulated.counts()
    assert read == loads * bytes_of_load


@pytest.mark.usefixtures("generated")
def test_every_row_is_read_once_and_those_of_destinations_once_for_all_their_edges():
    f, slot = gated()
    edges = Adjacency(torch.tensor([0, 0, 4, 8, 40]), torch.arange(40) % SOURCES, SOURCES)
    k, q, v = (numbers(rows, 128, torch.float32, 1) for rows in (4, SOURCES, SOURCES))
    emulated.counts()
    compared(edges, f, [k, q, v], 128, [slot])
    _, read, indices = emulated.counts()
    assert read == (4 + 2 * 40) * 128 * 4
    assert indices == 40 * 32  # of each lane


@pytest.mark.usefixtures("generated")
def test_indices_of_32_bits():
    edges, width = graph(5000, 4500), 8
    f, slot, inputs = everything(width, torch.float64, 5000)
    wanted = ops.run_formula(edges, f, inputs, width, [slot], kept=[(slot, 4)])
    short = Adjacency(edges.indptr, edges.indices.int(), SOURCES, edges.edge_id.int())
    found = ops.run_formula(short, f, inputs, width, [slot], kept=[(slot, 4)])
    assert all(map(torch.equal, found, wanted))


@pytest.mark.usefixtures("generated")
def test_graphs_without_edges_or_without_rows():
    f, slot = gated()
    none = torch.zeros(0, dtype=torch.int64)
    features = [torch.full((rows, 8), torch.nan) for rows in (3, 5, 5)]
    edges = Adjacency(torch.zeros(4, dtype=torch.int64), none, 5)
    for how in ops.REDUCTIONS:
        (found,) = ops.run_formula(edges, f, features, 8, [slot], how)
        assert found.tolist() == [[0.0] * 8] * 3
    edges = Adjacency(torch.zeros(1, dtype=torch.int64), none, 5)
    rows, kept = ops.run_formula(
        edges, f, [features[0][:0], *features[1:]], 8, [slot], kept=[(slot, 1)]
    )
    assert rows.shape == (0, 8) and kept.shape == (0, 1)


@pytest.mark.usefixtures("generated")
def test_numbers_that_change_compile_nothing():
    edges, x, names = graph(), numbers(SOURCES, 8, torch.float32, 1), set()
    for slope in (0.1, 0.2):
        f = Formula([NEIGHBOR])
        slot = f.add("leaky", 0, number=slope)
        compared(edges, f, [x], 8, [slot])
        names.add(ops.source_of(ops._shape(f, [x], 8, [slot], "sum", [])).name)
    assert len(names) == 1


@pytest.mark.usefixtures("generated")
def test_an_index_beyond_the_features_ends_the_kernel():
    f, slot = gated()
    edges = Adjacency(torch.tensor([0, 2]), torch.tensor([0, 4]), 5)
    given = [torch.ones(rows, 8) for rows in (1, 5, 4)]  # four rows of the third
    with pytest.raises(RuntimeError, match="edge_formula failed: the kernel trapped"):
        ops.run_formula(edges, f, given, 8, [slot])
    ids = torch.tensor([0, 2])
    edges = Adjacency.of_checked(torch.tensor([0, 2]), torch.tensor([0, 3]), 5, ids)
    with pytest.raises(RuntimeError, match="edge_formula failed: the kernel trapped"):
        ops.run_formula(edges, f, given, 8, [slot], kept=[(slot, 8)])


def test_arguments_that_do_not_fit_are_refused():
    emulated.load()
    op = torch.ops.pyg_scale_emulated.edge_formula_compiled
    graph = torch.tensor([0, 2]), torch.tensor([0, 1]), None
    x = torch.ones(3, 8)
    for message, given in {
        "inputs must be 1 to 16": ([], [], "f", [], 8, 1, []),
        "inputs must be float32": ([x.half()], [0], "f", [], 8, 1, []),
        "matrices of one type": ([x, x.double()], [0, 0], "f", [], 8, 1, []),
        "ends must be 0": ([x], [3], "f", [], 8, 1, []),
        "columns of inputs must divide": ([x], [0], "f", [], 12, 1, []),
        "one row per destination": ([x], [1], "f", [], 8, 1, []),
        "columns of kept": ([x], [0], "f", [], 8, 1, [3]),
        "at most 16 slots": ([x], [0], "f", [], 8, 17, []),
        "numbers must be 64": ([x], [0], "f", [0.0] * 65, 8, 1, []),
    }.items():
        with pytest.raises(Exception, match=message):
            op(*graph, *given)


def test_what_a_kernel_cannot_take_is_said(monkeypatch):
    monkeypatch.setattr(ops, "_run_interpreted", ops._run_generated)
    monkeypatch.setattr(fused, "why_not_generated", lambda device: "there is no NVRTC")
    said = []
    monkeypatch.setattr(library, "warn_plain_path", lambda *given: said.append(given))
    f, slot = gated()
    given = [numbers(rows, 8, torch.float32, 1) for rows in (DESTINATIONS, SOURCES, SOURCES)]
    ops.run_formula(graph(), f, given, 8, [slot])
    assert said == [("edge_formula", "there is no NVRTC")]
    cuda = torch.device("cuda", 0)
    assert ops.why_not_on_cuda(f, cuda) == "there is no NVRTC"
    assert "3 steps on 13 inputs" in ops.why_not_on_cuda(gated([NEIGHBOR] * 13)[0], cuda)


# Compiling ################################################################################


@pytest.mark.parametrize(
    ("switch", "reason"),
    [
        ("auto", "there is no NVRTC to compile kernels for CUDA. Run: pip install"),
        ("1", "PYG_SCALE_CUDA=1 requires those of nvcc. Unset it"),
        ("0", "PYG_SCALE_CUDA=0 forbids kernels for CUDA. Unset it"),
    ],
)
def test_generated_sources_are_only_for_nvrtc(switch, reason, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_CUDA", switch)
    monkeypatch.setattr(nvrtc, "find", lambda: None)
    assert reason in cuda_modules.why_not_generated(90)
    with pytest.raises(KernelsError, match="no NVRTC"):
        cuda_modules.module("edge_formula_of_none", "16", 90)


@needs_nvrtc
def test_nvrtc_compiles_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    f, slot, inputs = everything(64, torch.float32)
    shape = ops._shape(f, inputs, 64, [slot], "sum", [(slot, 1), (slot, 64)])
    source = ops.source_of(shape)
    cuda_modules.keep_source(source.name, source.text)
    made = cuda_modules.module(source.name, "16", 90)
    for kernel in (f"{source.name}_16", f"{source.name}_fold_16"):
        assert f".text.{kernel}\0".encode() in made
    assert cuda_modules.module(source.name, "16", 90) == made
    (kept,) = [p for p in (tmp_path / "pyg_scale" / "cuda").iterdir() if p.suffix != ".lock"]
    assert kept.name.startswith(f"{source.name}-16-sm_90-")


def _stepped(ends, steps):
    f = Formula(ends)
    return f, steps(f)


def _of_cg(f):
    gate = f.add("sigmoid", f.add("add", f.add("add", 0, 1), 2))
    return f.add("mul", gate, f.add("softplus", f.add("add", f.add("add", 3, 4), 5)))


FORMULAS = {  # and the loads that are under way together, forward and backward
    "gine": (lambda: _stepped([NEIGHBOR, EDGE], lambda f: f.add("leaky", f.add("add", 0, 1))), 6),
    "resgated": (gated, 6),
    "cg": (lambda: _stepped([OWN, NEIGHBOR, EDGE] * 2, _of_cg), 4),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("generated")
@pytest.mark.parametrize("name", FORMULAS)
def test_nvcc_keeps_them_in_registers_with_rows_under_way(name, monkeypatch, tmp_path):
    compiler, found = building.find_compiler(), nvcc.find_nvcc()
    if compiler is None or found is None:
        pytest.skip("needs nvcc")
    make, least = FORMULAS[name]
    f, slot = make()
    rows = {NEIGHBOR: SOURCES, OWN: DESTINATIONS, EDGE: 300}
    inputs = [numbers(rows[end], 128, torch.float32, k) for k, end in enumerate(f.ends)]
    texts, keep = {}, cuda_modules.keep_source
    monkeypatch.setattr(
        cuda_modules, "keep_source", lambda *given: (texts.update([given]), keep(*given))
    )
    edges, reduction = graph(), Reduction(f, slot, "sum", 128)
    run = lambda given: reduce_formula(edges, reduction, given)  # noqa: E731
    grown(run, inputs)

    def of_sources(given):
        rows = iter(given)
        return run(
            [next(rows) if end == NEIGHBOR else x for x, end in zip(inputs, f.ends, strict=True)]
        )

    # Where edges want a gradient too, that of the sources may be a sum of theirs.
    grown(of_sources, [x for x, end in zip(inputs, f.ends, strict=True) if end == NEIGHBOR])
    assert len(texts) == 3  # forward, by destination, by source
    for file, text in texts.items():
        source, module = tmp_path / f"{file}.cu", tmp_path / f"{file}.cubin"
        source.write_text(text)
        command = [found, "-ccbin", compiler[0], "-std=c++17", "-O3", "-DNDEBUG", "-fmad=false"]
        command += ["-Xptxas=-v", "-DPYG_SCALE_BYTES=16", f"-I{sources.source_dir() / 'cuda'}"]
        command += ["-cubin", "-arch=sm_90", "-o", str(module), str(source)]
        made = subprocess.run(command, capture_output=True, text=True, timeout=250)
        said = made.stdout + made.stderr
        assert made.returncode == 0, said
        assert {int(n) for n in re.findall(r"(\d+) bytes spill", said)} == {0}, said
        assert max(int(n) for n in re.findall(r"Used (\d+) registers", said)) <= 168
        code = subprocess.run(
            [disassembler(), "-c", module], capture_output=True, text=True, timeout=100
        )
        assert code.returncode == 0, code.stderr
        kernel = operations(code.stdout)[f"{file}_16"]
        assert in_flight(kernel, 128) >= least
        assert not [each for each in kernel if each.startswith(("MATCH", "REDUX", "VOTEU"))]
