"""Who may talk to a rank, and what strangers at its port cannot do."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from pyg_scale import comm
from pyg_scale.comm import Group, handshake
from pyg_scale.comm.handshake import Acceptor, introduce
from pyg_scale.comm.secret import checked_secret, derive_key, known_secret, read_secret
from pyg_scale.comm.tcp import TcpService
from pyg_scale.distributed import init
from pyg_scale.distributed.failover import Health, Search
from pyg_scale.errors import AccessError, CommError

SECRET = "a secret of sixteen or more"
OTHER = "another secret, as long as it"
LONG = 20.0


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYG_SCALE_SECRET", "PYG_SCALE_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)


class Rank:
    """A rank that serves, and counts what it was asked."""

    def __init__(
        self, store: HashStore, rank: int, secret: str | None = SECRET, world_size: int = 3
    ) -> None:
        self.asked = 0
        group = Group(store, rank, world_size, LONG, secret)
        self.service = TcpService(group, {"graph": self._answer}, 2)

    def _answer(self, got: list[torch.Tensor]) -> list[torch.Tensor]:
        self.asked += 1
        return got

    def ask(self, other: int) -> int:
        return int(self.service.request(other, "graph", [torch.tensor(7)]).wait(LONG)[0])

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.service.close()


def where(store: HashStore, rank: int) -> tuple[str, int]:
    host, port = store.get(f"address/{rank}").decode().split()
    return host, int(port)


def threads() -> int:
    return sum(each.name.startswith("pyg_scale") for each in threading.enumerate())


# The handshake #################################################################################


@pytest.mark.parametrize("secret", [SECRET, None])
def test_ranks_with_one_secret_or_without_any_answer_each_other(secret: str | None) -> None:
    store = HashStore()
    with Rank(store, 0, secret) as zero, Rank(store, 1, secret) as one:
        assert zero.ask(1) == one.ask(0) == 7


@pytest.mark.parametrize("secret", [OTHER, None])
def test_another_secret_is_said_in_time_with_the_rank_and_what_to_do(secret: str | None) -> None:
    store = HashStore()
    with Rank(store, 0, world_size=2) as zero, Rank(store, 1, secret, 2) as one:
        host, port = where(store, 1)
        said = rf"^rank 1 at {host}:{port} has another secret than rank 0, or .*PYG_SCALE_SECRET_FI"
        with pytest.raises(AccessError, match=said):
            zero.ask(1)
        with pytest.raises(PermissionError, match="rank 0 at .* than rank 1"):
            one.ask(0)
        assert zero.asked == one.asked == 0
        assert one.service.close(wait=0.5) == [0]  # neither hears the other's goodbye
        assert zero.service.close(wait=0.5) == [1]


def test_another_secret_is_no_failure_that_other_ranks_make_good() -> None:
    class Both:
        direct, num_parts = (), 1

        def holders(self, part: int) -> list[int]:
            return [1, 2]

    search = Search(0, Both(), Health(1.0), 1.0)
    search.failed(1, CommError("gone"))
    with pytest.raises(AccessError):
        search.failed(2, AccessError("rank 2 has another secret"))


def test_whoever_reads_the_store_and_replays_what_was_said_is_not_answered() -> None:
    store = HashStore()
    with Rank(store, 0) as rank:
        hello, request = recorded_talk(rank, where(store, 0))
        assert rank.asked == 1
        for said in (hello + request, hello, hello[:48], hello[48:], request):
            with socket.create_connection(where(store, 0), timeout=LONG) as stranger:
                with contextlib.suppress(OSError):
                    stranger.sendall(said)
                    stranger.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    assert len(stranger.recv(1 << 16, socket.MSG_WAITALL)) in (0, 40)
        # In turn, as the one that is called asks for it
        with socket.create_connection(where(store, 0), timeout=LONG) as stranger:
            stranger.sendall(hello[:48])
            assert len(stranger.recv(40, socket.MSG_WAITALL)) == 40
            stranger.sendall(hello[48:])
            assert stranger.recv(33, socket.MSG_WAITALL) == bytes(33)
            with contextlib.suppress(OSError):
                stranger.sendall(request)
                assert stranger.recv(1) == b""
        # With the token of the store as if it were the secret, and with none
        token = store.get("token").decode()
        for key in (derive_key(token, f"ranks {token}"), derive_key("", f"ranks {token}")):
            with (
                socket.create_connection(where(store, 0), timeout=LONG) as stranger,
                pytest.raises(AccessError),
            ):
                introduce(stranger, key, 1, 0, LONG)
        assert rank.asked == 1


def test_who_stands_between_two_ranks_and_passes_on_their_proofs_is_noticed() -> None:
    """A stranger has written its own address into the store."""
    store = HashStore()
    with Rank(store, 0) as zero, Rank(store, 1) as one:
        address = where(store, 1)
        with socket.create_server(("127.0.0.1", 0)) as between:
            store.set("address/1", "127.0.0.1 {1}".format(*between.getsockname()))

            def copy(source: socket.socket, sink: socket.socket) -> None:
                with contextlib.suppress(OSError):
                    while more := source.recv(1 << 16):
                        sink.sendall(more)
                    sink.shutdown(socket.SHUT_WR)

            def pass_on() -> None:
                ends = between.accept()[0], socket.create_connection(address, timeout=LONG)
                with ends[0], ends[1]:
                    back = threading.Thread(target=copy, args=ends[::-1], daemon=True)
                    back.start()
                    copy(*ends)
                    back.join(LONG)

            thread = threading.Thread(target=pass_on, daemon=True)
            thread.start()
            with pytest.raises(AccessError):
                zero.ask(1)
            thread.join(LONG)
        assert one.asked == 0


class Recorded:
    """A socket, and everything that was sent by it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.sent = connection, b""

    def sendall(self, said: bytes) -> None:
        self.sent += said
        self.connection.sendall(said)

    def __getattr__(self, name: str) -> object:
        return getattr(self.connection, name)


def recorded_talk(rank: Rank, address: tuple[str, int]) -> tuple[bytes, bytes]:
    """What a rank with the secret says in its hello, and as a request."""
    from pyg_scale.comm import frames

    with socket.create_connection(address, timeout=LONG) as connection:
        recorded = Recorded(connection)
        introduce(recorded, rank.service._key, 1, 0, LONG)  # type: ignore[arg-type]
        here, there = socket.socketpair()
        frames.send(here, frames.Frame(frames.REQUEST, 1, "graph", [torch.tensor(7)]))
        request = there.recv(1 << 16)
        connection.sendall(request)
        assert frames.receive(connection, 1000) is not None
    return recorded.sent, request


def test_a_rank_that_cannot_prove_the_secret_is_told_nothing() -> None:
    """It says that the caller is welcome, and has to prove that it may say so."""
    here, there = socket.socketpair()
    with here, there:
        key = derive_key(SECRET, "ranks x")

        def pretend() -> None:
            hello = there.recv(48, socket.MSG_WAITALL)
            there.sendall(hello[:8] + bytes(32))
            proof = there.recv(32, socket.MSG_WAITALL)
            there.sendall(b"\1" + proof)  # the caller's own proof, sent back

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(AccessError):
            introduce(here, key, 0, 1, LONG)


def test_what_speaks_another_protocol_is_said() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)
        with pytest.raises(CommError, match="another protocol"):
            introduce(here, bytes(32), 0, 1, LONG)
    here, there = socket.socketpair()
    with here, there, pytest.raises(TimeoutError):
        introduce(here, bytes(32), 0, 1, 0.05)


# Strangers #####################################################################################


def test_two_hundred_idle_connections_cost_no_threads_and_keep_nobody_out() -> None:
    store = HashStore()
    with Rank(store, 0) as zero, Rank(store, 1) as one, contextlib.ExitStack() as stack:
        before = threads()
        idle = [
            stack.enter_context(socket.create_connection(where(store, 1), timeout=LONG))
            for _ in range(200)
        ]
        assert zero.ask(1) == 7
        assert threads() <= before + 3  # the two ends of that connection, and who makes it
        assert len(one.service._acceptor._heard) <= handshake.MOST_CALLERS
        assert idle[0].recv(1) == b""  # the first ones were dropped for the last


def test_a_slow_hello_ends_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HELLO_SECONDS", 0.3)
    store = HashStore()
    with Rank(store, 0), socket.create_connection(where(store, 0), timeout=LONG) as stranger:
        ended = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                for byte in handshake._MARK * 5:  # fewer than a hello has
                    stranger.sendall(bytes([byte]))
                    if ended.wait(0.02):
                        return

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        ended.set()
        thread.join(LONG)


def test_a_hello_that_is_too_long_or_of_none_of_ours_is_cut_off() -> None:
    store = HashStore()
    with Rank(store, 0) as zero, Rank(store, 1) as one:
        hello = handshake._HELLO.pack(handshake._MARK, 0, 1, bytes(32))
        wrong = [
            hello + b"x",  # more than it may say before it is answered
            bytes(1 << 20),
            handshake._HELLO.pack(handshake._MARK, 3, 1, bytes(32)),  # no such rank
            handshake._HELLO.pack(handshake._MARK, 0, 2, bytes(32)),  # looks for another one
            handshake._HELLO.pack(b"pygs-hi0", 0, 1, bytes(32)),
            b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n" * 2,
        ]
        for said in wrong:
            with socket.create_connection(where(store, 1), timeout=LONG) as stranger:
                with contextlib.suppress(OSError):
                    stranger.sendall(said)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        assert zero.ask(1) == 7 and one.asked == 1


def test_hellos_of_random_bytes_neither_crash_nor_hang_it() -> None:
    store, draw = HashStore(), random.Random(3)
    key = derive_key(SECRET, "wrong")
    with Rank(store, 0) as zero, Rank(store, 1) as one:
        hello = handshake._HELLO.pack(handshake._MARK, 0, 1, bytes(32))
        for _ in range(300):
            said = bytearray(hello + draw.randbytes(draw.randrange(64)))
            for _ in range(draw.randrange(4)):
                said[draw.randrange(len(said))] = draw.randrange(256)
            pieces = draw.randrange(1, 4)
            with (
                socket.create_connection(where(store, 1), timeout=LONG) as stranger,
                contextlib.suppress(OSError),
            ):
                for i in range(pieces):
                    stranger.sendall(said[i::pieces][: draw.randrange(1, 120)])
                if draw.random() < 0.5:
                    stranger.shutdown(socket.SHUT_WR)
        for _ in range(20):  # as far as the proof
            with (
                socket.create_connection(where(store, 1), timeout=LONG) as stranger,
                pytest.raises(AccessError),
            ):
                introduce(stranger, key, 0, 1, LONG)
        assert zero.ask(1) == 7 and one.asked == 1
        assert one.service._acceptor.thread.is_alive()


def test_random_answers_end_a_call_with_an_error() -> None:
    draw = random.Random(4)
    for _ in range(200):
        here, there = socket.socketpair()
        with here, there:
            mark = handshake._MARK if draw.random() < 0.5 else draw.randbytes(8)
            there.sendall(mark + draw.randbytes(draw.randrange(80)))
            there.shutdown(socket.SHUT_WR)
            with pytest.raises((CommError, OSError)):
                introduce(here, bytes(32), 0, 1, LONG)


# The acceptor ##################################################################################


@contextlib.contextmanager
def accepting(callers: int = 2) -> Iterator[tuple[Acceptor, tuple[str, int], list[int]]]:
    listener, admitted = socket.create_server(("127.0.0.1", 0)), list[int]()
    address = listener.getsockname()
    kept = []

    def admit(connection: socket.socket, number: int) -> None:
        kept.append(connection)
        admitted.append(number)
        if number == 1:
            raise RuntimeError("not this one")

    acceptor = Acceptor(listener, bytes(32), 0, callers, admit)
    try:
        yield acceptor, address, admitted
    finally:
        acceptor.close()
        for each in kept:
            each.close()


def assert_becomes(admitted: list[int], expected: list[int]) -> None:
    """The caller has its answer before it is admitted, by another thread."""
    deadline = time.monotonic() + LONG
    while admitted != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert admitted == expected


def test_an_error_in_who_admits_ends_one_connection_alone() -> None:
    with accepting() as (acceptor, address, admitted):
        for number in (1, 0):
            with socket.create_connection(address, timeout=LONG) as caller:
                introduce(caller, bytes(32), number, 0, LONG)
                if number == 1:
                    assert caller.recv(1) == b""
        assert_becomes(admitted, [1, 0])
        assert acceptor.thread.is_alive()


def test_no_file_numbers_left_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with accepting() as (acceptor, address, admitted):
        idle = socket.create_connection(address, timeout=LONG)
        deadline = time.monotonic() + LONG
        while not acceptor._heard and time.monotonic() < deadline:
            time.sleep(0.01)
        real, failures = socket.socket.accept, iter([True, True])

        def accept(listener: socket.socket) -> object:
            if next(failures, False):
                raise OSError(24, "Too many open files")
            return real(listener)

        monkeypatch.setattr(socket.socket, "accept", accept)
        with idle, socket.create_connection(address, timeout=LONG) as caller:
            introduce(caller, bytes(32), 0, 0, LONG)
            assert idle.recv(1) == b""  # gave its number
        assert_becomes(admitted, [0])


def test_nothing_is_left_of_an_acceptor_and_a_fork_does_not_end_it() -> None:
    with accepting() as (acceptor, address, _):
        if (child := os.fork()) == 0:
            acceptor.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with socket.create_connection(address, timeout=LONG) as caller:
            introduce(caller, bytes(32), 0, 0, LONG)
        acceptor.close()
        acceptor.close()
        assert not acceptor.thread.is_alive()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=LONG)


# Where the secret comes from ###################################################################


def held(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def test_a_secret_is_of_the_environment_or_a_file_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert known_secret() is None
    path = held(tmp_path / "secret", f" {SECRET}\n")
    monkeypatch.setenv("PYG_SCALE_SECRET_FILE", str(path))
    assert known_secret() == SECRET == Group(None, 0, 1).secret
    assert SECRET not in repr(Group(None, 0, 1))
    held(path, SECRET, 0o400)
    assert known_secret() == SECRET
    monkeypatch.setenv("PYG_SCALE_SECRET", OTHER)
    with pytest.raises(ValueError, match="both PYG_SCALE_SECRET and PYG_SCALE_SECRET_FILE"):
        known_secret()
    monkeypatch.delenv("PYG_SCALE_SECRET_FILE")
    assert known_secret() == OTHER
    monkeypatch.setenv("PYG_SCALE_SECRET", "")
    with pytest.raises(ValueError, match="PYG_SCALE_SECRET must have at least 16 characters"):
        known_secret()
    with pytest.raises(TypeError):
        checked_secret(b"bytes of sixteen or more")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666, 0o610])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = held(tmp_path / "secret", SECRET, mode)
    with pytest.raises(ValueError, match=f"mode {mode:04o}.: chmod 600 {path}"):
        read_secret(path)


def test_files_without_a_secret_are_refused(tmp_path: Path) -> None:
    for text in (b"", b"short", b"\xff" * 20, b"x" * 5000):
        with pytest.raises(ValueError, match="secret"):
            read_secret(held(tmp_path / "secret", text))
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises((ValueError, OSError)):
            read_secret(path)
    with pytest.raises(FileNotFoundError):
        read_secret(tmp_path / "none")


def test_a_wrong_secret_is_said_before_anybody_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYG_SCALE_SECRET_FILE", str(held(tmp_path / "secret", SECRET, 0o644)))
    others = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in others.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="PYG_SCALE_SECRET_FILE: .*chmod 600"):
        comm.connect("gloo", timeout=2.0)
    with pytest.raises(ValueError, match="PYG_SCALE_SECRET_FILE: .*chmod 600"):
        init(start_timeout=2.0)


def test_keys_of_a_secret_differ_by_purpose() -> None:
    keys = {derive_key(secret, purpose) for secret in (SECRET, OTHER) for purpose in ("a", "b")}
    assert len(keys) == 4 and all(len(key) == 32 for key in keys)
