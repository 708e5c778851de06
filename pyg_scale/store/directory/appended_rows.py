"""Rows that are to be appended to a graph: read from what the user gives, and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import TensorFrame

from pyg_scale.files.npy import torch_dtype
from pyg_scale.graph.source import INDEX_TYPES, of
from pyg_scale.graph.topology import EdgeType, NodeType, refuse_rounded
from pyg_scale.store.directory.frame import COLUMNS, FRAME, PADDING, taken_apart
from pyg_scale.store.directory.meta import Attribute, EdgeMeta, Meta, NodeMeta
from pyg_scale.store.directory.values import as_plain_tensor

EDGE_INDEX, NUM_NODES = "edge_index", "num_nodes"


class NodeRows(NamedTuple):
    """New nodes of a type: their number, and their attributes by name."""

    num_nodes: int
    attributes: dict[str, Tensor]


class EdgeRows(NamedTuple):
    """New edges of a type: ``int64`` ``[2, num_edges]``, and their attributes by name."""

    edge_index: Tensor
    attributes: dict[str, Tensor]


@dataclass
class AppendedRows:
    """New nodes and edges, by type."""

    nodes: dict[NodeType, NodeRows] = field(default_factory=dict)
    edges: dict[EdgeType, EdgeRows] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """True if there is no row at all."""
        edges = any(rows.edge_index.numel() for rows in self.edges.values())
        return not edges and not any(rows.num_nodes for rows in self.nodes.values())


def rows_of(meta: Meta, nodes: Any, edges: Any) -> AppendedRows:
    """Read new nodes and edges; nothing is checked against the number of nodes yet.

    Args:
        meta: The graph.
        nodes: See :func:`pyg_scale.append`.
        edges: See there.

    Raises:
        TypeError: If a value is of another type or dtype; names it.
        ValueError: If a type or attribute is unknown or missing, or has another shape; names it.
    """
    if isinstance(nodes, Data | HeteroData) and edges is None and nodes.num_edges:
        raise ValueError(
            f"nodes= has {nodes.num_edges} edges, which it does not append: pass the same graph as "
            "edges= too, or leave the edges out"
        )
    out = AppendedRows()
    for node_type, found in _by_type(nodes, meta, meta.nodes, "nodes").items():
        out.nodes[node_type] = _nodes(meta, meta.nodes[node_type], found)
    for edge_type, found in _by_type(edges, meta, meta.edges, "edges").items():
        out.edges[edge_type] = _edges(meta, meta.edges[edge_type], found)
    return out


def _by_type(value: Any, meta: Meta, known: Mapping[Any, Any], what: str) -> dict[Any, Any]:
    """Attributes by name, by type; of PyG's graphs those of nodes or of edges."""
    if value is None:
        return {}
    if isinstance(value, HeteroData if meta.is_hetero else Data):
        if isinstance(value, HeteroData):
            items = list(value.node_items() if what == "nodes" else value.edge_items())
        else:
            items = [(None, value._store)]
        found = {kind: store.to_dict() for kind, store in items if len(store)}
        for kind in found.keys() & known.keys():
            stay = known[kind].other
            found[kind] = {k: v for k, v in found[kind].items() if k not in stay}
        if not meta.is_hetero:
            found[None] = _of_one_kind(found.get(None, {}), meta, what)
    elif meta.is_hetero and isinstance(value, Mapping):
        found = dict(value)
    elif not meta.is_hetero and (isinstance(value, Mapping) or what == "edges"):
        found = {None: value}
    else:
        graph = "HeteroData or a mapping by type" if meta.is_hetero else "Data or a mapping by name"
        raise TypeError(f"{what} must be {graph} (got {type(value).__name__})")
    for kind in found:
        if kind not in known:
            names = ", ".join(map(repr, known)) or "none"
            raise ValueError(f"{what}= has the type {kind!r}, the graph has {names}")
    return found


def _of_one_kind(found: Mapping[str, Any], meta: Meta, what: str) -> dict[str, Any]:
    """The attributes of a ``Data`` that are of nodes, or of edges."""
    mine, other = set(meta.nodes[None].attributes) | {NUM_NODES}, {EDGE_INDEX}
    for edge in meta.edges.values():
        other |= set(edge.attributes)
    if what == "edges":
        mine, other = other, mine
    other |= set(meta.graph_attributes)
    return {k: v for k, v in found.items() if k in mine or k not in other}


def _nodes(meta: Meta, node: NodeMeta, found: Any) -> NodeRows:
    what = f"the new nodes{of(node.name)}"
    if not isinstance(found, Mapping):
        raise TypeError(f"{what} must be a mapping by name (got {type(found).__name__})")
    given = dict(found)
    if isinstance(frame := given.get(FRAME), TensorFrame):
        del given[FRAME]
        given |= _arrays_of(frame, node, what)
    count = given.pop(NUM_NODES, None)
    attributes = _attributes(given, node.attributes, what)
    sizes = {name: len(value) for name, value in attributes.items()}
    if count is not None:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise TypeError(f"num_nodes of {what} must be a number of nodes (got {count!r})")
        sizes[NUM_NODES] = count
    if not sizes:
        raise ValueError(f"{what} have no attribute: say their number, as num_nodes")
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{what} differ in their number of rows: {sizes}")
    check_values(meta, attributes, what, of_edges=False)
    return NodeRows(next(iter(sizes.values())), attributes)


def _arrays_of(frame: TensorFrame, node: NodeMeta, what: str) -> dict[str, Tensor]:
    """The arrays of a frame, whose columns must be those that the graph has."""
    columns, arrays = taken_apart(frame, f"{FRAME!r} of {what}")
    stored = node.other.get(COLUMNS)
    known = stored if isinstance(stored, dict) else {}
    ours = columns.names, columns.offsets
    theirs = known.get("stypes"), known.get("offsets", {})
    if ours != theirs:
        raise ValueError(
            f"{FRAME!r} of {what} has the columns {columns.names}, the graph {theirs[0]}: take the "
            "same, in the same order, with embeddings of the same length"
        )
    lists = columns.arrays.get("multicategorical", "")
    if lists in arrays and lists in node.attributes:
        longest, rows = node.attributes[lists].row[-1], arrays[lists]
        if rows.size(-1) > longest:
            raise ValueError(
                f"{FRAME!r} of {what} has {rows.size(-1)} categories in a row, the graph was saved "
                f"with at most {longest}: save it again with all of them"
            )
        arrays[lists] = torch.nn.functional.pad(rows, (0, longest - rows.size(-1)), value=PADDING)
    return arrays


def _edges(meta: Meta, edge: EdgeMeta, found: Any) -> EdgeRows:
    what = f"the new edges{of(edge.name)}"
    given = dict(found) if isinstance(found, Mapping) else {EDGE_INDEX: found}
    if EDGE_INDEX not in given:
        raise ValueError(f"{what} lack edge_index")
    value = given.pop(EDGE_INDEX)
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if (
        not isinstance(value, Tensor)
        or value.dim() != 2
        or value.size(0) != 2
        or value.dtype not in INDEX_TYPES
    ):
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else value
        raise TypeError(f"edge_index of {what} must be int64 or int32 [2, num_edges] (got {got})")
    edge_index = value.detach().to("cpu", torch.int64)
    attributes = _attributes(given, edge.attributes, what)
    for name, rows in attributes.items():
        if len(rows) != edge_index.size(1):
            raise ValueError(
                f"{name!r} of {what} has {len(rows)} rows, edge_index {edge_index.size(1)} edges"
            )
    check_values(meta, attributes, what, of_edges=True)
    return EdgeRows(edge_index, attributes)


def _attributes(
    given: Mapping[str, Any], known: Mapping[str, Attribute], what: str
) -> dict[str, Tensor]:
    check_names(given, known, what)
    out = {}
    for name, spec in known.items():
        value = given[name]
        if isinstance(value, np.ndarray):
            value = as_plain_tensor(value, f"{name!r} of {what}")
        if not isinstance(value, Tensor):
            raise TypeError(f"{name!r} of {what} must be a tensor (got {type(value).__name__})")
        value = as_plain_tensor(value, f"{name!r} of {what}").detach().cpu()
        if value.dtype != torch_dtype(spec.dtype):
            raise TypeError(f"{name!r} of {what} must be {spec.dtype} (got {value.dtype})")
        if value.dim() == 0 or tuple(value.shape[1:]) != tuple(spec.row):
            raise ValueError(
                f"{name!r} of {what} has the shape {list(value.shape)}, expected {['n', *spec.row]}"
            )
        out[name] = value
    return out


def check_names(given: Iterable[str], known: Mapping[str, Any], what: str) -> None:
    """Refuse attributes that are missing, or that the graph does not have.

    Raises:
        ValueError: If there is one; names all.
    """
    names = set(given)
    if missing := sorted(known.keys() - names):
        raise ValueError(f"{what} lack {', '.join(map(repr, missing))}: each has all attributes")
    if unknown := sorted(map(repr, names - known.keys())):
        listed = ", ".join(map(repr, known)) or "none"
        raise ValueError(f"{what} have {', '.join(unknown)}, the graph has {listed}")


def check_values(
    meta: Meta, attributes: Mapping[str, Tensor], what: str, *, of_edges: bool
) -> None:
    """Refuse times that are NaN or would be rounded, and weights that are no weights.

    Raises:
        ValueError: If there is one; names the first.
    """
    time = attributes.get(meta.time_attr or "")
    if time is not None and of_edges == meta.time_of_edges:
        name = f"{meta.time_attr!r} of {what}"
        if time.is_floating_point():
            _refuse(time.isnan(), name, time, "must not be NaN")
        elif meta.float_time:
            refuse_rounded(time.to(torch.int64), name)
    weight = attributes.get(meta.weight_attr or "") if of_edges else None
    if weight is not None:
        wrong = ~torch.isfinite(weight) | (weight < 0)
        _refuse(wrong, f"{meta.weight_attr!r} of {what}", weight, "must be finite, 0 or more")


def _refuse(wrong: Tensor, name: str, value: Tensor, why: str) -> None:
    if bool(wrong.any()):
        first = int(wrong.view(-1).nonzero()[0])
        raise ValueError(f"{name} {why} (row {first} is {value.view(-1)[first].item()})")
