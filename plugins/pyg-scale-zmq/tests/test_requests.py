"""Requests and answers over real sockets, and everything that may come instead."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import pytest
import torch
import zmq

from pyg_scale.errors import CommError, CommTimeoutError, RequestError
from pyg_scale_zmq import listener
from pyg_scale_zmq.backend import Zmq
from pyg_scale_zmq.messages import REPLY, REQUEST, Message, frames_of, message_of
from pyg_scale_zmq.settings import keys_of

TOKEN = "a secret of sixteen or more"
ANYWHERE = "tcp://127.0.0.1:*"


def listen(handlers: Any = None, address: str = ANYWHERE, **options: Any) -> Any:
    handlers = {"twice": lambda got: [*got, *got]} | (handlers or {})
    return Zmq.listen(address, handlers, token=TOKEN, **options)


def connect(*listeners: Any, token: str = TOKEN, timeout: float = 20.0) -> Any:
    addresses = [each if isinstance(each, str) else each.address for each in listeners]
    return Zmq.connect(addresses, token=token, timeout=timeout)


def test_too_large_a_request_is_not_taken():
    with listen(max_bytes=10_000) as server, connect(server) as client:
        large = client.request(0, "twice", [torch.zeros(1 << 20)])
        with pytest.raises(CommError):
            large.wait(5)
    with listen(max_bytes=10_000) as server, connect(server, timeout=0.5) as client:
        many = [torch.zeros(1000) for _ in range(5)]  # each fits, together they do not
        with pytest.raises(CommError):
            client.request(0, "twice", many).wait()
        assert len(client.request(0, "twice", many[:1]).wait(10)) == 2


def test_a_stranger_at_the_port_harms_nobody():
    with listen() as server:
        port = int(server.address.rpartition(":")[2])
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(said)
        with connect(server) as client:
            assert client.request(0, "twice", [torch.ones(1)]).wait()[0].item() == 1


def test_a_server_of_another_protocol_is_said():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def answer() -> None:
            while True:
                try:
                    found, _ = other.accept()
                except OSError:
                    return
                with found:
                    found.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)

        threading.Thread(target=answer, daemon=True).start()
        with connect(f"tcp://127.0.0.1:{port}") as client, pytest.raises(CommError):
            client.request(0, "twice", []).wait(10)
        other.shutdown(socket.SHUT_RDWR)


def test_other_wrong_arguments():
    with pytest.raises(ValueError, match="16 characters"):
        Zmq.connect(["tcp://host:1"], token="short")
    with pytest.raises(ValueError, match="where to listen"):
        Zmq.connect(["tcp://*:5"], token=TOKEN)
    with pytest.raises(NotImplementedError, match="gloo"):
        Zmq.join(None)
    with listen() as server, pytest.raises(CommError, match="cannot listen"):
        listen(address=server.address)
    with (
        listen() as server,
        connect(server) as client,
        pytest.raises(ValueError, match="no server"),
    ):
        client.request(1, "twice", [])


# What must not end a thread ####################################################################


def malformed() -> bytes:
    """A request of a tensor without elements whose other extent no tensor can have."""
    (head,) = frames_of(Message(REQUEST, 0, "twice", [torch.empty(0, 5)]))
    shape = struct.pack("<2Q", 0, 5)
    assert head.endswith(shape)
    return head[: -len(shape)] + struct.pack("<2Q", 0, (1 << 64) - 1)


def test_a_malformed_request_is_dropped_and_the_next_one_answered():
    context = zmq.Context()
    try:
        stranger = context.socket(zmq.DEALER)
        stranger.curve_serverkey = keys_of(TOKEN, "server")[0]
        stranger.curve_publickey, stranger.curve_secretkey = keys_of(TOKEN, "client")
        with listen() as server, connect(server) as client:
            stranger.connect(server.address)
            stranger.send(malformed())
            stranger.send_multipart(frames_of(Message(REQUEST, 7, "twice", [])))
            assert stranger.poll(20_000), "the server is gone"
            answer = message_of(stranger.recv_multipart(copy=False), 1 << 20)
            assert (answer.kind, answer.number) == (REPLY, 7)
            assert client.request(0, "twice", []).wait() == []
            assert server.error is None
    finally:
        context.destroy(linger=0)


def no_memory(*_: Any) -> Any:
    raise MemoryError("there is none")


@pytest.mark.parametrize("how", ["malformed", "no memory"])
def test_an_answer_that_cannot_be_read_fails_no_later_request(how, monkeypatch):
    with listen() as server, connect(server) as client:
        with monkeypatch.context() as patch:
            if how == "malformed":
                patch.setattr(listener, "frames_of", lambda message: [malformed()])
            else:
                patch.setattr("pyg_scale_zmq.connection.message_of", no_memory)
            with pytest.raises(CommError, match=f"{server.address}: it sent what is no answer"):
                client.request(0, "twice", []).wait()
        assert client.request(0, "twice", []).wait() == []


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def test_an_error_that_cannot_be_told_is_told_nevertheless():
    def fail(_: Any) -> Any:
        raise Unspeakable

    with listen({"fail": fail}) as server, connect(server) as client:
        with pytest.raises(RequestError, match="no words"):
            client.request(0, "fail", []).wait()
        assert client.request(0, "twice", []).wait() == []


def broken(*_: Any) -> Any:
    raise OSError("no such socket")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_client_whose_thread_has_ended_says_why_at_once(monkeypatch):
    with listen() as server, connect(server) as client:
        assert client.request(0, "twice", []).wait() == []
        monkeypatch.setattr(client._inside._servers[0], "flush", broken)
        for _ in range(3):
            with pytest.raises(CommError, match="has ended by OSError: no such socket"):
                client.request(0, "twice", []).wait()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_whose_thread_has_ended_says_why(monkeypatch):
    with listen() as server, connect(server) as client:
        assert client.request(0, "twice", []).wait() == []
        assert server.error is None
        monkeypatch.setattr(server._inside, "_receive", broken)
        with pytest.raises(CommError) as found:
            client.request(0, "twice", []).wait()
        assert not isinstance(found.value, CommTimeoutError)
        assert f"{server.address} has ended by OSError: no such socket" in str(server.error)


# What is on the wire ###########################################################################


def arrived(parts: list[bytes], max_bytes: int = 1 << 20) -> Message:
    return message_of([zmq.Frame(bytes(part)) for part in parts], max_bytes)


def test_a_message_is_what_was_sent():
    sent = [torch.arange(6).view(2, 3), torch.empty(0, 4), torch.tensor(2.5)]
    found = arrived(frames_of(Message(REQUEST, 9, "name", sent)))
    assert (found.kind, found.number, found.text) == (REQUEST, 9, "name")
    assert all(torch.equal(a, b) for a, b in zip(found.tensors, sent, strict=True))


def test_altered_messages_raise_and_nothing_else():
    head, *payload = (bytes(f) for f in frames_of(Message(REQUEST, 9, "name", [torch.ones(3)] * 2)))
    for at in range(len(head)):
        for value in (0, 1, 127, 255):
            altered = head[:at] + bytes([value]) + head[at + 1 :]
            try:
                found = arrived([altered, *payload])
            except CommError:
                continue
            assert sum(t.nbytes for t in found.tensors) == 24
    for cut in range(len(head)):
        with pytest.raises(CommError):
            arrived([head[:cut], *payload])
    for parts in ([], [head], [head, payload[0]], [head, *payload, b"more"], [head, b"", b""]):
        with pytest.raises(CommError):
            arrived(parts)
    with pytest.raises(CommError, match="a message may have 23"):
        arrived([head, *payload], max_bytes=23)


def test_sizes_that_overflow_are_refused():
    head, payload = frames_of(Message(REQUEST, 0, "", [torch.ones(2, 2)]))
    shape = struct.pack("<2Q", 2, 2)
    assert head.endswith(shape)
    for wrong in ((1 << 63, 1 << 63), (1 << 62, 4), (0, 1 << 63), (1, 4)):
        other = head[: -len(shape)] + struct.pack("<2Q", *wrong)
        try:
            found = arrived([other, bytes(payload)])
        except CommError:
            continue
        assert found.tensors[0].shape == (1, 4)
