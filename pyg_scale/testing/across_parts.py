"""Conformance of a sampler across the parts of a graph: it draws the same as in one process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData

import pyg_scale
from pyg_scale.partitioner.base import Partition
from pyg_scale.partitioner.write import write_partition
from pyg_scale.sampler.base import NeighborSampler
from pyg_scale.sampler.parts import parts_topology
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.testing import graphs
from pyg_scale.testing.ask import bind, draw
from pyg_scale.testing.draws import assert_equal

SEEDS: dict[bool, Any] = {
    False: [0, 7, 5, 99, 98, 4, 8, 6, 40, 41],
    True: {"user": [19, 2, 0], "item": [3, 0, 11]},
}
"""Options for the graph without types, and for the one with types."""


class AcrossPartsTests:
    """The tests of :class:`~pyg_scale.testing.SamplerTests` for graphs of several parts."""

    @pytest.mark.parametrize(
        ("typed", "options"),
        [
            (False, {}),
            (False, {"replace": True}),
            (False, {"disjoint": True}),
            (False, {"weight_attr": "weight"}),
            (False, {"time_attr": "when"}),
            (False, {"time_attr": "when", "temporal_strategy": "last"}),
            (False, {"subgraph_type": "induced"}),
            (True, {}),
        ],
        ids=str,
    )
    def test_parts_give_the_batches_of_the_whole_graph(
        self, unbound: NeighborSampler, typed: bool, options: dict[str, Any]
    ) -> None:
        if not unbound.across_parts:
            pytest.skip("the sampler declares across_parts = False")
        data = graphs.hetero() if typed else graphs.hostile()
        attrs = {name: options[name] for name in ("time_attr", "weight_attr") if name in options}
        time = [4, 0, 7, 3, 3, 5, 1, 4, 9, 2] if "time_attr" in options else None
        whole = bind(unbound, data, [3, 2], **options)
        in_parts = bind(unbound, data, [3, 2], **options)
        with tempfile.TemporaryDirectory() as folder:
            in_parts.topology = parts_topology(_in_parts(data, Path(folder), **attrs), **attrs)
            for key in (1, 2):
                expected = draw(whole, SEEDS[typed], key, time)
                found = draw(in_parts, SEEDS[typed], key, time)
                try:
                    assert_equal(found, expected)
                except AssertionError as error:
                    raise AssertionError(
                        f"three parts give a different batch from the whole graph: {error}. Each "
                        "part is asked for its own nodes, and has edges in other places: draw "
                        "by the index among the in-edges of a node (position - "
                        "frontier.begin[row]), and not by the place of a node in the frontier; or "
                        "declare across_parts = False"
                    ) from None


def _in_parts(data: Data | HeteroData, folder: Path, **attrs: Any) -> GraphDirectory:
    """The graph in three parts with random nodes."""
    pyg_scale.save(data, folder / "whole", **attrs)
    generator = torch.Generator().manual_seed(3)
    assignment = {
        t: torch.randint(3, (size,), generator=generator).int()
        for t, size in graphs.Facts.of(data).num_nodes.items()
    }
    partition = Partition(assignment, 3, "random")
    return write_partition(folder / "whole", partition, folder / "parts")
