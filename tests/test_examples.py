"""Every example runs, in its smallest setting."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.run import get_args_parser

from tests import preloaded

pytestmark = pytest.mark.matrix(2)

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))


def run(
    example: Path,
    folder: Path,
    *arguments: str,
    ranks: int = 0,
    timeout: float = 110,
    python: str = sys.executable,
) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [python, *(launcher if ranks else []), example, *arguments],
        cwd=folder,
        env=os.environ | {"MPLBACKEND": "agg", "PYTHON_EXEC": python},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs an example in this process, which has imported torch already; what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")

    def main(example: Path, *arguments: str) -> str:
        runpy.run_path(str(example), run_name="example")["main"](list(arguments))
        return capsys.readouterr().out

    return main


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_runs_tiny(example, call, monkeypatch):
    if example.stem == "server_client":
        pytest.importorskip("zmq", reason="pip install ./plugins/pyg-scale-zmq")
        monkeypatch.setattr(sys, "executable", preloaded.python())  # of the servers
    assert call(example, "--tiny").strip()


def test_tgn_is_as_good_as_with_pygs_buffer_and_goes_on_where_it_was_stopped(call, tmp_path):
    tgn = next(example for example in EXAMPLES if example.stem == "tgn")

    def precision(*arguments: str) -> float:
        out = call(tgn, "--events", "3000", *arguments)
        return float(re.search(r"test AP ([\d.]+)", out)[1])

    ours, theirs = precision("--epochs", "3"), precision("--epochs", "3", "--buffer", "pyg")
    assert ours > 0.7
    assert ours > theirs - 0.02
    saved = str(tmp_path / "run")
    precision("--epochs", "1", "--checkpoint", saved)
    assert precision("--epochs", "3", "--checkpoint", saved) == ours


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_says_what_it_does(example, call, capsys):
    with pytest.raises(SystemExit) as end:
        call(example, "--help")
    assert end.value.code == 0 and "--tiny" in capsys.readouterr().out


def test_runs_as_a_script(tmp_path):
    assert "--tiny" in run(named("train_sage"), tmp_path, "--help")


def test_train_sage_draws_a_picture_of_a_real_graph(call, tmp_path, data_dir):
    args = ("--tiny", "--data", str(data_dir / "cora.npz"), "--out", "picture.png")
    assert "accuracy" in call(named("train_sage"), *args)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def named(name: str) -> Path:
    (found,) = (path for path in EXAMPLES if path.stem == name)
    return found


def accuracies(printed: str) -> dict[str, float]:
    return scores(printed, "accuracy")


def scores(printed: str, metric: str) -> dict[str, float]:
    return {k: float(v) for k, v in re.findall(rf"test {metric}, ([^:]*): ([\d.]+)", printed)}


def test_train_sage_says_how_fast_it_is_and_why_pyg_is_not(call):
    printed = call(named("train_sage"), "--tiny", "--accelerate")
    assert "conv1  SAGEConv  yes" in printed
    assert re.search(r"training [\d.]+, loading only [\d.]+", printed)
    assert re.search(r"PyG's own loader: ([\d.]+ batches|.*requires either 'pyg-lib')", printed)


def test_resuming_gives_the_same_model(call):
    assert "the same to the bit" in call(named("resume"), "--tiny")


@pytest.mark.slow
@pytest.mark.parametrize("split_seeds", ["global", "part"])
def test_ranks_share_seeds_and_evaluate_together_or_alone(tmp_path, split_seeds):
    options = ("--tiny", "--split-seeds", split_seeds, "--layerwise", "out")
    python = sys.executable if split_seeds == "global" else preloaded.python()
    printed = run(named("train_ddp"), tmp_path, *options, ranks=2, python=python)
    assert sorted(re.findall(r"rank (\d) of 2: 4 steps", printed)) == ["0", "1"]
    (found,) = re.findall(r"test accuracy, ranks 2: ([\d.]+), rank 0 alone: ([\d.]+)", printed)
    assert found[0] == found[1] and "all neighbours" in accuracies(printed)


@pytest.mark.parametrize("example", ["hetero_ddp", "link_prediction_ddp"])
def test_examples_on_two_ranks(tmp_path, example):
    printed = run(named(example), tmp_path, "--tiny", ranks=2, python=preloaded.python())
    assert re.search(r"epoch 1: .* 0\.\d+", printed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_on_the_full_graph_are_as_good_as_one_process(tmp_path, data_dir):
    data = ("--data", str(data_dir / "facebook_pages.npz"), "--epochs", "10", "--check")
    python = preloaded.python()
    found = accuracies(
        run(named("full_graph"), tmp_path, *data, ranks=2, timeout=400, python=python)
    )
    assert found["ranks 2"] == found["one process"] > 0.85


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_learn_as_well_as_one(tmp_path, data_dir):
    data = ("--data", str(data_dir / "facebook_pages.npz"), "--epochs", "2")
    found: list[float] = []
    for ranks in (0, 2):
        printed = run(
            named("train_ddp"),
            tmp_path,
            *data,
            ranks=ranks,
            timeout=400,
            python=preloaded.python(),
        )
        found += accuracies(printed).values()
    assert found[1] > 0.9 and abs(found[1] - found[0]) < 0.01


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sampled_training_is_as_good_as_on_the_whole_graph(tmp_path, data_dir):
    options = ["--data", str(data_dir / "facebook_pages.npz"), "--full-batch", "--accelerate"]
    options += ["--epochs", "2", "--batch-size", "256", "--num-neighbors", "5", "3"]
    python = preloaded.python()
    printed = run(named("train_sage"), tmp_path, *options, timeout=800, python=python)
    found = accuracies(printed)
    assert found["whole graph"] > 0.93
    assert found["sampled neighbours"] > found["whole graph"] - 0.01


@pytest.mark.parametrize("loader", ["shadow", "ppr", "ibmb", "random"])
def test_every_loader_of_subgraphs_runs_tiny(call, loader):
    found = accuracies(call(named("cluster_gcn"), "--tiny", "--loader", loader))
    assert found.keys() == {loader, "whole graph"} and min(found.values()) > 0.4


@pytest.mark.parametrize("layers", [[], ["--layers"]])
def test_every_importance_sampler_runs_tiny(call, layers):
    names = ["labor", "neighbours", "ladies", "fastgcn", "cost"]
    found = accuracies(call(named("importance_sampling"), "--tiny", *layers, "--samplers", *names))
    assert [*found] == [*names, "whole graph"] and min(found.values()) > 0.7


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("example", "options"),
    [
        ("importance_sampling", "--samplers labor ladies cost --epochs 3"),
        ("importance_sampling", "--samplers fastgcn --layer-nodes 20000 --epochs 3"),
        ("graph_saint", "--epochs 8"),
        ("cluster_gcn", "--loader clusters"),
        ("cluster_gcn", "--loader shadow --epochs 2"),
        ("cluster_gcn", "--loader ppr --epochs 2"),
        ("cluster_gcn", "--loader ibmb --epochs 4"),
    ],
)
def test_every_family_of_samplers_is_as_good_as_the_whole_graph(
    example, options, tmp_path, data_dir
):
    data = ("--data", str(data_dir / "facebook_pages.npz"))
    python = preloaded.python()
    printed = run(named(example), tmp_path, *data, *options.split(), timeout=800, python=python)
    found = accuracies(printed)
    whole = found.pop("whole graph")
    assert found and whole > 0.9
    assert min(found.values()) > whole - 0.01, printed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_classes_of_unequal_size_are_told_apart(tmp_path, data_dir):
    options = (
        "--data",
        str(data_dir / "tolokers.npz"),
        "--epochs",
        "50",
        "--neighbors",
        "50",
        "50",
    )
    example, python = named("importance_sampling"), preloaded.python()
    found = scores(run(example, tmp_path, *options, timeout=500, python=python), "ROC AUC")
    whole = found.pop("whole graph")
    assert set(found) == {"labor", "neighbours"} and whole > 0.7
    assert min(found.values()) > whole - 0.01, found


def test_area_under_the_roc_curve():
    """As counted over all pairs, equal scores as half."""
    roc_auc = runpy.run_path(str(named("importance_sampling")), run_name="example")["roc_auc"]
    draw = torch.Generator().manual_seed(0)
    score = torch.randint(20, (300,), generator=draw).float()
    y = torch.randint(4, (300,), generator=draw).eq(0).long()
    apart = score[y == 1][:, None] - score[y == 0]
    assert roc_auc(score, y) == pytest.approx(float(((apart.sign() + 1) / 2).mean()), abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_types_of_nodes_are_told_apart(tmp_path, data_dir):
    data = str(data_dir / "dblp.npz")
    printed = run(
        named("hetero_dblp"), tmp_path, "--data", data, timeout=500, python=preloaded.python()
    )
    found = accuracies(printed)
    assert found["sampled neighbours"] > max(0.85, found["whole graph"] - 0.01)


@pytest.mark.parametrize(
    "script", [*EXAMPLES, *EXAMPLES[0].parent.glob("*/*.py")], ids=lambda path: path.name
)
def test_options_are_no_beginnings_of_those_of_torchrun(script):
    """It takes them for its own where they are, even behind the name of the script."""
    theirs = get_args_parser()._option_string_actions
    for mine in re.findall(r'add_argument\("(--[a-z-]+)"', script.read_text()):
        assert not [each for each in theirs if each.startswith(mine)], mine


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_embeddings_are_as_good_as_a_dense_table(tmp_path, ranks):
    out = run(named("embeddings"), tmp_path, "--tiny", ranks=ranks)
    mean, sharded, dense = (float(found) for found in re.findall(r"error (\d\.\d+)", out))
    assert abs(sharded - dense) <= 0.01 and max(sharded, dense) < 0.9 * mean
    assert f"rank 0 has {200 // max(1, ranks)} rows" in out
