"""What reaches a port of ours, and what cannot hurt it."""

from __future__ import annotations

import socket
import struct
import threading

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from pyg_scale.comm import Group, frames
from pyg_scale.comm.frames import REPLY, REQUEST, Frame
from pyg_scale.comm.tcp import TcpService
from pyg_scale.errors import CommError


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


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (b"GET / HTTP/1.1\r\n\r\n" + bytes(20), "no message of pyg_scale"),
        (HEAD.pack(b"pygs", 9, 0, 0, 0), "no message of pyg_scale"),
        (HEAD.pack(b"pygs", 0, 0, 5000, 0), "no message of pyg_scale"),
        (HEAD.pack(b"pygs", 0, 1, 0, 0) + SPEC.pack(99, 1, 8), "no tensor"),
        (HEAD.pack(b"pygs", 0, 1, 0, 0) + SPEC.pack(5, 9, 8), "no tensor"),
        (
            HEAD.pack(b"pygs", 0, 1, 0, 0) + SPEC.pack(5, 1, 8) + struct.pack("<Q", 2**61),
            "was announced with 8",
        ),
        (
            HEAD.pack(b"pygs", 0, 1, 0, 0) + SPEC.pack(5, 1, 8 << 20) + struct.pack("<Q", 1 << 20),
            "may carry 1000",
        ),
    ],
)
def test_what_is_no_message_is_refused_before_memory_is_taken(said: bytes, message: str) -> None:
    here, there = pair()
    here.sendall(said)
    with pytest.raises(CommError, match=message):
        frames.receive(there, 1000)


def test_a_message_that_ends_early_is_an_error() -> None:
    here, there = pair()
    here.sendall(HEAD.pack(b"pygs", 0, 1, 0, 0))
    here.close()
    with pytest.raises(ConnectionResetError, match="in the middle of a message"):
        frames.receive(there, 1000)


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_strangers_are_not_listened_to() -> None:
    store = HashStore()
    asked: list[int] = []

    def handler(_: list[torch.Tensor]) -> list[torch.Tensor]:
        asked.append(1)
        return []

    service = TcpService(Group(store, 0, 2, 5.0), {"secret": handler}, 1)
    try:
        host, port = store.get("address/0").decode().split()
        for hello in (b"x" * 40, b"0" * 32 + struct.pack("<Q", 1), b"short"):
            with socket.create_connection((host, int(port)), timeout=10) as stranger:
                stranger.sendall(hello)
                if len(hello) < 40:
                    stranger.shutdown(socket.SHUT_WR)
                assert closed(stranger)
        # with the token, but as a rank that cannot be
        with socket.create_connection((host, int(port)), timeout=10) as stranger:
            stranger.sendall(store.get("token") + struct.pack("<Q", 2))
            assert closed(stranger)
        # with the token, then garbage: closed, and the service goes on
        with socket.create_connection((host, int(port)), timeout=10) as peer:
            peer.sendall(store.get("token") + struct.pack("<Q", 1) + b"garbage" * 10)
            assert closed(peer)
        with socket.create_connection((host, int(port)), timeout=10) as peer:
            peer.sendall(store.get("token") + struct.pack("<Q", 1))
            frames.send(peer, Frame(REQUEST, 7, "secret"))
            answer = frames.receive(peer, 1000)
            assert answer is not None and answer.kind == REPLY and answer.number == 7
        assert asked == [1]
    finally:
        service.close()
