"""Batches of few sizes: padded with nodes and edges that touch no real ones."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage

from pyg_scale.loader.seeds.epoch import BatchIndex, Cut
from pyg_scale.ops import colptr, keys

_TRIED = 8  # batches
_MULTIPLE = 8  # of nodes and edges
_PADDING = 2  # nodes at least, so that padding edges are no loops
_BESIDE = {"edge_index", "num_nodes", "batch_size", "input_id", "seed_time", "edge_label"}
_BESIDE |= {"num_sampled_nodes", "num_sampled_edges", "edge_label_index", "edge_label_time"}
_BESIDE |= {"src_index", "dst_pos_index", "dst_neg_index"}


@dataclass(frozen=True)
class Buckets:
    """The sizes to which batches are padded: ``NeighborLoader(..., pad_to=Buckets(headroom=1.3))``.

    Attributes:
        headroom: The largest size, as a multiple of the largest of some batches that are sampled
            when the loader is made. The next sizes are a half and a quarter of it. A batch that
            does not fit into the largest gets twice that, or twice that again.
        sizes: The sizes themselves, ascending, as pairs of nodes and edges; for graphs without
            types. Nothing is sampled then, and a batch that fits into none raises.

    Raises:
        TypeError: If one of them is of another type.
        ValueError: If a number is out of its range, or sizes do not ascend.
    """

    headroom: float = 1.15
    sizes: Sequence[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.headroom, bool) or not isinstance(self.headroom, int | float):
            raise TypeError(f"headroom must be a number (got {self.headroom!r})")
        if not 1 <= self.headroom <= 16:
            raise ValueError(f"headroom must be 1 to 16 (got {self.headroom})")
        if self.sizes is None:
            return
        try:
            found = [(operator.index(nodes), operator.index(edges)) for nodes, edges in self.sizes]
        except (TypeError, ValueError):
            raise TypeError(
                f"sizes must be pairs of integers, nodes and edges, such as [(5_000, 20_000)] (got "
                f"{self.sizes!r})"
            ) from None
        grows = all(a <= c and b <= d for (a, b), (c, d) in itertools.pairwise(found))
        if not found or not grows or found[0][0] < _PADDING or found[0][1] < 0:
            raise ValueError(
                f"sizes must ascend, with at least {_PADDING} nodes each (got {self.sizes!r})"
            )


@dataclass(frozen=True)
class Size:
    """Numbers of nodes and edges, by type."""

    nodes: Mapping[Any, int]
    edges: Mapping[Any, int]

    def fits(self, other: Size) -> bool:
        """Return True if a batch of this size, and its padding, fits into another."""
        nodes = all(n + _PADDING <= other.nodes[kind] for kind, n in self.nodes.items())
        return nodes and all(n <= other.edges[kind] for kind, n in self.edges.items())

    def of(self, other: Size) -> Size:
        """The size for the types of another; small for those that it does not know."""
        nodes = {kind: self.nodes.get(kind, _MULTIPLE) for kind in other.nodes}
        return Size(nodes, {kind: self.edges.get(kind, _MULTIPLE) for kind in other.edges})

    def times(self, factor: float) -> Size:
        """The size times a number, rounded up."""

        def scaled(count: int) -> int:
            return -(-int(count * factor + 0.999) // _MULTIPLE) * _MULTIPLE

        nodes = {kind: max(scaled(n), _MULTIPLE) for kind, n in self.nodes.items()}
        return Size(nodes, {kind: scaled(n) for kind, n in self.edges.items()})


class Padding:
    """Pads batches to few sizes, the same for any number of workers.

    Args:
        sizes: Ascending.
        grows: Whether a batch that fits into none gets a multiple of the last.
    """

    def __init__(self, sizes: Sequence[Size], grows: bool) -> None:
        self._sizes, self._grows = list(sizes), grows

    def pad(self, batch: Data | HeteroData, graph: Any) -> None:
        """Add nodes and edges to a batch, and ``node_mask``, ``edge_mask`` and ``seed_mask``.

        Args:
            batch: The batch; changed.
            graph: The loader's graph, which knows what are attributes of nodes and of edges.

        Raises:
            NotImplementedError: If an attribute of nodes or edges is no tensor, or edges are no
                ``edge_index``.
            ValueError: If the batch fits into no size.
        """
        of_nodes, of_edges = list(_node_stores(batch)), list(_edge_stores(batch))
        for kind, store in of_edges:
            _check_edges(kind, store)
        counts = {kind: int(store.num_nodes or 0) for kind, store in of_nodes}
        edges = {kind: store.edge_index.size(1) for kind, store in of_edges}
        size = self._size_for(Size(counts, edges))
        # Before a node is added: by its number of rows an attribute is known for one of nodes.
        at_edges = [_rows_of(store, kind, graph, of_edges=True) for kind, store in of_edges]
        at_nodes = [_rows_of(store, kind, graph, of_edges=False) for kind, store in of_nodes]
        for (kind, store), names in zip(of_edges, at_edges, strict=True):
            ends = (kind, kind) if kind is None else (kind[0], kind[2])
            source, target = ((counts[end], size.nodes[end]) for end in ends)
            _pad_edges(store, names, size.edges[kind], source, target, ends[0] == ends[1])
        for (kind, store), names in zip(of_nodes, at_nodes, strict=True):
            _pad_nodes(store, names, counts[kind], size.nodes[kind])

    def _size_for(self, size: Size) -> Size:
        for each in self._sizes:
            if size.fits(found := each.of(size)):
                return found
        if not self._grows:
            raise ValueError(
                f"a batch has {_said(size)}, and needs {_PADDING} nodes of padding, but the "
                f"largest of pad_to=Buckets(sizes=...) is {_said(found)}: add a larger one"
            )
        while not size.fits(found):
            found = found.times(2)
        return found


def padding_of(
    pad_to: Any,
    graph: Any,
    cut: Cut | None,
    sample: Callable[[BatchIndex], Any],
) -> Padding | None:
    """The padding that the argument ``pad_to`` of a loader stands for.

    Args:
        pad_to: ``None``, ``"buckets"`` or :class:`Buckets`.
        graph: The loader's graph.
        cut: The way in which seeds are cut into batches; ``None`` if nobody knows.
        sample: Samples a batch.

    Raises:
        TypeError: If it is something else.
        ValueError: If sizes are needed and not known.
        NotImplementedError: If sizes are given for a graph with types.
    """
    if pad_to is None:
        return None
    buckets = Buckets() if pad_to == "buckets" else pad_to
    if not isinstance(buckets, Buckets):
        raise TypeError(f"pad_to must be 'buckets', a Buckets or None (got {pad_to!r})")
    if buckets.sizes is not None:
        if isinstance(graph, HeteroData):
            raise NotImplementedError(
                "Buckets(sizes=...) is for graphs without types: use Buckets(headroom=...)"
            )
        return Padding([Size({None: n}, {None: e}) for n, e in buckets.sizes], grows=False)
    if cut is None:
        raise ValueError(
            "pad_to='buckets' samples some batches to find sizes, but sampler= or batch_sampler= "
            "must not be asked for them: pass pad_to=Buckets(sizes=[(nodes, edges), ...])"
        )
    largest = _largest(cut, sample)
    return Padding([largest.times(f * buckets.headroom) for f in (0.25, 0.5, 1.0)], grows=True)


def _largest(cut: Cut, sample: Callable[[BatchIndex], Any]) -> Size:
    """The largest numbers of nodes and edges in some batches of epoch 0 of seed 0."""
    nodes: dict[Any, int] = {}
    edges: dict[Any, int] = {}
    seeds = cut.of_epoch(0, 0) if cut.count else None
    places = torch.linspace(0, cut.count - 1, min(cut.count, _TRIED)).round().long()
    for number in places.unique().tolist():
        assert seeds is not None
        out = sample(BatchIndex(seeds(number), keys.batch_key(0, 0, number)))
        for found, value in ((nodes, out.node), (edges, out.row)):
            for kind, each in (value if isinstance(value, dict) else {None: value}).items():
                found[kind] = max(found.get(kind, 0), each.numel())
    return Size(nodes, edges)


# One batch #################################################################################


def _node_stores(batch: Any) -> Iterator[tuple[Any, BaseStorage]]:
    if isinstance(batch, HeteroData):
        yield from batch.node_items()
    else:
        yield None, batch._store


def _edge_stores(batch: Any) -> Iterator[tuple[Any, BaseStorage]]:
    if isinstance(batch, HeteroData):
        yield from batch.edge_items()
    else:
        yield None, batch._store


def _check_edges(kind: Any, store: BaseStorage) -> None:
    if not isinstance(store.get("edge_index"), Tensor):
        of = "" if kind is None else f" of type {kind!r}"
        raise NotImplementedError(
            f"pad_to= pads edge_index, which edges{of} of a batch have not: set data.edge_index "
            "instead of adj_t"
        )


def _rows_of(store: Any, kind: Any, graph: Any, *, of_edges: bool) -> list[str]:
    """The names of attributes with a row for each node or edge."""
    given: Any = {}
    if isinstance(graph, Data | HeteroData):
        given = graph._store if kind is None else graph[kind]
    found = []
    for name in list(store.keys()):
        if name in _BESIDE or store[name] is None:
            continue
        known = given if name in given else store
        if name in ("n_id", "e_id"):  # the sampler's, whatever their number
            wanted = (name == "e_id") == of_edges
        else:
            wanted = known.is_edge_attr(name) if of_edges else known.is_node_attr(name)
        if not wanted:
            continue
        if not isinstance(store[name], Tensor):
            raise NotImplementedError(
                f"pad_to= cannot pad {name!r}, a {type(store[name]).__name__}: make it a tensor"
            )
        found.append(name)
    return found


def _pad_nodes(store: Any, names: Sequence[str], count: int, size: int) -> None:
    seeds = store.get("batch_size")
    for name in names:
        # What is disjoint stays so: padding is one more subgraph.
        last = name == "batch" and count > 0
        fill = int(store[name].max()) + 1 if last else 0
        store[name] = _longer(store, name, size - count, fill)
    if "num_nodes" in store:
        store.num_nodes = size
    if store.get("num_sampled_nodes"):
        store.num_sampled_nodes = _last_hop(store.num_sampled_nodes, size - count)
    place = torch.arange(size, device=_device(store, names))
    store.node_mask = place < count
    if seeds is not None:
        store.seed_mask = place < seeds


def _pad_edges(
    store: Any,
    names: Sequence[str],
    size: int,
    source: tuple[int, int],
    target: tuple[int, int],
    same: bool,
) -> None:
    edges = store.edge_index
    count, more = edges.size(1), size - edges.size(1)
    known = colptr.recall(edges)
    # Spread over the padding nodes, and still in the order of destinations.
    place = torch.arange(more, device=edges.device, dtype=edges.dtype)
    free = target[1] - target[0]
    step = place * free // max(1, more)
    other = (step + 1) % free if same else step % (source[1] - source[0])
    store.edge_index = torch.cat([edges, torch.stack([source[0] + other, target[0] + step])], dim=1)
    for name in names:
        store[name] = _longer(store, name, more, 0)
    if store.get("num_sampled_edges"):
        store.num_sampled_edges = _last_hop(store.num_sampled_edges, more)
    if known is not None:
        nodes = torch.arange(target[1] + 1, device=edges.device, dtype=edges.dtype)
        ends = store.edge_index[1].contiguous()
        colptr.keep(store, torch.searchsorted(ends, nodes))
    store.edge_mask = torch.arange(size, device=edges.device) < count


def _longer(store: Any, name: str, more: int, fill: int) -> Tensor:
    value: Tensor = store[name]
    dim = store._parent().__cat_dim__(name, value, store)
    shape = list(value.shape)
    shape[dim] = more
    return torch.cat([value, value.new_full(shape, fill)], dim=dim)


def _last_hop(numbers: Sequence[int], more: int) -> list[int]:
    """Padding stands at the end, where ``trim_to_layer`` takes away the last hop."""
    return [*numbers[:-1], numbers[-1] + more]


def _device(store: Any, names: Sequence[str]) -> Any:
    return store[names[0]].device if names else None


def _said(size: Size) -> str:
    nodes, edges = sum(size.nodes.values()), sum(size.edges.values())
    return f"{nodes} nodes and {edges} edges"
