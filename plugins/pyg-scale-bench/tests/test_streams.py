"""Rounds and streams measure what they say."""

import mmap
import time

import pytest
import torch
from torch_geometric.data import Data

from pyg_scale import plugins
from pyg_scale.datasets import planted_communities
from pyg_scale.ops import library
from pyg_scale_bench import graphs, memory, peers, streams
from pyg_scale_bench.rounds import OURS, PYG, in_one_line, take_turns
from pyg_scale_bench.streams import Case, Counts, resident

needs_kernels = pytest.mark.skipif(
    not library.status()["loaded"], reason="the kernels are not compiled: run `pyg-scale build`"
)


# Measuring ####################################################################################


def case(stream, side=OURS, label="a loader", **more):
    return Case(
        side=side, group="loader", label=label, variant="a graph", stream=stream, workers=0, **more
    )


def run_rounds(one, rounds, warmup, batches, max_seconds):
    take_turns([one], lambda case: case.measure(warmup, batches, max_seconds), rounds)


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
    run_rounds(one, rounds=3, warmup=2, batches=4, max_seconds=1000.0)
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
    run_rounds(one, rounds=1, warmup=0, batches=40, max_seconds=5.0)
    assert one.timed == 3 and one.rates == [pytest.approx(0.1)]


def test_what_pyg_cannot_do_is_a_finding_and_what_we_cannot_is_an_error():
    def stream():
        raise RuntimeError("no such\n thing")
        yield

    theirs = case(stream, PYG)
    run_rounds(theirs, rounds=2, warmup=0, batches=1, max_seconds=1.0)
    assert theirs.error == "RuntimeError: no such thing" and not theirs.rates
    with pytest.raises(RuntimeError, match="no such"):
        run_rounds(case(stream), rounds=1, warmup=0, batches=1, max_seconds=1.0)


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

    steady = resident(case(lambda: stream(False)), 20, 60.0)
    grows = resident(case(lambda: stream(True)), 20, 60.0)
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
