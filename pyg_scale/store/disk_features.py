"""The features of a graph directory, read from its files row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import FeatureStore, TensorAttr

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.files.npy import check_header, numpy_dtype, torch_dtype
from pyg_scale.store.directory import Attribute, GraphDirectory
from pyg_scale.store.directory.meta import attribute_file, edge_dir, node_dir
from pyg_scale.store.disk_file import DiskFile
from pyg_scale.store.memory import _key, _name, _rows

Key = tuple[Any, str]


class _Tensor(NamedTuple):
    """One attribute: a file per local part."""

    num_rows: int
    row: tuple[int, ...]
    dtype: torch.dtype
    of_edges: bool
    type: Any
    files: dict[int, DiskFile]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.row)


class DiskFeatures(FeatureStore):
    """Every feature of nodes and edges of a graph directory, by original ids, without a cache.

    A whole tensor or rows are read from the files at each call. Groups are as in
    :class:`~pyg_scale.store.MemoryFeatureStore`.

    Args:
        path: A graph directory, or an opened one; rows of missing parts cannot be read.
        attributes: Names of the attributes to serve; ``None`` for all.
        direct: See :class:`~pyg_scale.store.disk_file.DiskFile`.
        threads: See :class:`~pyg_scale.store.disk_file.DiskFile`.

    Raises:
        GraphDirectoryError: If it is not a graph directory, or is damaged.
        KeyError: If an attribute does not exist.
    """

    read_only = True

    def __init__(
        self,
        path: str | Path | GraphDirectory,
        attributes: Sequence[str] | None = None,
        *,
        direct: bool | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__()
        if direct is not None and not isinstance(direct, bool):
            raise TypeError(f"direct must be True, False or None (got {direct!r})")
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise ValueError(f"threads must be a number of at least 1 (got {threads!r})")
        self.directory = path if isinstance(path, GraphDirectory) else GraphDirectory(path)
        self._arguments = (self.directory.path, attributes, direct, threads)
        self._tensors = self._find_tensors(attributes, direct, threads)
        self._ids: dict[tuple[Any, int], Tensor | None] = {}

    def _find_tensors(
        self, attributes: Sequence[str] | None, direct: bool | None, threads: int | None
    ) -> dict[Key, _Tensor]:
        meta, found = self.directory.meta, {}
        types: list[Any] = [(False, node) for node in meta.nodes.values()]
        types += [(True, edge) for edge in meta.edges.values()]
        for of_edges, each in types:
            sizes = each.part_edges if of_edges else each.part_nodes
            for name, spec in each.attributes.items():
                if attributes is not None and name not in attributes:
                    continue
                files = {}
                for part in self.directory.parts:
                    folder = edge_dir(each.name, part) if of_edges else node_dir(each.name, part)
                    file = attribute_file(folder, name)
                    files[part] = self._file(file, spec, sizes[part], direct, threads)
                group = each.name if each.name is not None or not of_edges else (None, None)
                found[group, name] = _Tensor(
                    each.num_edges if of_edges else each.num_nodes,
                    tuple(spec.row),
                    torch_dtype(spec.dtype),
                    of_edges,
                    each.name,
                    files,
                )
        if missing := set(attributes or ()) - {name for _, name in found}:
            known = ", ".join(sorted({name for _, name in found})) or "none"
            raise KeyError(
                f"{self.directory.path} has no attribute {', '.join(map(repr, sorted(missing)))} "
                f"(found: {known})"
            )
        return found

    def _file(
        self, name: str, spec: Attribute, rows: int, direct: bool | None, threads: int | None
    ) -> DiskFile:
        directory = self.directory
        path, opened = directory.path / name, partial(directory.open_file, name)
        offset = check_header(
            path, spec.dtype, (rows, *spec.row), open_file=partial(directory.file, name)
        )
        row_bytes = numpy_dtype(spec.dtype).itemsize * math.prod(spec.row)
        return DiskFile(path, opened, offset, rows, row_bytes, direct, threads)

    @property
    def files(self) -> list[DiskFile]:
        """The files of all tensors."""
        return [file for tensor in self._tensors.values() for file in tensor.files.values()]

    def close(self) -> None:
        """Close all files; later reads raise ``ValueError``."""
        for file in self.files:
            file.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.directory.path)!r})"

    # Reading ###############################################################################

    def _get_tensor(self, attr: TensorAttr) -> Tensor:
        """Read rows of a tensor from the files.

        Raises:
            KeyError: If the tensor does not exist.
            IndexError: If a row does not exist.
            GraphDirectoryError: If a row is in a part that is not local, or cannot be read.
        """
        tensor, index = self._find(attr), attr.index
        if index is None or isinstance(index, slice):
            rows = torch.arange(tensor.num_rows)[slice(None) if index is None else index]
        else:
            rows = _rows(index, tensor.num_rows, attr)
        out = torch.empty([rows.numel(), *tensor.row], dtype=tensor.dtype)
        if out.numel():
            raw, wanted = out.view(rows.numel(), -1).view(torch.uint8), rows.reshape(-1)
            self.read_rows(attr, wanted.contiguous(), torch.arange(rows.numel()), raw)
        return out.view([*rows.shape, *tensor.row])

    def read_rows(self, attr: TensorAttr, index: Tensor, position: Tensor, out: Tensor) -> None:
        """Write row ``index[i]`` of a tensor to ``out[position[i]]``.

        Args:
            attr: The tensor; its own index is ignored.
            index: Original ids ``int64`` ``[n]``, which exist.
            position: ``int64`` ``[n]``, without repetition.
            out: ``uint8`` ``[m, row_bytes]``.

        Raises:
            GraphDirectoryError: If a row is in a part that is not local, or cannot be read.
        """
        tensor = self._find(attr)
        if self.directory.meta.num_parts == 1 and 0 in tensor.files:
            tensor.files[0].read(index, position, out)
            return
        find = self._local_edges if tensor.of_edges else self._local_nodes
        left = torch.ones(index.numel(), dtype=torch.bool)
        for part, mine, local in find(tensor, index):
            tensor.files[part].read(local, position[mine], out)
            left[mine] = False
        if bool(left.any()):
            raise GraphDirectoryError(
                f"{_name(attr)}: row {int(index[left][0])} is in a part that is not local: "
                f"{self.directory.path} has {self.directory.parts or 'no part'} of "
                f"{self.directory.meta.num_parts}"
            )

    def _local_nodes(self, tensor: _Tensor, index: Tensor) -> Any:
        book = self.directory.books[tensor.type]
        part, local = book.part_of(index), book.local_of(index)
        for number in tensor.files:
            mine = (part == number).nonzero().view(-1)
            if mine.numel():
                yield number, mine, local[mine]

    def _local_edges(self, tensor: _Tensor, index: Tensor) -> Any:
        for number in tensor.files:
            if (tensor.type, number) not in self._ids:
                self._ids[tensor.type, number] = self.directory.part(number).edge_ids(tensor.type)
            ids = self._ids[tensor.type, number]
            if ids is None:
                yield number, torch.arange(index.numel()), index
                return
            if not ids.numel():
                continue
            at = torch.searchsorted(ids, index.to(ids.dtype))
            mine = (at < ids.numel()) & (ids[at.clamp(max=ids.numel() - 1)] == index)
            yield number, mine.nonzero().view(-1), at[mine]

    def _find(self, attr: TensorAttr) -> _Tensor:
        tensor = self._tensors.get(_key(attr))
        if tensor is None:
            known = ", ".join(f"{name!r} of {group!r}" for group, name in self._tensors)
            raise KeyError(f"{_name(attr)} is not in the store, which has: {known or 'nothing'}")
        return tensor

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        tensor = self._tensors.get(_key(attr))
        return None if tensor is None else (tensor.num_rows, *tensor.row)

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """The attributes of the directory."""
        return [self._tensor_attr_cls(group, name) for group, name in self._tensors]

    # Writing ###############################################################################

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        raise NotImplementedError(_READ_ONLY)

    def update_tensor(self, tensor: Any, *args: Any, **kwargs: Any) -> bool:
        """Refused: the files are read only.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(_READ_ONLY)

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        raise NotImplementedError(_READ_ONLY)

    def __reduce__(self) -> tuple[Any, ...]:
        path, attributes, direct, threads = self._arguments
        return _opened, (type(self), path, attributes, direct, threads)


def _opened(
    cls: Any, path: Path, attributes: Any, direct: Any, threads: int | None
) -> DiskFeatures:
    return cls(path, attributes, direct=direct, threads=threads)


_READ_ONLY = (
    "the files of a graph directory are read only: pyg_scale.save(data, path) writes another one"
)
