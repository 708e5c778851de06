"""The contracts of a graph that is more than PyG's ``Data``: opened, served, or on several ranks.

Each capability is one protocol. Loaders ask for it with ``isinstance``, so that any class with the
methods takes part; a graph has as many of them as fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from torch_geometric.data import FeatureStore
from torch_geometric.sampler import BaseSampler

if TYPE_CHECKING:
    from pyg_scale.graph.topology import Topology


class TopologyOptions(NamedTuple):
    """The arguments of :func:`~pyg_scale.store.topology_of` that say which topology is meant."""

    direction: str = "forward"
    time_attr: str | None = None
    weight_attr: str | None = None
    is_sorted: bool = False


@runtime_checkable
class SuppliesTopology(Protocol):
    """A graph that knows itself how its in-edges are reached, such as one on several ranks."""

    def supply_topology(self, options: TopologyOptions) -> Topology | None:
        """The topology for some options: always the same one, while somebody holds it.

        Args:
            options: Which topology.

        Returns:
            The topology; ``None`` if it is to be read from the graph as from any other.

        Raises:
            ValueError: If there is none with these options, or the graph was changed.
        """


@runtime_checkable
class SuppliesFeatures(Protocol):
    """A graph that knows itself how features are read, such as one on several ranks."""

    def supply_features(self) -> FeatureStore | None:
        """Features of nodes and edges by original id.

        Returns:
            A feature store; ``None`` if they are read from the graph as from any other.
        """


@runtime_checkable
class SuppliesSampler(Protocol):
    """A graph that is sampled elsewhere, such as by servers, which send features as well."""

    def sampler_for(self, sampler: Any, options: dict[str, Any], sampling: Any) -> BaseSampler:
        """The sampler of a loader.

        Args:
            sampler: The name of a sampler.
            options: The loader's arguments for the sampler.
            sampling: ``SamplingOptions`` or ``None``: which servers to ask, and how far ahead.

        Raises:
            TypeError: If the graph cannot be sampled so; likewise for ``ValueError``.
        """


@runtime_checkable
class NeedsThreads(Protocol):
    """A graph that other processes may be unable to read."""

    @property
    def needs_threads(self) -> str:
        """The reason why worker processes cannot read the graph; empty if they can."""


@runtime_checkable
class InDirectory(Protocol):
    """A graph that was opened from a directory, here or on servers."""

    @property
    def graph_directory(self) -> Any:
        """The opened directory: metadata, parts and who has which node."""


@runtime_checkable
class HasBooks(Protocol):
    """A directory that knows which part has which node; servers keep that of theirs.

    Attributes:
        books: The :class:`~pyg_scale.store.directory.PartitionBook` of every node type.
    """

    books: Mapping[Any, Any]


@runtime_checkable
class OnRanks(Protocol):
    """A graph that several ranks opened together."""

    @property
    def comm(self) -> Any:
        """The :class:`~pyg_scale.comm.Communicator` of these ranks."""


@runtime_checkable
class HasOwners(Protocol):
    """A graph in parts that know which ranks answer for them."""

    @property
    def owners(self) -> Any:
        """The :class:`~pyg_scale.distributed.Owners`: the ranks that answer for each part."""


@runtime_checkable
class AtSnapshot(Protocol):
    """A graph directory, or a store that reads one, at one snapshot.

    Attributes:
        path: The directory.
        snapshot: The number of the snapshot; ``None`` if a store has a directory of its own.
    """

    path: Path
    snapshot: int | None


def needs_threads(data: Any) -> str:
    """The reason why worker processes cannot read a graph; empty if they can."""
    return data.needs_threads if isinstance(data, NeedsThreads) else ""


def directory_of(data: Any) -> Any:
    """The directory from which a graph was opened, or ``None``."""
    return data.graph_directory if isinstance(data, InDirectory) else None


def snapshot_of(data: Any) -> int:
    """The number of the snapshot that a graph, or a pair of stores, is; 0 if it is no directory."""
    held = data if isinstance(data, tuple | list) else [directory_of(data)]
    return max((each.snapshot or 0 for each in held if isinstance(each, AtSnapshot)), default=0)
