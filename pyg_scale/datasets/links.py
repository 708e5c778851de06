"""Links between stubs: who is tied to whom, distinct and in a random order.

A stub is half of an edge, as in the configuration model: two that are tied make one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pyg_scale.datasets.work import CHUNK, ChunkWork, generator

Array = NDArray[Any]

_COMMUNITY, _DEGREE, _LINK = range(3)
_U32 = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ODD = 0x9E3779B97F4A7C15
_ODD_INVERSE = pow(_ODD, -1, 1 << 64)


@dataclass
class Side:
    """The nodes at one end of edges.

    Attributes:
        community: Of every node.
        stub: Nodes, each as often as the number of its stubs, grouped by community.
        start: The stubs of community ``c`` are ``start[c]`` to ``start[c + 1] - 1``.
    """

    community: Array
    stub: Array
    start: Array


def side_of(
    work: ChunkWork,
    key: int,
    num_nodes: int,
    num_communities: int,
    num_stubs: int,
    exponent: float,
    community_key: int | None = None,
) -> Side:
    """Communities and stubs; nodes of one ``community_key`` have the same communities."""
    community_key = key if community_key is None else community_key
    community = generator(community_key, _COMMUNITY, 0).integers(
        0, num_communities, num_nodes, dtype=np.int32
    )
    order = np.argsort(community, kind="stable").astype(np.int32)
    u = 1.0 - generator(key, _DEGREE, 0).random(num_nodes)
    count = _stub_counts(u, exponent, num_stubs, cap=max(4.0, (2 * num_stubs) ** 0.5 / 2))
    stub = np.repeat(order, count[order])
    start = np.zeros(num_communities + 1, dtype=np.int64)
    start[1:] = np.cumsum(np.bincount(community, weights=count, minlength=num_communities))
    work.done(num_nodes)
    return Side(community, stub, start)


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


def links(
    work: ChunkWork,
    key: int,
    src: Side,
    dst: Side,
    num_links: int,
    homophily: float,
    undirected: bool = False,
    loops: bool = False,
) -> Array:
    """Distinct links as scrambled 64-bit words in a random order, see :func:`scramble`.

    Sorting the words finds doubles and, being a random order, which links to leave out.

    Args:
        work: Runs the pieces.
        key: Of the random numbers.
        src: One end; every stub of it is used about once.
        dst: The other end; stubs of it are drawn, of the same community or of all.
        num_links: How many, exactly.
        homophily: Share of the links that are tied inside a community on purpose.
        undirected: A link and its reverse are the same; the smaller node comes first.
        loops: Whether both ends may have the same number.

    Raises:
        ValueError: If so many different links cannot be found.
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
            random = generator(key, _LINK, chunk, turn)
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
            if undirected:
                a, b = np.minimum(a, b), np.maximum(a, b)
            words[part] = scramble((a.astype(np.uint64) << _U32) | b.astype(np.uint64))
            work.done((part.stop - part.start) if turn == 0 else 0)

        work.map(fill, -(-count // CHUNK))
        words.sort()
        keep = np.empty(count, dtype=bool)
        keep[0] = True
        np.not_equal(words[1:], words[:-1], out=keep[1:])
        words = words[keep]
        if not loops:
            pair = unscramble(words)
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


def pairs(words: Array) -> torch.Tensor:
    """The result of :func:`links` as an edge index ``[2, num_links]``, ``int64``."""
    pair = unscramble(words)
    out = np.empty((2, words.size), dtype=np.int64)
    out[0], out[1] = pair >> _U32, pair & _LOW
    return torch.from_numpy(out)


def both_directions(words: Array, order: str, dtype: torch.dtype) -> torch.Tensor:
    """The edge index ``[2, 2 * num_links]`` with every link in both directions.

    Args:
        words: What :func:`links` found.
        order: ``"random"``, ``"source"`` or ``"destination"``.
        dtype: ``torch.int32`` or ``torch.int64``.
    """
    n = words.size
    pair = np.empty(2 * n, dtype=np.uint64)
    pair[:n] = unscramble(words)
    np.bitwise_or(pair[:n] >> _U32, pair[:n] << _U32, out=pair[n:])
    if order != "random":
        pair.sort()
    out = np.empty((2, 2 * n), dtype=np.int32 if dtype == torch.int32 else np.int64)
    first, second = (1, 0) if order == "destination" else (0, 1)
    for begin in range(0, 2 * n, CHUNK):
        part = slice(begin, begin + CHUNK)
        out[first, part], out[second, part] = pair[part] >> _U32, pair[part] & _LOW
    return torch.from_numpy(out)


def scramble(word: Array) -> Array:
    """A one-to-one map of 64-bit words onto themselves whose order looks random."""
    for _ in range(2):
        word = word ^ (word >> _U32)
        word *= np.uint64(_ODD)
    return word ^ (word >> _U32)


def unscramble(word: Array) -> Array:
    """The reverse of :func:`scramble`."""
    for _ in range(2):
        word = word ^ (word >> _U32)
        word *= np.uint64(_ODD_INVERSE)
    return word ^ (word >> _U32)


def pair_numbers(
    work: ChunkWork, key: int, edge_index: torch.Tensor, convert: Callable[[Array], Array]
) -> torch.Tensor:
    """One number per edge, the same for both directions, whatever the order of the edges."""
    src, dst = edge_index.numpy()
    salt = np.uint64(key)
    num_chunks = -(-src.size // CHUNK)
    parts: list[Array] = [np.empty(0)] * num_chunks

    def fill(chunk: int) -> None:
        a, b = src[chunk * CHUNK :][:CHUNK], dst[chunk * CHUNK :][:CHUNK]
        low, high = np.minimum(a, b).astype(np.uint64), np.maximum(a, b).astype(np.uint64)
        parts[chunk] = convert(scramble(scramble((low << _U32) | high) ^ salt))

    work.map(fill, num_chunks)
    return torch.from_numpy(np.concatenate(parts) if parts else convert(np.empty(0, np.uint64)))


def as_time(word: Array) -> Array:
    """Integers below ``2**30`` from random words."""
    return (word >> np.uint64(34)).astype(np.int64)


def as_weight(word: Array) -> Array:
    """Numbers in ``(0, 1]``, fp32, from random words."""
    return ((word >> np.uint64(40)).astype(np.float32) + np.float32(1)) / np.float32(2**24)
