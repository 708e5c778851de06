"""Requests and answers over real sockets, and everything that may come instead."""

from __future__ import annotations

import gc
import pickle
import socket
import struct
import threading
import time
from typing import Any

import pytest
import torch
import zmq

from pyg_scale.errors import CommError, CommTimeoutError, RequestError
from pyg_scale_zmq.backend import Zmq
from pyg_scale_zmq.messages import REQUEST, Message, frames_of, message_of

TOKEN = "a token of sixteen or more"
ANYWHERE = "tcp://127.0.0.1:*"


def listen(handlers: Any = None, address: str = ANYWHERE, **options: Any) -> Any:
    handlers = {"twice": lambda got: [*got, *got]} | (handlers or {})
    return Zmq.listen(address, handlers, token=TOKEN, **options)


def connect(*listeners: Any, token: str = TOKEN, timeout: float = 20.0) -> Any:
    addresses = [each if isinstance(each, str) else each.address for each in listeners]
    return Zmq.connect(addresses, token=token, timeout=timeout)


def test_every_dtype_and_shape_comes_back():
    with listen() as server, connect(server) as client:
        for dtype in (torch.bool, torch.uint8, torch.int32, torch.bfloat16, torch.complex128):
            for shape in ((), (0,), (3,), (2, 0, 4), (700, 41)):
                sent = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
                found = client.request(0, "twice", [sent, sent.t() if sent.dim() == 2 else sent])
                one, two, three, _ = found.wait()
                assert one.dtype == dtype and one.shape == shape
                assert torch.equal(one, sent) and torch.equal(three, sent)
                assert torch.equal(two, sent.t() if sent.dim() == 2 else sent)
                one.zero_()  # the memory is the reader's own


def test_what_came_lives_as_long_as_its_tensor():
    with listen() as server, connect(server) as client:
        sent = torch.randn(1 << 18)
        kept = [client.request(0, "twice", [sent]).wait()[0] for _ in range(5)]
    gc.collect()
    assert all(torch.equal(each, sent) for each in kept)


def test_many_requests_of_several_threads_and_servers():
    with listen() as one, listen() as two, connect(one, two) as client:
        errors: list[BaseException] = []

        def ask(number: int) -> None:
            try:
                for i in range(20):
                    sent = torch.full((100 * number + i,), number)
                    asked = [client.request(s, "twice", [sent]) for s in (0, 1)]
                    for reply in reversed(asked):
                        assert torch.equal(reply.wait()[1], sent)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not errors


def test_an_error_of_a_handler_says_its_kind():
    def fail(_: Any) -> Any:
        raise IndexError("node 7 is not here")

    handlers = {"fail": fail, "odd": lambda _: ["no tensor"]}
    with listen(handlers) as server, connect(server) as client:
        with pytest.raises(RequestError, match="node 7") as found:
            client.request(0, "fail", []).wait()
        assert (found.value.kind, found.value.reason) == ("IndexError", "node 7 is not here")
        with pytest.raises(RequestError, match="no handler 'what'; this rank serves"):
            client.request(0, "what", []).wait()
        with pytest.raises(RequestError, match="TypeError: a message has tensors"):
            client.request(0, "odd", []).wait()
        assert client.request(0, "twice", []).wait() == []


def test_a_wrong_token_is_refused_before_anything_is_read():
    called = threading.Event()
    with listen({"call": lambda _: called.set() or []}) as server:
        with connect(server, token="another token, as long") as stranger:
            for _ in range(2):
                with pytest.raises(RequestError, match="refuses the token"):
                    stranger.request(0, "call", []).wait()
        with connect(server) as client:
            client.request(0, "twice", []).wait()
        assert not called.is_set()


def test_nobody_there_and_somebody_who_comes_later():
    with listen() as server:
        address = server.address
    with connect(address) as client:
        with pytest.raises(CommError, match="cannot be reached"):
            client.request(0, "twice", []).wait()
        with listen(address=address):
            deadline = time.monotonic() + 15
            while True:
                try:
                    assert client.request(0, "twice", []).wait() == []
                    break
                except CommTimeoutError:
                    raise
                except CommError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)


def test_a_server_that_goes_fails_what_it_was_asked():
    began, release = threading.Event(), threading.Event()

    def stuck(_: Any) -> Any:
        began.set()
        release.wait(20)
        return []

    with listen({"stuck": stuck}) as server, connect(server) as client:
        reply = client.request(0, "stuck", [])
        assert began.wait(10)
        server.close()
        with pytest.raises(CommError, match="lost|reached"):
            reply.wait()
        release.set()


def test_an_answer_that_does_not_come_is_a_timeout_that_names_the_server():
    release = threading.Event()
    handlers = {"stuck": lambda _: release.wait(20) and []}
    with listen(handlers) as server, connect(server, timeout=0.3) as client:
        with pytest.raises(CommTimeoutError, match=f"{server.address} did not answer"):
            client.request(0, "stuck", []).wait()
        release.set()
        assert client.request(0, "twice", []).wait(10) == []


def test_a_client_that_goes_leaves_the_server_well():
    release = threading.Event()
    with listen({"slow": lambda got: (release.wait(20), got)[1]}) as server:
        with connect(server) as gone:
            for _ in range(3):
                gone.request(0, "slow", [torch.randn(1000)])
        release.set()
        with connect(server) as client:
            assert len(client.request(0, "slow", [torch.ones(2)]).wait()) == 1


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


def test_a_copy_in_another_process_connects_anew():
    with listen() as server, connect(server) as client:
        client.request(0, "twice", []).wait()
        with pickle.loads(pickle.dumps(client)) as copy:
            assert copy.request(0, "twice", [torch.ones(1)]).wait()[0].item() == 1
        assert client.request(0, "twice", []).wait() == []
    with pytest.raises(CommError, match="closed"):
        client.request(0, "twice", [])
    client.close()
    server.close()


@pytest.mark.parametrize("address", ["here", "tcp://host", "tcp://host:99999", "http://host:1"])
def test_wrong_addresses(address: str):
    with pytest.raises(ValueError, match="tcp://host:5555"):
        Zmq.connect([address], token=TOKEN)
    with pytest.raises(ValueError, match="tcp://host:5555"):
        listen(address=address)


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
