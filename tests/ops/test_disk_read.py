"""Rows of a file: every size and offset, merged reads, the end of the file, with O_DIRECT too."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale.ops.disk_read import BLOCK, TRUNCATED, disk_read

pytestmark = pytest.mark.matrix(5)

DIRECT = getattr(os, "O_DIRECT", 0)


@pytest.fixture(params=["never", "require"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "require" and not library.status()["loaded"]:
        pytest.skip("the kernels are not compiled")
    monkeypatch.setenv("PYG_SCALE_KERNELS", request.param)
    return request.param


class Rows:
    """A file of rows of random bytes after a header."""

    def __init__(self, path: Path, num_rows: int, row_bytes: int, offset: int, flags: int) -> None:
        generator = torch.Generator().manual_seed(row_bytes)
        self.values = torch.randint(
            0, 256, (num_rows, row_bytes), generator=generator, dtype=torch.uint8
        )
        self.path = path
        path.write_bytes(b"h" * offset + self.values.numpy().tobytes())
        self.offset = offset
        try:
            self.fd = os.open(path, os.O_RDONLY | flags)
        except OSError:
            pytest.skip(f"the file system of {path} has no O_DIRECT")


@pytest.fixture(params=[0, DIRECT], ids=["cached", "direct"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[object]:
    made: list[Rows] = []

    def build(num_rows: int, row_bytes: int, offset: int = 128) -> Rows:
        made.append(Rows(tmp_path / str(len(made)), num_rows, row_bytes, offset, request.param))
        return made[-1]

    yield build
    for each in made:
        os.close(each.fd)


@pytest.mark.parametrize("row_bytes", [1, 7, 400, 512, 4096, 5000, 70_001])
@pytest.mark.parametrize("offset", [0, 128, 4096, 4100])
def test_rows_in_any_order(kernels: str, make, row_bytes: int, offset: int) -> None:
    file = make(37, row_bytes, offset)
    generator = torch.Generator().manual_seed(1)
    for count in (1, 5, 60):
        index = torch.randint(0, 37, (count,), generator=generator)
        position = torch.randperm(80, generator=generator)[:count]
        out = torch.full((80, row_bytes), 3, dtype=torch.uint8)
        done = disk_read(file.fd, offset, 37, index, position, out, longest=8192, gap=512)
        assert done.error == 0 and done.num_bytes > 0
        expected = torch.full((80, row_bytes), 3, dtype=torch.uint8)
        expected[position] = file.values[index]
        assert torch.equal(out, expected)


def test_the_last_row_and_every_row(kernels: str, make) -> None:
    file = make(1000, 33)
    out = torch.empty(1000, 33, dtype=torch.uint8)
    every = torch.arange(1000)
    assert disk_read(file.fd, 128, 1000, every, every.flip(0), out).reads == 1
    assert torch.equal(out, file.values.flip(0))
    last = torch.tensor([999])
    disk_read(file.fd, 128, 1000, last, last * 0, out)
    assert torch.equal(out[0], file.values[999])


@pytest.mark.parametrize(
    ("gap", "longest", "reads"),
    [(0, 1 << 20, 3), (BLOCK, 1 << 20, 2), (100 * BLOCK, 1 << 20, 1), (100 * BLOCK, BLOCK, 4)],
)
def test_neighbours_are_read_together(
    kernels: str, make, gap: int, longest: int, reads: int
) -> None:
    """Rows of one block each: 5 and 6 beside each other, 8 after one more, 50 far away."""
    file = make(60, BLOCK, 0)
    index = torch.tensor([8, 50, 5, 6])
    out = torch.empty(4, BLOCK, dtype=torch.uint8)
    done = disk_read(
        file.fd, 0, 60, index, torch.arange(4), out, gap=gap, longest=longest, num_threads=3
    )
    assert done.reads == reads
    assert torch.equal(out, file.values[index])


@pytest.mark.parametrize("left", [0, 100, 128 + 5 * 400 - 1, 6000])
def test_a_file_that_was_truncated(kernels: str, make, left: int) -> None:
    file = make(50, 400)
    os.truncate(file.path, left)
    out = torch.zeros(3, 400, dtype=torch.uint8)
    index, position = torch.tensor([40, 4, 41]), torch.arange(3)
    done = disk_read(file.fd, 128, 50, index, position, out, gap=0, num_threads=1)
    assert done.error == TRUNCATED
    assert (done.first, done.last) == ((4, 4) if left < 6000 else (40, 41))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("num_threads", [None, 1, 16])
@pytest.mark.parametrize("row_bytes", [600, 4096, 300_000])
def test_many_reads(kernels: str, make, row_bytes: int, num_threads: int | None) -> None:
    """More than a ring has room for, and blocks that several rows need."""
    num_rows = min(20_000, 60_000_000 // row_bytes)
    file = make(num_rows, row_bytes, 4096)
    index = torch.randperm(num_rows, generator=torch.Generator().manual_seed(2))[: num_rows // 2]
    out = torch.empty(index.numel(), row_bytes, dtype=torch.uint8)
    position = torch.arange(index.numel()).flip(0)
    done = disk_read(
        file.fd,
        4096,
        num_rows,
        index,
        position,
        out,
        gap=0,
        longest=4 * BLOCK,
        num_threads=num_threads,
    )
    assert done.error == 0 and done.reads > 40
    assert torch.equal(out[position], file.values[index])


@pytest.mark.parametrize("num_threads", [None, 4])
@pytest.mark.parametrize("left", [0, 3_000_000, 4_000_100])
def test_many_reads_of_a_file_that_was_truncated(
    kernels: str, make, left: int, num_threads: int | None
) -> None:
    file = make(1000, 8192, 0)
    os.truncate(file.path, left)
    index = torch.arange(0, 1000, 3)
    out = torch.zeros(index.numel(), 8192, dtype=torch.uint8)
    position = torch.arange(index.numel())
    done = disk_read(file.fd, 0, 1000, index, position, out, gap=0, num_threads=num_threads)
    assert done.error == TRUNCATED
    assert done.first == done.last and done.first * 8192 + 8192 > left and done.first in index


def _rings() -> list[str]:
    """The rings that this process has open."""
    folder = Path("/proc/self/fd")
    names = [os.readlink(each) for each in folder.iterdir() if each.is_symlink()]
    return [name for name in names if "io_uring" in name]


def test_a_thread_keeps_a_ring_of_its_own(tmp_path: Path) -> None:
    """One for all of its reads; it ends with the thread, and a fork does not share it."""
    if not library.status()["loaded"] or not DIRECT:
        pytest.skip("no compiled kernels, or no O_DIRECT")
    file = Rows(tmp_path / "rows", 500, 4096, 0, DIRECT)
    mine, others = torch.arange(0, 500, 10), torch.arange(5, 500, 10)
    expected = {id(each): file.values[each].numpy().tobytes() for each in (mine, others)}
    positions, out = torch.arange(50), torch.zeros(50, 4096, dtype=torch.uint8)

    def right(index: torch.Tensor) -> bool:  # no op of torch, whose threads a fork does not copy
        ctypes.memset(out.data_ptr(), 0, out.numel())
        done = disk_read(file.fd, 0, 500, index, positions, out, gap=0)
        return done.error == 0 and out.numpy().tobytes() == expected[id(index)]

    found: list[object] = []

    def work() -> None:
        before = len(_rings())
        found.extend(right(mine) for _ in range(3))
        found.append(len(_rings()) - before)
        if (child := os.fork()) == 0:
            signal.alarm(20)  # which ends it
            os._exit(0 if right(others) and right(others) else 1)
        found.append(os.waitpid(child, 0)[1])
        found.append(right(mine))

    try:
        start = len(_rings())
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if found[3] == 0:
            pytest.skip("the kernel allows no rings")
        assert found == [True, True, True, 1, 0, True]
        for _ in range(100):  # a thread is joined before it has destroyed what is its own
            if len(_rings()) <= start:
                break
            time.sleep(0.1)
        assert len(_rings()) <= start
    finally:
        os.close(file.fd)


def test_a_file_that_is_closed(kernels: str, make) -> None:
    file = make(50, 400)
    out, index = torch.zeros(1, 400, dtype=torch.uint8), torch.tensor([7])
    wrong = os.open(file.path, os.O_WRONLY)
    try:
        done = disk_read(wrong, 128, 50, index, index * 0, out)
    finally:
        os.close(wrong)
    assert done.error > 0 and (done.first, done.last) == (7, 7)


@pytest.mark.parametrize(("row", "position"), [(-1, 0), (50, 0), (3, -1), (3, 1)])
def test_rows_and_positions_that_do_not_exist(kernels: str, make, row: int, position: int) -> None:
    file = make(50, 400)
    out = torch.zeros(1, 400, dtype=torch.uint8)
    with pytest.raises(ValueError, match="rows of the file and of out"):
        disk_read(file.fd, 128, 50, torch.tensor([row]), torch.tensor([position]), out)


def test_nothing_to_read(kernels: str, make) -> None:
    file, none = make(5, 8), torch.empty(0, dtype=torch.int64)
    assert disk_read(file.fd, 128, 5, none, none, torch.empty(0, 8, dtype=torch.uint8)).reads == 0
