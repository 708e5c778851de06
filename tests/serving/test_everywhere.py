"""A node has one neighbourhood: in training, in bulk and when it is served, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import pyg_scale
from pyg_scale.loader import NeighborLoader
from pyg_scale.serving import Predictor
from pyg_scale.testing import graphs
from tests.store.directory.appended import Graph, grown, in_order

HOPS, SEED, STEPS = [4, 3], 5, 3
Found = dict[int, list[tuple[str, bytes]]]


NODES = ("n_id", "x", "y", "time")
EDGES = ("e_id", "edge_attr", "when", "weight")


def of_a_seed(batch: Graph, number: int) -> list[tuple[str, bytes]]:
    """All that a batch has around one of its seeds: ids, attributes, and edges among them."""
    found, place = [], dict[Any, Tensor]()
    for store in batch.node_stores:
        mine = (store.batch == number).nonzero().view(-1)
        place[store._key] = torch.full((store.num_nodes,), -1)
        place[store._key][mine] = torch.arange(mine.numel())
        found += [(f"{store._key} {n}", store[n][mine]) for n in NODES if n in store]
    for store in batch.edge_stores:
        source, destination = store._key[::2] if store._key else (None, None)
        row, col = store.edge_index
        mine = (place[destination][col] >= 0).nonzero().view(-1)
        assert bool((place[source][row[mine]] >= 0).all())  # no edge leads to another's nodes
        found.append((f"{store._key} row", place[source][row[mine]]))
        found.append((f"{store._key} col", place[destination][col[mine]]))
        found += [(f"{store._key} {n}", store[n][mine]) for n in EDGES if n in store]
    names = {name for store in batch.stores for name in store.keys()}  # noqa: SIM118
    others = ["batch", "edge_index", "input_id", "seed_time", "num_nodes", "batch_size"]
    others += ["num_sampled_nodes", "num_sampled_edges"]
    assert names <= {*NODES, *EDGES, *others}  # nothing is left out
    return [(name, value.numpy().tobytes()) for name, value in found]


def in_batches(batches: Iterator[Graph], input_type: str | None) -> Found:
    """The neighbourhoods of all seeds, by the number of the seed."""
    found: Found = {}
    for batch in batches:
        store = batch if input_type is None else batch[input_type]
        for number, position in enumerate(store.input_id.tolist()):
            found[position] = of_a_seed(batch, number)
    return found


def as_bytes(given: Any) -> Any:
    """A tensor, or tensors by type, as bytes."""
    if isinstance(given, Mapping):
        return {kind: as_bytes(value) for kind, value in given.items()}
    return str(given.dtype), list(given.shape), given.numpy().tobytes()


def read_by_models(batch: Graph) -> list[Any]:
    """The features and edges of a batch."""
    if isinstance(batch, HeteroData):
        return [as_bytes(batch.x_dict), as_bytes(batch.edge_index_dict)]
    return [as_bytes(batch.x), as_bytes(batch.edge_index)]


class Reads(torch.nn.Module):
    """A model that keeps what it was called with."""

    read: ClassVar[list[Any]] = []

    def forward(self, x: Any, edge_index: Any) -> Any:
        self.read = [as_bytes(x), as_bytes(edge_index)]
        return x


def places(
    data: Graph, folder: Path, time_attr: str | None
) -> dict[str, tuple[Any, dict[str, Any]]]:
    """The same graph in several places, and the options with which it is read from there."""
    pyg_scale.save(data, folder / "whole", time_attr=time_attr)
    grown(data, folder / "grown", STEPS, time_attr=time_attr)
    whole, appended = (pyg_scale.open(folder / name) for name in ("whole", "grown"))
    assert appended.graph_directory.snapshot == STEPS - 1
    return {
        "in memory": (data, {}),
        "mapped": (whole, {}),
        "on disk": (whole, {"feature_store": "disk"}),
        "after appends": (appended, {}),
        "on disk after appends": (appended, {"feature_store": "disk"}),
    }


@pytest.mark.matrix(2)
@pytest.mark.parametrize("time_attr", [None, "time", "when"])
@pytest.mark.parametrize("kind", ["homogeneous", "heterogeneous"])
def test_training_is_bulk_is_served(tmp_path: Path, kind: str, time_attr: str | None) -> None:
    typed = kind == "heterogeneous"
    data = in_order(graphs.hetero() if typed else graphs.hostile(), STEPS)
    assert isinstance(data, HeteroData if typed else Data)
    input_type = "item" if typed else None
    ids = torch.tensor([5, 0, 11, 8, 3, 9, 0])  # one of them twice, at two times
    time = None if time_attr is None else torch.tensor([4, 0, 7, 3, 9, 5, 6])
    options: dict[str, Any] = {"time_attr": time_attr, "seed": SEED}
    expected: Found = {}
    for place, (graph, read) in places(data, tmp_path, time_attr).items():
        common: dict[str, Any] = options | read | {"redraw": False, "disjoint": True}
        common |= {"input_nodes": (input_type, ids) if typed else ids, "input_time": time}
        training = NeighborLoader(graph, HOPS, batch_size=3, shuffle=True, **common)
        bulk = NeighborLoader(graph, HOPS, batch_size=5, num_workers=1, **common)
        model = Reads()
        with Predictor(model, graph, HOPS, input_type=input_type, **options, **read) as predictor:
            served: Found = {}
            for i in range(ids.numel()):
                when = None if time is None else time[i : i + 1]
                batch = predictor.neighborhoods.batch(ids[i : i + 1], when)
                served[i] = of_a_seed(batch, 0)
                predictor.predict(ids[i : i + 1], when)
                assert model.read == read_by_models(batch), (place, i)
        expected = expected or served
        edges = [len(value) for each in served.values() for name, value in each if " row" in name]
        assert sum(edges) > 20 * 8
        for what, found in (
            ("first epoch", in_batches(iter(training), input_type)),
            ("second epoch", in_batches(iter(training), input_type)),
            ("in bulk", in_batches(iter(bulk), input_type)),
            ("served", served),
        ):
            assert found == expected, (place, what)
