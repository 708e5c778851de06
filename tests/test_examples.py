"""Every example runs, in its smallest setting."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))


def run(example: Path, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, example, *arguments],
        cwd=folder,
        env=os.environ | {"MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_runs_tiny(example, tmp_path):
    assert run(example, tmp_path, "--tiny").strip()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_says_what_it_does(example, tmp_path):
    assert "--tiny" in run(example, tmp_path, "--help")


def test_train_sage_draws_a_picture_of_a_real_graph(tmp_path, data_dir):
    (example,) = (path for path in EXAMPLES if path.stem == "train_sage")
    data = str(data_dir / "cora.npz")
    assert "accuracy" in run(example, tmp_path, "--tiny", "--data", data, "--out", "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
