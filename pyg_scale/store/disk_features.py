"""The features of a graph directory, read from its files row by row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import TensorAttr

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.files.npy import check_header
from pyg_scale.store.directory import Attribute, GraphDirectory
from pyg_scale.store.directory.meta import attribute_file, edge_dir, node_dir
from pyg_scale.store.directory_features import DirectoryFeatures, FeatureColumn
from pyg_scale.store.disk_file import DiskFile
from pyg_scale.store.rows import Key, existing, key_of, name_of


class DiskFeatures(DirectoryFeatures):
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

    def __init__(
        self,
        path: str | Path | GraphDirectory,
        attributes: Sequence[str] | None = None,
        *,
        direct: bool | None = None,
        threads: int | None = None,
    ) -> None:
        if direct is not None and not isinstance(direct, bool):
            raise TypeError(f"direct must be True, False or None (got {direct!r})")
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise ValueError(f"threads must be a number of at least 1 (got {threads!r})")
        super().__init__(
            path if isinstance(path, GraphDirectory) else GraphDirectory(path), attributes
        )
        self._arguments = (self.directory, attributes, direct, threads)
        self._appended: dict[Key, DiskFile] = {}
        self._files: dict[Key, dict[int, DiskFile]] = {
            key: {part: self._file(column, part) for part in self.directory.parts}
            for key, column in self.columns.items()
        }
        self._ids: dict[tuple[Any, int], Tensor | None] = {}

    def _file(self, column: FeatureColumn, part: int) -> DiskFile:
        directory, kind = self.directory, column.type
        meta = directory.base_meta
        described: Any = (meta.edges if column.of_edges else meta.nodes)[kind]
        spec: Attribute = described.attributes[column.name]
        rows = (described.part_edges if column.of_edges else described.part_nodes)[part]
        folder = edge_dir(kind, part) if column.of_edges else node_dir(kind, part)
        name = attribute_file(folder, column.name)
        offset = check_header(
            directory.path / name,
            spec.dtype,
            (rows, *spec.row),
            open_file=partial(directory.file, name),
        )
        new = None if directory.delta is None else directory.delta.columns.get(name)
        if new is not None:
            self._appended[column.key] = self._open(column, new.name, new.pad, new.rows)
        return self._open(column, name, offset, rows)

    def _open(self, column: FeatureColumn, name: str, offset: int, rows: int) -> DiskFile:
        directory, (_, _, direct, threads) = self.directory, self._arguments
        opened = partial(directory.open_file, name)
        path = directory.path / name
        return DiskFile(path, opened, offset, rows, column.row_bytes, direct, threads)

    @property
    def files(self) -> list[DiskFile]:
        """The files of all tensors."""
        found = [file for files in self._files.values() for file in files.values()]
        return [*found, *self._appended.values()]

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
        column, index = self.column(attr), attr.index
        if index is None or isinstance(index, slice):
            rows = torch.arange(column.num_rows)[slice(None) if index is None else index]
        else:
            rows = existing(index, column.num_rows, attr)
        out = torch.empty([rows.numel(), *column.row], dtype=column.dtype)
        if out.numel():
            raw, wanted = out.view(rows.numel(), -1).view(torch.uint8), rows.reshape(-1)
            self.read_rows(attr, wanted.contiguous(), torch.arange(rows.numel()), raw)
        return out.view([*rows.shape, *column.row])

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
        column, files = self.column(attr), self._files[key_of(attr)]
        if self.directory.meta.num_parts == 1 and 0 in files:
            new = self._appended.get(key_of(attr))
            if new is None:
                files[0].read(index, position, out)
                return
            appended = index >= files[0].num_rows
            for file, mine, first in (
                (files[0], ~appended, 0),
                (new, appended, files[0].num_rows),
            ):
                file.read(index[mine] - first, position[mine], out)
            return
        find = self._local_edges if column.of_edges else self._local_nodes
        left = torch.ones(index.numel(), dtype=torch.bool)
        for part, mine, local in find(column, index):
            files[part].read(local, position[mine], out)
            left[mine] = False
        if bool(left.any()):
            raise GraphDirectoryError(
                f"{name_of(attr)}: row {int(index[left][0])} is in a part that is not local: "
                f"{self.directory.path} has {self.directory.parts or 'no part'} of "
                f"{self.directory.meta.num_parts}"
            )

    def _local_nodes(self, column: FeatureColumn, index: Tensor) -> Any:
        book = self.directory.books[column.type]
        part, local = book.part_of(index), book.local_of(index)
        for number in self._files[column.key]:
            mine = (part == number).nonzero().view(-1)
            if mine.numel():
                yield number, mine, local[mine]

    def _local_edges(self, column: FeatureColumn, index: Tensor) -> Any:
        for number in self._files[column.key]:
            if (column.type, number) not in self._ids:
                self._ids[column.type, number] = self.directory.part(number).edge_ids(column.type)
            ids = self._ids[column.type, number]
            if ids is None:
                yield number, torch.arange(index.numel()), index
                return
            if not ids.numel():
                continue
            at = torch.searchsorted(ids, index.to(ids.dtype))
            mine = (at < ids.numel()) & (ids[at.clamp(max=ids.numel() - 1)] == index)
            yield number, mine.nonzero().view(-1), at[mine]

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (type(self), *self._arguments)


def _opened(
    cls: Any, directory: GraphDirectory, attributes: Any, direct: Any, threads: int | None
) -> DiskFeatures:
    return cls(directory, attributes, direct=direct, threads=threads)
