"""What reaches a port of ours, and what cannot hurt it."""

from __future__ import annotations

import socket
import struct
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from pyg_scale.comm import Group, frames
from pyg_scale.comm.frames import REPLY, REQUEST, Frame
from pyg_scale.comm.gloo import Gloo
from pyg_scale.comm.handshake import introduce
from pyg_scale.comm.landing import Landing, Landings
from pyg_scale.comm.tcp import TcpService
from pyg_scale.errors import CommError, CommTimeoutError
from pyg_scale.ops.sockets import GatheredRows, RowPlaces
from pyg_scale.testing.ranks import run_ranks


def pair() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(10)
    return ends


def test_frames_come_as_they_went() -> None:
    here, there = pair()
    tensors = [torch.randn(1000, 333), torch.empty(0, 3), torch.tensor(True), torch.ones(3, 2).t()]
    sent = Frame(REQUEST, 2**40, "näme", tensors)
    thread = threading.Thread(target=frames.send, args=(here, sent))
    thread.start()
    found = frames.receive(there, 1 << 30)
    thread.join(10)
    assert found is not None
    assert (found.kind, found.number, found.text) == (REQUEST, 2**40, "näme")
    for a, b in zip(found.tensors, tensors, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    here.close()
    assert frames.receive(there, 1) is None


def test_what_cannot_be_sent_is_refused() -> None:
    here, _ = pair()
    with pytest.raises(ValueError, match="255 tensors"):
        frames.send(here, Frame(REPLY, 0, "", [torch.empty(0)] * 256))
    with pytest.raises(TypeError, match="cannot be sent"):
        frames.send(here, Frame(REPLY, 0, "", [torch.empty(0, dtype=torch.complex32)]))


HEAD, SPEC = frames._HEAD, frames._SPEC


def head(tensors: int, specs: bytes = b"", kind: int = 0, text: int = 0) -> bytes:
    return HEAD.pack(b"pygs", kind, tensors, text, len(specs), 0) + specs


def spec(code: int, dims: int, size: int, *shape: int) -> bytes:
    return SPEC.pack(code, dims, size) + struct.pack(f"<{len(shape)}Q", *shape)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (b"GET / HTTP/1.1\r\n\r\n" + bytes(20), "not a message of pyg_scale"),
        (head(0, kind=9), "not a message of pyg_scale"),
        (head(0, text=5000), "not a message of pyg_scale"),
        (HEAD.pack(b"pygs", 0, 0, 0, 2**31, 0), "not a message of pyg_scale"),
        (head(1, spec(99, 1, 8, 1)), "tensor is not valid"),
        (head(1, spec(5, 9, 8, *[1] * 9)), "tensor is not valid"),
        (head(1, spec(5, 2, 8, 1)), "tensor is not valid"),
        (head(2, spec(5, 1, 8, 1)), "tensor is not valid"),
        (head(1, spec(5, 1, 8, 1, 7)), "tensor is not valid"),
        (head(1), "tensor is not valid"),
        (head(1, spec(5, 1, 8, 2**32)), "was announced with 8"),
        (head(1, spec(5, 1, 8, 2**61)), "which none can have"),
        (head(1, spec(5, 2, 0, 0, 2**64 - 1)), "which none can have"),
        (head(1, spec(5, 3, 0, 0, 2**32, 2**32)), "which none can have"),
        (head(1, spec(5, 1, 8 << 20, 1 << 20)), "may carry 1000"),
    ],
)
def test_what_is_no_message_is_refused_before_memory_is_taken(said: bytes, message: str) -> None:
    here, there = pair()
    here.sendall(said)
    with pytest.raises(CommError, match=message):
        frames.receive(there, 1000)


def test_a_message_that_ends_early_is_an_error() -> None:
    for said in (head(1, spec(5, 1, 800, 100)), head(1, spec(5, 1, 800, 100)) + bytes(799)):
        here, there = pair()
        here.sendall(said)
        here.close()
        with pytest.raises(ConnectionResetError, match="in the middle of a message"):
            frames.receive(there, 1000)


# Rows that go where they belong ################################################################

X = torch.arange(600, dtype=torch.int16).view(torch.uint8).view(100, 12)


def landing(count: int, row_bytes: int = 12) -> Landing:
    out = torch.zeros(100, row_bytes, dtype=torch.uint8)
    return Landing(RowPlaces(out, count, torch.arange(count).flip(0), None))


@pytest.mark.parametrize("timeout", [None, 10.0])
def test_rows_are_chosen_as_they_go_and_land_as_they_come(timeout: float | None) -> None:
    here, there = pair()
    for end in (here, there):
        end.settimeout(timeout)
    index = torch.arange(0, 100, 3)
    wanted, other_count, other_size = landing(34), landing(33), landing(34, 11)
    sent = Frame(REPLY, 5, "", [torch.arange(3), *[GatheredRows(X, index)] * 3, torch.ones(2)])
    asked = []

    def landings(kind: int, number: int) -> list[Landing | None]:
        asked.append((kind, number))
        return [None, wanted, other_count, other_size]

    thread = threading.Thread(target=frames.send, args=(here, sent), daemon=True)
    thread.start()
    found = frames.receive(there, 1 << 30, landings)
    thread.join(10)
    assert found is not None and asked == [(REPLY, 5)]
    first, landed, *others, last = found.tensors
    assert first.tolist() == [0, 1, 2] and last.tolist() == [1, 1]
    assert wanted.landed and landed.shape == (34, 12) and landed.nbytes == 34 * 12
    assert torch.equal(wanted.places.out[:34], X[index].flip(0))
    assert not wanted.places.out[34:].any()
    for other, rows in zip((other_count, other_size), others, strict=True):
        assert not other.landed and not other.places.out.any()
        assert torch.equal(rows, X[index])


def test_answers_land_and_what_is_withdrawn_does_not() -> None:
    late = threading.Event()

    class Answers:
        def __call__(self, got: list[torch.Tensor]) -> list[torch.Tensor]:
            return [each.tensor() for each in self.rows(got)]

        def rows(self, got: list[torch.Tensor]) -> list[GatheredRows]:
            if got[0].numel() == 5:
                assert late.wait(20)
            return [GatheredRows(X, got[0])]

    def work(group: Group) -> None:
        with Gloo.join(group) as comm:
            service = comm.serve({"rows": Answers()})
            if group.rank == 0:
                index = torch.arange(0, 100, 3)
                for rank in (0, 1):  # itself as well, which writes nothing
                    wanted = landing(34)
                    answer = service.request(rank, "rows", [index])
                    answer.land([wanted])
                    (found,) = answer.wait()
                    if wanted.landed:
                        found = wanted.places.out[:34].flip(0)
                    assert torch.equal(found, X[index])
                dropped = landing(5)
                answer = service.request(1, "rows", [torch.arange(5)])
                answer.land([dropped])
                answer.withdraw()
                late.set()
                assert torch.equal(answer.wait()[0], X[:5])
                assert not dropped.landed and not dropped.places.out.any()
                with pytest.raises(CommError, match="index.1. is 100"):
                    service.request(1, "rows", [torch.tensor([1, 100])]).wait()
            service.close(wait=20)

    run_ranks(2, work)


def test_what_is_being_written_is_broken_off() -> None:
    landings, ended = Landings(), threading.Event()
    landings.open(3)
    landings.expect(3, [landing(1)])
    assert len(landings.begin(3, ended.set)) == 1

    def stop() -> None:
        assert ended.wait(20)
        landings.done(3)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    landings.withdraw(3, 20.0)
    assert ended.is_set() and not landings._now
    landings.expect(3, [landing(1)])  # too late
    assert landings.begin(3, ended.set) == ()
    thread.join(10)


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def calling(store: Any, service: TcpService, rank: int) -> socket.socket:
    """The connection of a rank that is played."""
    host, port = store.get(f"address/{service.rank}").decode().split()
    connection = socket.create_connection((host, int(port)), timeout=10)
    introduce(connection, service._key, rank, service.rank, 10.0)
    return connection


def test_what_follows_a_hello_may_be_garbage() -> None:
    store = HashStore()
    service = TcpService(Group(store, 0, 2, 5.0), {"one": lambda _: [torch.ones(1)]}, 1)
    try:
        with calling(store, service, 1) as peer:
            peer.sendall(b"garbage" * 10)
            assert closed(peer)
        with calling(store, service, 1) as peer:
            frames.send(peer, Frame(REQUEST, 7, "one"))
            answer = frames.receive(peer, 1000)
            assert answer is not None and answer.kind == REPLY and answer.number == 7
    finally:
        service.close()


def test_waiting_for_a_rank_out_of_reach_is_ended_by_another_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service, tried = TcpService(Group(HashStore(), 0, 2, 5.0), {}, 1), threading.Event()

    def out_of_reach(*_: object) -> None:
        tried.set()
        raise CommTimeoutError("rank 1 cannot be reached")

    monkeypatch.setattr(service, "_peer", out_of_reach)
    missing: list[int] = []
    waits = threading.Thread(target=lambda: missing.extend(service.close(60.0)), daemon=True)
    waits.start()
    assert tried.wait(20)
    service.close()
    waits.join(20)
    assert not waits.is_alive() and missing == [1]


def test_nobody_is_waited_for_who_can_never_come() -> None:
    """The store went with rank 0 before this rank spoke to any other: nobody finds it any more."""
    limit = timedelta(seconds=20)
    held = [TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)]
    store = TCPStore("127.0.0.1", held[0].port, None, False, limit)
    store.set("token", "0" * 32)
    service, missing = TcpService(Group(store, 1, 3, 5.0), {}, 1), [[-1]]
    held.clear()
    waits = threading.Thread(target=lambda: missing.append(service.close(600.0)), daemon=True)
    waits.start()
    waits.join(30)
    ended = not waits.is_alive()
    service.close()
    assert ended and missing[-1] == [0, 2]


@pytest.mark.parametrize("how", ["token", "address", "gloo"])
def test_a_store_that_is_gone_is_no_rank_that_is_late(how: str) -> None:
    limit = timedelta(seconds=20)
    held = [TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)]
    group = Group(TCPStore("127.0.0.1", held[0].port, None, False, limit), 1, 2, 15.0)

    def address() -> None:
        group.store.set("token", "0" * 32)
        service = TcpService(group, {}, 1)
        try:
            service.request(0, "any", []).wait()
        finally:
            service.close()

    ways = {"token": lambda: TcpService(group, {}, 1), "gloo": lambda: Gloo.join(group)}
    goes = threading.Timer(0.3, held.clear)
    goes.start()
    with pytest.raises(CommError, match="in which the ranks meet, is gone") as error:
        ways.get(how, address)()
    goes.join(10)
    assert not isinstance(error.value, CommTimeoutError) and "15" not in str(error.value)


def test_whoever_is_connected_is_waited_for_without_a_store() -> None:
    limit = timedelta(seconds=20)
    held = [TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)]
    store = TCPStore("127.0.0.1", held[0].port, None, False, limit)
    store.set("token", "0" * 32)
    service = TcpService(Group(store, 1, 2, 5.0), {"one": lambda _: [torch.ones(1)]}, 1)
    with calling(store, service, 0) as peer:
        frames.send(peer, Frame(REQUEST, 1, "one"))
        assert frames.receive(peer, 1000) is not None
        held.clear()
        missing: list[list[int]] = []
        waits = threading.Thread(target=lambda: missing.append(service.close(60.0)), daemon=True)
        waits.start()
        waits.join(1.0)
        assert waits.is_alive()
        frames.send(peer, Frame(REQUEST, 2, "one"))
        answer = frames.receive(peer, 1000)
        assert answer is not None and answer.kind == REPLY
    waits.join(20)
    service.close()
    assert missing == [[0]]  # it ended without a word


def test_a_rank_that_reads_nothing_does_not_keep_all_threads() -> None:
    """It has asked for more than a socket holds, several times; others get their answers."""
    store, begun = HashStore(), threading.Semaphore(0)

    def large(_: list[torch.Tensor]) -> list[torch.Tensor]:
        begun.release()
        return [torch.zeros(1 << 25, dtype=torch.uint8)]

    handlers = {"large": large, "small": lambda got: got}
    asked = TcpService(Group(store, 0, 3, 20.0), handlers, 2)
    other = TcpService(Group(store, 2, 3, 20.0), {}, 1)
    try:
        with calling(store, asked, 1) as stopped:
            for number in range(4):
                frames.send(stopped, Frame(REQUEST, number, "large"))
            for _ in range(4):  # both threads are done with making the answers
                assert begun.acquire(timeout=15)
            for number in range(8):
                (found,) = other.request(0, "small", [torch.tensor(number)]).wait(15)
                assert int(found) == number
            numbers = []
            for _ in range(4):  # and the rank that reads again gets all of them
                answer = frames.receive(stopped, 1 << 30)
                assert answer is not None and answer.tensors[0].nbytes == 1 << 25
                numbers.append(answer.number)
            assert sorted(numbers) == [0, 1, 2, 3]
    finally:
        other.close()
        asked.close()
