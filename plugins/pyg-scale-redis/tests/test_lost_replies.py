"""A server that did what it was asked, and whose reply does not come."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pyg_scale_redis import Redis, feature_store

pytestmark = pytest.mark.timeout(60)
PATIENCE = 20.0
OLD, NEW, NEWEST = torch.zeros(5, 2), torch.ones(5, 2), torch.full((5, 2), 2.0)

OnExec = Callable[[bytes, socket.socket, socket.socket], None]
"""What becomes of a transaction, given the two ends of the connection; then it is cut."""


class Between:
    """Stands between a store and its server, and gives the first transaction to ``on_exec``."""

    def __init__(self, server: Any, on_exec: OnExec) -> None:
        self._server, self._on_exec = server.socket, [on_exec]
        path = server.socket.with_name("between.sock")
        path.unlink(missing_ok=True)
        self.url = f"unix://{path}"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                store, _ = self._listening.accept()
                threading.Thread(target=self._pass, args=(store,), daemon=True).start()

    def _pass(self, store: socket.socket) -> None:
        with contextlib.suppress(OSError), store, socket.socket(socket.AF_UNIX) as there:
            there.connect(str(self._server))
            while True:
                for end in select.select([store, there], [], [], PATIENCE)[0]:
                    said = end.recv(1 << 16)
                    if not said:
                        return
                    if end is store and b"EXEC" in said and self._on_exec:
                        self._on_exec.pop()(said, store, there)
                        return
                    (there if end is store else store).sendall(said)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


@pytest.fixture
def between(server: Any) -> Iterator[Callable[[OnExec], str]]:
    """Makes the URL of a server whose first transaction is given to a function."""
    made: list[Between] = []

    def make(on_exec: OnExec) -> str:
        made.append(Between(server, on_exec))
        return made[-1].url

    yield make
    for each in made:
        each.close()


def apply(said: bytes, there: socket.socket) -> None:
    """Let the server do it."""
    there.sendall(said)
    reply = b""
    while not re.search(rb"\r\n[*_]", reply):  # what EXEC returns, or nothing
        found = there.recv(1 << 16)
        assert found
        reply += found


def lost(said: bytes, store: socket.socket, there: socket.socket) -> None:
    apply(said, there)


def late(said: bytes, store: socket.socket, there: socket.socket) -> None:
    apply(said, there)
    assert not store.recv(1)  # it has hung up


def whole(server: Any, expected: torch.Tensor) -> None:
    """The server has this tensor, for good, and no other rows."""
    assert torch.equal(Redis(server.url)["a", "x", None], expected)
    with server.client() as client:
        (rows,) = client.keys("pyg_scale:rows:*")
        assert client.ttl(rows) == -1


@pytest.mark.parametrize("what", [lost, late])
@pytest.mark.parametrize("before", [OLD, None], ids=["replaced", "new"])
def test_what_was_published_is_not_taken_away(
    server: Any, between: Any, what: OnExec, before: torch.Tensor | None
) -> None:
    if before is not None:
        Redis(server.url)["a", "x", None] = before
    store = Redis(between(what), timeout=1.0)
    assert store.put_tensor(NEW, group_name="a", attr_name="x", index=None)
    whole(server, NEW)
    assert torch.equal(store["a", "x", None], NEW)


def test_an_error_does_not_take_away_what_was_published(
    server: Any, between: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Redis(server.url)["a", "x", None] = OLD
    monkeypatch.setattr(feature_store, "_ATTEMPTS", 1)
    with pytest.raises(RuntimeError, match="1 times"):
        Redis(between(lost))["a", "x", None] = NEW
    whole(server, NEW)


def test_what_another_writer_put_meanwhile_stays(server: Any, between: Any) -> None:
    other = Redis(server.url)
    other["a", "x", None] = OLD

    def overtaken(said: bytes, store: socket.socket, there: socket.socket) -> None:
        apply(said, there)
        other["a", "x", None] = NEWEST

    with pytest.raises(RuntimeError, match="replaced by another writer already"):
        Redis(between(overtaken))["a", "x", None] = NEW
    whole(server, NEWEST)


def test_what_comes_after_its_rows_were_dropped_does_nothing(
    server: Any, between: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Redis(server.url)["a", "x", None] = OLD
    monkeypatch.setattr(feature_store, "_ATTEMPTS", 1)
    release, done = threading.Event(), threading.Event()

    def held(said: bytes, store: socket.socket, there: socket.socket) -> None:
        store.shutdown(socket.SHUT_RDWR)
        assert release.wait(PATIENCE)
        apply(said, there)
        done.set()

    with pytest.raises(RuntimeError, match="1 times"):
        Redis(between(held))["a", "x", None] = NEW
    release.set()
    assert done.wait(PATIENCE)
    whole(server, OLD)
