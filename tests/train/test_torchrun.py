"""Runs under torchrun whose ranks die or are told to stop end as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch

import pyg_scale
from pyg_scale.train import EXIT_CODE, Checkpoint
from tests import preloaded
from tests.train.run_of_ranks import EPOCHS, STEPS, loss_of, pieces

ROOT = Path(pyg_scale.__file__).parents[1]
SCRIPT = Path(__file__).with_name("run_of_ranks.py")
LIMIT = 240


pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT + 60)]


def torchrun(folder, out, *faults, restarts=0, world_size=2):
    """What all ranks found, and what torchrun said."""
    out.mkdir()
    command = [preloaded.python(), "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world_size), "--max-restarts", str(restarts)]
    command += ["--monitor-interval", "0.1", str(SCRIPT), str(folder), str(out), *faults]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env["PYTHON_EXEC"] = preloaded.python()
    process = subprocess.Popen(
        command,
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=LIMIT)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    assert process.returncode == 0, said
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(world_size)], said


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run that nothing happened to, and what it found."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder / "run", torchrun(folder / "run", folder / "out")[0]


def test_a_rank_is_killed_and_later_told_to_stop(tmp_path, undisturbed):
    """To the bit the same, and no restart was lost for another reason."""
    _, expected = undisturbed
    faults = ("kill@3", "stop@5")
    found, said = torchrun(tmp_path / "run", tmp_path / "out", *faults, restarts=2)
    assert f"exitcode: {EXIT_CODE}" in said, said
    for rank in range(2):
        assert found[rank]["attempt"] == 2
        assert found[rank]["parameters"] == expected[rank]["parameters"]
        assert found[rank]["resumed"] in (5, 6)  # the step of the signal, or the next one
        assert found[rank]["draws"] == expected[rank]["draws"][found[rank]["resumed"] :]
    assert found[0]["parameters"] == found[1]["parameters"]


@pytest.mark.parametrize("world_size", [3, 4])
def test_killed_three_times(tmp_path, world_size):
    """After the first step, in the middle of an epoch, and after its last step."""
    expected, _ = torchrun(tmp_path / "plain", tmp_path / "expected", world_size=world_size)
    found, _ = torchrun(
        tmp_path / "run",
        tmp_path / "out",
        *("kill@1", "kill@5", "kill@6"),
        restarts=3,
        world_size=world_size,
    )
    for rank in range(world_size):
        assert found[rank]["attempt"] == 3
        assert found[rank]["parameters"] == expected[rank]["parameters"]


def test_one_process_goes_on_where_two_were(tmp_path, undisturbed):
    """The same batches, two of them for each step, and the same gradients in float64."""
    run, expected = undisturbed
    shutil.copytree(run, tmp_path / "run")
    for path in (tmp_path / "run").iterdir():
        if int(path.name.rpartition("-")[2]) > 4:
            shutil.rmtree(path)
    with torch.random.fork_rng(devices=[]):
        model, optimizer, loader = pieces(1, 6)
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        with Checkpoint(tmp_path / "run", state) as checkpoint:
            step = checkpoint.load().step
        assert step == 4
        while loader.epoch < EPOCHS:
            batches = list(loader)
            for two in zip(batches[::2], batches[1::2], strict=True):
                optimizer.zero_grad()
                seeds = sum(batch.batch_size for batch in two)
                for batch in two:
                    (loss_of(model, batch) * batch.batch_size / seeds).backward()
                optimizer.step()
                step += 1
    assert step == STEPS
    for parameter, values in zip(model.parameters(), expected[0]["parameters"], strict=True):
        difference = parameter.detach().flatten() - torch.tensor(values, dtype=torch.float64)
        assert float(difference.abs().max()) < 1e-11
