"""A power-law graph with planted communities of any size, made piece by piece.

Nothing of it is ever held in memory: the edges of a chunk, the features and labels of a range of
nodes are functions of the seed and of where they stand. The degrees follow the model of Chung and
Lu ("The average distances in random graphs with given expected degrees", PNAS 2002) with weights
that can be inverted in closed form; other than in :func:`planted_communities`, a few edges
may be parallel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_scale.datasets.work import generator
from pyg_scale.ops.keys import fold

LINKS = 1 << 20
"""Links of one chunk; each is an edge in both directions. Part of what a graph is."""
NODES = 1 << 16
"""Nodes whose features and labels are drawn together. Part of what a graph is."""

_LINK, _NOISE, _LABEL, _SPLIT, _CENTRE = range(5)
_BYTE_STD = math.sqrt((256**2 - 1) / 12)


@dataclass(frozen=True)
class StreamedCommunities:
    """A homogeneous, undirected graph that is computed where it is asked for.

    Attributes:
        num_nodes: Number of nodes, below ``2**31``.
        num_edges: Number of directed edges, both directions of every link; even.
        num_classes: Number of classes; community ``c`` has class ``c % num_classes``.
        num_features: Columns of the features.
        num_communities: Number of communities; ``num_classes`` if ``None``.
        homophily: Share of the links that are tied inside a community on purpose.
        exponent: Of the power law of the degrees, above 2.
        signal: Half the distance of two community centres, in standard deviations of the noise.
        label_noise: Share of the nodes whose label is drawn at random.
        split: Shares of training, validation and test nodes.
        seed: All of the graph follows from it.

    Raises:
        ValueError: If a size is out of its range.
    """

    num_nodes: int
    num_edges: int
    num_classes: int = 172
    num_features: int = 128
    num_communities: int | None = None
    homophily: float = 0.8
    exponent: float = 2.5
    signal: float = 0.25
    label_noise: float = 0.02
    split: tuple[float, float, float] = (0.011, 0.001, 0.002)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.num_nodes < 2**31:
            raise ValueError(f"num_nodes must be from 2 to 2**31 - 1 (got {self.num_nodes})")
        if self.num_edges < 0 or self.num_edges % 2:
            raise ValueError(f"num_edges must be even and not negative (got {self.num_edges})")
        if not 1 <= self.num_classes <= self.communities <= self.num_nodes:
            raise ValueError(
                "expected 1 <= num_classes <= num_communities <= num_nodes (got "
                f"{self.num_classes}, {self.communities}, {self.num_nodes})"
            )
        if self.exponent <= 2 or not 0 <= self.homophily <= 1:
            raise ValueError("exponent must be above 2, homophily from 0 to 1")

    @property
    def communities(self) -> int:
        """Number of communities."""
        return self.num_classes if self.num_communities is None else self.num_communities

    @property
    def num_chunks(self) -> int:
        """Number of chunks of edges."""
        return -(-(self.num_edges // 2) // LINKS)

    def edges(self, chunk: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Sources and destinations of the edges of a chunk, a link's two directions together.

        Args:
            chunk: From 0 to ``num_chunks - 1``.
        """
        count = min(LINKS, self.num_edges // 2 - chunk * LINKS)
        random = generator(fold(0, self.seed), _LINK, chunk)
        first, second = self._rank(random.random(count)), self._rank(random.random(count))
        inside = random.random(count, dtype=np.float32) < self.homophily
        communities = self.communities
        tied = second - second % communities + first % communities
        tied[tied >= self.num_nodes] -= communities
        second = np.where(inside, tied, second)
        # A node next to itself becomes the neighbour of the next one of its community.
        loop = first == second
        second[loop] = (second[loop] + communities) % self.num_nodes
        loop = first == second
        second[loop] = (second[loop] + 1) % self.num_nodes
        source, destination = self._id(first), self._id(second)
        ends = np.empty((2, count, 2), dtype=np.int32)
        ends[0, :, 0] = ends[1, :, 1] = source
        ends[0, :, 1] = ends[1, :, 0] = destination
        return ends[0].reshape(-1), ends[1].reshape(-1)

    def community(self, begin: int, end: int) -> NDArray[np.int64]:
        """The community of the nodes ``begin`` to ``end - 1``."""
        factor, shift = self._affine
        node = np.arange(begin, end, dtype=np.int64)
        rank = (node - shift) % self.num_nodes * pow(factor, -1, self.num_nodes) % self.num_nodes
        return rank % self.communities

    def features(self, begin: int, end: int, dtype: torch.dtype = torch.float16) -> Tensor:
        """Features ``[end - begin, num_features]`` of a range of nodes.

        Args:
            begin: A multiple of :data:`NODES`.
            end: At most ``num_nodes``.
            dtype: Of the result.
        """
        kind = torch.from_numpy(self.community(begin, end) % self.num_classes)
        parts = []
        for at in range(begin, end, NODES):
            count = min(NODES, end - at)
            random = generator(fold(0, self.seed), _NOISE, at // NODES)
            noise = random.integers(0, 256, (count, self.num_features), dtype=np.uint8)
            part = torch.from_numpy(noise).to(torch.float32).sub_(127.5).div_(_BYTE_STD)
            part += self._centres[kind[at - begin : at - begin + count]]
            parts.append(part.to(dtype))
        return torch.cat(parts) if parts else torch.empty(0, self.num_features, dtype=dtype)

    def labels(self, begin: int, end: int) -> NDArray[np.int64]:
        """The class of a range of nodes; ``begin`` is a multiple of :data:`NODES`."""
        out = self.community(begin, end) % self.num_classes
        for at in range(begin, end, NODES):
            part = out[at - begin : at - begin + NODES]
            random = generator(fold(0, self.seed), _LABEL, at // NODES)
            wrong = random.random(NODES)[: part.size] < self.label_noise
            other = random.integers(0, self.num_classes, NODES)[: part.size]
            part[wrong] = other[wrong]
        return out

    def splits(self, begin: int, end: int) -> dict[str, NDArray[np.int64]]:
        """The ``train``, ``val`` and ``test`` nodes of a range; ``begin`` as in :meth:`labels`."""
        bounds = np.cumsum(self.split)
        found: dict[str, list[Any]] = {"train": [], "val": [], "test": []}
        for at in range(begin, end, NODES):
            random = generator(fold(0, self.seed), _SPLIT, at // NODES)
            which = np.searchsorted(bounds, random.random(min(NODES, end - at)), side="right")
            for number, name in enumerate(found):
                found[name].append(at + np.flatnonzero(which == number))
        return {
            name: np.concatenate(ids).astype(np.int64) if ids else np.empty(0, np.int64)
            for name, ids in found.items()
        }

    # Parts #################################################################################

    @property
    def _affine(self) -> tuple[int, int]:
        """Ranks to ids: ``rank * factor + shift``, so that hubs are not the first nodes."""
        factor = int(self.num_nodes * 0.6180339887498949) | 1
        while math.gcd(factor, self.num_nodes) != 1:
            factor += 2
        return factor % self.num_nodes or 1, fold(0, self.seed, 7) % self.num_nodes

    def _id(self, rank: NDArray[np.int64]) -> NDArray[np.int64]:
        factor, shift = self._affine
        return (rank * factor + shift) % self.num_nodes

    def _rank(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """Ranks with probability proportional to ``(rank + offset) ** -1 / (exponent - 1)``."""
        rest = 1.0 - 1.0 / (self.exponent - 1.0)
        largest = max(4.0, math.sqrt(self.num_edges))  # the largest expected degree
        share = rest * self.num_edges / (self.num_nodes**rest * largest)
        offset = max(1.0, share ** (1.0 / (1.0 - rest)))
        low, high = offset**rest, (self.num_nodes + offset) ** rest
        rank = (uniform * (high - low) + low) ** (1.0 / rest) - offset
        return np.clip(rank, 0, self.num_nodes - 1).astype(np.int64)

    @property
    def _centres(self) -> Tensor:
        random = generator(fold(0, self.seed), _CENTRE)
        sign = random.integers(0, 2, (self.num_classes, self.num_features)) * 2 - 1
        return torch.from_numpy(sign).to(torch.float32) * self.signal
