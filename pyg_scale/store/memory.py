"""Features and edges in memory, behind PyG's two store interfaces."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import EdgeAttr, FeatureStore, GraphStore, TensorAttr

from pyg_scale.graph.source import index_column
from pyg_scale.ops import memory
from pyg_scale.ops.gather import gather
from pyg_scale.store.rows import dense, existing, integers, key_of, name_of, unknown

_writing = threading.Lock()


class MemoryFeatureStore(FeatureStore):
    """Tensors by group and name.

    A group is a node type, an edge type, or in a homogeneous graph ``None`` for nodes and
    ``(None, None)`` for edges. Arrays are kept without a copy, memory-mapped ones too. Rows are
    read by tensors, slices or single numbers, from any number of threads: a write replaces a tensor
    and never changes it in place.

    Example::

        store = MemoryFeatureStore()
        store["paper", "x", None] = torch.randn(100, 16)
        store["paper", "x", torch.tensor([3, 1])]  # [2, 16]
    """

    returns_views = True
    """A whole tensor (``index=None``) and slices share memory with the store."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_tensors"] = {}

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        """Store a tensor or an array ``[n, ...]``, or rows of a stored one.

        Raises:
            TypeError: If it is neither a dense tensor nor a numeric array.
            ValueError: If it has no rows dimension, or rows are given in another shape or dtype.
            KeyError: If rows are given of a tensor that is not stored.
            IndexError: If a row does not exist.
        """
        value = dense(tensor, name_of(attr))
        key = key_of(attr)
        if attr.index is None and value.nbytes >= memory.MANY_PAGES:
            memory.in_huge_pages(value)  # takes a while: others may write meanwhile
        with _writing:
            if attr.index is not None:
                value = self._with_rows(value, attr)
            self._tensors[key] = value
        return True

    def _with_rows(self, value: Tensor, attr: TensorAttr) -> Tensor:
        whole = self._find(attr).clone()
        index = attr.index
        if not isinstance(index, slice):
            index = existing(index, whole.size(0), attr)
        shape = whole[index].shape
        if value.shape != shape or value.dtype != whole.dtype:
            raise ValueError(
                f"{name_of(attr)} takes {whole.dtype} of shape {list(shape)} there "
                f"(got {value.dtype} of shape {list(value.shape)})"
            )
        whole[index] = value
        return whole

    def update_tensor(self, tensor: Any, *args: Any, **kwargs: Any) -> bool:
        """Replace a tensor, or rows of it; readers see either the old or the new tensor.

        Raises:
            KeyError: If it is not stored.
        """
        attr = self._tensor_attr_cls.cast(*args, **kwargs)
        self._find(attr)
        return self.put_tensor(tensor, attr)

    def _get_tensor(self, attr: TensorAttr) -> Tensor:
        """Read rows of a tensor.

        Raises:
            KeyError: If it is not stored.
            IndexError: If a row does not exist; names it and the number of rows.
        """
        whole, index = self._find(attr), attr.index
        if index is None:
            return whole
        if isinstance(index, slice):
            return whole[index]
        rows = integers(index, attr)
        if rows.dim() == 1:
            try:
                return gather(whole, rows)
            except IndexError as error:
                raise IndexError(f"{name_of(attr)}: {error}") from None
        return whole[existing(rows, whole.size(0), attr)]

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        return self._tensors.pop(key_of(attr), None) is not None

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        tensor = self._tensors.get(key_of(attr))
        return None if tensor is None else tuple(tensor.shape)

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """The stored attributes, in the order in which they were first put."""
        return [self._tensor_attr_cls(group, name) for group, name in list(self._tensors)]

    def _find(self, attr: TensorAttr) -> Tensor:
        tensor = self._tensors.get(key_of(attr))
        if tensor is None:
            raise unknown(attr, self._tensors)
        return tensor


class MemoryGraphStore(GraphStore):
    """Edges by edge type and layout; in a homogeneous graph the edge type is ``None``.

    Example::

        store = MemoryGraphStore()
        store.put_edge_index((row, col), edge_type=("user", "buys", "item"), layout="coo",
                             size=(num_users, num_items))
        colptr = store.csc()[1]["user", "buys", "item"]
    """

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_edges"] = {}

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        """Store the edges of a type in a layout.

        Raises:
            TypeError: If they are not two one-dimensional integer tensors or arrays.
            ValueError: If these do not fit each other or the sizes, or are declared sorted and are
                not.
            IndexError: If a node is negative or, if the sizes are given, too large.
        """
        row, col = _checked_edges(edge_index, edge_attr)
        attr = copy.copy(edge_attr)
        attr.size = None if attr.size is None else tuple(attr.size)
        self._edges[_type(attr), attr.layout] = (row, col), attr
        return True

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[Tensor, Tensor] | None:
        edges, _ = self._edges.get((_type(edge_attr), edge_attr.layout), (None, None))
        return edges

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        return self._edges.pop((_type(edge_attr), edge_attr.layout), None) is not None

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        """The stored attributes, in the order in which they were first put."""
        return [copy.copy(attr) for _, attr in list(self._edges.values())]


# Checks ###################################################################################


def _type(attr: EdgeAttr) -> Any:
    return None if attr.edge_type is None else tuple(attr.edge_type)


def _checked_edges(edge_index: Any, attr: EdgeAttr) -> tuple[Tensor, Tensor]:
    name = "edge_index" if attr.edge_type is None else f"edge_index of {attr.edge_type!r}"
    if len(edge_index) != 2:
        raise TypeError(f"{name} must be a pair of tensors (got {len(edge_index)} items)")
    row, col = (index_column(part, name) for part in edge_index)
    layout, size = attr.layout.value, attr.size or (None, None)
    if layout == "coo" and row.numel() != col.numel():
        raise ValueError(f"{name} has {row.numel()} sources and {col.numel()} destinations")
    for part, pointers, nodes in ((row, layout == "csr", size[0]), (col, layout == "csc", size[1])):
        if pointers:
            _check_pointers(part, (col if part is row else row).numel(), nodes, name)
        elif part.numel():
            low, high = (int(v) for v in torch.aminmax(part))
            if low < 0 or (nodes is not None and high >= nodes):
                node = low if low < 0 else high
                raise IndexError(f"{name} has node {node}, but size says {nodes} nodes")
    if attr.is_sorted and layout == "coo" and bool((col[1:] < col[:-1]).any()):
        raise ValueError(f"{name} is not sorted by destination: leave is_sorted out, or sort it")
    return row, col


def _check_pointers(pointers: Tensor, num_edges: int, nodes: int | None, name: str) -> None:
    if nodes is not None and pointers.numel() != nodes + 1:
        raise ValueError(
            f"{name} has {pointers.numel()} pointers, expected one more than the {nodes} nodes"
        )
    rising = pointers.numel() and int(pointers[0]) == 0 and int(pointers[-1]) == num_edges
    if not rising or bool((pointers[1:] < pointers[:-1]).any()):
        raise ValueError(f"the pointers of {name} must rise from 0 to {num_edges}, its edges")
