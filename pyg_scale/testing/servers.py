"""Conformance of the second part of a communicator: servers at an address, and their clients."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_scale.comm import Connection, Listener
from pyg_scale.errors import CommError, CommTimeoutError, RequestError

TOKEN = "a secret of sixteen or more"
LONG = 20.0
"""Time limit in seconds for immediate results, on a busy machine."""

Handler = Callable[[list[Tensor]], Sequence[Tensor]]


class ServerTests:
    """Tests of ``listen`` and ``connect``; independent of :class:`~pyg_scale.testing.CommTests`.

    ``comm`` is a subclass of :class:`~pyg_scale.comm.Communicator` with both.

    * ``anywhere``: An address where a server gets a free port.
    * ``wrong_addresses``: Invalid addresses.

    Example::

        class TestMyServers(ServerTests):
            @pytest.fixture
            def comm(self):
                return MyCommunicator
    """

    anywhere = "tcp://127.0.0.1:*"
    wrong_addresses: tuple[str, ...] = ("here", "tcp://host", "tcp://host:99999", "http://host:1")

    @pytest.fixture
    def comm(self) -> Any:
        """The communicator with ``listen`` and ``connect``."""
        raise NotImplementedError("return a class with both methods, such as MyCommunicator")

    def listen(
        self,
        comm: Any,
        handlers: Mapping[str, Handler] | None = None,
        address: str | None = None,
        **options: Any,
    ) -> Listener:
        """A server with the handler ``twice`` and others."""
        known = {"twice": lambda got: [*got, *got], **(handlers or {})}
        where = address or self.anywhere
        made: Listener = comm.listen(where, known, token=TOKEN, **options)
        assert isinstance(made, Listener)
        return made

    def connect(
        self, comm: Any, *servers: Listener | str, token: str = TOKEN, timeout: float = LONG
    ) -> Connection:
        """A client of some servers."""
        addresses = [each if isinstance(each, str) else each.address for each in servers]
        made: Connection = comm.connect(addresses, token=token, timeout=timeout)
        assert isinstance(made, Connection) and list(made.addresses) == addresses
        return made

    # Messages ##############################################################################

    def test_every_dtype_and_shape_comes_back(self, comm: Any) -> None:
        with self.listen(comm) as server, self.connect(comm, server) as client:
            for dtype in (torch.bool, torch.uint8, torch.int32, torch.bfloat16, torch.complex128):
                for shape in ((), (0,), (3,), (2, 0, 4), (700, 41)):
                    sent = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
                    turned = sent.t() if sent.dim() == 2 else sent
                    found = client.request(0, "twice", [sent, turned]).wait()
                    assert len(found) == 4
                    for one, other in zip(found, [sent, turned] * 2):
                        assert one.dtype == dtype and one.shape == other.shape
                        assert torch.equal(one, other)
                    found[0].zero_()  # the client owns the memory
            assert client.request(0, "twice", []).wait() == []

    def test_what_came_lives_as_long_as_its_tensor(self, comm: Any) -> None:
        sent = torch.randn(1 << 18)
        with self.listen(comm) as server, self.connect(comm, server) as client:
            kept = [client.request(0, "twice", [sent]).wait()[0] for _ in range(5)]
        gc.collect()
        assert all(torch.equal(each, sent) for each in kept)

    def test_several_threads_ask_several_servers(self, comm: Any) -> None:
        errors: list[BaseException] = []
        with (
            self.listen(comm) as one,
            self.listen(comm) as two,
            self.connect(comm, one, two) as client,
        ):

            def ask(number: int) -> None:
                try:
                    for i in range(20):
                        sent = torch.full((100 * number + i,), number)
                        asked = [client.request(server, "twice", [sent]) for server in (0, 1)]
                        for reply in reversed(asked):
                            assert torch.equal(reply.wait()[1], sent)
                except BaseException as error:
                    errors.append(error)

            _in_threads(ask, 6)
        assert not errors, errors

    def test_requests_are_answered_at_a_time(self, comm: Any) -> None:
        """As many requests as threads are answered at once; a client does not wait for others."""
        both = threading.Barrier(2)

        def meet(_: list[Tensor]) -> list[Tensor]:
            both.wait(LONG)
            return []

        with (
            self.listen(comm, {"meet": meet}, num_threads=2) as server,
            self.connect(comm, server) as one,
            self.connect(comm, server) as two,
        ):
            asked = [each.request(0, "meet", []) for each in (one, two)]
            assert [reply.wait() for reply in asked] == [[], []]
            assert all(reply.done for reply in asked)

    # Failures ##############################################################################

    def test_an_error_of_a_handler_says_its_kind(self, comm: Any) -> None:
        def fail(_: list[Tensor]) -> list[Tensor]:
            raise IndexError("node 7 is not here")

        handlers: dict[str, Any] = {"fail": fail, "odd": lambda _: ["no tensor"]}
        with self.listen(comm, handlers) as server, self.connect(comm, server) as client:
            with pytest.raises(RequestError, match="node 7") as found:
                client.request(0, "fail", []).wait()
            assert (found.value.kind, found.value.reason) == ("IndexError", "node 7 is not here")
            with pytest.raises(RequestError, match="no handler 'what'"):
                client.request(0, "what", []).wait()
            with pytest.raises(RequestError):
                client.request(0, "odd", []).wait()
            assert client.request(0, "twice", []).wait() == []

    def test_who_has_another_secret_is_not_listened_to(self, comm: Any) -> None:
        called = threading.Event()

        def call(_: list[Tensor]) -> list[Tensor]:
            called.set()
            return []

        with self.listen(comm, {"call": call}) as server:
            with self.connect(comm, server, token="another secret, as long") as stranger:
                for _ in range(2):
                    with pytest.raises(RequestError) as found:
                        stranger.request(0, "call", []).wait()
                    assert found.value.kind == "PermissionError"
            with self.connect(comm, server) as client:
                assert client.request(0, "twice", []).wait() == []
        assert not called.is_set()

    def test_a_server_that_is_not_there_yet(self, comm: Any) -> None:
        with self.listen(comm) as server:
            address = server.address
        with self.connect(comm, address) as client:
            with pytest.raises(CommError) as found:
                client.request(0, "twice", []).wait()
            assert not isinstance(found.value, CommTimeoutError), "it must fail at once"
            assert address in str(found.value)
            with self.listen(comm, address=address):
                _until_answered(client)

    def test_a_server_that_goes_fails_what_it_was_asked(self, comm: Any) -> None:
        began, release = threading.Event(), threading.Event()

        def stuck(_: list[Tensor]) -> list[Tensor]:
            began.set()
            release.wait(LONG)
            return []

        with self.listen(comm, {"stuck": stuck}) as server, self.connect(comm, server) as client:
            reply = client.request(0, "stuck", [])
            assert began.wait(LONG)
            closing = threading.Thread(target=server.close)  # close may wait for the handler
            closing.start()
            with pytest.raises(CommError) as found:
                reply.wait()
            assert not isinstance(found.value, CommTimeoutError)
            release.set()
            closing.join(LONG)
            assert not closing.is_alive()

    def test_an_answer_that_does_not_come_is_a_timeout_that_names_the_server(
        self, comm: Any
    ) -> None:
        release = threading.Event()

        def stuck(_: list[Tensor]) -> list[Tensor]:
            release.wait(LONG)
            return []

        with (
            self.listen(comm, {"stuck": stuck}) as server,
            self.connect(comm, server, timeout=0.3) as client,
        ):
            reply = client.request(0, "stuck", [])
            with pytest.raises(CommTimeoutError, match=f"{server.address} did not answer"):
                reply.wait()
            release.set()
            assert client.request(0, "twice", []).wait(LONG) == []
            abandoned = client.request(0, "twice", [])
            abandoned.abandon()
            assert client.request(0, "twice", []).wait(LONG) == []

    def test_a_client_that_goes_leaves_the_server_well(self, comm: Any) -> None:
        release = threading.Event()

        def slow(got: list[Tensor]) -> list[Tensor]:
            release.wait(LONG)
            return got

        with self.listen(comm, {"slow": slow}) as server:
            with self.connect(comm, server) as gone:
                for _ in range(3):
                    gone.request(0, "slow", [torch.randn(1000)])
            release.set()
            with self.connect(comm, server) as client:
                assert len(client.request(0, "slow", [torch.ones(2)]).wait()) == 1

    def test_too_large_a_request_is_not_taken(self, comm: Any) -> None:
        with self.listen(comm, max_bytes=10_000) as server:
            with self.connect(comm, server, timeout=2.0) as client, pytest.raises(CommError):
                client.request(0, "twice", [torch.zeros(1 << 20)]).wait()
            with self.connect(comm, server) as client:
                assert len(client.request(0, "twice", [torch.zeros(1000)]).wait()) == 2

    # Ends ##################################################################################

    def test_a_copy_in_another_process_connects_anew(self, comm: Any) -> None:
        with self.listen(comm) as server, self.connect(comm, server) as client:
            assert client.request(0, "twice", []).wait() == []
            with pickle.loads(pickle.dumps(client)) as copy:
                assert copy.request(0, "twice", [torch.ones(1)]).wait()[0].item() == 1
            assert client.request(0, "twice", []).wait() == []

    def test_nothing_is_asked_or_left_after_close(self, comm: Any) -> None:
        before = set(threading.enumerate())
        server = self.listen(comm)
        client = self.connect(comm, server)
        assert client.request(0, "twice", []).wait() == []
        client.close()
        client.close()
        with pytest.raises(CommError, match="closed"):
            client.request(0, "twice", [])
        server.close()
        server.close()
        deadline = time.monotonic() + LONG
        while left := set(threading.enumerate()) - before:
            assert time.monotonic() < deadline, left
            time.sleep(0.01)

    def test_wrong_arguments(self, comm: Any) -> None:
        for address in self.wrong_addresses:
            with pytest.raises(ValueError, match="tcp://host:5555"):
                self.connect(comm, address)
            with pytest.raises(ValueError, match="tcp://host:5555"):
                self.listen(comm, address=address)
        with pytest.raises(ValueError, match="16 characters"):
            self.connect(comm, "tcp://host:1", token="short")
        with pytest.raises(ValueError, match="16 characters"):
            comm.listen(self.anywhere, {}, token="short")
        with self.listen(comm) as server, self.connect(comm, server) as client:
            with pytest.raises(CommError, match="cannot listen"):
                self.listen(comm, address=server.address)
            for number in (-1, 1):
                with pytest.raises(ValueError, match=f"no server {number}"):
                    client.request(number, "twice", [])

    def test_a_graph_is_served(self, comm: Any, tmp_path: Any) -> None:
        """Loaders of a client give the same batches as loaders of the graph itself."""
        import pyg_scale
        from pyg_scale.distributed.server.graph_server import GraphServer
        from pyg_scale.loader import NeighborLoader
        from pyg_scale.testing import graphs

        data = graphs.hostile()
        path = pyg_scale.save(data, tmp_path / "graph")
        servers = [GraphServer(pyg_scale.open(path)) for _ in range(2)]
        options: dict[str, Any] = {"num_neighbors": [4, 3], "batch_size": 20, "seed": 7}
        with (
            self.listen(comm, servers[0].handlers) as one,
            self.listen(comm, servers[1].handlers) as two,
            pyg_scale.open(f"{one.address},{two.address}", token=TOKEN, transport=comm) as served,
        ):
            found = list(NeighborLoader(served, **options, num_workers=2))
        expected = list(NeighborLoader(data, **options))
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected):
            for name in ("n_id", "e_id", "edge_index", "x", "y"):
                assert torch.equal(ours[name], theirs[name]), name


def _in_threads(function: Callable[[int], None], count: int) -> None:
    threads = [
        threading.Thread(target=function, args=(number,), daemon=True) for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * LONG)
        assert not thread.is_alive()


def _until_answered(client: Connection) -> None:
    """Send requests until a server answers."""
    deadline = time.monotonic() + LONG
    while True:
        try:
            assert client.request(0, "twice", []).wait() == []
            return
        except CommError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
