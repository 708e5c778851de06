"""Ranks come and go, and the optimizer takes the steps of a single process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pyg_scale
from tests import preloaded
from tests.distributed.processes import free_port
from tests.train.run_elastic import EPOCHS, STEPS, STEPS_OF_EPOCH, loss_of, pieces

ROOT = Path(pyg_scale.__file__).parents[1]
SCRIPT = Path(__file__).with_name("run_elastic.py")
RANKS = dict(enumerate([1] * 2 + [3] * 6 + [2] * 4, 1))
"""How many make each step."""
ENVIRON = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def alone() -> tuple[list[list[int]], list[torch.Tensor]]:
    """The seeds of each step and the parameters at the end, of one process that nobody disturbs."""
    model, optimizer, loader = pieces()
    seeds = []
    while loader.epoch < EPOCHS:
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            seeds.append(batch.input_id.tolist())
    assert len(seeds) == STEPS == EPOCHS * STEPS_OF_EPOCH
    return seeds, [parameter.detach().flatten() for parameter in model.parameters()]


def lines_of(log: Path) -> list[dict[str, Any]]:
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def check(log: Path, alone: Any, ranks: dict[int, int]) -> None:
    """Each step was made once, by so many ranks, of the same seeds; and so with the parameters."""
    expected, parameters = alone
    steps = defaultdict(dict)
    for line in lines_of(log):
        assert line["rank"] not in steps[line["step"]], line
        steps[line["step"]][line["rank"]] = line["seeds"]
    assert {step: len(found) for step, found in steps.items()} == ranks
    for step, found in steps.items():
        together = [seed for rank in sorted(found) for seed in found[rank]]
        assert together == expected[step - 1], step
    found = json.loads(Path(f"{log}.parameters").read_text())
    for mine, theirs in zip(found, parameters, strict=True):
        assert (torch.tensor(mine, dtype=torch.float64) - theirs).abs().max() < 1e-12


def run(world_size: int, *arguments: str) -> None:
    """Ranks as processes, until all have ended."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(world_size)}
    ranks = [
        subprocess.Popen(
            [preloaded.python(), str(SCRIPT), *arguments],
            env=os.environ | ENVIRON | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        for rank in ranks:
            said, _ = rank.communicate(timeout=90)
            assert rank.returncode == 0, said
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()


@pytest.mark.timeout(300)
def test_one_rank_then_three_then_two(tmp_path: Path, alone: Any) -> None:
    """Stopped in the middle of epochs, and gone on with by other numbers of ranks."""
    log, plan = tmp_path / "log", ("1@2", "3@8", "2@12")
    for number, each in enumerate(plan):
        world_size = int(each.partition("@")[0])
        run(world_size, str(tmp_path / "run"), str(log), *plan[: number + 1])
    check(log, alone, RANKS)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchrun_with_agents_that_come_and_go(tmp_path: Path, alone: Any) -> None:
    """``torchrun --nnodes 1:4``: one agent, then two more, one of which is killed with its rank."""
    log = tmp_path / "log"
    command = [
        *(preloaded.python(), "-m", "torch.distributed.run", "--nnodes=1:4", "--nproc-per-node=1"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=elastic"),
        *("--rdzv-conf=last_call_timeout=3", "--monitor-interval=0.2", "--max-restarts=5"),
        *(str(SCRIPT), str(tmp_path / "run"), str(log), "1@2", "3@8", "2@12"),
    ]
    agents: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> None:
        with open(tmp_path / f"{name}.txt", "wb") as out:
            environ = os.environ | ENVIRON | {"PYTHON_EXEC": preloaded.python()}
            environ["AGENT"] = name
            environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else who comes later finds nobody
            agent = subprocess.Popen(
                command, env=environ, stdout=out, stderr=out, start_new_session=True
            )
        agents.append(agent)

    def until(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 150
        while not done():
            said = [path.read_text()[-4000:] for path in sorted(tmp_path.glob("*.txt"))]
            assert time.monotonic() < deadline, said
            assert all(agent.poll() is None for agent in agents), said
            time.sleep(0.1)

    def made(step: int, ranks: int) -> bool:
        return sum(line["step"] == step for line in lines_of(log)) == ranks

    try:
        start("first")
        until(lambda: made(2, 1))
        start("second")
        start("third")
        until(lambda: made(8, 3))
        third = agents.pop()
        (rank,) = (e["pid"] for e in lines_of(log) if (e["step"], e["agent"]) == (8, "third"))
        os.kill(preloaded.pid_behind(third), signal.SIGKILL)
        os.kill(rank, signal.SIGKILL)
        third.wait(30)
        until(lambda: Path(f"{log}.parameters").exists())
        for agent in agents:
            assert agent.wait(60) == 0
    finally:
        for agent in agents:
            agent.terminate()  # and its rank
            try:
                agent.wait(40)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait(10)
    check(log, alone, RANKS)
