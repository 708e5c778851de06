"""Generated graphs: power-law degrees, planted communities, labels and features that fit them.

The model is a degree-corrected stochastic block model (Karrer and Newman: "Stochastic
blockmodels and community structure in networks", Physical Review E 2011), sampled by
stubs: every node gets a number of stubs from a truncated power law, and every stub is tied
to a random stub of its own community or, more rarely, of the whole graph. Every random
number comes from a counter-based generator keyed by the seed, a purpose and a chunk number,
so a graph does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data, HeteroData
from tqdm import tqdm

from pyg_scale.ops.keys import fold

Array = NDArray[Any]
CHUNK = 1 << 21
EDGE_ORDERS = ("random", "source", "destination")
TIME_RANGE = 1 << 30
"""Generated times are integers from 0 to ``TIME_RANGE - 1``."""

_COMMUNITY, _RENAME, _DEGREE, _LINK, _CENTRE, _NOISE, _LABEL, _SPLIT, _TIME, _WEIGHT = range(10)
_U32 = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ODD = 0x9E3779B97F4A7C15
_ODD_INVERSE = pow(_ODD, -1, 1 << 64)


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
    with _Work(progress, 2 * num_edges + num_nodes * (1 + num_features)) as work:
        side = _side(work, fold(0, seed, 0), num_nodes, num_communities, num_edges // 2, exponent)
        hashed = _links(work, fold(0, seed, 1), side, side, num_edges // 2, homophily, loops=False)
        edge_index = _both_directions(hashed, edge_order, index_dtype)
        del hashed
        work.done(num_edges // 2)

        data = Data(edge_index=edge_index, num_nodes=num_nodes)
        key = fold(0, seed, 2)
        for name, value in _node_data(
            work, key, side.community, num_classes, num_communities, num_features, signal,
            label_noise, split, node_time,
        ).items():
            data[name] = value
        if edge_time:
            data.edge_time = _pair_numbers(work, fold(key, _TIME), edge_index, _as_time)
        if edge_weight:
            data.edge_weight = _pair_numbers(work, fold(key, _WEIGHT), edge_index, _as_weight)
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
    for nodes, edges in ((num_papers, 2 * num_citations), (min(num_papers, num_authors),
                                                           2 * num_writes)):
        _check_graph(nodes, edges, num_classes, num_classes, homophily, exponent)
    total = 2 * (num_citations + num_writes) + (num_papers + num_authors) * (1 + num_features)
    data = HeteroData()
    with _Work(progress, total) as work:
        papers, authors, cited = (
            _side(work, fold(0, seed, key), nodes, num_classes, edges, exponent, community)
            for key, nodes, edges, community in (
                (3, num_papers, num_citations, fold(0, seed, 30)),
                (4, num_authors, num_writes, fold(0, seed, 40)),
                (5, num_papers, num_citations, fold(0, seed, 30)),
            )
        )
        cites = _links(work, fold(0, seed, 6), papers, cited, num_citations, homophily, False)
        writes = _links(work, fold(0, seed, 7), authors, papers, num_writes, homophily, True)
        for node_type, side, key in (("paper", papers, 30), ("author", authors, 40)):
            values = _node_data(
                work, fold(0, seed, key), side.community, num_classes, num_classes, num_features,
                signal, label_noise, split, node_time, centre_key=fold(0, seed, 8),
            )
            for name, value in values.items():
                if node_type == "paper" or name in ("x", "time"):
                    data[node_type][name] = value
            data[node_type].num_nodes = side.community.size
        data["paper", "cites", "paper"].edge_index = _pairs(cites)
        data["author", "writes", "paper"].edge_index = _pairs(writes)
        data["paper", "rev_writes", "author"].edge_index = _pairs(writes).flip(0).contiguous()
    return data


# Nodes ########################################################################################


@dataclass
class _Side:
    """The nodes at one end of edges.

    Attributes:
        community: Of every node.
        stub: Nodes, each as often as the number of its stubs, grouped by community.
        start: The stubs of community ``c`` are ``start[c]`` to ``start[c + 1] - 1``.
    """

    community: Array
    stub: Array
    start: Array


def _side(
    work: _Work, key: int, num_nodes: int, num_communities: int, num_stubs: int,
    exponent: float, community_key: int | None = None,
) -> _Side:
    """Communities and stubs; nodes of one ``community_key`` have the same communities."""
    community_key = key if community_key is None else community_key
    community = _random(community_key, _COMMUNITY, 0).integers(
        0, num_communities, num_nodes, dtype=np.int32
    )
    order = np.argsort(community, kind="stable").astype(np.int32)
    u = 1.0 - _random(key, _DEGREE, 0).random(num_nodes)
    count = _stub_counts(u, exponent, num_stubs, cap=max(4.0, (2 * num_stubs) ** 0.5 / 2))
    stub = np.repeat(order, count[order])
    start = np.zeros(num_communities + 1, dtype=np.int64)
    start[1:] = np.cumsum(np.bincount(community, weights=count, minlength=num_communities))
    work.done(num_nodes)
    return _Side(community, stub, start)


def _stub_counts(u: Array, exponent: float, total: int, cap: float) -> Array:
    """Power-law counts from uniform ``u``: from 1 to ``cap`` each, ``total`` in all."""
    shape = u ** (-1.0 / (exponent - 1.0))
    total = max(total, u.size)
    low, high = 0.0, float(total)
    for _ in range(60):
        scale = (low + high) / 2
        if np.clip(scale * shape, 1.0, cap).sum() < total:
            low = scale
        else:
            high = scale
    exact = np.cumsum(np.clip(high * shape, 1.0, cap))
    # Rounding the running sum keeps the total and every count within one of its value.
    return np.diff(np.rint(exact), prepend=0.0).astype(np.int64)


def _node_data(
    work: _Work, key: int, community: Array, num_classes: int, num_communities: int,
    num_features: int, signal: float, label_noise: float, split: tuple[float, float, float],
    with_time: bool, centre_key: int | None = None,
) -> dict[str, torch.Tensor]:
    num_nodes = community.size
    label = (community % num_classes).astype(np.int64)
    random = _random(key, _LABEL, 0)
    noisy = random.random(num_nodes) < label_noise
    label[noisy] = random.integers(0, num_classes, int(noisy.sum()))
    out = {"y": torch.from_numpy(label), "community": torch.from_numpy(community.astype(np.int64))}
    if num_features:
        scale = 2 * signal / (2 * num_features) ** 0.5
        centre_key = key if centre_key is None else centre_key
        centre = scale * _random(centre_key, _CENTRE, 0).standard_normal(
            (num_communities, num_features), dtype=np.float32
        )
        x = np.empty((num_nodes, num_features), dtype=np.float32)
        rows = max(1, CHUNK // num_features)

        def fill(chunk: int) -> None:
            part = slice(chunk * rows, min((chunk + 1) * rows, num_nodes))
            _random(key, _NOISE, chunk).standard_normal(dtype=np.float32, out=x[part])
            x[part] += centre[community[part]]
            work.done(x[part].size)

        work.map(fill, -(-num_nodes // rows))
        out["x"] = torch.from_numpy(x)
    u = _random(key, _SPLIT, 0).random(num_nodes)
    begin = 0.0
    for name, share in zip(("train_mask", "val_mask", "test_mask"), split, strict=True):
        out[name] = torch.from_numpy((u >= begin) & (u < begin + share))
        begin += share
    if with_time:
        times = _random(key, _TIME, 1).integers(0, TIME_RANGE, num_nodes)
        out["time"] = torch.from_numpy(times)
    return out


# Edges ########################################################################################


def _links(
    work: _Work, key: int, src: _Side, dst: _Side, num_links: int, homophily: float, loops: bool
) -> Array:
    """Distinct links as scrambled 64-bit words in a random order, see :func:`_scramble`.

    Sorting the words finds doubles and, being a random order, which links to leave out.
    ``loops=False`` also means that a link and its reverse are the same.
    """
    start, size = dst.start[:-1].astype(np.uint64), np.diff(dst.start).astype(np.uint64)
    coin = np.uint64(round(homophily * 2**32))
    src_total, dst_total = src.stub.size, np.uint64(dst.stub.size)
    wanted, found, rounds = num_links, np.empty(0, dtype=np.uint64), 0
    while found.size < num_links:
        count = wanted + wanted // 25 + 16
        words = np.empty(count, dtype=np.uint64)

        def fill(chunk: int, words: Array = words, count: int = count, turn: int = rounds) -> None:
            part = slice(chunk * CHUNK, min((chunk + 1) * CHUNK, count))
            random = _random(key, _LINK, chunk, turn)
            draw = random.integers(0, 2**64, part.stop - part.start, dtype=np.uint64)
            first = random.integers(0, src_total, part.stop - part.start)
            if turn == 0 and count >= src_total:  # every stub once, then random ones again
                once = np.arange(part.start, min(part.stop, src_total))
                first[: once.size] = once
            a = src.stub[first]
            c = src.community[a]
            inside = ((draw & _LOW) < coin) & (size[c] > 0)
            offset = np.where(inside, start[c], np.uint64(0))
            b = dst.stub[offset + (((draw >> _U32) * np.where(inside, size[c], dst_total)) >> _U32)]
            if not loops:
                a, b = np.minimum(a, b), np.maximum(a, b)
            words[part] = _scramble((a.astype(np.uint64) << _U32) | b.astype(np.uint64))
            work.done((part.stop - part.start) if turn == 0 else 0)

        work.map(fill, -(-count // CHUNK))
        words.sort()
        keep = np.empty(count, dtype=bool)
        keep[0] = True
        np.not_equal(words[1:], words[:-1], out=keep[1:])
        words = words[keep]
        if not loops:
            pair = _unscramble(words)
            words = words[(pair >> _U32) != (pair & _LOW)]
            del pair
        found = words if rounds == 0 else np.union1d(found, words)
        wanted = max(1, num_links - found.size) * 2
        rounds += 1
        if rounds > 30:
            raise ValueError(
                f"only {found.size} different links of {num_links} were found: ask for fewer "
                f"edges, more nodes, fewer communities or a lower homophily"
            )
    return found[:num_links]


def _pairs(words: Array) -> torch.Tensor:
    pair = _unscramble(words)
    out = np.empty((2, words.size), dtype=np.int64)
    out[0], out[1] = pair >> _U32, pair & _LOW
    return torch.from_numpy(out)


def _both_directions(words: Array, order: str, dtype: torch.dtype) -> torch.Tensor:
    n = words.size
    pair = np.empty(2 * n, dtype=np.uint64)
    pair[:n] = _unscramble(words)
    np.bitwise_or(pair[:n] >> _U32, pair[:n] << _U32, out=pair[n:])
    if order != "random":
        pair.sort()
    out = np.empty((2, 2 * n), dtype=np.int32 if dtype == torch.int32 else np.int64)
    first, second = (1, 0) if order == "destination" else (0, 1)
    for begin in range(0, 2 * n, CHUNK):
        part = slice(begin, begin + CHUNK)
        out[first, part], out[second, part] = pair[part] >> _U32, pair[part] & _LOW
    return torch.from_numpy(out)


def _scramble(word: Array) -> Array:
    """A one-to-one map of 64-bit words onto themselves whose order looks random."""
    for _ in range(2):
        word = word ^ (word >> _U32)
        word *= np.uint64(_ODD)
    return word ^ (word >> _U32)


def _unscramble(word: Array) -> Array:
    for _ in range(2):
        word = word ^ (word >> _U32)
        word *= np.uint64(_ODD_INVERSE)
    return word ^ (word >> _U32)


def _pair_numbers(
    work: _Work, key: int, edge_index: torch.Tensor, convert: Callable[[Array], Array]
) -> torch.Tensor:
    """One number per edge, the same for both directions, whatever the order of the edges."""
    src, dst = edge_index.numpy()
    salt = np.uint64(key)
    num_chunks = -(-src.size // CHUNK)
    parts: list[Array] = [np.empty(0)] * num_chunks

    def fill(chunk: int) -> None:
        a, b = src[chunk * CHUNK :][:CHUNK], dst[chunk * CHUNK :][:CHUNK]
        low, high = np.minimum(a, b).astype(np.uint64), np.maximum(a, b).astype(np.uint64)
        parts[chunk] = convert(_scramble(_scramble((low << _U32) | high) ^ salt))

    work.map(fill, num_chunks)
    return torch.from_numpy(np.concatenate(parts) if parts else convert(np.empty(0, np.uint64)))


def _as_time(word: Array) -> Array:
    return (word >> np.uint64(34)).astype(np.int64)


def _as_weight(word: Array) -> Array:
    return ((word >> np.uint64(40)).astype(np.float32) + np.float32(1)) / np.float32(2**24)


# Work #########################################################################################


def _random(key: int, *purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=fold(key, *purpose)))


class _Work:
    """Chunks over threads, with one progress bar."""

    def __init__(self, progress: bool, total: int):
        self._bar = tqdm(total=total, desc="Generating", unit_scale=True, leave=False,
                         disable=None if progress else True)
        self._pool = ThreadPoolExecutor(torch.get_num_threads())

    def __enter__(self) -> _Work:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._bar.close()

    def map(self, function: Callable[[int], None], count: int) -> None:
        for _ in self._pool.map(function, range(count)):
            pass

    def done(self, amount: int) -> None:
        self._bar.update(amount)


# Arguments ####################################################################################


def _check_graph(
    num_nodes: int, num_edges: int, num_classes: int, num_communities: int,
    homophily: float, exponent: float,
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
