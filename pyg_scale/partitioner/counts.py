"""Measures of a partition: cut, balance, replication, halo nodes, remote features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyg_scale.graph.topology import EdgeType, NodeType


@dataclass(frozen=True)
class Remote:
    """Number of features that a batch takes from other parts, measured by sampling.

    Attributes:
        num_neighbors: Neighbours per hop.
        batch_size: Seeds of a batch, all of one part.
        num_batches: Number of batches that were sampled.
        per_batch: Average number of nodes of a batch that other parts own, over the batches of all
            parts.
        std_error: Standard error of :attr:`per_batch`.
        share: :attr:`per_batch` as a share of the nodes of a batch.
        cached: Average number of these that are in the cache list of the batch's part.
    """

    num_neighbors: list[int]
    batch_size: int
    num_batches: int
    per_batch: float
    std_error: float
    share: float
    cached: float = 0.0


@dataclass
class Quality:
    """Counts of a partition, from which all other measures are derived.

    Attributes:
        num_parts: Number of parts.
        nodes: Nodes of each part ``[num_parts]``, by node type.
        edges: Edges of each part, by edge type.
        cut_edges: Edges between parts, by edge type.
        halo: Nodes of other parts that are neighbours of each part's nodes, by node type.
        train: Training nodes of each part, for the node types that have any.
        edge_assign_strategy: ``"by_dst"``: edges are with their destination, and halo nodes are
            sources; ``"by_src"``: the other way round.
        method: The name of the partitioner, if known.
        seconds: Duration of partitioning, if measured.
        remote: Features from other parts, if measured.
    """

    num_parts: int
    nodes: dict[NodeType, list[int]]
    edges: dict[EdgeType, list[int]]
    cut_edges: dict[EdgeType, int]
    halo: dict[NodeType, list[int]]
    train: dict[NodeType, list[int]] = field(default_factory=dict)
    edge_assign_strategy: str = "by_dst"
    method: str | None = None
    seconds: float | None = None
    remote: Remote | None = None

    @property
    def cut(self) -> float:
        """Share of the edges whose ends are in different parts."""
        return _share(sum(self.cut_edges.values()), _total(self.edges))

    @property
    def replication(self) -> float:
        """Average number of copies of a node: own and halo nodes of all parts, divided by nodes."""
        nodes = _total(self.nodes)
        return (nodes + _total(self.halo)) / nodes if nodes else 1.0

    @property
    def node_balance(self) -> float:
        """Nodes of the largest part, as a multiple of the average."""
        return _balance(_sum(self.nodes, self.num_parts))

    @property
    def edge_balance(self) -> float:
        """Edges of the part with the most, as a multiple of the average."""
        return _balance(_sum(self.edges, self.num_parts))

    @property
    def train_balance(self) -> float | None:
        """Training nodes of the part with the most, as a multiple of the average."""
        return _balance(_sum(self.train, self.num_parts)) if _total(self.train) else None

    @property
    def largest_halo(self) -> int:
        """Halo nodes of the part with the most."""
        return max(_sum(self.halo, self.num_parts), default=0)

    def to_dict(self) -> dict[str, Any]:
        """The counts and derived measures as JSON values."""
        return {
            "method": self.method,
            "num_parts": self.num_parts,
            "edge_assign_strategy": self.edge_assign_strategy,
            "seconds": self.seconds,
            "cut": self.cut,
            "node_balance": self.node_balance,
            "edge_balance": self.edge_balance,
            "train_balance": self.train_balance,
            "replication": self.replication,
            "largest_halo": self.largest_halo,
            "remote": None if self.remote is None else vars(self.remote),
            "node_types": [
                {
                    "name": name,
                    "nodes": nodes,
                    "halo": self.halo[name],
                    "train": self.train.get(name),
                    "balance": _balance(nodes),
                }
                for name, nodes in self.nodes.items()
            ],
            "edge_types": [
                {
                    "name": name,
                    "edges": edges,
                    "cut_edges": self.cut_edges[name],
                    "balance": _balance(edges),
                }
                for name, edges in self.edges.items()
            ],
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Quality:
        """Read the result of :meth:`to_dict`.

        Raises:
            ValueError: If it is something else.
        """
        try:
            nodes = {each["name"]: each for each in found["node_types"]}
            edges = {_edge_type(each["name"]): each for each in found["edge_types"]}
            return cls(
                num_parts=found["num_parts"],
                nodes={name: each["nodes"] for name, each in nodes.items()},
                edges={name: each["edges"] for name, each in edges.items()},
                cut_edges={name: each["cut_edges"] for name, each in edges.items()},
                halo={name: each["halo"] for name, each in nodes.items()},
                train={n: e["train"] for n, e in nodes.items() if e["train"] is not None},
                edge_assign_strategy=found["edge_assign_strategy"],
                method=found["method"],
                seconds=found["seconds"],
                remote=None if found["remote"] is None else Remote(**found["remote"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a quality report: {type(error).__name__}: {error}") from None


def _edge_type(name: list[str] | None) -> EdgeType:
    if name is None:
        return None
    source, relation, destination = name
    return source, relation, destination


def _total(counts: Mapping[Any, list[int]]) -> int:
    return sum(sum(each) for each in counts.values())


def _sum(counts: Mapping[Any, list[int]], parts: int) -> list[int]:
    return [sum(each[part] for each in counts.values()) for part in range(parts)]


def _balance(sizes: list[int]) -> float:
    total = sum(sizes)
    return max(sizes) * len(sizes) / total if total else 1.0


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
