"""Every example runs, in its smallest setting."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))


def run(example: Path, folder: Path, *arguments: str, ranks: int = 0, timeout: float = 110) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *(launcher if ranks else []), example, *arguments],
        cwd=folder,
        env=os.environ | {"MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_runs_tiny(example, tmp_path):
    if example.stem == "server_client":
        pytest.importorskip("zmq", reason="pip install ./plugins/pyg-scale-zmq")
    assert run(example, tmp_path, "--tiny").strip()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_says_what_it_does(example, tmp_path):
    assert "--tiny" in run(example, tmp_path, "--help")


def test_train_sage_draws_a_picture_of_a_real_graph(tmp_path, data_dir):
    args = ("--tiny", "--data", str(data_dir / "cora.npz"), "--out", "picture.png")
    assert "accuracy" in run(named("train_sage"), tmp_path, *args)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def named(name: str) -> Path:
    (found,) = (path for path in EXAMPLES if path.stem == name)
    return found


def accuracies(printed: str) -> dict[str, float]:
    return {k: float(v) for k, v in re.findall(r"test accuracy, ([^:]*): ([\d.]+)", printed)}


def test_train_sage_says_how_fast_it_is_and_why_pyg_is_not(tmp_path):
    printed = run(named("train_sage"), tmp_path, "--tiny", "--accelerate")
    assert "conv1  SAGEConv  yes" in printed
    assert re.search(r"training [\d.]+, loading only [\d.]+", printed)
    assert re.search(r"PyG's own loader: ([\d.]+ batches|.*requires either 'pyg-lib')", printed)


def test_resuming_gives_the_same_model(tmp_path):
    assert "the same to the bit" in run(named("resume"), tmp_path, "--tiny")


@pytest.mark.parametrize("split_seeds", ["global", pytest.param("part", marks=pytest.mark.slow)])
def test_ranks_share_seeds_and_evaluate_together_or_alone(tmp_path, split_seeds):
    options = ("--tiny", "--split-seeds", split_seeds, "--layerwise", "out")
    printed = run(named("train_ddp"), tmp_path, *options, ranks=2)
    assert sorted(re.findall(r"rank (\d) of 2: 4 batches", printed)) == ["0", "1"]
    (found,) = re.findall(r"test accuracy, ranks 2: ([\d.]+), rank 0 alone: ([\d.]+)", printed)
    assert found[0] == found[1] and "all neighbours" in accuracies(printed)


@pytest.mark.parametrize("example", ["hetero_ddp", "link_prediction_ddp"])
def test_examples_on_two_ranks(tmp_path, example):
    assert re.search(r"epoch 1: .* 0\.\d+", run(named(example), tmp_path, "--tiny", ranks=2))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_learn_as_well_as_one(tmp_path, data_dir):
    data = ("--data", str(data_dir / "facebook_pages.npz"), "--epochs", "4")
    found = [
        *accuracies(run(named("train_ddp"), tmp_path, *data, timeout=400)).values(),
        *accuracies(run(named("train_ddp"), tmp_path, *data, ranks=2, timeout=400)).values(),
    ]
    assert found[1] > 0.9 and abs(found[1] - found[0]) < 0.01


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sampled_training_is_as_good_as_on_the_whole_graph(tmp_path, data_dir):
    data = str(data_dir / "facebook_pages.npz")
    printed = run(named("train_sage"), tmp_path, "--data", data, "--full-batch", timeout=800)
    found = accuracies(printed)
    assert found["whole graph"] > 0.93
    assert found["sampled neighbours"] > found["whole graph"] - 0.01


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_types_of_nodes_are_told_apart(tmp_path, data_dir):
    data = str(data_dir / "dblp.npz")
    printed = run(named("hetero_dblp"), tmp_path, "--data", data, timeout=500)
    assert max(map(float, re.findall(r"test accuracy ([\d.]+)", printed))) > 0.85
