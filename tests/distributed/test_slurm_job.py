"""The batch script of the examples, with an ``srun`` that only sets what SLURM's sets."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import preloaded

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"

SRUN = """
import os, signal, subprocess, sys
tasks = int(os.environ["SLURM_NTASKS"])
last = os.environ.get("TERM_AFTER")
started = []
for task in range(tasks):
    environ = os.environ | {
        "SLURM_PROCID": str(task), "SLURM_LOCALID": "0", "SLURM_NODEID": str(task),
        "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NODELIST": f"127.0.0.[1-{tasks}]",
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{tasks})",
    }
    out = subprocess.PIPE if task == 0 else None
    started.append(subprocess.Popen(sys.argv[1:], env=environ, stdout=out, text=True))
for line in started[0].stdout:
    print(line, end="", flush=True)
    if last and line.startswith(last):
        for task in started:
            task.send_signal(signal.SIGTERM)
sys.exit(max(task.wait(60) if task.returncode is None else task.returncode for task in started))
"""
SCONTROL = """
import os, sys
assert sys.argv[1:] == ["requeue", os.environ["SLURM_JOB_ID"]], "only srun may be needed"
open(os.environ["RUN"] + "/requeued", "w").close()
"""


def command(folder: Path, name: str, code: str) -> None:
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(code)}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_the_script_is_one() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True, timeout=30)
    text = SCRIPT.read_text()
    for option in ("--requeue", "--signal=TERM@", "--nodes=", "--ntasks-per-node="):
        assert re.search(rf"^#SBATCH {option}", text, re.M), option


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_that_is_told_to_stop_is_requeued_and_goes_on(tmp_path: Path) -> None:
    for name, code in (("srun", SRUN), ("scontrol", SCONTROL)):
        command(tmp_path, name, code)
    (tmp_path / "python").symlink_to(preloaded.python())
    run = tmp_path / "run"
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environ |= {
        "PATH": f"{tmp_path}:{environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "ENVIRONMENT": "BATCH",
        "RUN": str(run),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[1-9]",  # of which no name can be resolved
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_CPUS_PER_TASK": "1",
    }

    def job(**extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(SCRIPT), "--tiny", "--epochs", "6"],
            env=environ | extra,
            capture_output=True,
            text=True,
            timeout=180,
        )

    first = job(TERM_AFTER="epoch 1")
    assert first.returncode == 75, first.stdout + first.stderr
    assert (run / "requeued").exists() and "back into the queue" in first.stdout
    second = job()
    assert second.returncode == 0, second.stdout + second.stderr
    (step,) = re.findall(r"2 ranks, from step (\d+)", second.stdout)
    (last,) = re.findall(r"done after (\d+) steps", second.stdout)
    assert int(last) == 24 and 4 <= int(step) < 24, second.stdout
    assert "epoch 1" not in second.stdout and "epoch 6" in second.stdout
