"""Ways to request rows of another process: our service, ZeroMQ, UCX and gloo.

Every way does the same work. Rank 1 sends ids; rank 0 answers with these rows of its table; rank 1
has each row at its place in a batch, in no order of memory, as rows of several ranks make one
batch. Beside our service, every library is used directly, with as little around it as possible:
without checks of what arrives, without time limits, and with message sizes that both sides know.
The exception is the backend ``zmq``, which has all of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_scale import plugins
from pyg_scale.comm import Communicator, Work
from pyg_scale.comm.landing import Landing
from pyg_scale.ops import row_cache
from pyg_scale.ops.gather import gather
from pyg_scale.ops.sockets import GatheredRows, RowPlaces
from pyg_scale_bench.dist_network import process_group

UCX_ENVIRON = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "UCX_WARN_UNUSED_ENV_VARS": "n"}
"""Makes UCX use TCP: ranks of one machine read the same files, and request nothing."""

_HOST = "127.0.0.1"


class Request(NamedTuple):
    """A request for rows.

    Attributes:
        ids: The rows of the table, ``int64`` ``[n]``.
        position: Their places in ``out``, ``int64`` ``[n]``.
        out: ``uint8`` ``[n, row_bytes]``, written to.
    """

    ids: Tensor
    position: Tensor
    out: Tensor


class Way(ABC):
    """A way to request rows of rank 0; both ranks make an instance at the same time.

    Args:
        comm: The communicator of the two ranks.
        table: The rows, ``uint8`` ``[k, row_bytes]``; empty on rank 1.
        in_flight: Number of requests under way at a time.
    """

    def __init__(self, comm: Communicator, table: Tensor, in_flight: int) -> None:
        self.comm, self.table, self.in_flight = comm, table, in_flight

    @abstractmethod
    def ask(self, requests: Sequence[Request]) -> None:
        """Request rows, and write them to their places; rank 1 calls it."""

    def answer(self, count: int, rows: int) -> None:  # noqa: B027
        """Answer requests, unless threads do so anyway; rank 0 calls it.

        Args:
            count: Number of requests.
            rows: Rows of each.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection; both ranks call it at the same time."""


def _in_turn(
    count: int, most: int, start: Callable[[int], object], finish: Callable[[int], object]
) -> None:
    """Start and finish requests in order, with several of them under way."""
    started = 0
    for number in range(count):
        while started < min(count, number + most):
            start(started)
            started += 1
        finish(number)


# Our service ##############################################################################


class _Answers:
    """The handler of our service."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        return [gather(self._table, tensors[0])]

    def rows(self, tensors: list[Tensor]) -> list[GatheredRows]:
        """The rows, to be chosen while they are sent."""
        return [GatheredRows(self._table, tensors[0])]


class Ours(Way):
    """The service of ranks: rows go from the table to the socket, and from it to their places."""

    _landing = True

    def __init__(self, comm: Communicator, table: Tensor, in_flight: int) -> None:
        super().__init__(comm, table, in_flight)
        answers = _Answers(table)
        handlers = {"rows": answers if self._landing else answers.__call__}
        self._service = comm.serve(handlers if comm.rank == 0 else {})

    def ask(self, requests: Sequence[Request]) -> None:
        under_way: dict[int, tuple[Work[list[Tensor]], Landing]] = {}

        def start(number: int) -> None:
            ids, position, out = requests[number]
            work = self._service.request(0, "rows", [ids])
            landing = Landing(RowPlaces(out, ids.numel(), position, None))
            if self._landing:
                work.land([landing])
            under_way[number] = work, landing

        def finish(number: int) -> None:
            work, landing = under_way.pop(number)
            (rows,) = work.wait()
            if not landing.landed:
                row_cache.scatter(rows, requests[number].position, requests[number].out)

        _in_turn(len(requests), self.in_flight, start, finish)

    def close(self) -> None:
        self._service.close()


class OursCopied(Ours):
    """The service of ranks with messages of tensors, as of any library."""

    _landing = False


# Libraries ################################################################################


class Zmq(Way):
    """ZeroMQ: a DEALER and a ROUTER socket, and messages that are not copied."""

    _curve = False

    def __init__(self, comm: Communicator, table: Tensor, in_flight: int) -> None:
        zmq: Any = importlib.import_module("zmq")
        super().__init__(comm, table, in_flight)
        self._more = zmq.SNDMORE
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if comm.rank == 0 else zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        public, secret = zmq.curve_keypair() if self._curve else (b"", b"")
        if self._curve and comm.rank == 0:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        if comm.rank == 0:
            said = [self._socket.bind_to_random_port(f"tcp://{_HOST}"), *public]
            comm.broadcast(torch.tensor(said))
            return
        port, *key = comm.broadcast(None).tolist()
        if self._curve:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, bytes(key))
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.connect(f"tcp://{_HOST}:{port}")

    def ask(self, requests: Sequence[Request]) -> None:
        def start(number: int) -> None:
            self._socket.send(requests[number].ids.numpy(), copy=False)

        def finish(number: int) -> None:
            _, position, out = requests[number]
            frame = self._socket.recv(copy=False)
            rows = torch.frombuffer(frame.buffer, dtype=torch.uint8).view(out.shape)
            row_cache.scatter(rows, position, out)

        _in_turn(len(requests), self.in_flight, start, finish)

    def answer(self, count: int, rows: int) -> None:
        for _ in range(count):
            client, ids = self._socket.recv_multipart(copy=False)
            found = gather(self.table, torch.frombuffer(ids.buffer, dtype=torch.int64))
            self._socket.send(client, self._more, copy=False)
            self._socket.send(found.numpy(), copy=False)

    def close(self) -> None:
        self._context.destroy(linger=0)


class ZmqCurve(Zmq):
    """ZeroMQ with CURVE, by which sides know each other and all that travels is encrypted."""

    _curve = True


class ZmqService(Way):
    """The backend ``zmq``: ZeroMQ with CURVE behind the same checks and threads as our service."""

    def __init__(self, comm: Communicator, table: Tensor, in_flight: int) -> None:
        super().__init__(comm, table, in_flight)
        backend: Any = plugins.get("comm", "zmq")
        token = "a secret of this benchmark alone"
        if comm.rank == 0:
            handlers = {"rows": _Answers(table).__call__}
            self._side: Any = backend.listen(f"tcp://{_HOST}:*", handlers, token=token)
            port = int(self._side.address.rpartition(":")[2])
            comm.broadcast(torch.tensor(port))
        else:
            port = int(comm.broadcast(None))
            self._side = backend.connect([f"tcp://{_HOST}:{port}"], token=token)

    def ask(self, requests: Sequence[Request]) -> None:
        under_way: dict[int, Work[list[Tensor]]] = {}

        def start(number: int) -> None:
            under_way[number] = self._side.request(0, "rows", [requests[number].ids])

        def finish(number: int) -> None:
            (rows,) = under_way.pop(number).wait()
            row_cache.scatter(rows, requests[number].position, requests[number].out)

        _in_turn(len(requests), self.in_flight, start, finish)

    def close(self) -> None:
        self._side.close()


class Ucx(Way):
    """UCX over TCP, by tagged messages of ucxx."""

    def __init__(self, comm: Communicator, table: Tensor, in_flight: int) -> None:
        ucxx: Any = importlib.import_module("ucxx")
        super().__init__(comm, table, in_flight)
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        ucxx.init(progress_mode="thread")  # else nothing goes on while rows are gathered
        self._listener: Any = None
        self._peer: Any = None
        self._received: list[Tensor] = []
        self._run(self._accept(ucxx) if comm.rank == 0 else self._connect(ucxx))

    async def _accept(self, ucxx: Any) -> None:
        arrived = asyncio.Event()

        def arrive(peer: Any) -> None:
            self._peer = peer
            arrived.set()

        self._listener = ucxx.create_listener(arrive)
        self.comm.broadcast(torch.tensor([self._listener.port]))
        await arrived.wait()

    async def _connect(self, ucxx: Any) -> None:
        port = int(self.comm.broadcast(None))
        self._peer = await ucxx.create_endpoint(_HOST, port)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.run_until_complete(work)

    def ask(self, requests: Sequence[Request]) -> None:
        shape = requests[0].out.shape
        if not self._received or self._received[0].shape != shape:
            self._received = [torch.ones(shape, dtype=torch.uint8) for _ in range(self.in_flight)]
        self._run(self._ask(requests))

    async def _ask(self, requests: Sequence[Request]) -> None:
        under_way: dict[int, tuple[Any, Any]] = {}

        def start(number: int) -> None:
            rows = self._received[number % self.in_flight]
            under_way[number] = (
                asyncio.ensure_future(self._peer.send(requests[number].ids.numpy())),
                asyncio.ensure_future(self._peer.recv(rows.numpy())),
            )

        started = 0
        for number, (_, position, out) in enumerate(requests):
            while started < min(len(requests), number + self.in_flight):
                start(started)
                started += 1
            for part in under_way.pop(number):
                await part
            row_cache.scatter(self._received[number % self.in_flight], position, out)

    def answer(self, count: int, rows: int) -> None:
        self._run(self._answer(count, rows))

    async def _answer(self, count: int, rows: int) -> None:
        sent: list[Any] = []
        for _ in range(count):
            ids = torch.empty(rows, dtype=torch.int64)
            await self._peer.recv(ids.numpy())
            found = gather(self.table, ids)
            sent.append(asyncio.ensure_future(self._peer.send(found.numpy())))
        for part in sent:
            await part

    def close(self) -> None:
        if self.comm.rank == 1:
            self._run(self._peer.close())
        self.comm.barrier()
        with contextlib.suppress(Exception):  # of an end that the other side closed first
            if self.comm.rank == 0:
                self._run(self._peer.close())
        if self._listener is not None:
            self._listener.close()
        self._loop.close()


class Gloo(Way):
    """``all_to_all`` of gloo: ids of a request and rows of the one before, in lock step."""

    def __init__(self, comm: Communicator, table: Tensor, in_flight: int) -> None:
        super().__init__(comm, table, in_flight)
        self._group = process_group(comm)

    def ask(self, requests: Sequence[Request]) -> None:
        none = torch.empty(0, dtype=torch.uint8)
        rows = torch.empty(0, dtype=torch.uint8)
        for number in range(len(requests) + 1):
            last = number == len(requests)
            ids = none if last else requests[number].ids.view(torch.uint8)
            if number == 0:
                self._exchange(ids, none)
                continue
            _, position, out = requests[number - 1]
            rows = rows if rows.shape == out.shape else torch.empty_like(out)
            self._exchange(ids, rows.view(-1))
            row_cache.scatter(rows, position, out)

    def answer(self, count: int, rows: int) -> None:
        none = found = torch.empty(0, dtype=torch.uint8)
        ids = torch.empty(rows, dtype=torch.int64)
        for number in range(count + 1):
            self._exchange(found.view(-1), none if number == count else ids.view(torch.uint8))
            found = none if number == count else gather(self.table, ids)

    def _exchange(self, sent: Tensor, received: Tensor) -> None:
        other = 1 - self.comm.rank
        to, of = [0, 0], [0, 0]
        to[other], of[other] = sent.numel(), received.numel()
        self._group.alltoall_base(received, sent, of, to).wait()

    def close(self) -> None:
        self._group = None


WAYS: dict[str, type[Way]] = {
    "ours": Ours,
    "ours-copied": OursCopied,
    "zmq": Zmq,
    "zmq-curve": ZmqCurve,
    "zmq-service": ZmqService,
    "ucx": Ucx,
    "gloo": Gloo,
}
"""The ways by name."""

MODULES = {
    "zmq": "zmq",
    "zmq-curve": "zmq",
    "zmq-service": "pyg_scale_zmq.listener",
    "ucx": "ucxx",
}
"""The modules that ways need, if they need one."""
