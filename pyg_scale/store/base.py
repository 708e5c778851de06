"""The contracts of feature stores beyond PyG's ``FeatureStore``.

A store needs none of them. Each capability is one protocol with one name, which is asked for with
``isinstance``: any class with its members takes part. ``docs/stores.md`` shows who gains from
which, and :class:`pyg_scale.testing.FeatureStoreTests` checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor
from torch_geometric.data import FeatureStore, TensorAttr

from pyg_scale import lazy

if TYPE_CHECKING:
    from pyg_scale.graph.topology import CSC, EdgeType, NodeType, Topology, sortable_time
    from pyg_scale.store.lending import LentRows

__all__ = [
    "CSC",
    "AcceptsSome",
    "BuildsFromData",
    "DeclaresCapacity",
    "DeclaresDtypes",
    "DeclaresError",
    "DeclaresReadOnly",
    "DeclaresViews",
    "EdgeType",
    "KeepsInFlight",
    "LendsRows",
    "LooksAhead",
    "NodeType",
    "ReadSchedule",
    "RowReader",
    "RowRequester",
    "Topology",
    "is_read_only",
    "look_ahead_of",
    "returns_views",
    "sortable_time",
]


@runtime_checkable
class DeclaresReadOnly(Protocol):
    """A store that says whether it takes new tensors; one that does not say takes them.

    Attributes:
        read_only: True if ``put_tensor``, ``update_tensor`` and ``remove_tensor`` raise.
    """

    read_only: bool


@runtime_checkable
class DeclaresViews(Protocol):
    """A store that says whether it returns views; one that does not say returns copies.

    Attributes:
        returns_views: True if whole tensors and slices may share memory with the store.
    """

    returns_views: bool


@runtime_checkable
class DeclaresDtypes(Protocol):
    """A store that takes tensors of some dtypes only; putting another one raises ``TypeError``.

    Attributes:
        dtypes: The dtypes that it takes.
    """

    dtypes: Collection[torch.dtype]


@runtime_checkable
class DeclaresError(Protocol):
    """A store whose numbers deviate from those that were put."""

    def error_bound(self, attr_name: str, group_name: Any = None, index: Any = None) -> Tensor:
        """The largest deviation of rows of a tensor, to broadcast over them."""


@runtime_checkable
class DeclaresCapacity(Protocol):
    """A store with a cache.

    Attributes:
        capacity: Largest size of the cache in bytes.
    """

    capacity: int

    def stats(self) -> dict[str, Any]:
        """Counts since the store was made: ``hits``, ``misses`` (rows read by index), and the
        ``cached_bytes`` in use."""


@runtime_checkable
class AcceptsSome(Protocol):
    """A store that leaves some features of a graph where they are, when it is filled by name."""

    def accepts(self, value: Any) -> bool:
        """Return True if the store takes a tensor or an array."""


@runtime_checkable
class RowReader(Protocol):
    """A store that writes rows where they belong, instead of returning new tensors."""

    def read_rows(self, attr: TensorAttr, index: Tensor, position: Tensor, out: Tensor) -> None:
        """Write row ``index[i]`` of a tensor to ``out[position[i]]``.

        Args:
            attr: The tensor; its own index is not used.
            index: Ids ``int64`` ``[n]``, which exist.
            position: ``int64`` ``[n]``, without repetition.
            out: ``uint8`` ``[m, row_bytes]``.
        """


@runtime_checkable
class RowRequester(Protocol):
    """A store whose rows take a while to come, and can be asked for before they are needed."""

    def ask_rows(self, wanted: Sequence[tuple[TensorAttr, Tensor]]) -> list[Callable[[], Tensor]]:
        """Ask for rows that are needed soon; returns at once.

        Args:
            wanted: Tensors, and ids ``int64`` ``[n]``, which exist.

        Returns:
            For each, a function that waits and returns the rows, ``uint8`` ``[n, row_bytes]``;
            to be called once.
        """


@runtime_checkable
class LendsRows(Protocol):
    """A store whose rows can be read where it holds them, beside the few that it brings.

    Stores that return views of whole tensors need not be one: their tensors are read.

    Attributes:
        lends_rows: False if it has no such rows after all, as the store below it has none.
    """

    lends_rows: bool

    def lend_rows(self, attr: TensorAttr) -> LentRows | None:
        """Lend rows of a matrix; their values stay the same while somebody holds them.

        Args:
            attr: The tensor, with ids ``int64`` ``[n]`` that exist as its index.

        Returns:
            The rows; ``None`` if those of this tensor have to be read.
        """


class ReadSchedule(Protocol):
    """The batches of one iteration, in order, as a loader announces them to a store.

    Attributes:
        paused: True while the iteration is paused: a read must not wait for other batches then.
    """

    paused: bool

    def announce(self, batch: int, attrs: Sequence[TensorAttr]) -> None:
        """Say what a batch, later than all announced ones, will read."""

    def suffices(self, ahead: int) -> bool:
        """Return True if batches need not be announced any further ahead for now.

        Args:
            ahead: Number of announced batches after the one to be read next.
        """

    def serving(self, batch: int) -> AbstractContextManager[Any]:
        """A block in which this thread reads for an announced batch."""

    def close(self) -> None:
        """Forget the batches that were not read."""


@runtime_checkable
class LooksAhead(Protocol):
    """A store that gains from knowing what the coming batches will read.

    Attributes:
        look_ahead: Number of batches to announce before they are read; 0 for none.
    """

    @property
    def look_ahead(self) -> int: ...

    def schedule(self) -> ReadSchedule:
        """A schedule for the batches of one iteration."""


@runtime_checkable
class KeepsInFlight(Protocol):
    """A store that asks for the rows of several batches at a time.

    Attributes:
        in_flight: Number of these batches, the one that is read next among them.
    """

    in_flight: int


@runtime_checkable
class BuildsFromData(Protocol):
    """A class of stores that reads the features of a graph where they are, without a copy."""

    @classmethod
    def for_data(cls, data: Any) -> Self:
        """A store of the features of a graph.

        Raises:
            ValueError: If the graph is not one whose features can be read so.
        """


def is_read_only(store: FeatureStore) -> bool:
    """Return True if a store says that it takes no new tensors."""
    return isinstance(store, DeclaresReadOnly) and store.read_only


def returns_views(store: FeatureStore) -> bool:
    """Return True if a store says that what it returns may share memory with it."""
    return isinstance(store, DeclaresViews) and store.returns_views


def look_ahead_of(store: FeatureStore) -> int:
    """The number of batches that are announced to a store before they are read."""
    return store.look_ahead if isinstance(store, LooksAhead) else 0


_TOPOLOGY = "graph.topology"
__getattr__, _ = lazy.names(
    "pyg_scale",
    dict.fromkeys(("CSC", "EdgeType", "NodeType", "Topology", "sortable_time"), _TOPOLOGY),
)
