"""Scripts that end in the middle of an epoch without closing anything: what they do, and a fork.

Run as a program with a folder and the names of scenarios, it imports everything once and forks a
process for each rank of each, which goes on to the end of the interpreter as any script does. Half
of them collect what was imported, too, when they end; that copies all of it, and takes longest.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import pyg_scale
from pyg_scale.comm import connect
from pyg_scale.distributed.server.graph_server import GraphServer
from pyg_scale.loader import NeighborLoader
from pyg_scale.train import Checkpoint

LIMIT = 60.0
"""Seconds that a process may take."""
kept: list[Any] = []
"""What a script still has when it ends."""


def begin(data: Any, **options: Any) -> None:
    """Be in the middle of an epoch, with threads at work."""
    loader = NeighborLoader(data, [10, 10], batch_size=64, shuffle=True, seed=1, **options)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    kept.extend([data, loader, iterator])


def in_memory(folder: Path) -> None:
    begin(pyg_scale.open(folder / "whole"), num_workers=3, prefetch_factor=4)


def stores_that_look_ahead(folder: Path) -> None:
    data = pyg_scale.open(folder / "parts")
    store = pyg_scale.store.Disk(folder / "parts", "1MB", policy="belady")
    begin(data, num_workers=3, feature_store=store)


def processes(folder: Path) -> None:
    begin(pyg_scale.open(folder / "whole"), num_workers=2, worker_type="process")


def rings(folder: Path) -> None:
    begin(pyg_scale.open(folder / "whole"), num_workers=2, worker_type="ring")


def ranks(folder: Path) -> None:
    rank = os.environ["RANK"]
    data: Any = pyg_scale.open(folder / f"parts-rank-{rank}-of-2", timeout=30)
    begin(data, num_workers=3)
    data.comm.barrier()  # a rank that ends by an error takes the others with it


def services(folder: Path) -> None:
    """Ranks that ask each other, save, and wait for signals."""
    comm = connect(timeout=30)
    large = torch.zeros(1 << 20)
    service = comm.serve({"large": lambda got: [large + 1]})
    other = 1 - comm.rank
    kept.extend(service.request(other, "large", []) for _ in range(20))
    model = torch.nn.Linear(2, 2)
    checkpoint = Checkpoint(folder / "saved", {"model": model}, stop_on=["SIGTERM"], comm=comm)
    checkpoint.step(1)
    checkpoint.step(2)
    kept[0].wait()
    kept.extend([comm, service, checkpoint])
    comm.barrier()
    if comm.rank == 0:
        checkpoint.step(3)  # a thread waits for the other one, which ends


def servers(folder: Path) -> None:
    """A server and its client in one process."""
    from pyg_scale_zmq.backend import Zmq

    token = "a token of sixteen or more"
    server = GraphServer(pyg_scale.open(folder / "whole"))
    listener = Zmq.listen("tcp://127.0.0.1:*", server.handlers, token=token)
    data = pyg_scale.open(listener.address, token=token)
    kept.extend([listener, server])
    begin(data, num_workers=2)


def meeting(folder: Path) -> None:
    """A rank that waits for another one, until somebody presses Ctrl-C."""

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(LIMIT))
        raise Ended("as it should")

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.4)
    connect(timeout=LIMIT / 2, name="meeting")


SCENARIOS = {
    each.__name__: each
    for each in (
        in_memory,
        stores_that_look_ahead,
        processes,
        rings,
        ranks,
        services,
        servers,
        meeting,
    )
}
SEVERAL = ("ranks", "services")
"""Those of two processes."""


class Ended(Exception):
    """How a script ends."""


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*takes the plain-torch path")
    gc.freeze()
    started: list[tuple[str, int]] = []
    for number, name in enumerate(names):
        scenario, _, way = name.partition("-")
        port = _free_port()
        for rank in range(2 if scenario in SEVERAL else 1):
            label = f"{number}-{name}-{rank}"
            pid = os.fork()
            if not pid:
                if number < len(names) / 2:
                    gc.unfreeze()
                _become(folder / label, rank, port if scenario in (*SEVERAL, "meeting") else None)
                SCENARIOS[scenario](folder)
                if way == "error":
                    raise Ended("as it should")
                sys.exit(0)
            started.append((label, pid))
        if len(started) >= 4:
            _collect(started)
    _collect(started)


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _become(output: Path, rank: int, port: str | None) -> None:
    """Be a script of its own."""
    for fd, name in ((1, "out"), (2, "err")):
        file = os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, fd)
        os.close(file)
    signal.alarm(int(LIMIT))
    if port is not None:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="ends")


def _collect(started: list[tuple[str, int]]) -> None:
    for label, pid in started:
        _, status = os.waitpid(pid, 0)  # which ends, by SIGALRM at the latest
        print(label, os.waitstatus_to_exitcode(status), flush=True)
    started.clear()


if __name__ == "__main__":
    main()
