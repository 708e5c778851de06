"""The contract of a reader: it describes a graph, and yields its edges and attributes in chunks."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.store.directory.meta import Attribute

T = TypeVar("T")


@dataclass
class Nodes:
    """The nodes of one type.

    Attributes:
        num_nodes: ``None`` where only the edges tell: one more than the largest id.
        attributes: Dtype and row shape of each attribute, in the order that the user sees.
        index_sets: Named sets of nodes (``"train"``): how many ids each has.
        other: What the type has beside rows, as JSON (see
            :mod:`pyg_scale.store.directory.values`).
    """

    num_nodes: int | None = None
    attributes: dict[str, Attribute] = field(default_factory=dict)
    index_sets: dict[str, int] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)


@dataclass
class EdgeList:
    """The edges of one type. The id of an edge is its place in the list.

    Attributes:
        num_edges: ``None`` where it is known only after reading them all.
        index_dtype: ``"int64"`` or ``"int32"``, what batches are to hold.
        attributes: Dtype and row shape of each attribute, one row an edge.
    """

    num_edges: int | None = None
    index_dtype: str = "int64"
    attributes: dict[str, Attribute] = field(default_factory=dict)


@dataclass
class Description:
    """A graph before it is read.

    Attributes:
        nodes: Every node type, in the order of the metadata; ``{None: ...}`` if homogeneous.
        edges: Every edge type; ``{None: ...}`` if homogeneous.
        graph_attributes: What the graph has beside nodes and edges, as JSON.
        time_attr: The attribute that holds times, where the user names none.
    """

    nodes: dict[NodeType, Nodes]
    edges: dict[EdgeType, EdgeList]
    graph_attributes: dict[str, Any] = field(default_factory=dict)
    time_attr: str | None = None

    @property
    def is_hetero(self) -> bool:
        return None not in self.nodes


class Workspace(Protocol):
    """The folder and memory that a conversion lends to :meth:`Reader.prepare`."""

    folder: Path
    """A folder for files of the reader's own. It is still there after a restart, and deleted when
    the conversion is complete."""

    memory: int
    """Bytes that the reader may use at a time."""

    def once(self, name: str, work: Callable[[], T]) -> T:
        """Do a step and remember what it returned, as JSON; after a restart return that at once.

        Args:
            name: What it is called, the same in every run.
            work: Called without arguments. Files that it leaves must be complete when it returns.
        """
        ...

    def progress(self, what: str, total: int | None, unit: str) -> Any:
        """A progress bar with ``update(n)``, to be used in a ``with`` statement."""
        ...


class Reader(abc.ABC):
    """Reads a graph for :func:`pyg_scale.convert.convert`.

    It is made from what the user typed: ``convert("mine:a/b", path)`` and ``convert("a/b.mine",
    path)`` make ``Reader("a/b")`` and ``Reader("a/b.mine")`` of the reader that is registered as
    ``"mine"``; options of the user are further keyword arguments. The constructor checks what can
    be checked quickly, and raises ``FileNotFoundError``, ``ValueError`` or ``TypeError`` that name
    the file.

    The methods that yield have the same two arguments: ``begin`` is the row to begin with (not 0
    after a restart), ``rows`` the most that a chunk may have. Chunks follow one another without a
    gap, and none is empty. What they hold never depends on ``begin`` or ``rows``. Memory is
    bounded by a few chunks. Nothing is checked twice: node ids and lengths are checked by the
    conversion.

    Example::

        class MyReader(Reader):
            def __init__(self, source):
                self.edge_index = np.load(source, mmap_mode="r")

            def describe(self):
                edges = EdgeList(num_edges=self.edge_index.shape[1])
                return Description({None: Nodes()}, {None: edges})

            def edges(self, edge_type, begin, rows):
                for first in range(begin, self.edge_index.shape[1], rows):
                    src, dst = self.edge_index[:, first : first + rows].copy()
                    yield torch.from_numpy(src), torch.from_numpy(dst)
    """

    def files(self) -> list[Path]:
        """The files that the graph is read from: if one changes, a restart begins anew."""
        return []

    def options(self) -> Mapping[str, Any]:
        """Further options of the reader, as JSON: if they change, a restart begins anew."""
        return {}

    def prepare(self, work: Workspace) -> None:  # noqa: B027
        """Whatever must be done before the graph can be described. Called once, first."""

    @abc.abstractmethod
    def describe(self) -> Description:
        """The graph's types, sizes and attributes."""

    @abc.abstractmethod
    def edges(self, edge_type: EdgeType, begin: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield source and destination ids, ``int64`` or ``int32`` ``[n]`` each."""

    def node_attribute(
        self, node_type: NodeType, name: str, begin: int, rows: int
    ) -> Iterator[Tensor]:
        """Yield rows ``[n, ...]`` of an attribute that :meth:`describe` lists."""
        raise NotImplementedError(f"{type(self).__name__} reads no attributes of nodes")

    def edge_attribute(
        self, edge_type: EdgeType, name: str, begin: int, rows: int
    ) -> Iterator[Tensor]:
        """Yield rows ``[n, ...]`` of an attribute, in the order of :meth:`edges`."""
        raise NotImplementedError(f"{type(self).__name__} reads no attributes of edges")

    def index_set(self, node_type: NodeType, name: str, begin: int, rows: int) -> Iterator[Tensor]:
        """Yield node ids ``int64`` ``[n]`` of a named set."""
        raise NotImplementedError(f"{type(self).__name__} reads no index sets")

    def node_attribute_file(self, node_type: NodeType, name: str) -> Path | None:
        """A ``.npy`` file that holds exactly an attribute, if there is one: it can be linked.

        One in the workspace's folder always is linked, not copied.
        """
        return None

    def edge_name(self, edge_type: EdgeType, row: int) -> str:
        """The name of an edge in errors: the file and the row in it, where there are such."""
        return f"edge {row}" if edge_type is None else f"edge {row} of {edge_type!r}"

    def result_files(self) -> Mapping[str, Path]:
        """More ``.npy`` files for the graph directory, ``{name in it: file}``, after the rest.

        They are linked if they lie in the workspace's folder, otherwise copied.
        """
        return {}

    def close(self) -> None:  # noqa: B027
        """Let go of files. Called once, last, also after an error."""


def suffix(path: Path) -> str:
    """The name of the reader of a file: its suffix, that before ``.gz`` where it is compressed."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix[1:].lower()
