"""Who may talk to a server, and what strangers at its port cannot do."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from typing import Any

import pytest
import torch
import zmq

from pyg_scale.errors import CommError, RequestError
from pyg_scale_zmq import check, settings
from pyg_scale_zmq.backend import Zmq
from pyg_scale_zmq.messages import REQUEST, Message, frames_of
from pyg_scale_zmq.settings import greets_with_curve, keys_of

SECRET = "a secret of sixteen or more"
OTHER = "another secret, as long as it"
ANYWHERE = "tcp://127.0.0.1:*"
LONG = 20.0


class Server:
    """A server that counts what it was asked."""

    def __init__(self, address: str = ANYWHERE) -> None:
        self.asked = 0
        self.listener = Zmq.listen(address, {"graph": self._answer}, token=SECRET)
        self.address = self.listener.address

    def _answer(self, got: list[torch.Tensor]) -> list[torch.Tensor]:
        self.asked += 1
        return got

    @property
    def where(self) -> tuple[str, int]:
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        return host, int(port)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()


def ask(address: str, secret: str = SECRET, number: int = 7) -> int:
    with Zmq.connect([address], token=secret, timeout=LONG) as client:
        return int(client.request(0, "graph", [torch.tensor(number)]).wait()[0])


def test_what_travels_is_encrypted_and_answered_once():
    """A stranger hears everything that goes over the wire, and says it again later."""
    heard: list[bytes] = []
    with Server() as server, socket.create_server(("127.0.0.1", 0)) as between:

        def pass_on() -> None:
            ends = between.accept()[0], socket.create_connection(server.where, timeout=LONG)

            def copy(source: socket.socket, sink: socket.socket) -> None:
                with contextlib.suppress(OSError):
                    while more := source.recv(1 << 16):
                        if source is ends[0]:
                            heard.append(more)
                        sink.sendall(more)
                    sink.shutdown(socket.SHUT_WR)

            with ends[0], ends[1]:
                back = threading.Thread(target=copy, args=ends[::-1], daemon=True)
                back.start()
                copy(*ends)
                back.join(LONG)

        thread = threading.Thread(target=pass_on, daemon=True)
        thread.start()
        said = 0x1122334455667788
        assert ask("tcp://127.0.0.1:{1}".format(*between.getsockname()), number=said) == said
        thread.join(LONG)
        whole = b"".join(heard)
        assert b"CURVE" in whole and server.asked == 1
        for plain in (SECRET.encode(), b"graph", b"pygz", said.to_bytes(8, "little")):
            assert plain not in whole
        for pieces in (heard, [whole]):
            with socket.create_connection(server.where, timeout=2.0) as stranger:
                for piece in pieces:
                    with contextlib.suppress(OSError):
                        stranger.sendall(piece)
                        stranger.recv(1 << 16)
        assert ask(server.address) == 7
        assert server.asked == 2


@pytest.mark.parametrize("how", ["none", "plain", "own keys", "the server's key"])
def test_strangers_with_a_socket_of_zeromq_are_not_answered(how):
    context = zmq.Context()
    try:
        stranger = context.socket(zmq.DEALER)
        if how == "plain":
            stranger.plain_username, stranger.plain_password = b"pyg_scale", SECRET.encode()
        elif how != "none":
            server_secret = SECRET if how == "the server's key" else OTHER
            stranger.curve_serverkey = keys_of(server_secret, "server")[0]
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        with Server() as server:
            stranger.connect(server.address)
            stranger.send_multipart(frames_of(Message(REQUEST, 1, "graph", [])))
            assert not stranger.poll(300)
            assert ask(server.address) == 7 and server.asked == 1
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("address", [ANYWHERE, "ipc://{}", "tcp://[::1]:*"])
def test_another_secret_is_said_again_and_again(address, tmp_path):
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(Server(address.format(tmp_path / "s")))
        except CommError:
            pytest.skip("this machine has no IPv6")
        client = stack.enter_context(Zmq.connect([server.address], token=OTHER, timeout=LONG))
        for _ in range(5):
            with pytest.raises(RequestError, match="another secret") as found:
                client.request(0, "graph", []).wait()
            assert (found.value.kind, found.value.where) == ("PermissionError", server.address)
        assert ask(server.address) == 7 and server.asked == 1


def test_a_client_is_let_in_by_a_server_that_comes_with_its_secret():
    with Server() as server:
        address = server.address
        client = Zmq.connect([address], token=OTHER, timeout=LONG)
        with pytest.raises(RequestError):
            client.request(0, "graph", []).wait()
    with client, Zmq.listen(address, {"graph": lambda got: got}, token=OTHER):
        deadline = time.monotonic() + LONG
        while True:
            try:
                assert client.request(0, "graph", []).wait() == []
                return
            except CommError:
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_who_ends_every_connection_is_not_taken_for_one_with_another_secret():
    """As what stands before a server that is down, and may come back."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        address = "tcp://127.0.0.1:{1}".format(*door.getsockname())

        def end() -> None:
            with contextlib.suppress(OSError):
                while True:
                    door.accept()[0].close()

        threading.Thread(target=end, daemon=True).start()
        with pytest.raises(CommError, match=address) as found:
            ask(address)
        assert not isinstance(found.value, RequestError)
        door.shutdown(socket.SHUT_RDWR)


def test_two_hundred_idle_connections_cost_no_threads_and_keep_nobody_out():
    with Server() as server, contextlib.ExitStack() as stack:
        before = threading.active_count()
        for _ in range(200):
            stack.enter_context(socket.create_connection(server.where, timeout=LONG))
        assert threading.active_count() == before
        assert ask(server.address) == 7


def test_random_bytes_neither_crash_nor_hang_it():
    draw = random.Random(5)
    greeting = settings._GREETING
    with Server() as server:
        for _ in range(100):
            said = bytearray(greeting + b"\x04\xc8\x05HELLO\x01\x00" + draw.randbytes(192))
            for _ in range(draw.randrange(3)):
                said[draw.randrange(len(said))] = draw.randrange(256)
            with (
                socket.create_connection(server.where, timeout=LONG) as stranger,
                contextlib.suppress(OSError),
            ):
                stranger.sendall(said[: draw.randrange(1, len(said) + 1)])
        assert ask(server.address) == 7
        assert server.asked == 1 and server.listener.error is None


def test_what_greets_like_a_server_of_ours():
    context = zmq.Context()
    try:
        with Server() as server:
            assert greets_with_curve(server.address)
        assert not greets_with_curve(server.address)
        other = context.socket(zmq.ROUTER)
        other.bind(ANYWHERE)
        assert not greets_with_curve(other.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())
    finally:
        context.destroy(linger=0)


def test_without_curve_nothing_begins(monkeypatch):
    monkeypatch.setattr(zmq, "has", lambda _: False)
    begins: Any
    for begins in (lambda: Zmq.listen(ANYWHERE, {}, token=SECRET), lambda: ask("tcp://host:1")):
        with pytest.raises(CommError, match="without CURVE.*pip install"):
            begins()
    found = check.check()
    assert found.ok is False and "without CURVE" in found.detail and "pip install" in found.fix
