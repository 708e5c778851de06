"""A sampled subgraph and its features become a ``Data`` or ``HeteroData``."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput
from torch_geometric.typing import SparseTensor, TensorFrame

from pyg_scale.loader.batch.features import Features
from pyg_scale.loader.stats import Stats
from pyg_scale.ops import colptr as destination_pointers
from pyg_scale.ops import memory
from pyg_scale.ops.gather import gather
from pyg_scale.ops.lazy_rows import LazyRows
from pyg_scale.sampler import base
from pyg_scale.sampler.capabilities import HasEdgeAttrs, HasNodeAttrs, HasPointers
from pyg_scale.store.directory.data import OpenedGraph, RecordedAttributes
from pyg_scale.store.directory.frame import FRAME
from pyg_scale.store.reading import Reads

_OURS = (base.SamplerOutput, base.HeteroSamplerOutput)


def build(
    data: Any,
    out: SamplerOutput | HeteroSamplerOutput,
    *,
    permutation: Any = None,
    features: Features | None = None,
    custom_cls: Any = None,
    stats: Stats | None = None,
    collect: bool = True,
    lazy_x: bool = False,
) -> Data | HeteroData:
    """Everything of a batch that does not depend on what its seeds were.

    Args:
        data: ``Data``, ``HeteroData`` or ``(FeatureStore, GraphStore)``.
        out: The sampled subgraph.
        permutation: PyG's ``BaseSampler.edge_permutation``.
        features: Where features come from, instead of or besides ``data``.
        custom_cls: The class of the batch, if ``data`` is a pair of stores.
        stats: Counts the rows and bytes that were read.
        collect: Whether to put features and other attributes of nodes and edges on the batch.
        lazy_x: Whether ``x`` of nodes stays where it is until somebody looks at it
            (:class:`~pyg_scale.ops.lazy_rows.LazyRows`), where it is a tensor in memory or mapped.

    Raises:
        TypeError: If ``out`` does not fit ``data``.
    """
    stats = stats or Stats()
    collected = (out.collected if isinstance(out, _OURS) else None) or {}
    source = _Source(features if collect else None, collected, collect, stats, lazy_x)
    if isinstance(out, SamplerOutput):
        if isinstance(data, HeteroData):
            raise TypeError("the sampler returned a SamplerOutput for a HeteroData")
        return _homogeneous(data, out, permutation, source, custom_cls)
    if isinstance(out, HeteroSamplerOutput):
        if isinstance(data, Data):
            raise TypeError("the sampler returned a HeteroSamplerOutput for a Data")
        return _heterogeneous(data, out, permutation or {}, source, custom_cls)
    raise TypeError(
        f"a sampler must return a SamplerOutput or a HeteroSamplerOutput (got {type(out).__name__})"
    )


@dataclass
class _Source:
    """The source of rows that do not come from the graph.

    Attributes:
        features: A feature store.
        collected: Rows that came with what was sampled, by (of edges, type, name).
        collect: Whether rows are wanted.
        stats: Counts them.
        lazy_x: Whether ``x`` of nodes stays where it is.
    """

    features: Features | None
    collected: Mapping[tuple[bool, Any, str], Tensor | None]
    collect: bool
    stats: Stats
    lazy_x: bool

    def names(self, of_edges: bool, group: Any) -> set[str]:
        """The names that the feature store has of a type."""
        return set() if self.features is None else self.features.names(of_edges, group)


def _homogeneous(
    data: Any,
    out: SamplerOutput,
    permutation: Tensor | None,
    source: _Source,
    custom_cls: Any,
) -> Data:
    edge = _original(out.edge, permutation)
    if isinstance(data, Data):
        batch: Any = data.plain_copy() if isinstance(data, OpenedGraph) else copy.copy(data)
        size = (out.node.numel(), out.node.numel())
        _take_nodes(data._store, batch._store, None, out.node, source)
        _take_edges(data._store, batch._store, None, out.row, out.col, edge, size, source)
    else:
        batch = custom_cls() if custom_cls is not None else Data()
        batch.edge_index = edge_index_of(out.row, out.col)
        batch.num_nodes = out.node.numel()
    if source.features is not None:
        for feature in source.features.read(
            {None: out.node}, {None: edge}, source.stats, source.lazy_x
        ):
            batch[feature.name] = feature.value
    if isinstance(data, Data):
        _put_frame(data._store, batch._store)
    if "n_id" not in batch:
        batch.n_id = out.node
    if edge is not None and "e_id" not in batch:
        batch.e_id = edge
    batch.batch = out.batch
    batch.num_sampled_nodes = out.num_sampled_nodes
    batch.num_sampled_edges = out.num_sampled_edges
    if out.orig_row is not None and out.orig_col is not None:
        batch._orig_edge_index = torch.stack([out.orig_row, out.orig_col])
    for name, value in _extras(out):
        batch[name] = _with_own(batch._store, name, value)
    _remember(batch._store, _pointers_of(out))
    return batch


def _heterogeneous(
    data: Any,
    out: HeteroSamplerOutput,
    permutation: Mapping[Any, Tensor | None],
    source: _Source,
    custom_cls: Any,
) -> HeteroData:
    none = torch.empty(0, dtype=torch.int64)
    edges = out.edge or {}
    edge = {t: _original(edges.get(t), permutation.get(t)) for t in out.row}
    if isinstance(data, HeteroData):
        batch: Any = data.plain_copy() if isinstance(data, OpenedGraph) else copy.copy(data)
        for node_type in data.node_types:
            _take_nodes(
                data[node_type],
                batch[node_type],
                node_type,
                out.node.get(node_type, none),
                source,
            )
        for edge_type in data.edge_types:
            _take_edges(
                data[edge_type],
                batch[edge_type],
                edge_type,
                out.row.get(edge_type, none),
                out.col.get(edge_type, none),
                edge.get(edge_type, none),
                tuple(out.node.get(t, none).numel() for t in edge_type[::2]),
                source,
            )
    else:
        batch = custom_cls() if custom_cls is not None else HeteroData()
        for node_type, node in out.node.items():
            batch[node_type].num_nodes = node.numel()
        for edge_type in out.row:
            batch[edge_type].edge_index = edge_index_of(out.row[edge_type], out.col[edge_type])
    if source.features is not None:
        for feature in source.features.read(out.node, edge, source.stats, source.lazy_x):
            batch[feature.type][feature.name] = feature.value
    for node_type in data.node_types if isinstance(data, HeteroData) else ():
        _put_frame(data[node_type], batch[node_type])
    for node_type, node in out.node.items():
        if "n_id" not in batch[node_type]:
            batch[node_type].n_id = node
    for edge_type, edge_id in edge.items():
        if edge_id is not None and "e_id" not in batch[edge_type]:
            batch[edge_type].e_id = edge_id
    batch.set_value_dict("batch", out.batch)
    batch.set_value_dict("num_sampled_nodes", out.num_sampled_nodes)
    batch.set_value_dict("num_sampled_edges", out.num_sampled_edges)
    if out.orig_row is not None and out.orig_col is not None:
        for edge_type in out.orig_row:
            batch[edge_type]._orig_edge_index = torch.stack(
                [out.orig_row[edge_type], out.orig_col[edge_type]]
            )
    for name, values in _extras(out):
        own = {t: _with_own(batch[t], name, value) for t, value in values.items()}
        batch.set_value_dict(name, own)
    for edge_type, pointers in (_pointers_of(out) or {}).items():
        _remember(batch[edge_type], pointers)
    return batch


def _extras(out: Any) -> Iterator[tuple[str, Any]]:
    """The names and values of what a sampler gives beside PyG's fields."""
    ours = isinstance(out, _OURS)  # quicker than to ask a protocol
    if ours or isinstance(out, HasNodeAttrs):
        yield from out.node_attrs.items()
    if ours or isinstance(out, HasEdgeAttrs):
        yield from out.edge_attrs.items()


def _pointers_of(out: Any) -> Any:
    return out.colptr if isinstance(out, (*_OURS, HasPointers)) else None


def _with_own(store: BaseStorage, name: str, value: Tensor) -> Tensor:
    """The values of a sampler; weights of edges are multiplied with those of the data."""
    own = store[name] if name == "edge_weight" and name in store else None
    if not isinstance(own, Tensor):
        return value
    return own * value.to(own.device).view(-1, *[1] * (own.dim() - 1))


def _original(edge: Tensor | None, permutation: Tensor | None) -> Tensor | None:
    """Original edge ids, ``int64``."""
    if edge is None:
        return None
    edge = edge.to(torch.int64)
    return edge if permutation is None else permutation[edge]


def _take_nodes(
    store: BaseStorage, into: BaseStorage, kind: Any, node: Tensor, source: _Source
) -> None:
    skip = source.names(False, kind)
    for key in list(store.keys()):
        columns = store.frame_columns(key) if isinstance(store, RecordedAttributes) else None
        if key == "num_nodes":
            into.num_nodes = node.numel()
        elif columns is not None:
            del into[key]
            for part in columns.parts if source.collect else ():
                if part not in skip:
                    into[part] = None
                    _take_rows(store, into, (False, kind, part), node, source)
        elif key in skip:
            del into[key]
        elif store.is_node_attr(key):
            _take_rows(store, into, (False, kind, key), node, source)


def _put_frame(store: BaseStorage, into: BaseStorage) -> None:
    """Put the rows of a ``TensorFrame`` together, of which the batch has the arrays."""
    columns = store.frame_columns(FRAME) if isinstance(store, RecordedAttributes) else None
    if columns is not None and all(part in into for part in columns.parts):
        into[FRAME] = columns.frame({part: into[part] for part in columns.parts})
        for part in columns.parts:
            del into[part]


def _take_edges(
    store: BaseStorage,
    into: BaseStorage,
    kind: Any,
    row: Tensor,
    col: Tensor,
    edge: Tensor | None,
    size: tuple[int, int],
    source: _Source,
) -> None:
    skip = source.names(True, kind)
    for key in list(store.keys()):
        if key == "edge_index":
            into.edge_index = edge_index_of(row, col)
            # What is in a file stays there, and what was sampled on a device too.
            stays = isinstance(store, RecordedAttributes) and store.is_waiting(key)
            if row.device.type == "cpu" and not stays:
                into.edge_index = into.edge_index.to(store[key].device)
        elif key == "adj_t":
            into.adj_t = adjacency_like(store[key], row, col, edge, size)
        elif key in skip:
            if key in into:
                del into[key]
        elif store.is_edge_attr(key):
            _take_rows(store, into, (True, kind, key), edge, source)


def _take_rows(
    store: BaseStorage,
    into: BaseStorage,
    address: tuple[bool, Any, str],
    index: Tensor | None,
    source: _Source,
) -> None:
    key = address[2]
    if not source.collect:
        del into[key]
        return
    if index is None:
        into[key] = None
        return
    rows = None
    if isinstance(store, RecordedAttributes) and store.is_waiting(key):
        rows = source.collected.get(address)
        if rows is None:
            rows = store.waiting_rows(key, index)
    lazy = rows is None and source.lazy_x and not address[0] and key == "x"
    if lazy and LazyRows.takes(store[key]):
        into[key] = found = LazyRows(store[key], index)
        size = found.numel() * found.dtype.itemsize
        source.stats.count("fetch", rows=index.numel())
        source.stats.count_reads(Reads(lent_rows=index.numel(), lent_bytes=size))
        return
    if rows is None:
        into[key] = select_rows(store, key, store[key], index, source.stats)
        return
    into[key] = rows
    source.stats.count("fetch", rows=index.numel(), num_bytes=rows.nbytes)


def put(into: BaseStorage, values: Mapping[str, Any]) -> None:
    """Set attributes of a new batch, none of which is ``None``, all at once.

    If they are set one by one, PyG looks each time for a list of attributes by kind, which a new
    batch does not have: that costs an exception.
    """
    into.__dict__.pop("_cached_attr", None)
    into._mapping.update(values)


def select_rows(store: BaseStorage, key: str, value: Any, index: Tensor, stats: Stats) -> Any:
    """The rows ``index`` of a feature, along the dimension in which PyG concatenates it.

    Raises:
        IndexError: If the feature has fewer rows than that.
        TypeError: If the feature is nothing that has rows.
    """
    dim = store._parent().__cat_dim__(key, value, store)
    if isinstance(value, Tensor):
        there = index if index.device == value.device else index.to(value.device)
        out: Any = _select_tensor(value, there, dim)
        size = out.numel() * out.element_size()
    elif isinstance(value, np.ndarray):
        out = torch.from_numpy(np.take(value, index.cpu().numpy(), axis=dim))
        size = out.numel() * out.element_size()
    elif isinstance(value, TensorFrame):
        out, size = value[index.to(value.device)], 0
    elif isinstance(value, list | tuple):
        out, size = [value[place] for place in index.tolist()], 0
    else:
        raise TypeError(
            f"cannot take rows of {key!r}, a {type(value).__name__}: make it a tensor, an array or "
            "a list"
        )
    stats.count("fetch", rows=index.numel(), num_bytes=size)
    return out


def _select_tensor(value: Tensor, index: Tensor, dim: int) -> Tensor:
    if (
        torch.utils.data.get_worker_info() is not None
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.dtype in _SHAREABLE
        and not value.requires_grad
    ):
        # In a worker process, straight into shared memory: sending the batch then copies nothing.
        size = list(value.shape)
        size[dim] = index.numel()
        num_bytes = math.prod(size) * value.element_size()
        storage = value.untyped_storage()._new_shared(num_bytes)
        shared = value.new_empty(0).set_(storage).view(size)
        return torch.index_select(value, dim, index, out=shared)
    return gather(value, index, dim)


_SHAREABLE = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}


def edge_index_of(row: Tensor, col: Tensor) -> Tensor:
    """``[2, num_edges]`` from its rows; no copy where they already lie one after the other."""
    size = row.numel()
    if (
        size
        and row.is_contiguous()
        and col.is_contiguous()
        and row.dtype == col.dtype
        and row.untyped_storage().data_ptr() == col.untyped_storage().data_ptr()
        and col.storage_offset() == row.storage_offset() + size
    ):
        return row.as_strided((2, size), (size, 1))
    if size and row.device.type == "cpu" and row.dtype == col.dtype:
        return torch.stack([row, col], out=memory.empty([2, size], row.dtype))
    return torch.stack([row, col])


def _remember(store: BaseStorage, pointers: Tensor | None) -> None:
    if pointers is not None and "edge_index" in store:
        destination_pointers.keep(store, pointers)


def adjacency_like(
    adj_t: Any, row: Tensor, col: Tensor, edge: Tensor | None, size: tuple[int, int]
) -> Any:
    """The transposed adjacency matrix ``[num_dst, num_src]`` of a batch.

    Values are taken by edge id, which is the position in ``adj_t``; without ids there are none
    (ones in torch's formats, which cannot be without).

    Args:
        adj_t: ``torch_sparse.SparseTensor``, or a sparse ``Tensor`` of layout CSR, CSC or COO.
        row: Positions of the sources ``[num_edges]``.
        col: Positions of the destinations ``[num_edges]``.
        edge: Original edge ids.
        size: Number of source and of destination nodes.
    """
    if isinstance(adj_t, Tensor):
        return _torch_sparse(adj_t, row, col, edge, size)
    row, col = row.to(adj_t.device()), col.to(adj_t.device())
    value = adj_t.storage.value()
    if value is not None:
        value = None if edge is None else gather(value, edge.to(value.device))
    return SparseTensor(
        row=col, col=row, value=value, sparse_sizes=size[::-1], is_sorted=False, trust_data=True
    )


def _torch_sparse(
    adj_t: Tensor, row: Tensor, col: Tensor, edge: Tensor | None, size: tuple[int, int]
) -> Tensor:
    values = adj_t._values() if adj_t.layout == torch.sparse_coo else adj_t.values()
    row, col = row.to(adj_t.device, torch.int64), col.to(adj_t.device, torch.int64)
    if edge is None:
        value = values.new_ones(row.numel(), *values.shape[1:])
    else:
        value = gather(values, edge.to(adj_t.device))
    shape = (size[1], size[0], *values.shape[1:])
    # An entry per edge, parallel edges too: nothing is summed up here. torch's check of what these
    # tensors must be refuses parallel edges, and warns where nobody said whether it is wanted.
    make: dict[str, Any] = {"size": shape, "check_invariants": False}
    order = (col * size[0] + row).argsort(stable=True)
    row, col, value = row[order], col[order], value[order]
    if adj_t.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(torch.stack([col, row]), value, **make)
    if adj_t.layout == torch.sparse_csr:
        return torch.sparse_csr_tensor(_pointers(col, size[1]), row, value, **make)
    order = row.argsort(stable=True)
    return torch.sparse_csc_tensor(_pointers(row[order], size[0]), col[order], value[order], **make)


def _pointers(index: Tensor, size: int) -> Tensor:
    out = torch.zeros(size + 1, dtype=torch.int64, device=index.device)
    torch.cumsum(torch.bincount(index, minlength=size), 0, out=out[1:])
    return out
