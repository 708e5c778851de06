"""Number of features that a batch takes from other parts, measured by sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyg_scale import plugins
from pyg_scale.graph.topology import NodeType, Topology
from pyg_scale.ops import keys
from pyg_scale.partitioner.assigned import Assigned
from pyg_scale.partitioner.counts import Remote


def measure_remote(
    graph: Topology,
    assigned: Assigned,
    train: Mapping[NodeType, Tensor],
    num_neighbors: Sequence[int],
    *,
    batch_size: int = 1024,
    num_batches: int = 64,
    cache: Mapping[NodeType, Sequence[Tensor]] | None = None,
    seed: int = 0,
) -> Remote:
    """Sample batches of every part and count the nodes that other parts own.

    Each part has the same share of the batches as in an epoch in which every part trains on its own
    nodes.

    Args:
        graph: In-edges of every node, without times.
        assigned: The part of every node.
        train: Training nodes by node type; if none, all nodes are seeds.
        num_neighbors: Neighbours per hop.
        batch_size: Seeds of a batch.
        num_batches: Number of batches over all parts.
        cache: Ids of nodes that each part caches, by node type.
        seed: Seed of the batches.

    Raises:
        ValueError: If a number is not positive.
        TypeError: If ``num_neighbors`` is not a list of integers.
    """
    if batch_size < 1 or num_batches < 1:
        raise ValueError(
            f"batch_size and num_batches must be at least 1 (got {batch_size}, {num_batches})"
        )
    sampler = sampler_of(graph, num_neighbors)
    seeds = train or {t: torch.arange(n) for t, n in graph.num_nodes.items()}
    strata = [
        (number, name, mine)
        for name, nodes in seeds.items()
        for number in range(assigned.num_parts)
        if (mine := nodes[assigned.part[name][nodes] == number]).numel()
    ]
    epoch = [-(-mine.numel() // batch_size) for _, _, mine in strata]
    wanted = [max(1, round(num_batches * n / sum(epoch))) for n in epoch]
    cached = _masks(cache, graph, assigned.num_parts)
    mean, variance = torch.zeros(3, dtype=torch.float64), 0.0
    with tqdm(total=sum(wanted), desc="batches", disable=None, delay=2) as bar:
        for stratum, ((number, name, mine), count) in enumerate(zip(strata, wanted)):
            key = keys.fold(0, seed, stratum)
            counts = torch.zeros(count, 3, dtype=torch.float64)
            for index, batch in enumerate(batches(mine, batch_size, count, key)):
                sample = sampler.sample({name: batch}, None, keys.batch_key(key, 0, index))
                counts[index] = _count(sample.node, assigned, number, cached)
                bar.update()
            share = epoch[stratum] / sum(epoch)
            mean += share * counts.mean(0)
            if count > 1:
                variance += share**2 * float(counts[:, 1].var()) / count
    nodes, remote, held = mean.tolist()
    return Remote(
        num_neighbors=[int(k) for k in num_neighbors],
        batch_size=batch_size,
        num_batches=sum(wanted),
        per_batch=remote,
        std_error=math.sqrt(variance),
        share=remote / nodes if nodes else 0.0,
        cached=held,
    )


def _count(
    nodes: Mapping[NodeType, Tensor],
    assigned: Assigned,
    number: int,
    cached: Mapping[NodeType, list[Tensor]],
) -> Tensor:
    """Numbers of nodes of a batch, of those of other parts, and of cached ones among these."""
    remote = {name: node[assigned.part[name][node] != number] for name, node in nodes.items()}
    held = sum(int(cached[name][number][remote[name]].sum()) for name in cached)
    sizes = [sum(each.numel() for each in found.values()) for found in (nodes, remote)]
    return torch.tensor([*sizes, held], dtype=torch.float64)


def sampler_of(graph: Topology, num_neighbors: Sequence[int]) -> Any:
    """The native sampler for a topology, without times."""
    if isinstance(num_neighbors, Mapping):
        raise TypeError("num_neighbors must be one number per hop, for all edge types")
    sampler = plugins.get("sampler", "native")(num_neighbors=list(num_neighbors))
    sampler.topology = graph
    sampler.num_neighbors = list(num_neighbors)  # checked against the graph
    return sampler


def batches(
    seeds: Tensor, batch_size: int, count: int, key: int, *, drop_last: bool = False
) -> Iterator[Tensor]:
    """Batches of shuffled seeds, one epoch after the other.

    Args:
        seeds: Node ids ``[n]``, at least one.
        batch_size: Seeds of a batch; at most ``n`` if ``drop_last``.
        count: Number of batches.
        key: Key of the orders.
        drop_last: If True, leave out the last batch of an epoch if it is smaller.
    """
    size = seeds.numel() // batch_size * batch_size if drop_last else seeds.numel()
    epoch = 0
    while count > 0:
        order = keys.permutation(keys.fold(key, epoch), seeds.numel())
        for batch in seeds[order[:size]].split(batch_size)[:count]:
            yield batch
            count -= 1
        epoch += 1


def _masks(
    cache: Mapping[NodeType, Sequence[Tensor]] | None, graph: Topology, num_parts: int
) -> dict[NodeType, list[Tensor]]:
    masks: dict[NodeType, list[Tensor]] = {}
    for node_type, lists in (cache or {}).items():
        if len(lists) != num_parts:
            raise ValueError(f"cache has {len(lists)} lists for {num_parts} parts: give one each")
        masks[node_type] = []
        for ids in lists:
            mask = torch.zeros(graph.num_nodes[node_type], dtype=torch.bool)
            mask[ids.long()] = True
            masks[node_type].append(mask)
    return masks
