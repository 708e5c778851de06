"""`pyg-scale serve` in processes of its own, and clients in others."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import pyg_scale
from pyg_scale.comm import Listener
from pyg_scale.datasets import load
from pyg_scale.errors import CommError
from pyg_scale.loader import NeighborLoader
from tests import preloaded
from tests.distributed.served import graph
from tests.loader.batches import assert_same_batches

pytest.importorskip("pyg_scale_zmq", reason="pip install ./plugins/pyg-scale-zmq")

NODES: dict[str, Any] = {"num_neighbors": [4, 3], "batch_size": 30, "seed": 7, "shuffle": True}
PATIENCE = 100.0


class Server:
    """A process that serves."""

    def __init__(self, path: Path, secret: Path, *options: str, bind: str = "tcp://127.0.0.1:0"):
        self.process = subprocess.Popen(
            [
                *(preloaded.python(), "-m", "pyg_scale.cli", "serve", str(path), "--bind", bind),
                *("--secret-file", str(secret), "--threads", "1", *options),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._limit = threading.Timer(PATIENCE, self.process.kill)
        self._limit.start()

    @property
    def address(self) -> str:
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving "), line + self.process.stderr.read()
        return line.split()[-1]

    def end(self) -> tuple[int, str]:
        out, err = self.process.communicate(timeout=PATIENCE)
        self._limit.cancel()
        return self.process.returncode, out + err

    def kill(self) -> None:
        self._limit.cancel()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def started() -> Iterator[list[Server]]:
    servers: list[Server] = []
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYG_SCALE_SECRET_FILE", str(tmp_path / "secret"))
    return tmp_path / "secret"


CLIENT = """
import sys, torch, pyg_scale
from pyg_scale.loader import NeighborLoader
address, out, seed = sys.argv[1:]
with pyg_scale.open(address) as data:
    loader = NeighborLoader(data, [4, 3], batch_size=30, seed=int(seed), shuffle=True)
    sums = [[int(b.n_id.sum()), int(b.e_id.sum()), float(b.x.double().sum())] for b in loader]
torch.save(sums, out)
"""


def test_two_servers_and_two_clients_in_processes(
    tmp_path: Path, secret: Path, started: list[Server]
) -> None:
    data = graph()
    pyg_scale.save(data, tmp_path / "graph")
    for _ in range(2):
        started.append(Server(tmp_path / "graph", secret, "--clients", "2"))
    where = ",".join(server.address for server in started)
    assert os.stat(secret).st_mode & 0o077 == 0
    clients = [
        subprocess.Popen([preloaded.python(), "-c", CLIENT, where, str(tmp_path / f"{s}"), str(s)])
        for s in (1, 2)
    ]
    for client in clients:
        assert client.wait(PATIENCE) == 0
    for server in started:  # both clients have said goodbye
        code, printed = server.end()
        assert code == 0 and "served" in printed and "served 0 batches" not in printed
    for seed in (1, 2):
        loader = NeighborLoader(data, **NODES | {"seed": seed})
        expected = [
            [int(b.n_id.sum()), int(b.e_id.sum()), float(b.x.double().sum())] for b in loader
        ]
        assert torch.load(tmp_path / f"{seed}") == expected


@pytest.mark.slow
def test_an_epoch_of_a_real_graph_with_a_server_killed_in_the_middle(
    tmp_path: Path, secret: Path, started: list[Server], data_dir: Path
) -> None:
    data = load(str(data_dir / "facebook_pages.npz"))
    pyg_scale.save(data, tmp_path / "graph")
    for _ in range(2):
        started.append(Server(tmp_path / "graph", secret))
    where = ",".join(server.address for server in started)
    options = NODES | {"batch_size": 1500, "input_nodes": data.train_mask}
    with pyg_scale.open(where, timeout=PATIENCE) as served:
        loader = NeighborLoader(served, **options)
        found = []
        for number, batch in enumerate(loader):
            found.append(batch)
            if number == 2:
                started[0].process.send_signal(signal.SIGKILL)
        assert_same_batches(NeighborLoader(data, **options), found)
    started[1].process.send_signal(signal.SIGTERM)
    code, printed = started[1].end()
    assert code == 0 and "served" in printed


def test_a_server_that_stops_moving_is_replaced(
    tmp_path: Path, secret: Path, started: list[Server]
) -> None:
    data = graph()
    pyg_scale.save(data, tmp_path / "graph")
    for _ in range(2):
        started.append(Server(tmp_path / "graph", secret))
    where = ",".join(server.address for server in started)
    with pyg_scale.open(where, timeout=4.0) as served:
        iterator = iter(NeighborLoader(served, **NODES))
        found = [next(iterator)]
        os.kill(preloaded.pid_behind(started[0].process), signal.SIGSTOP)
        start = time.monotonic()
        found += list(iterator)
        assert time.monotonic() - start < PATIENCE
        assert_same_batches(NeighborLoader(data, **NODES), found)
    os.kill(preloaded.pid_behind(started[0].process), signal.SIGCONT)


def test_worker_processes_ask_for_themselves(
    tmp_path: Path, secret: Path, started: list[Server]
) -> None:
    data = graph()
    pyg_scale.save(data, tmp_path / "graph")
    started.append(Server(tmp_path / "graph", secret, "--clients", "1"))
    with pyg_scale.open(started[0].address) as served:
        loader = NeighborLoader(served, **NODES, num_workers=2, worker_type="process")
        assert_same_batches(NeighborLoader(data, **NODES), loader)
    assert started[0].end()[0] == 0  # the workers' copies said no goodbye of their own


RANK = """
import os, sys
from pyg_scale.cli.serve import main
folder, port = sys.argv[1:]
sys.exit(main([f"{folder}/rank{os.environ['RANK']}", "--bind", f"tcp://127.0.0.1:{port}",
               "--clients", "1", "--threads", "2"]))
"""


@pytest.mark.slow
def test_servers_that_are_ranks_hold_only_their_own_parts(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret.write_text("a secret of sixteen or more")
    secret.chmod(0o600)
    data = graph()
    pyg_scale.partition(data, 2, "hash", tmp_path / "parts")
    for rank in (0, 1):
        shutil.copytree(tmp_path / "parts", tmp_path / f"rank{rank}")
        shutil.rmtree(tmp_path / f"rank{rank}" / f"part-{1 - rank}")
    (tmp_path / "serve.py").write_text(RANK)
    port = free_ports(2)
    launch = [preloaded.python(), "-m", "torch.distributed.run", "--standalone"]
    launch.append("--nproc-per-node=2")
    monkeypatch.setenv("PYTHON_EXEC", preloaded.python())
    servers = subprocess.Popen([*launch, tmp_path / "serve.py", str(tmp_path), str(port)])
    limit = threading.Timer(PATIENCE, servers.kill)
    limit.start()
    try:
        where = f"tcp://127.0.0.1:{port},tcp://127.0.0.1:{port + 1}"
        with pyg_scale.open(where, timeout=PATIENCE) as served:
            assert_same_batches(NeighborLoader(data, **NODES), NeighborLoader(served, **NODES))
            assert torch.equal(served.y, data.y)
        assert servers.wait(PATIENCE) == 0
    finally:
        limit.cancel()
        servers.terminate()
        servers.wait(PATIENCE)


def free_ports(count: int) -> int:
    """The first of so many ports one after the other."""
    for port in range(45_600, 60_000, 7):
        with contextlib.ExitStack() as stack:
            try:
                for each in range(port, port + count):
                    found = stack.enter_context(socket.socket())
                    found.bind(("127.0.0.1", each))
            except OSError:
                continue
            return port
    raise AssertionError("no free ports")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("nowhere", "--bind", "tcp://127.0.0.1:0"), "not a graph directory"),
        ((".", "--bind", "here"), "tcp://host:5555"),
        ((".", "--bind", "tcp://127.0.0.1"), "tcp://host:5555"),
        ((".", "--bind", "tcp://127.0.0.1:65536"), "tcp://host:5555"),
        ((".", "--bind", "tcp://127.0.0.1:0", "--transport", "pigeons"), "unknown comm"),
        ((".", "--bind", "tcp://127.0.0.1:0", "--feature-store", "attic"), "unknown feature_store"),
    ],
)
def test_what_cannot_be_served_is_said(
    tmp_path: Path,
    secret: Path,
    options: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pyg_scale.cli.serve import main

    pyg_scale.save(graph(), tmp_path / "graph")
    monkeypatch.chdir(tmp_path / "graph")
    assert main([*options, "--secret-file", str(secret)]) == 1
    assert said in capsys.readouterr().err
    assert not secret.exists()


class Ended(Listener):
    """What listened, and has come to its end by itself."""

    address = "tcp://host:5555"
    error = CommError("what answers at tcp://host:5555 has ended by OSError: no such socket")
    closed = False

    def close(self) -> None:
        type(self).closed = True


@pytest.mark.timeout(60)
def test_it_ends_with_what_listens(
    tmp_path: Path,
    secret: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pyg_scale.cli.serve import main
    from pyg_scale_zmq.backend import Zmq

    pyg_scale.save(graph(), tmp_path / "graph")
    monkeypatch.setattr(Zmq, "listen", lambda *_, **__: Ended())
    bind = ["--bind", "tcp://127.0.0.1:0", "--secret-file", str(secret)]
    assert main([str(tmp_path / "graph"), *bind]) == 1
    assert "has ended by OSError: no such socket" in capsys.readouterr().err
    assert Ended.closed


def test_ranks_of_a_machine_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyg_scale.cli.serve import bind_of_rank, secret_in

    assert bind_of_rank("tcp://*:5555") == "tcp://*:5555"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert bind_of_rank("tcp://*:5555") == "tcp://*:5558"
    assert bind_of_rank("tcp://*:0") == "tcp://*:0"
    monkeypatch.setenv("PYG_SCALE_SECRET", "the secret itself")
    assert secret_in(None) == "the secret itself"


def test_a_secret_is_made_once_and_must_be_ones_own(tmp_path: Path) -> None:
    from pyg_scale.cli.serve import secret_in

    path = tmp_path / "secret"
    with ThreadPoolExecutor(4) as pool:  # servers that are started at the same time
        found = set(pool.map(secret_in, [str(path)] * 8))
    assert len(found) == 1 and len(found.pop()) == 64
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]
    path.chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        secret_in(str(path))
