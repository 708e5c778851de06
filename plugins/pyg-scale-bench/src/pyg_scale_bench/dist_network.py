"""Bytes per second between ranks: rows of features, plain sockets, gloo, also on a slow network.

Messages between processes of one machine are copied by its processors, which do not limit machines
connected by a network. A network of a given speed is the loopback of a network namespace with a
token bucket; it needs root and iproute2 (``ip`` and ``tc``).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch_geometric.data import TensorAttr

from pyg_scale.comm import Communicator
from pyg_scale.distributed.features.store import RankFeatures

WAYS = ("tcp", "features", "gloo")
"""The ways: plain sockets, rows of features, ``all_to_all`` of gloo."""

_SECONDS = 60.0
_LINK_SECONDS = 30.0
_BURST = ("burst", "4mb", "latency", "20ms")
_groups = itertools.count()


def bandwidth(comm: Communicator, data: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Bytes per second that this rank receives, as rows of the next rank's nodes and in other ways.

    Also processor seconds per byte, which hardly depend on other load. All ranks send and receive
    at the same time, as many bytes in each way; ways take turns.

    Args:
        comm: The communicator; all ranks call the function.
        data: The graph, opened with ``through="requests"``.
        settings: The options of ``pyg-scale bench dist``.
    """
    features = data.rank_features(attributes=["x"], in_flight=settings["in_flight"])
    part = data.graph_directory.books[None].part_of(torch.arange(data.num_nodes))
    to = torch.tensor([data.owners.ask(p) for p in range(data.owners.num_parts)])
    others = (to[part] == (comm.rank + 1) % comm.world_size).nonzero().view(-1)
    rows = min(settings["rows"], others.numel())
    generator = torch.Generator().manual_seed(comm.rank)
    batches = [
        others[torch.randperm(others.numel(), generator=generator)[:rows]]
        for _ in range(settings["messages"])
    ]
    row_bytes = settings["features"] * 4
    num_bytes = len(batches) * rows * row_bytes
    ring, exchange = Ring(comm, rows * row_bytes), Exchange(comm, rows * row_bytes)
    run: dict[str, Callable[[], object]] = {
        "tcp": lambda: ring.turn(len(batches)),
        "features": lambda: _read(features, batches),
        "gloo": lambda: exchange.turn(len(batches)),
    }
    found: dict[str, Any] = {"rows": rows}
    found |= {name: [] for way in WAYS for name in (way, f"{way}_cpu")}
    try:
        for turn in range(1 + settings["rounds"]):  # the first one warms up
            for way in WAYS:
                comm.barrier()
                start, before = time.perf_counter(), time.process_time()
                run[way]()
                seconds = time.perf_counter() - start
                comm.barrier()  # bytes sent by this rank have arrived too
                if turn:
                    found[way].append(num_bytes / seconds)
                    found[f"{way}_cpu"].append((time.process_time() - before) / num_bytes)
    finally:
        ring.close()
    return found


def _read(features: RankFeatures, batches: list[Tensor]) -> None:
    """Read rows with several batches in flight, as loaders do."""
    with contextlib.closing(features.schedule()) as schedule:
        asked = 0
        for number, index in enumerate(batches):
            while asked < len(batches) and not (
                asked > number and schedule.suffices(asked - number - 1)
            ):
                schedule.announce(asked, [TensorAttr(None, "x", batches[asked])])
                asked += 1
            with schedule.serving(number):
                features.multi_get_tensor([TensorAttr(None, "x", index)])


class Ring:
    """A plain socket from every rank to the next one.

    Args:
        comm: The communicator; all ranks make an instance at the same time.
        num_bytes: Size of a message in bytes.
    """

    def __init__(self, comm: Communicator, num_bytes: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(_SECONDS)
        ports = comm.all_gather(torch.tensor([listener.getsockname()[1]]))
        to = int(ports[(comm.rank + 1) % comm.world_size])
        self._out = socket.create_connection(("127.0.0.1", to), timeout=_SECONDS)
        self._into, _ = listener.accept()
        listener.close()
        for each in (self._out, self._into):
            each.settimeout(_SECONDS)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Written to, as unwritten memory is one page of zeros, which costs nothing to read.
        self._sent = b"\1" * num_bytes
        self._received = bytearray(num_bytes)

    def turn(self, messages: int) -> None:
        """Send this many messages while receiving as many."""
        sender = threading.Thread(target=self._send, args=(messages,), daemon=True)
        sender.start()
        view = memoryview(self._received)
        for _ in range(messages):
            done = 0
            while done < len(view):
                size = self._into.recv_into(view[done:])
                if not size:
                    raise ConnectionResetError("the rank before this one is gone")
                done += size
        sender.join(_SECONDS)

    def _send(self, messages: int) -> None:
        for _ in range(messages):
            self._out.sendall(self._sent)

    def close(self) -> None:
        """Close both connections."""
        self._out.close()
        self._into.close()


class Exchange:
    """A process group of gloo in which every rank sends to the next one.

    Args:
        comm: The communicator; all ranks make an instance at the same time.
        num_bytes: Size of a message in bytes.
    """

    def __init__(self, comm: Communicator, num_bytes: int) -> None:
        self._group = process_group(comm)
        self._sent = torch.ones(num_bytes, dtype=torch.uint8)
        self._received = torch.ones(num_bytes, dtype=torch.uint8)
        self._to, self._from = [0] * comm.world_size, [0] * comm.world_size
        self._to[(comm.rank + 1) % comm.world_size] = num_bytes
        self._from[(comm.rank - 1) % comm.world_size] = num_bytes

    def turn(self, messages: int) -> None:
        """Send this many messages while receiving as many."""
        for _ in range(messages):
            self._group.alltoall_base(self._received, self._sent, self._from, self._to).wait()


def process_group(comm: Communicator) -> Any:
    """A process group of gloo on the loopback; all ranks call it at the same time."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=_SECONDS)
    assert comm.group is not None, "several ranks have a group"
    # Addresses of an earlier group must not be found.
    store = PrefixStore(f"bench/gloo/{next(_groups)}", comm.group.store)
    return dist.ProcessGroupGloo(store, comm.rank, comm.world_size, options)


# A network of a given speed ###############################################################


def rate(text: str) -> str:
    """Check bits per second in the form of ``tc``, such as ``10gbit``.

    Raises:
        ValueError: If it has another form.
    """
    if not re.fullmatch(r"[1-9]\d*[mg]bit", text):
        raise ValueError(f"a rate is a number of mbit or gbit (got {text!r})")
    return text


def missing() -> str | None:
    """The reason why this machine cannot have such a network, or ``None``."""
    if os.geteuid() != 0:
        return "a network namespace needs root"
    lacking = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} of iproute2 cannot be found" if lacking else None


@contextlib.contextmanager
def namespace() -> Iterator[list[str]]:
    """A context with a network namespace; yields the start of commands that run in it.

    Raises:
        SystemExit: If it is not possible; has the reason.
    """
    if reason := missing():
        raise SystemExit(f"pyg-scale bench: --link: {reason}")
    name = f"pyg-scale-bench-{os.getpid()}"
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "-n", name, "link", "set", "lo", "up")
        yield ["ip", "netns", "exec", name]
    finally:
        _run("ip", "netns", "delete", name)


@contextlib.contextmanager
def limited(comm: Communicator, speed: str) -> Iterator[None]:
    """A context in which all ranks in a :func:`namespace` share a link of this speed.

    Args:
        comm: The communicator; all ranks call the function.
        speed: See :func:`rate`.
    """
    link = ("dev", "lo", "root")
    comm.barrier()
    try:
        if comm.rank == 0:
            _run("tc", "qdisc", "add", *link, "tbf", "rate", speed, *_BURST)
        comm.barrier()
        yield
        comm.barrier()
    finally:
        if comm.rank == 0:
            _run("tc", "qdisc", "delete", *link)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LINK_SECONDS)
    if done.returncode:
        raise SystemExit(f"pyg-scale bench: --link: {' '.join(command)}: {done.stderr.strip()}")
