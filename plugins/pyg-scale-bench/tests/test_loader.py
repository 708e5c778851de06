"""``pyg-scale bench loader`` measures what it says, and reports it as it measured it."""

import json
import shlex

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale_bench import command, graphs, loader, loader_report
from pyg_scale_bench.rounds import OURS, PYG
from pyg_scale_bench.streams import LIMIT, Case

SMALL = shlex.split(
    "--nodes 2000 --edges 20000 --features 8 --batch-size 64 --num-neighbors 3,2 --batches 3 "
    "--warmup 1 --repeats 2 --workers 0,1 --memory-batches 8"
)

needs_kernels = pytest.mark.skipif(
    not library.status()["loaded"], reason="the kernels are not compiled: run `pyg-scale build`"
)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")


# The command ##################################################################################


@needs_kernels
def test_the_whole_run(tmp_path, capsys):
    files = {name: tmp_path / "out" / f"r.{name}" for name in ("json", "png", "md")}
    args = ["--json", files["json"], "--png", files["png"], "--report", files["md"]]
    assert command.main(["loader", *SMALL, *map(str, args)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(files["json"].read_text())

    assert found["graph"] | {"name": ""} == {
        "name": "",
        "nodes": 2000,
        "edges": 20_000,
        "features": 8,
        "bytes_per_node": 32,
    }
    assert found["environment"]["kernels"]["loaded"]
    ours = [c for c in found["cases"] if c["side"] == OURS]
    assert {(c["group"], c["variant"]) for c in ours} == {
        (g, v) for g in ("sampler", "loader") for v in graphs.VARIANTS
    }
    assert {c["group"] for c in found["cases"] if c["side"] == LIMIT} == {"limit"}
    for c in ours:
        assert len(c["rates"]) == 2 and c["timed"] == 3
        assert c["batches_per_s_low"] <= c["batches_per_s"] <= c["batches_per_s_high"]
    # The graph and the seeds are the same, and so is what is sampled, whoever loads it.
    by_variant = {(c["variant"], c["mean"]["nodes"]) for c in ours if c["group"] == "loader"}
    assert len(by_variant) == len(graphs.VARIANTS)
    assert found["resident"][0]["batches"] == 8
    undeclared = {f"{v}, not declared" for v in graphs.VARIANTS if graphs.is_sorted(v)}
    assert {b["variant"] for b in found["builds"]} == set(graphs.VARIANTS) | undeclared

    text = files["md"].read_text()
    for expected in (
        "pyg-scale bench loader --nodes 2000",
        "torch " + torch.__version__,
        "load average",
        "Sampling plus a plain copy",
        "![Chart](r.png)",
    ):
        assert expected in text
    assert "Sampling only" in printed
    assert files["png"].read_bytes().startswith(b"\x89PNG")


@needs_kernels
@pytest.mark.slow
def test_every_option_runs_the_compiled_op(tmp_path):
    args = [
        "--no-pyg",
        "--options",
        "--nodes",
        "20000",
        "--edges",
        "200000",
        "--json",
        str(tmp_path / "r.json"),
        "--variants",
        "int64 unsorted",
    ]
    assert command.main(["loader", *SMALL, *args]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    options = {
        c["variant"]: c["notes"]["compiled"] for c in found["cases"] if c["group"] == "options"
    }
    assert set(options.values()) == {"neighbor_sample", "hgt_sample"}
    words = " ".join(options)
    for option in (
        "disjoint",
        "weighted",
        "node time",
        "edge time",
        "last",
        "induced",
        "bidirectional",
        "backward",
        "links",
        "triplet",
        "heterogeneous",
        "HGT",
    ):
        assert option in words


@needs_kernels
def test_a_graph_from_a_file(data_dir, tmp_path):
    args = [
        "--data",
        str(data_dir / "cora.npz"),
        "--variants",
        "int32 unsorted",
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert command.main(["loader", *SMALL, *args]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["graph"]["nodes"], found["graph"]["features"]) == (2708, 1433)


def test_the_cache_holds_the_same_graph(tmp_path):
    first, second = (graphs.cached(str(tmp_path), 500, 4000, 3) for _ in range(2))
    assert torch.equal(first.edge_index, second.edge_index) and torch.equal(first.x, second.x)
    assert [p.name for p in tmp_path.iterdir()] == ["planted-500-4000-3"]


def test_without_kernels_it_says_what_to_do(monkeypatch):
    from pyg_scale.errors import KernelsError

    monkeypatch.setattr(library._library, "loaded", False)
    monkeypatch.setattr(library._library, "load", lambda: False)
    monkeypatch.setattr(library._library, "reason", "they are not compiled")
    with pytest.raises(KernelsError, match="pyg-scale build"):
        command.main(["loader", *SMALL])


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "usage"),
        (["loaders"], "there is no benchmark 'loaders'"),
        (["loader", "--batches", "0"], "--batches must be at least 1"),
        (["loader", "--variants", "int16"], "is not one of"),
        (["loader", "--data", "x.npz", "--options"], "leave --data out"),
    ],
)
def test_wrong_usage_is_named(args, complaint, capsys):
    try:
        status = command.main(args)
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert complaint in capsys.readouterr().err


def test_help_names_the_benchmarks(capsys):
    assert command.main(["--help"]) == 0
    assert "loader" in capsys.readouterr().out


# Reports ######################################################################################


def case(side=OURS, label="a loader", **more):
    return Case(side=side, group="loader", label=label, variant="a graph", stream=None, **more)


def products_shaped(rate: float) -> dict:
    mean = {"nodes": 1.0, "edges": 1e6, "bytes": 0.0}
    ours = case(
        label="pyg_scale, 2 workers", workers=2, rates=[rate - 1, rate, rate + 2], mean=mean
    )
    theirs = case(PYG, "PyG on x, 2 workers", workers=2, rates=[4.0, 5.0, 4.5], mean=mean)
    return {
        "benchmark": "loader",
        "command": "pyg-scale bench loader",
        "graph": {
            "name": "generated",
            "nodes": 2_400_000,
            "edges": 120_000_000,
            "features": 100,
            "bytes_per_node": 400,
        },
        "settings": {
            "data": None,
            "batch_size": 1024,
            "num_neighbors": [15, 10, 5],
            "repeats": 3,
            "batches": 40,
            "warmup": 5,
        },
        "environment": {
            "cpu": "a CPU",
            "cpus": 2,
            "memory_bytes": 2**34,
            "threads": 2,
            "system": "Linux",
            "load_average_before": 3.0,
            "load_average_after": 2.0,
            "quiet": False,
            "versions": {"torch": "2.13"},
            "commit": None,
            "date": "today",
            "kernels": {"path": "k.so", "reason": ""},
        },
        "backends": [
            {"name": "x", "version": "1", "reason": ""},
            {"name": "y", "version": None, "reason": "not installed"},
        ],
        "pyg_says": "",
        "cases": [ours.to_dict(), theirs.to_dict()],
        "builds": [],
        "resident": [],
    }


def test_a_report_compares_with_pyg_and_marks_what_it_did_not_measure(tmp_path):
    report = loader.report(products_shaped(27.0))
    text = report.markdown()
    assert "| pyg_scale, 2 workers | a graph | 27.00 | 26.00–29.00 | 27.00 | 6.0× |" in text
    assert "| PyG on x, 2 workers | a graph | 4.50 | 4.00–5.00 | 4.50 |  |" in text
    assert "NOT QUIET" in text and "PyG on y: not measured: not installed" in text
    report.draw(str(tmp_path / "c.png"))
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_six_bars() -> None:
    mean = {"nodes": 1.0, "edges": 1e6, "bytes": 0.0}

    def measured(side, label, variant, workers, *rates):
        group = "loader" if workers is not None else "sampler"
        more = {"variant": variant, "workers": workers, "rates": list(rates), "mean": mean}
        return Case(side=side, group=group, label=label, stream=None, **more).to_dict()

    cases = [measured(OURS, "pyg_scale", "int32", 2, 99.0)]  # PyG has no such graphs
    for workers in (None, 0, 1, 2):
        cases.append(measured(OURS, "pyg_scale", "int64", workers, 20.0, 30.0, 24.0))
        cases.append(measured(PYG, "PyG on a, x", "int64", workers, 2.0))
        cases.append(measured(PYG, "PyG on b, x", "int64", workers, 3.0))
        cases.append(measured(OURS, "pyg_scale", "int64 sorted", workers, 50.0))
    panel = loader_report.glance({"cases": cases})
    assert [(bar.side, bar.value, bar.note) for bar in panel.bars] == 3 * [
        (OURS, 24.0, "(8.0×)"),
        ("PyG on b", 3.0, ""),
    ]
    assert [row.replace("\n", " ") for row in panel.rows] == [
        "Sampling alone, 1 thread",
        "Loader, features included, no workers",
        "Loader, features included, 2 workers",
    ]
    alone = loader_report.glance({"cases": [each for each in cases if each["side"] == OURS]})
    assert [(bar.value, bar.note) for bar in alone.bars] == [(99.0, "")]
