"""Tensors and rows through a socket, compiled or not: what arrives is what was sent."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_scale.ops import library
from pyg_scale.ops.sockets import GatheredRows, RowPlaces, receive, send


@pytest.fixture(params=["never", "require"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "require" and not library.status()["loaded"]:
        pytest.skip("the kernels are not compiled")
    monkeypatch.setenv("PYG_SCALE_KERNELS", request.param)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    yield here, there
    here.close()
    there.close()


def matrix(rows: int, row_bytes: int) -> Tensor:
    generator = torch.Generator().manual_seed(row_bytes)
    return torch.randint(256, (rows, row_bytes), dtype=torch.uint8, generator=generator)


def through(ends: tuple[socket.socket, socket.socket], sent: Any, into: Any) -> None:
    thread = threading.Thread(target=send, args=(ends[0], sent), daemon=True)
    thread.start()
    receive(ends[1], into)
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("row_bytes", [0, 1, 8, 37, 512, 5000, 300_000])
def test_rows_go_where_they_belong(
    ends: tuple[socket.socket, socket.socket], row_bytes: int
) -> None:
    count = 3000 if row_bytes <= 512 else 40
    x = matrix(count, row_bytes)
    generator = torch.Generator().manual_seed(1)
    index = torch.randint(count, (count * 2 // 3,), generator=generator)
    position = torch.randperm(count, generator=generator)[: index.numel()]
    out = torch.zeros_like(x)
    expected = torch.zeros_like(x)
    expected[position] = x[index]
    first, last = torch.arange(5), torch.randn(100_000)
    got_first, got_last = torch.empty_like(first), torch.empty_like(last)
    places = RowPlaces(out, index.numel(), position, None)
    for rows in (
        GatheredRows(x, index),
        GatheredRows(x, index.int()),
        GatheredRows(x, index).tensor(),
    ):
        out.zero_()
        through(ends, [first, rows, last], [got_first, places, got_last])
        assert torch.equal(out, expected)
        assert torch.equal(got_first, first) and torch.equal(got_last, last)


def test_a_row_that_goes_to_several_places(ends: tuple[socket.socket, socket.socket]) -> None:
    x = matrix(2000, 300)
    take = torch.randint(2000, (5000,), generator=torch.Generator().manual_seed(2)).sort().values
    position = torch.randperm(6000, generator=torch.Generator().manual_seed(3))[:5000]
    out = torch.zeros(6000, 300, dtype=torch.uint8)
    through(ends, [x], [RowPlaces(out, 2000, position, take)])
    assert torch.equal(out[position], x[take])
    assert int(out.count_nonzero()) == int(x[take].count_nonzero()), "nothing else was written"


def test_the_first_rows_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    x, out = matrix(700, 9), torch.zeros(900, 9, dtype=torch.uint8)
    none = torch.empty(0, dtype=torch.int64)
    through(ends, [x], [RowPlaces(out, 700, none, None)])
    assert torch.equal(out[:700], x) and not out[700:].any()


@pytest.mark.parametrize("wrong", [-1, 10])
def test_nothing_is_sent_of_rows_that_do_not_exist(
    ends: tuple[socket.socket, socket.socket], wrong: int
) -> None:
    with pytest.raises(IndexError, match=str(wrong)):
        send(ends[0], [torch.arange(3), GatheredRows(matrix(10, 4), torch.tensor([1, wrong]))])
    ends[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        ends[1].recv(1)


@pytest.mark.parametrize(
    ("position", "take"),
    [
        ([0, 9, 1], None),
        ([0, -1, 1], None),
        ([0, -(2**63), 1], None),
        ([0, 2**63 - 1, 1], None),
        ([0, 1, 2], [0, 2, 1]),
        ([0, 1, 2], [0, 1, 3]),
        ([0, 1, 2], [-1, 1, 2]),
    ],
)
def test_places_that_do_not_exist(
    ends: tuple[socket.socket, socket.socket], position: list[int], take: list[int] | None
) -> None:
    if not library.compiled():
        pytest.skip("places are checked where they are written without torch")
    out = torch.zeros(9, 4, dtype=torch.uint8)
    taken = None if take is None else torch.tensor(take)
    with pytest.raises(ValueError, match="a position is out of range|take must ascend"):
        receive(ends[1], [RowPlaces(out, 3, torch.tensor(position), taken)])


def test_connections_that_end(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    here.sendall(b"abc")
    here.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError, match="in the middle of a message"):
        receive(there, [torch.empty(4, dtype=torch.uint8)])
    there.close()
    with pytest.raises(OSError) as error:
        send(here, [torch.zeros(1 << 20)])
    assert error.value.errno in (errno.EPIPE, errno.ECONNRESET)
