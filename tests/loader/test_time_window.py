"""A seed sees what is in its window, and nothing else: by brute force over the edge list."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.sampler import NeighborSampler as PyGSampler

import pyg_scale
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader
from pyg_scale.serving.neighborhoods import Neighborhoods
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same_batches

Ids = list[tuple[int, int]]


def stream(num_nodes: int = 30, num_events: int = 400, seed: int = 0) -> Data:
    """Events in order of time, with ties, both ways."""
    rng = random.Random(seed)
    src = [rng.randrange(num_nodes) for _ in range(num_events)]
    dst = [rng.randrange(num_nodes) for _ in range(num_events)]
    time = sorted(rng.randrange(100) for _ in range(num_events))
    ends = torch.tensor([src + dst, dst + src])
    return Data(edge_index=ends, when=torch.tensor(time * 2), num_nodes=num_nodes)


def neighborhood(
    data: Data, seed: int, now: float, window: float, hops: list[int], *, strict: bool = False
) -> tuple[set[int], Ids]:
    """What is reached from a seed with the last ``k`` events of each node, in plain Python."""
    source, target = data.edge_index.tolist()
    time = data.when.tolist()
    seen, new, taken = {seed}, [seed], []
    for k in hops:
        found = []
        for node in new:
            inside = [
                edge
                for edge in range(len(time))
                if target[edge] == node
                and now - window < time[edge] <= now
                and not (strict and time[edge] == now)
            ]
            inside.sort(key=lambda edge: (time[edge], edge))
            inside = inside if k < 0 else inside[max(0, len(inside) - k) :]
            taken += [(edge, node) for edge in inside]
            found += [source[edge] for edge in inside]
        new = [node for node in dict.fromkeys(found) if node not in seen]
        seen |= set(new)
    return seen, taken


@pytest.mark.parametrize("hops", [[5], [3, 4], [2, -1, 3]], ids=str)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", [torch.int64, torch.float64], ids=str)
def test_the_last_events_in_the_window(hops: list[int], strict: bool, kind: torch.dtype) -> None:
    data = stream()
    data.when = data.when.to(kind)
    window = 12 if kind == torch.int64 else 11.5
    seeds, now = torch.arange(30), (torch.arange(30) * 7 % 100).to(kind)
    loader = NeighborLoader(
        data, hops, seeds, now, time_attr="when", temporal_strategy="last", batch_size=8,
        time_window=window, strictly_earlier=strict, num_workers=1,
    )  # fmt: skip
    count = 0
    for batch in loader:
        for place, seed in enumerate(batch.input_id.tolist()):
            nodes, edges = neighborhood(data, seed, float(now[seed]), window, hops, strict=strict)
            rows = batch.batch == place
            assert set(batch.n_id[rows].tolist()) == nodes
            mine = rows[batch.edge_index[1]]
            ends = batch.n_id[batch.edge_index[1][mine]].tolist()
            assert sorted(zip(batch.e_id[mine].tolist(), ends)) == sorted(edges)
            count += len(edges)
    assert count > 50


def test_uniform_draws_come_from_the_window_alone_and_from_all_of_it() -> None:
    data = stream(num_nodes=4)
    reached = set()
    for seed in range(60):
        loader = NeighborLoader(
            data, [3], torch.tensor([1]), torch.tensor([60]), time_attr="when", time_window=20,
            seed=seed,
        )  # fmt: skip
        reached |= set(next(iter(loader)).e_id.tolist())
    _, edges = neighborhood(data, 1, 60, 20, [-1])
    assert reached == {edge for edge, _ in edges}
    assert len(reached) > 20


def test_a_window_as_long_as_everything_changes_no_bit() -> None:
    data, now = stream(), torch.full((30,), 70)
    for strategy in ("last", "uniform"):
        arguments: dict[str, Any] = {
            "num_neighbors": [3, 2], "input_time": now, "time_attr": "when", "seed": 4,
            "temporal_strategy": strategy, "batch_size": 9,
        }  # fmt: skip
        without = list(NeighborLoader(data, **arguments))
        assert_same_batches(without, NeighborLoader(data, time_window=10**9, **arguments))
        assert_same_batches(without, NeighborLoader(data, time_window=2**63 - 1, **arguments))


@pytest.mark.parametrize("attr", ["time", "when"])
def test_workers_disk_and_the_reference(tmp_path: Path, attr: str) -> None:
    data = graphs.hostile()
    arguments: dict[str, Any] = {
        "num_neighbors": [4, 3], "input_time": torch.full((100,), 6), "time_attr": attr,
        "time_window": 4, "seed": 3, "batch_size": 9, "shuffle": True,
    }  # fmt: skip
    expected = list(NeighborLoader(data, **arguments))
    for others in (
        {"num_workers": 2},
        {"num_workers": 1, "worker_type": "process"},
        {"neighbor_sampler": "reference"},
    ):
        assert_same_batches(expected, NeighborLoader(data, **arguments, **others))
    pyg_scale.save(data, tmp_path / "graph", time_attr=attr)
    assert_same_batches(expected, NeighborLoader(pyg_scale.open(tmp_path / "graph"), **arguments))


def test_a_seed_has_the_same_window_in_training_and_in_serving() -> None:
    data, now = graphs.hostile(), torch.arange(100) % 9
    options: dict[str, Any] = {"time_attr": "when", "time_window": 3, "temporal_strategy": "last"}
    served = Neighborhoods(data, [4, 3], seed=5, **options)
    loader = NeighborLoader(data, [4, 3], None, now, batch_size=10, seed=5, redraw=False, **options)
    for batch in loader:
        ids = batch.input_id
        found = served.batch(ids, now[ids])
        assert torch.equal(found.n_id, batch.n_id)
        assert torch.equal(found.e_id, batch.e_id)


def test_links_do_not_see_themselves() -> None:
    data = stream()
    half = data.num_edges // 2
    links, time = data.edge_index[:, :half], data.when[:half]
    arguments: dict[str, Any] = {
        "num_neighbors": [5, 5], "edge_label_index": links, "edge_label_time": time,
        "time_attr": "when", "temporal_strategy": "last", "batch_size": 40,
    }  # fmt: skip

    def sees_itself(**options: Any) -> int:
        count = 0
        for batch in LinkNeighborLoader(data, **arguments, **options):
            of_link = batch.input_id[batch.batch[batch.edge_index[1]]]
            count += int((batch.e_id % half == of_link).sum())
        return count

    assert sees_itself() > half
    assert sees_itself(strictly_earlier=True) == 0
    assert sees_itself(strictly_earlier=True, time_window=30) == 0


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"time_window": 5}, ValueError, "time_window=5 needs times: say in time_attr="),
        ({"strictly_earlier": True}, ValueError, "strictly_earlier=True needs times"),
        ({"temporal_strategy": "last"}, ValueError, "temporal_strategy='last' needs times"),
        ({"time_window": 5, "neighbor_sampler": "labor"}, NotImplementedError, "time_window="),
        ({"time_window": 5, "neighbor_sampler": "ladies"}, NotImplementedError, "time_window="),
        ({"time_window": 0, "time_attr": "time"}, ValueError, "time_window must be positive"),
        ({"time_window": 1.5, "time_attr": "time"}, TypeError, "time_window must be an integer"),
        ({"strictly_earlier": 3, "time_attr": "time"}, TypeError, "strictly_earlier must be True"),
    ],
    ids=str,
)
def test_wrong_windows(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        NeighborLoader(graphs.hostile(), [2], **options)


def test_windows_by_edge_type_must_be_of_edge_types_with_times() -> None:
    data = graphs.hetero()
    untimed = ("user", "has", "item")
    data[untimed].edge_index = torch.tensor([[0, 1], [1, 2]])
    now = torch.zeros(data["item"].num_nodes, dtype=torch.int64)
    arguments: dict[str, Any] = {"num_neighbors": [2], "input_nodes": "item", "input_time": now}
    with pytest.raises(ValueError, match="is no edge type of the graph"):
        NeighborLoader(data, **arguments, time_attr="when", time_window={("a", "b", "c"): 1})
    with pytest.raises(ValueError, match="neither edges of type .* have times"):
        NeighborLoader(data, **arguments, time_attr="when", time_window={untimed: 1})


@pytest.mark.parametrize("made", [False, True])
def test_samplers_of_pyg_know_no_window(made: bool) -> None:
    class Foreign(PyGSampler):
        def __init__(self, data: Data, num_neighbors: Any) -> None:
            self.num_neighbors = num_neighbors

    data = graphs.hostile()
    sampler: Any = Foreign(data, [2]) if made else Foreign
    with pytest.raises(NotImplementedError, match="Foreign knows no time_window="):
        NeighborLoader(data, [2], neighbor_sampler=sampler, time_attr="time", time_window=3)


def test_the_least_time_cannot_have_anything_before_it() -> None:
    data = stream()
    least = torch.full((1,), -(2**63))
    loader = NeighborLoader(
        data, [2], torch.tensor([0]), least, time_attr="when", strictly_earlier=True
    )
    with pytest.raises(ValueError, match="the least there is"):
        next(iter(loader))
    window = NeighborLoader(data, [2], torch.tensor([0]), least, time_attr="when", time_window=5)
    assert next(iter(window)).num_edges == 0


@pytest.mark.slow
def test_a_million_seeds_see_nothing_outside_of_their_windows() -> None:
    rng, events, seeds = torch.Generator().manual_seed(0), 200_000, 1_000_000
    ends = torch.randint(0, 5_000, (2, events), generator=rng)
    when = torch.randint(0, 10_000, (events,), generator=rng)
    data = Data(edge_index=ends, when=when, num_nodes=5_000)
    nodes = torch.randint(0, 5_000, (seeds,), generator=rng)
    now = torch.randint(0, 11_000, (seeds,), generator=rng)

    def seen(**options: Any) -> tuple[int, int, int]:
        """Edges in all, and those that are too late or too early."""
        count = late = early = 0
        for batch in NeighborLoader(data, [5, 2], nodes, now, batch_size=20_000, **options):
            seed = batch.batch if "batch" in batch else None
            assert seed is not None
            of_seed = batch.seed_time[seed[batch.edge_index[1]]]
            count += batch.num_edges
            late += int((batch.when >= of_seed).sum())
            early += int((batch.when <= of_seed - 700).sum())
        return count, late, early

    for strategy in ("last", "uniform"):
        options = {"time_attr": "when", "temporal_strategy": strategy}
        count, late, early = seen(time_window=700, strictly_earlier=True, **options)
        assert count > seeds
        assert late == early == 0
        _, late, early = seen(**options)  # a control: without windows
        assert late > 0
        assert early > 0
