"""The argument ``edge_label_index``, checked before any work."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import EdgeSamplerInput
from torch_geometric.utils import to_edge_index

from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.loader.seeds.nodes import check_data, num_nodes_of
from pyg_scale.ops.mapped_file import in_file, pieces

_WHAT = "edge_label_index must be an integer tensor [2, num_links]"


class SeedLinks(NamedTuple):
    """The seeds of a link loader.

    Attributes:
        edge_type: Their type, ``None`` in a homogeneous graph.
        edge_index: Sources and destinations, ``int64`` or ``int32`` ``[2, num_links]``.
        are_edges: Whether they are the edges of the graph itself.
        num_nodes: How many nodes there are that can be a source, and a destination.
        mapped: Whether they are in a mapped file.
    """

    edge_type: EdgeType
    edge_index: Tensor
    are_edges: bool
    num_nodes: tuple[int, int]
    mapped: bool

    def inputs(
        self, input_id: Tensor | None, label: Tensor | None, time: Tensor | None, shift: bool
    ) -> EdgeSamplerInput:
        """The input of a sampler. Mapped links stay in their file; others are copied, as in PyG.

        Args:
            input_id: What to call the links, ``[num_links]``.
            label: Their labels ``[num_links, ...]``.
            time: Their times ``[num_links]``.
            shift: Whether 0 is the label of negatives, so that labels from 0 on become 1 and more.
        """
        shift = shift and label is not None and label.numel() > 0 and _least(label) == 0
        if self.mapped:
            return _MappedLinks(self, input_id, label, time, shift)
        return EdgeSamplerInput(
            input_id,
            *self.edge_index,
            label=label + 1 if shift and label is not None else label,
            time=time,
            input_type=self.edge_type,
        )


class _MappedLinks(EdgeSamplerInput):
    """Links of which those of a batch are read, and looked at, when it is made."""

    def __init__(
        self,
        links: SeedLinks,
        input_id: Tensor | None,
        label: Tensor | None,
        time: Tensor | None,
        shift: bool,
    ) -> None:
        nothing = torch.empty(0, dtype=torch.int64)
        super().__init__(input_id, nothing, nothing, label, time, links.edge_type)
        self.row, self.col = links.edge_index  # the constructor would copy them
        self._links, self._shift = links, shift

    def __getitem__(self, index: Tensor | Any) -> EdgeSamplerInput:
        found = cast(EdgeSamplerInput, super().__getitem__(index))
        links = self._links
        _check_range(links.edge_type, links.num_nodes, found.row, found.col)
        if self._shift:
            found.label = found.label + 1
        return found


def seed_links_of(data: Any, edge_label_index: Any) -> SeedLinks:
    """The links that a loader's argument stands for.

    Args:
        data: ``Data``, ``HeteroData`` or ``(FeatureStore, GraphStore)``.
        edge_label_index: Links, or ``None`` for all edges; in a heterogeneous graph an edge type
            for all its edges, or ``(edge_type, links or None)``.

    Raises:
        TypeError: If ``data`` is no graph, or links are not integers.
        ValueError: If an edge type, or one too many, is given, or links have another shape.
        IndexError: If an endpoint is not a node; of mapped links, when a batch has it.
    """
    check_data(data)
    edge_type, links = _split(data, edge_label_index)
    index = _edges(data, edge_type) if links is None else _tensor(links)
    source, destination = (None, None) if edge_type is None else (edge_type[0], edge_type[2])
    num_nodes = _num_nodes(data, source), _num_nodes(data, destination)
    mapped = in_file(index)
    if not mapped:
        _check_range(edge_type, num_nodes, *index)
    return SeedLinks(edge_type, index, links is None, num_nodes, mapped)


def check_labels(edge_label: Any, num_links: int, name: str = "edge_label") -> Tensor | None:
    """Values of seed links, ``[num_links, ...]``.

    Raises:
        ValueError: If there are too few or too many.
    """
    if edge_label is None:
        return None
    label = torch.as_tensor(edge_label)
    if label.dim() == 0 or label.size(0) != num_links:
        raise ValueError(
            f"{name} must have one entry per seed link "
            f"(got shape {list(label.shape)} for {num_links} links)"
        )
    return label


def _num_nodes(data: Any, node_type: NodeType) -> int:
    if isinstance(data, HeteroData) and node_type not in data.node_types:
        raise ValueError(
            f"edge_label_index: {node_type!r} is no node type of the graph; it has "
            f"{', '.join(map(repr, data.node_types))}"
        )
    return num_nodes_of(data, node_type)


def _check_range(edge_type: EdgeType, num_nodes: tuple[int, int], *ends: Tensor) -> None:
    for node, count, end, place in zip(ends, num_nodes, ("source", "destination"), (0, 2)):
        if node.numel() == 0:
            return
        low, high = (int(each) for each in node.aminmax())
        if low < 0 or high >= count:
            raise IndexError(
                f"edge_label_index has {low if low < 0 else high} as a {end}, but there are "
                f"{count} nodes{'' if edge_type is None else f' of type {edge_type[place]!r}'}"
            )


def _least(label: Tensor) -> float:
    return float(torch.stack([piece.min() for piece in pieces(label)]).min())


def _split(data: Any, given: Any) -> tuple[EdgeType, Any]:
    """The edge type and the links, ``None`` for all edges of the type."""
    named = isinstance(given, list | tuple) and len(given) > 0
    if isinstance(data, Data):
        if named and (isinstance(given[0], str) or _is_type(given[0])):
            raise ValueError(
                f"edge_label_index names the edge type {given[0]!r}, but the graph has no types"
            )
        return None, given
    if named and _is_type(given):
        return _canonical(data, given), None
    if named and len(given) == 2 and _is_type(given[0]):
        return _canonical(data, given[0]), given[1]
    if isinstance(data, HeteroData) or data[1].get_all_edge_attrs()[0].edge_type is not None:
        raise ValueError(
            "edge_label_index must say of which type the seeds are: pass an edge type such as "
            "('user', 'rates', 'item') for all its edges, or (edge_type, links)"
        )
    if named and len(given) == 2 and given[0] is None:
        return None, given[1]
    return None, given


def _is_type(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) in (2, 3)
        and all(isinstance(part, str) for part in value)
    )


def _canonical(data: Any, edge_type: Any) -> EdgeType:
    if isinstance(data, HeteroData):
        edge_type = data._to_canonical(*edge_type)
    if len(edge_type) != 3:
        raise ValueError(f"edge_label_index: {tuple(edge_type)} is not one edge type of the graph")
    source, relation, destination = edge_type
    return source, relation, destination


def _edges(data: Any, edge_type: EdgeType) -> Tensor:
    """All edges of a type, in the order of their ids."""
    if isinstance(data, Data | HeteroData):
        if edge_type is not None and edge_type not in data.edge_types:
            raise ValueError(
                f"edge_label_index: {edge_type} is no edge type of the graph, so pass "
                f"(edge_type, links); it has {', '.join(map(str, data.edge_types))}"
            )
        store = data._store if isinstance(data, Data) else data[edge_type]
        if store.get("edge_index") is not None:
            return _tensor(store.edge_index)
        adj_t = store.get("adj_t")
        if isinstance(adj_t, Tensor):
            return to_edge_index(adj_t)[0].flip(0)
        if adj_t is not None:
            destination, source, _ = adj_t.coo()
            return torch.stack([source, destination])
        raise ValueError("the graph has no edges to take as seeds: pass edge_label_index=")
    if edge_type is None:
        row, col, _ = data[1].coo()
    else:
        rows, cols, _ = data[1].coo([edge_type])
        row, col = rows[edge_type], cols[edge_type]
    return torch.stack([row, col])


def _tensor(links: Any) -> Tensor:
    if not isinstance(links, Tensor):
        ends = isinstance(links, list | tuple) and all(isinstance(end, Tensor) for end in links)
        try:
            links = torch.stack(tuple(links)) if ends and links else torch.as_tensor(links)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{_WHAT} (got {type(links).__name__}: {error})") from None
        if links.numel() == 0:
            links = links.to(torch.int64)
    links = links.as_subclass(Tensor)
    if links.dim() != 2 or links.size(0) != 2:
        raise ValueError(f"{_WHAT} (got shape {list(links.shape)})")
    if links.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{_WHAT} (got {links.dtype}): use .long()")
    return links
