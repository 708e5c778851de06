"""Torchrun starts ranks again, and they find each other at once."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests import preloaded

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--monitor-interval=0.2"]

SCRIPT = """
import os, sys, time, torch, torch.distributed as dist
from pathlib import Path
from pyg_scale import comm, distributed
with distributed.init(device="cpu", start_timeout=60) as context:
    with comm.connect(timeout=30) as ranks:
        ranks.barrier()
        deaths = len(list(Path(sys.argv[1]).glob("death-*")))  # before rank 1 can add one
        x = torch.ones(1)
        dist.all_reduce(x)
        if deaths < int(sys.argv[2]):
            if context.rank == 1:
                (Path(sys.argv[1]) / f"death-{deaths}").touch()
                os._exit(9)
            time.sleep(100)  # its agent ends it; were it to fail by itself, that would count too
        ranks.barrier()
    os.write(1, f"restarts {context.restarts} sum {int(x)}\\n".encode())  # not in two pieces
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def environ() -> dict[str, str]:
    """For torchrun, which starts its ranks by ``PYTHON_EXEC``."""
    given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHON_EXEC": preloaded.python()}
    return {**os.environ, **given}


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return [str(path), str(tmp_path)]


def test_each_restart_succeeds_at_once(script: list[str]) -> None:
    """Without a fresh place to meet, a restart fails more often than not, and needs another."""
    done = subprocess.run(
        [
            *(preloaded.python(), *TORCHRUN),
            *("--standalone", "--nproc-per-node=2", "--max-restarts=3", *script, "3"),
        ],
        env=environ(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("restarts 3 sum 2") == 2, done.stdout


def test_machines_that_count_restarts_differently_meet(script: list[str]) -> None:
    """Only the agent whose rank died counts a restart, so no number says which attempt it is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [
        preloaded.python(),
        *TORCHRUN,
        "--nnodes=2",
        "--nproc-per-node=1",
        "--max-restarts=1",
        "--rdzv-backend=c10d",
        "--rdzv-id=test",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        *script,
        "1",
    ]
    agents = [
        subprocess.Popen(
            command, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        said = [agent.communicate(timeout=150) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # and its ranks
            agent.wait(60)
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sorted(out.strip() for out, _ in said) == ["restarts 0 sum 2", "restarts 1 sum 2"], said
