"""Calls of samplers, and their requests in terms of edge lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_scale import plugins
from pyg_scale.graph.topology import NodeType
from pyg_scale.sampler.base import NeighborSampler, Sample
from pyg_scale.sampler.capabilities import CAPABILITIES
from pyg_scale.testing.graphs import EdgeLists
from pyg_scale.testing.oracle import SampleRequest, verify, verify_edges, verify_nodes

Seeds = Sequence[int] | Mapping[Any, Sequence[int]]
"""Node ids of the only type, or a dictionary by type."""


def unbound(sampler: Any) -> NeighborSampler:
    """The sampler that the fixture ``sampler`` of a test class returned, itself or by name."""
    if isinstance(sampler, str):
        sampler = plugins.get("sampler", sampler)()
    assert isinstance(sampler, NeighborSampler), (
        f"the fixture 'sampler' returned {sampler!r}: return an instance of your subclass of "
        f"pyg_scale.sampler.NeighborSampler, made without data, or its name"
    )
    assert not sampler.is_bound, "the fixture 'sampler' returned a bound sampler: leave out data="
    return sampler


def needed(data: Data | HeteroData, **options: Any) -> list[str]:
    """The :data:`~pyg_scale.sampler.capabilities.CAPABILITIES` that a call needs."""
    time = options.get("time_attr")
    subgraph_type = options.get("subgraph_type")
    wanted = {
        "hetero": isinstance(data, HeteroData),
        "replace": options.get("replace"),
        "disjoint": options.get("disjoint"),
        "weighted": options.get("weight_attr"),
        "node_time": time == "time",
        "edge_time": time == "when",
        "last": options.get("temporal_strategy") == "last",
        "window": options.get("time_window") is not None,
        "strict": options.get("strictly_earlier"),
        "bidirectional": subgraph_type == "bidirectional",
        "induced": subgraph_type == "induced",
        "backward": options.get("sample_direction") == "backward",
        "fixed": options.get("redraw") is False,
    }
    return [name for name in CAPABILITIES if wanted.get(name)]


def bind(
    sampler: NeighborSampler, data: Data | HeteroData, num_neighbors: Any, **options: Any
) -> NeighborSampler:
    """Bind the sampler to a graph; skips the test if it does not support the options."""
    for name in needed(data, **options):
        if name not in sampler.supports:
            pytest.skip(f"{type(sampler).__name__} does not declare {name!r}")
    return sampler.bind(data, num_neighbors=num_neighbors, **options)


def draw(bound: NeighborSampler, seeds: Seeds, key: int = 0, time: Seeds | None = None) -> Sample:
    """Draw one sample for seeds (of the only type, or by type)."""
    node = {t: torch.tensor(s, dtype=torch.int64) for t, s in by_type(seeds).items()}
    times = None if time is None else {t: torch.tensor(s) for t, s in by_type(time).items()}
    return bound.sample_checked(node, times, key)


def by_type(seeds: Seeds) -> Mapping[NodeType, Sequence[int]]:
    return seeds if isinstance(seeds, Mapping) else {None: seeds}


def ask(
    sampler: NeighborSampler,
    data: Data | HeteroData,
    seeds: Seeds,
    num_neighbors: Any,
    *,
    key: int = 0,
    time: Seeds | None = None,
    **options: Any,
) -> tuple[Sample, SampleRequest]:
    """Bind, sample and check the result; skips the test if the sampler does not support it."""
    bound = bind(sampler, data, num_neighbors, **options)
    sample = draw(bound, seeds, key, time)
    request = requested(bound, data, seeds, num_neighbors, time=time, **options)
    backward = options.get("sample_direction") == "backward"
    directional = options.get("subgraph_type", "directional") == "directional"
    if backward:  # in the reversed graph, neighbours are rows again
        sample = Sample(**{**vars(sample), "row": sample.col, "col": sample.row})
    if directional:
        verify(sample, request)
    else:
        verify_nodes(sample, request)
        verify_edges(sample, request, options["subgraph_type"] == "bidirectional")
    return sample, request


def requested(
    sampler: NeighborSampler,
    data: Data | HeteroData,
    seeds: Seeds,
    num_neighbors: Any,
    *,
    time: Seeds | None = None,
    **options: Any,
) -> SampleRequest:
    """The request of a call."""
    facts = EdgeLists.of(data, options.get("time_attr"), options.get("weight_attr"))
    if options.get("sample_direction") == "backward":
        facts = facts.reversed()
    temporal = bool(facts.node_time or facts.edge_time)
    times = None
    if temporal and time is not None:
        of_type = by_type(time)
        times = [t for node_type in facts.num_nodes for t in of_type.get(node_type, [])]
    elif temporal:
        of_seed = by_type(seeds)
        times = [
            int(facts.node_time[node_type][v])
            for node_type in facts.num_nodes
            for v in of_seed.get(node_type, [])
        ]
    hops = (
        dict(num_neighbors)
        if isinstance(num_neighbors, Mapping)
        else {edge_type: list(num_neighbors) for edge_type in facts.edges}
    )
    window = options.get("time_window")
    windows: dict[Any, int] = {}
    if window is not None:
        by_edge_type = isinstance(window, Mapping)
        windows = dict(window) if by_edge_type else dict.fromkeys(facts.edges, window)
    return SampleRequest(
        facts=facts,
        seeds={t: list(s) for t, s in by_type(seeds).items()},
        hops=hops,
        times=times,
        replace=options.get("replace", False),
        disjoint=options.get("disjoint", False) or temporal,
        last=options.get("temporal_strategy") == "last",
        windows=windows,
        strict=options.get("strictly_earlier", False),
        exact_count=sampler.exact_count,
    )
