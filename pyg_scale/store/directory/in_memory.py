"""A graph directory in memory, with tensors in place of files."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from torch import Tensor

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.files.npy import dtype_name, num_bytes
from pyg_scale.store.directory.layout import expected_files
from pyg_scale.store.directory.meta import FileMeta, Meta
from pyg_scale.store.directory.reader import GraphDirectory

_HEADER = 128  # bytes of a .npy file in addition to its content


class MemoryDirectory(GraphDirectory):
    """A graph in memory that is read like a graph directory. Nothing is copied or written.

    Args:
        meta: The content of ``META.json``; this class fills in ``files``.
        tensors: The content of each file, by its path in the directory: all files of :attr:`parts`,
            and those that belong to no part.
        parts: The parts that it has.
        name: Its name in errors.

    Raises:
        ValueError: If ``meta`` contradicts itself.
        GraphDirectoryError: If a tensor is missing, or does not fit ``meta``.
    """

    def __init__(
        self, meta: Meta, tensors: Mapping[str, Tensor], parts: Sequence[int], name: str
    ) -> None:
        self.path = Path(name)
        self.meta, self.base_meta, self.parts = meta, meta, list(parts)
        self._tensors = dict(tensors)
        self.grouped, self.attributes = {}, {}
        meta.files = {k: _file(dtype_name(v.dtype), tuple(v.shape)) for k, v in tensors.items()}
        for file in expected_files(meta, range(meta.num_parts)):
            meta.files.setdefault(file.name, _file(file.dtype, file.shape))
        meta.check()
        for file in expected_files(meta, self.parts):
            self.array(file.name, file.dtype, file.shape)
        common = {k: v for k, v in meta.files.items() if not k.startswith("part-")}
        said = repr((meta.nodes, meta.edges, meta.num_parts, meta.time_attr, common))
        self._checksum = zlib.crc32(said.encode())

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryDirectory, (self.meta, self._tensors, self.parts, str(self.path))

    def array(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in place of a file.

        Raises:
            GraphDirectoryError: If it is missing, or has another dtype or shape.
        """
        found = self._tensors.get(name)
        if found is None:
            raise GraphDirectoryError(f"{self.path} does not have {name}")
        if dtype_name(found.dtype) != dtype or tuple(found.shape) != tuple(shape):
            raise GraphDirectoryError(
                f"{name} of {self.path} is {found.dtype} {list(found.shape)}, expected {dtype} "
                f"{list(shape)}"
            )
        return found

    def check_lengths(self) -> None:
        """Do nothing, as there are no files."""

    def file(self, name: str) -> BinaryIO:
        """Refused, as there are no files.

        Raises:
            GraphDirectoryError: Always.
        """
        self._refuse(name)

    def open_file(self, name: str, flags: int = 0) -> int:
        """Refused, as there are no files.

        Raises:
            GraphDirectoryError: Always.
        """
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise GraphDirectoryError(f"{self.path} is in memory and has no file {name}")


def _file(dtype: str, shape: tuple[int, ...]) -> FileMeta:
    return FileMeta(_HEADER + num_bytes(dtype, shape), 0)
