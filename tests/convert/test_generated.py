"""A graph that is computed while it is converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyg_scale.convert.generated import GeneratedReader

SOURCE = "nodes=70001,edges=4200000,features=4,classes=5,seed=2"


class Now:
    """Does the steps of a reader at once."""

    folder, memory = Path(), 1 << 30

    def once(self, name: str, work: Any) -> Any:
        return work()


def reader(source: str = SOURCE) -> GeneratedReader:
    made = GeneratedReader(source)
    made.prepare(Now())  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize(("begin", "rows"), [(0, 1 << 30), (0, 300_000), (2_500_001, 999_999)])
def test_chunks_follow_one_another_from_any_row_on(begin: int, rows: int) -> None:
    made = reader()
    graph = made.graph
    parts = list(made.edges(None, begin, rows))
    assert all(0 < source.numel() <= rows for source, _ in parts)
    whole = np.concatenate([np.stack(graph.edges(c)) for c in range(graph.num_chunks)], axis=1)
    found = torch.cat([torch.stack(part) for part in parts], dim=1)
    assert np.array_equal(found.numpy(), whole[:, begin:])
    first = begin % graph.num_nodes
    for name, expected in (
        ("x", graph.features(0, graph.num_nodes)),
        ("y", torch.from_numpy(graph.labels(0, graph.num_nodes))),
    ):
        parts = list(made.node_attribute(None, name, first, rows))
        assert all(0 < part.size(0) <= rows for part in parts)
        assert torch.equal(torch.cat(parts), expected[first:])
    sizes = made.describe().nodes[None].index_sets
    for name, ids in graph.splits(0, graph.num_nodes).items():
        assert sizes[name] == ids.size
        found = torch.cat([*made.index_set(None, name, 7, 10)])
        assert np.array_equal(found.numpy(), ids[7:])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nodes=10", "edges must be given"),
        ("nodes=10,edges=x", "edges must be a number"),
        ("nodes=10.5,edges=2", "whole number"),
        ("nodes=10,edges=2,colour=3", "'colour' is not one of nodes, edges"),
        ("nodes=10,edges=2,dtype=int64", "dtype must be floating point"),
        ("nodes=10,edges=3", "num_edges must be even"),
    ],
)
def test_what_cannot_be_is_refused(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GeneratedReader(source)
