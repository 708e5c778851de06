"""Generated graphs: power-law degrees, planted communities, labels and features that fit them.

The model is a degree-corrected stochastic block model (Karrer and Newman: "Stochastic
blockmodels and community structure in networks", Physical Review E 2011), sampled by
stubs: every node gets a number of stubs from a truncated power law, and every stub is tied
to a random stub of its own community or, more rarely, of the whole graph. Every random
number comes from a counter-based generator keyed by the seed, a purpose and a chunk number,
so a graph does not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data, HeteroData

from pyg_scale.datasets.links import (
    as_time,
    as_weight,
    both_directions,
    links,
    pair_numbers,
    pairs,
    side_of,
)
from pyg_scale.datasets.work import CHUNK, ChunkWork, generator
from pyg_scale.ops.keys import fold

Array = NDArray[Any]
EDGE_ORDERS = ("random", "source", "destination")
TIME_RANGE = 1 << 30
"""Generated times are integers from 0 to ``TIME_RANGE - 1``."""

_CENTRE, _NOISE, _LABEL, _SPLIT, _TIME, _WEIGHT = range(6)


def planted_communities(
    num_nodes: int = 200_000,
    num_edges: int = 4_000_000,
    num_classes: int = 16,
    num_features: int = 64,
    *,
    num_communities: int | None = None,
    homophily: float = 0.8,
    exponent: float = 2.5,
    signal: float = 1.0,
    label_noise: float = 0.02,
    split: tuple[float, float, float] = (0.5, 0.25, 0.25),
    edge_order: str = "random",
    index_dtype: torch.dtype = torch.int64,
    node_time: bool = False,
    edge_time: bool = False,
    edge_weight: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> Data:
    """Generate a graph with power-law degrees and planted communities.

    Edges go both ways, without self-loops and without parallel edges. A node's features are
    the centre of its community plus noise, too much noise to tell the class from one node
    alone; its label is the class of its community, but for ``label_noise`` of the nodes.

    Args:
        num_nodes: Number of nodes.
        num_edges: Number of directed edges, exactly; even.
        num_classes: Number of classes; community ``c`` has class ``c % num_classes``.
        num_features: Columns of ``x``; 0 for no features.
        num_communities: Number of communities, ``num_classes`` by default.
        homophily: Share of the edges tied inside a community on purpose. The share that
            connects equal communities is ``homophily + (1 - homophily) / num_communities``.
        exponent: Of the power law of the degrees, above 2. The largest expected degree is
            about ``sqrt(num_edges)``.
        signal: Half the distance between two community centres, in standard deviations of
            the noise. At 0 features say nothing.
        label_noise: Share of the nodes whose label is drawn at random.
        split: Shares of training, validation and test nodes.
        edge_order: ``"random"``, ``"source"`` (as PyG's ``coalesce``) or ``"destination"``
            (what ``is_sorted=True`` asks for).
        index_dtype: ``torch.int64`` or ``torch.int32``, of ``edge_index``.
        node_time: Add integer times ``time`` ``[num_nodes]``.
        edge_time: Add integer times ``edge_time`` ``[num_edges]``, equal for both directions.
        edge_weight: Add weights ``edge_weight`` ``[num_edges]`` in ``(0, 1]``, fp32.
        seed: All of the graph follows from it.
        progress: Show a progress bar if the terminal is one.

    Returns:
        ``Data`` with ``x`` ``[num_nodes, num_features]`` (fp32), ``edge_index``
        ``[2, num_edges]``, ``y`` ``[num_nodes]``, ``community`` ``[num_nodes]``, ``train_mask``,
        ``val_mask``, ``test_mask`` and what was asked for.

    Raises:
        ValueError: If an argument is out of its range, or so many edges do not fit.
    """
    num_communities = num_classes if num_communities is None else num_communities
    _check_graph(num_nodes, num_edges, num_classes, num_communities, homophily, exponent)
    _check_one_of("edge_order", edge_order, EDGE_ORDERS)
    _check_one_of("index_dtype", index_dtype, (torch.int64, torch.int32))
    with ChunkWork(progress, num_edges + num_nodes * (1 + num_features)) as work:
        side = side_of(work, fold(0, seed, 0), num_nodes, num_communities, num_edges // 2, exponent)
        hashed = links(
            work, fold(0, seed, 1), side, side, num_edges // 2, homophily, undirected=True
        )
        edge_index = both_directions(hashed, edge_order, index_dtype)
        del hashed
        work.done(num_edges // 2)

        data = Data(edge_index=edge_index, num_nodes=num_nodes)
        key = fold(0, seed, 2)
        for name, value in _node_data(
            work,
            key,
            side.community,
            num_classes,
            num_communities,
            num_features,
            signal,
            label_noise,
            split,
            node_time,
        ).items():
            data[name] = value
        if edge_time:
            data.edge_time = pair_numbers(work, fold(key, _TIME), edge_index, as_time)
        if edge_weight:
            data.edge_weight = pair_numbers(work, fold(key, _WEIGHT), edge_index, as_weight)
    return data


def hetero_communities(
    num_papers: int = 40_000,
    num_authors: int = 20_000,
    num_citations: int = 400_000,
    num_writes: int = 200_000,
    num_classes: int = 8,
    num_features: int = 64,
    *,
    homophily: float = 0.8,
    exponent: float = 2.5,
    signal: float = 1.0,
    label_noise: float = 0.02,
    split: tuple[float, float, float] = (0.5, 0.25, 0.25),
    node_time: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> HeteroData:
    """Generate papers and authors in common communities.

    Edge types: ``("paper", "cites", "paper")``, ``("author", "writes", "paper")`` and its
    reverse ``("paper", "rev_writes", "author")``. Arguments, features, labels and masks are as
    in :func:`planted_communities`; labels and masks belong to papers.

    Raises:
        ValueError: If an argument is out of its range, or so many edges do not fit.
    """
    for nodes, edges in (
        (num_papers, 2 * num_citations),
        (min(num_papers, num_authors), 2 * num_writes),
    ):
        _check_graph(nodes, edges, num_classes, num_classes, homophily, exponent)
    total = num_citations + num_writes + (num_papers + num_authors) * (1 + num_features)
    data = HeteroData()
    with ChunkWork(progress, total) as work:
        papers, authors, cited = (
            side_of(work, fold(0, seed, key), nodes, num_classes, edges, exponent, community)
            for key, nodes, edges, community in (
                (3, num_papers, num_citations, fold(0, seed, 30)),
                (4, num_authors, num_writes, fold(0, seed, 40)),
                (5, num_papers, num_citations, fold(0, seed, 30)),
            )
        )
        cites = links(work, fold(0, seed, 6), papers, cited, num_citations, homophily)
        writes = links(work, fold(0, seed, 7), authors, papers, num_writes, homophily, loops=True)
        for node_type, side, key in (("paper", papers, 30), ("author", authors, 40)):
            values = _node_data(
                work,
                fold(0, seed, key),
                side.community,
                num_classes,
                num_classes,
                num_features,
                signal,
                label_noise,
                split,
                node_time,
                centre_key=fold(0, seed, 8),
            )
            for name, value in values.items():
                if node_type == "paper" or name in ("x", "time"):
                    data[node_type][name] = value
            data[node_type].num_nodes = side.community.size
        data["paper", "cites", "paper"].edge_index = pairs(cites)
        data["author", "writes", "paper"].edge_index = pairs(writes)
        data["paper", "rev_writes", "author"].edge_index = pairs(writes).flip(0).contiguous()
    return data


# Nodes and arguments ##########################################################################


def _node_data(
    work: ChunkWork,
    key: int,
    community: Array,
    num_classes: int,
    num_communities: int,
    num_features: int,
    signal: float,
    label_noise: float,
    split: tuple[float, float, float],
    with_time: bool,
    centre_key: int | None = None,
) -> dict[str, torch.Tensor]:
    num_nodes = community.size
    label = (community % num_classes).astype(np.int64)
    random = generator(key, _LABEL, 0)
    noisy = random.random(num_nodes) < label_noise
    label[noisy] = random.integers(0, num_classes, int(noisy.sum()))
    out = {"y": torch.from_numpy(label), "community": torch.from_numpy(community.astype(np.int64))}
    if num_features:
        scale = 2 * signal / (2 * num_features) ** 0.5
        centre_key = key if centre_key is None else centre_key
        centre = scale * generator(centre_key, _CENTRE, 0).standard_normal(
            (num_communities, num_features), dtype=np.float32
        )
        # NumPy's memory begins anywhere in a line of the caches, so that rows would have one more.
        features = torch.empty(num_nodes, num_features, dtype=torch.float32, device="cpu")
        out["x"], x = features, features.numpy()
        rows = max(1, CHUNK // num_features)

        def fill(chunk: int) -> None:
            part = slice(chunk * rows, min((chunk + 1) * rows, num_nodes))
            generator(key, _NOISE, chunk).standard_normal(dtype=np.float32, out=x[part])
            x[part] += centre[community[part]]
            work.done(x[part].size)

        work.map(fill, -(-num_nodes // rows))
    u = generator(key, _SPLIT, 0).random(num_nodes)
    begin = 0.0
    for name, share in zip(("train_mask", "val_mask", "test_mask"), split, strict=True):
        out[name] = torch.from_numpy((u >= begin) & (u < begin + share))
        begin += share
    if with_time:
        times = generator(key, _TIME, 1).integers(0, TIME_RANGE, num_nodes)
        out["time"] = torch.from_numpy(times)
    return out


def _check_graph(
    num_nodes: int,
    num_edges: int,
    num_classes: int,
    num_communities: int,
    homophily: float,
    exponent: float,
) -> None:
    if not 2 <= num_nodes < 2**31:
        raise ValueError(f"num_nodes must be from 2 to 2**31 - 1 (got {num_nodes})")
    if num_edges < 0 or num_edges % 2 or num_edges >= 2**33:
        raise ValueError(
            f"num_edges must be even, as every edge goes both ways, and below 2**33 "
            f"(got {num_edges})"
        )
    if num_edges > num_nodes * (num_nodes - 1) // 2:
        raise ValueError(
            f"num_edges={num_edges} is more than half of what {num_nodes} nodes can have: "
            f"ask for fewer edges or more nodes"
        )
    if not 1 <= num_classes <= num_communities <= num_nodes:
        raise ValueError(
            f"num_classes={num_classes} must be at least 1 and at most "
            f"num_communities={num_communities}, which must be at most num_nodes={num_nodes}"
        )
    if not 0 <= homophily <= 1:
        raise ValueError(f"homophily must be from 0 to 1 (got {homophily})")
    if exponent <= 2:
        raise ValueError(f"exponent must be above 2 (got {exponent})")


def _check_one_of(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))} (got {value!r})")
