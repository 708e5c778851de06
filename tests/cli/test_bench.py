"""The benchmark measures what it says, and reports it as it measured it."""

import json
import mmap
import time

import pytest
import torch
from torch_geometric.data import Data

from pyg_scale.cli import bench
from pyg_scale.cli.bench import graphs, memory, peers, report, streams
from pyg_scale.cli.bench.measure import (
    LIMIT,
    OURS,
    PYG,
    Case,
    Counts,
    in_one_line,
    resident,
    run_rounds,
)
from pyg_scale.datasets import planted_communities
from pyg_scale.ops import library

SMALL = [
    "--nodes",
    "2000",
    "--edges",
    "20000",
    "--features",
    "8",
    "--batch-size",
    "64",
    "--num-neighbors",
    "3,2",
    "--batches",
    "3",
    "--warmup",
    "1",
    "--repeats",
    "2",
    "--workers",
    "0,1",
    "--memory-batches",
    "8",
]

needs_kernels = pytest.mark.skipif(
    not library.status()["loaded"], reason="the kernels are not compiled: run `pyg-scale build`"
)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")


# Measuring ####################################################################################


def case(stream, side=OURS):
    return Case("loader", "a loader", side, "a graph", stream, workers=0)


def test_rounds_time_what_comes_after_the_warm_up(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    closed = []

    def stream():
        try:
            for number in range(100):
                clock[0] += 50.0 if number < 2 else 0.5  # the warm-up is slow and not counted
                yield Counts(nodes=10 * number, edges=4, bytes=8)
        finally:
            closed.append(True)

    one = case(stream)
    run_rounds([one], repeats=3, warmup=2, batches=4, max_seconds=1000.0)
    assert one.rates == [2.0, 2.0, 2.0]
    assert one.timed == 4 and closed == [True] * 3
    assert one.mean == {"nodes": (20 + 30 + 40 + 50) / 4, "edges": 4.0, "bytes": 8.0}
    found = one.to_dict()
    assert (found["batches_per_s"], found["edges_per_s"]) == (2.0, 8.0)
    assert "stream" not in found


def test_a_slow_round_ends_early_but_has_three_batches(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def stream():
        while True:
            clock[0] += 10.0
            yield Counts(1, 1)

    one = case(stream)
    run_rounds([one], repeats=1, warmup=0, batches=40, max_seconds=5.0)
    assert one.timed == 3 and one.rates == [pytest.approx(0.1)]


def test_what_pyg_cannot_do_is_a_finding_and_what_we_cannot_is_an_error():
    def stream():
        raise RuntimeError("no such\n thing")
        yield

    theirs = case(stream, PYG)
    run_rounds([theirs], repeats=2, warmup=0, batches=1, max_seconds=1.0)
    assert theirs.error == "RuntimeError: no such thing" and not theirs.rates
    with pytest.raises(RuntimeError, match="no such"):
        run_rounds([case(stream)], repeats=1, warmup=0, batches=1, max_seconds=1.0)


def test_errors_of_workers_are_the_workers():
    text = (
        "Caught ValueError in DataLoader worker process 0.\nTraceback:\n  line\nValueError: why\n"
    )
    assert in_one_line(ValueError(text)) == "ValueError: why"


def test_memory_that_grows_is_seen():
    kept = []

    def stream(keep):
        for _ in range(20):
            # Mapped, so that what is closed leaves memory at once.
            block = mmap.mmap(-1, 4 << 20)
            block.write(b"1" * len(block))
            yield Counts(1, 1, len(block))
            if keep:
                kept.append(block)
            else:
                block.close()

    steady = resident("steady", "", lambda: stream(False), 20, 60.0)
    grows = resident("grows", "", lambda: stream(True), 20, 60.0)
    if memory.resident() is None:
        pytest.skip("this system has no /proc to read memory from")
    assert steady["bytes_per_batch"] == 4 << 20
    assert steady["largest_after"] - steady["at_early"] < 16 << 20
    assert grows["largest_after"] - grows["at_early"] > 30 << 20
    assert grows["peak"] > 70 << 20


# Graphs #######################################################################################


@pytest.mark.parametrize("variant", graphs.VARIANTS)
def test_variants_are_the_same_graph(variant):
    data = planted_communities(300, 4000, num_features=4)
    form = graphs.variant_of(data, variant)
    assert form.edge_index.dtype == (torch.int32 if "int32" in variant else torch.int64)

    def key(edge_index):
        return (edge_index[0].long() * 300 + edge_index[1].long()).sort().values

    assert torch.equal(key(form.edge_index), key(data.edge_index))
    col = form.edge_index[1]
    assert bool((col[1:] >= col[:-1]).all()) == graphs.is_sorted(variant)
    assert form.x is data.x


def test_a_sorted_graph_is_shuffled_where_unsorted_is_wanted():
    data = planted_communities(300, 4000, num_features=0, edge_order="destination")
    col = graphs.variant_of(data, "int64 unsorted").edge_index[1]
    assert not bool((col[1:] >= col[:-1]).all())


def test_seeds_are_every_node_before_any_comes_again():
    node = graphs.seeds(10, 25)
    assert node[:10].sort().values.tolist() == node[10:20].sort().values.tolist() == [*range(10)]
    assert node.shape == (25,) and torch.equal(node, graphs.seeds(10, 25))


# PyG ##########################################################################################


def test_without_a_package_pyg_is_left_out_with_a_reason(monkeypatch):
    monkeypatch.setitem(peers.PACKAGES, "torch-sparse", "no_such_module_at_all")
    found = {backend.name: backend for backend in peers.backends()}
    assert found["torch-sparse"].version is None
    assert found["torch-sparse"].reason == "not installed"


def test_flags_of_pyg_are_put_back():
    before = (peers.pyg_typing.WITH_PYG_LIB, peers.pyg_typing.WITH_TORCH_SPARSE)
    with peers.using("torch-sparse"):
        assert peers.pyg_typing.WITH_PYG_LIB is False
        assert peers.pyg_typing.WITH_TORCH_SPARSE is True
    assert before == (peers.pyg_typing.WITH_PYG_LIB, peers.pyg_typing.WITH_TORCH_SPARSE)


def test_what_pyg_says_is_what_a_user_sees():
    if any(backend.version for backend in peers.backends()):
        assert peers.what_pyg_says() == ""
    else:
        assert "requires either 'pyg-lib' or 'torch-sparse'" in peers.what_pyg_says()


# Streams ######################################################################################


def test_batches_are_counted():
    batch = Data(
        x=torch.zeros(5, 3), edge_index=torch.zeros(2, 7, dtype=torch.long), n_id=torch.arange(5)
    )
    assert streams.count(batch) == Counts(5, 7, 60)
    assert streams.row_bytes(batch) == 12


@needs_kernels
def test_the_limit_samples_and_copies_what_a_batch_holds():
    from pyg_scale import plugins

    data = planted_communities(2000, 20_000, num_features=8)
    sampler = plugins.get("sampler", "native")(data, num_neighbors=[3, 2])
    node = graphs.seeds(2000, 320)
    copied = list(streams.limit(sampler, data, node, 64, num_threads=2))
    sampled = list(streams.sampled(sampler, node, 64))
    assert [(c.nodes, c.edges) for c in copied] == [(s.nodes, s.edges) for s in sampled]
    assert [c.bytes for c in copied] == [32 * c.nodes for c in copied]
    early = streams.limit(sampler, data, node, 64, num_threads=2)
    next(early)
    early.close()  # leaves no thread behind


# The command ##################################################################################


@needs_kernels
def test_the_whole_run(tmp_path, capsys):
    files = {name: tmp_path / "out" / f"r.{name}" for name in ("json", "png", "md")}
    args = ["--json", files["json"], "--png", files["png"], "--report", files["md"]]
    assert bench.main(["loader", *SMALL, *map(str, args)]) == 0
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
    assert "Stated reference" not in text  # another graph than the one it is about
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
    assert bench.main(["loader", *SMALL, *args]) == 0
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
    assert bench.main(["loader", *SMALL, *args]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["graph"]["nodes"], found["graph"]["features"]) == (2708, 1433)


def test_the_cache_holds_the_same_graph(tmp_path):
    from pyg_scale.cli.bench.loader import cached

    first, second = (cached(str(tmp_path), 500, 4000, 3) for _ in range(2))
    assert torch.equal(first.edge_index, second.edge_index) and torch.equal(first.x, second.x)
    assert [p.name for p in tmp_path.iterdir()] == ["planted-500-4000-3"]


def test_without_kernels_it_says_what_to_do(monkeypatch):
    from pyg_scale.errors import KernelsError

    monkeypatch.setattr(library._library, "loaded", False)
    monkeypatch.setattr(library._library, "load", lambda: False)
    monkeypatch.setattr(library._library, "reason", "they are not compiled")
    with pytest.raises(KernelsError, match="pyg-scale build"):
        bench.main(["loader", *SMALL])


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "usage"),
        (["loaders"], "there is no benchmark 'loaders'"),
        (["loader", "--batches", "0"], "--batches must be at least 1"),
        (["loader", "--variants", "int16"], "is none of"),
        (["loader", "--data", "x.npz", "--options"], "leave --data out"),
    ],
)
def test_wrong_usage_is_named(args, complaint, capsys):
    try:
        status = bench.main(args)
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert complaint in capsys.readouterr().err


def test_help_names_the_benchmarks(capsys):
    assert bench.main(["--help"]) == 0
    assert "loader" in capsys.readouterr().out


# Reports ######################################################################################


def products_shaped(rate: float) -> dict:
    ours = Case(
        "loader",
        "pyg_scale, 2 workers",
        OURS,
        "int64 unsorted",
        iter,
        2,
        rates=[rate - 1, rate, rate + 2],
        mean={"nodes": 1.0, "edges": 1e6, "bytes": 0.0},
    )
    theirs = Case(
        "loader",
        "PyG on x, 2 workers",
        PYG,
        "int64 unsorted",
        iter,
        2,
        rates=[4.0, 5.0, 4.5],
        mean={"nodes": 1.0, "edges": 1e6, "bytes": 0.0},
    )
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
    text = report.markdown(products_shaped(27.0))
    assert "| pyg_scale, 2 workers | int64 unsorted | 27.00 | 26.00–29.00 | 27.00 | 6.0× |" in text
    assert "| PyG on x, 2 workers | int64 unsorted | 4.50 | 4.00–5.00 | 4.50 |  |" in text
    assert "NOT QUIET" in text and "PyG on y: not measured: not installed" in text
    assert "Stated reference, not from this run" in text
    report.write(products_shaped(27.0), png_path=str(tmp_path / "c.png"))
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
