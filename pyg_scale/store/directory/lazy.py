"""The mapping in which a storage of PyG keeps attributes of a graph directory.

An entry knows the shape and dtype of an attribute, and makes it on first access. Copies of a graph
share their entries, as they share tensors.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.typing import WITH_TORCH_FRAME, TensorFrame

from pyg_scale.files.npy import torch_dtype
from pyg_scale.store.directory import assemble
from pyg_scale.store.directory.frame import COLUMNS, FRAME, NOT_INSTALLED, FrameColumns
from pyg_scale.store.directory.reader import GraphDirectory

EDGE_INDEX = "edge_index"

Read = Callable[[GraphDirectory, bool, Any, str], Tensor]
"""Reads an attribute; its arguments are those of :func:`read_stored`."""


class LazyAttribute:
    """One attribute of a type in a directory.

    Args:
        directory: The directory.
        of_edges: True for an attribute of an edge type.
        kind: The node type or the edge type.
        name: The attribute.
        read: Reads it instead of :func:`read_stored`, if parts are not local.
    """

    def __init__(
        self,
        directory: GraphDirectory,
        of_edges: bool,
        kind: Any,
        name: str,
        read: Read | None = None,
    ) -> None:
        self._directory, self._read = directory, read
        self.address = (of_edges, kind, name)
        meta = directory.meta
        if of_edges:
            edge = meta.edges[kind]
            if name == EDGE_INDEX:
                self.shape: tuple[int, ...] = (2, edge.num_edges)
                dtype = edge.index_dtype
            else:
                self.shape = (edge.num_edges, *edge.attributes[name].row)
                dtype = edge.attributes[name].dtype
        else:
            node = meta.nodes[kind]
            self.shape = (node.num_nodes, *node.attributes[name].row)
            dtype = node.attributes[name].dtype
        self.dtype = torch_dtype(dtype)
        self._value: Tensor | None = None
        self._version = 0
        self._making = threading.Lock()

    @property
    def made(self) -> bool:
        """True if it was read."""
        return self._value is not None

    def get(self) -> Tensor:
        """The attribute itself.

        Raises:
            GraphDirectoryError: If its file has wrong content.
        """
        with self._making:
            if self._value is None:
                value = self.read()
                self._version = value._version
                self._value = value
            return self._value

    def read(self) -> Tensor:
        """A new tensor with the same content, which is not shared.

        Raises:
            GraphDirectoryError: If its file has wrong content.
        """
        with torch.inference_mode(False):  # tensors of inference mode have no version counter
            return (self._read or read_stored)(self._directory, *self.address)

    def rows(self, index: Tensor) -> Tensor | None:
        """Rows ``[n, ...]`` of a remote attribute if its reader has ``rows``; else ``None``.

        Args:
            index: Original ids ``[n]``.
        """
        rows = getattr(self._read, "rows", None)
        return None if rows is None else rows(self._directory, *self.address, index)

    def sketch(self) -> Tensor:
        """A tensor of the same shape and dtype, without content if it was not made yet."""
        if self._value is not None:
            return self._value
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    @property
    def intact(self) -> bool:
        """True if it was not changed in place."""
        value = self._value
        return value is None or (value._version == self._version and not value.requires_grad)

    def __deepcopy__(self, memo: Any) -> Any:
        waits = self._read is not None and not self.made
        if self.intact and (waits or self.address[2] == EDGE_INDEX):
            return LazyAttribute(self._directory, *self.address, self._read)
        return copy.deepcopy(self.get(), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyAttribute, (self._directory, *self.address, self._read)


def read_stored(directory: GraphDirectory, of_edges: bool, kind: Any, name: str) -> Tensor:
    """An attribute of the parts, all of which must be local.

    Raises:
        GraphDirectoryError: If one is not, or its file has wrong content.
    """
    if not of_edges:
        return assemble.node_attribute(directory, kind, name)
    if name == EDGE_INDEX:
        return assemble.edge_list(directory, kind)
    return assemble.edge_attribute(directory, kind, name)


class LazyFrame:
    """A ``TensorFrame`` whose arrays are attributes of a directory.

    Args:
        columns: What is in the arrays.
        entries: The arrays, by name.
    """

    def __init__(self, columns: FrameColumns, entries: dict[str, LazyAttribute]) -> None:
        self.columns, self.entries = columns, entries
        self._value: TensorFrame | None = None
        self._features: dict[Any, Any] = {}
        self._making = threading.Lock()

    @property
    def made(self) -> bool:
        """True if it was put together."""
        return self._value is not None

    def get(self) -> TensorFrame:
        """The frame itself, of all rows. Lists of categories are packed, which takes memory.

        Raises:
            GraphDirectoryError: If a file has wrong content, or an array is on other ranks.
        """
        with self._making:
            if self._value is None:
                value = self.columns.frame({n: each.get() for n, each in self.entries.items()})
                self._features = dict(value.feat_dict)
                self._value = value
            return self._value

    def sketch(self) -> TensorFrame:
        """A frame of the same columns, without content if it was not made yet."""
        if self._value is not None:
            return self._value
        return self.columns.sketch(next(iter(self.entries.values())).shape[0])

    @property
    def intact(self) -> bool:
        """True if no array of the frame was put in the place of another, or changed in place."""
        if not all(each.intact for each in self.entries.values()):
            return False
        value, own = self._value, self._features
        if value is None:
            return True
        same = value.feat_dict.keys() == own.keys()
        return same and all(value.feat_dict[stype] is own[stype] for stype in own)

    def __deepcopy__(self, memo: Any) -> Any:
        if not self.intact:
            return copy.deepcopy(self.get(), memo)
        copies = copy.deepcopy(self.entries, memo)
        if any(isinstance(each, Tensor) for each in copies.values()):
            return self.columns.frame({n: _tensor(each) for n, each in copies.items()})
        return LazyFrame(self.columns, copies)

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyFrame, (self.columns, self.entries)


_LAZY = (LazyAttribute, LazyFrame)


def _tensor(value: Any) -> Tensor:
    return value.get() if type(value) is LazyAttribute else value


class LazyMapping(MutableMapping[str, Any]):
    """Attributes by name, some of them entries of a directory.

    Reading a value gives a tensor. Setting an attribute to its current value changes nothing; any
    other value replaces the entry. Another process reads unchanged attributes from the directory.
    The arrays of a frame can be read by their names, and are not listed beside it.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def entry(self, name: str) -> LazyAttribute | None:
        """The entry of that name, unless it was replaced."""
        value = self._values.get(name)
        if value is None and (frame := self.frame(FRAME)) is not None:
            return frame.entries.get(name)
        return value if type(value) is LazyAttribute else None

    def entries(self) -> Iterator[LazyAttribute]:
        """All entries that were not replaced, arrays of frames included."""
        for name in self._values:
            frame = self.frame(name)
            found = [self.entry(name)] if frame is None else frame.entries.values()
            yield from (entry for entry in found if entry is not None)

    def frame(self, name: str) -> LazyFrame | None:
        """The frame of that name, if it is one of the directory that was not replaced."""
        value = self._values.get(name)
        return value if type(value) is LazyFrame and value.intact else None

    def sketch(self) -> dict[str, Any]:
        """All values; entries that were not read have no content."""
        return {k: v.sketch() if type(v) in _LAZY else v for k, v in self._values.items()}

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            entry = self.entry(name)
            if entry is not None:
                return entry.get()
            if name == FRAME and COLUMNS in self._values and not WITH_TORCH_FRAME:
                raise ModuleNotFoundError(NOT_INSTALLED)
        value = self._values[name]
        return value.get() if type(value) in _LAZY else value

    def __setitem__(self, name: str, value: Any) -> None:
        entry: Any = self._values.get(name)
        if type(entry) not in _LAZY or not entry.made or entry.get() is not value:
            self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self.sketch())

    def __copy__(self) -> LazyMapping:
        return LazyMapping(dict(self._values))

    def __deepcopy__(self, memo: Any) -> LazyMapping:
        return LazyMapping(copy.deepcopy(self._values, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        values = {
            k: v.get() if type(v) in _LAZY and not v.intact else v for k, v in self._values.items()
        }
        return LazyMapping, (values,)
