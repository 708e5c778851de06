"""Features of a graph directory on disk, behind a cache in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch_geometric.data import TensorAttr

from pyg_scale.files.byte_size import byte_size
from pyg_scale.graph.base import directory_of
from pyg_scale.store.cache.cached import Cached
from pyg_scale.store.cache.hot import by_degree_in_parts, listed
from pyg_scale.store.cache.pending import PendingRead
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.disk_features import DiskFeatures
from pyg_scale.store.lending import LentRows
from pyg_scale.store.read_ahead import ReadAhead
from pyg_scale.store.rows import Key


class Disk(Cached):
    """Reads features from the files of a graph directory and keeps the useful ones in memory.

    Missing rows are sorted, neighbouring ones are read at once, and many reads are under way at a
    time. They bypass the page cache of the system (``O_DIRECT``) if the file system supports that,
    so that ``cache`` bounds the memory; :meth:`stats` and ``repr`` tell if they do. See
    :class:`~pyg_scale.store.cache.Cached` for the choice of rows and for ``look_ahead``.

    Args:
        path: A graph directory, or an opened one; only local parts can be read.
        cache: Size of the cache in bytes, or text such as ``"2GB"``.
        policy: ``"belady"``, ``"sieve"`` or ``"placed"``.
        hot: For ``"placed"``: original ids, see :class:`~pyg_scale.store.cache.Cached`, or
            ``"degree"``: the most frequent neighbours of the nodes of local parts, or ``"listed"``:
            the nodes that the partitioner listed for local parts.
        look_ahead: See :class:`~pyg_scale.store.cache.Cached`.
        read_ahead: Bytes, or text, for missing rows of announced batches, which are read while
            earlier batches are in use. The missing rows of half of the announced batches are read
            in one pass over the file, if they fit; as these rows are used, those of the next pass
            replace them. This memory is in addition to ``cache``; ``None`` for the same size. For
            ``"belady"``.
        attributes: Names of the features to serve; ``None`` for all.
        direct: ``True``: reads bypass the page cache, or raise if they cannot. ``False``: they use
            it. ``None``: they bypass it if the file system supports that.
        threads: Number of threads that read, one read at a time each. ``None``: one thread with up
            to 128 reads by io_uring, if reads bypass the page cache and the kernel allows it; else
            16.

    Raises:
        GraphDirectoryError: If it is not a graph directory, or is damaged.
        KeyError: If an attribute does not exist.
        TypeError: If an argument has a wrong type.
        ValueError: If arguments contradict each other.

    Example::

        data = pyg_scale.open(path)
        loader = NeighborLoader(data, [15, 10, 5], feature_store=Disk(path, cache="2GB"))
    """

    def __init__(
        self,
        path: str | Path | GraphDirectory,
        cache: int | str = "2GB",
        policy: str = "belady",
        hot: Any = None,
        *,
        look_ahead: int = 15,
        read_ahead: int | str | None = None,
        attributes: Sequence[str] | None = None,
        direct: bool | None = None,
        threads: int | None = None,
    ) -> None:
        cache = byte_size(cache, "cache")
        features = DiskFeatures(path, attributes, direct=direct, threads=threads)
        if isinstance(hot, str) and hot in ("degree", "listed"):
            directory = features.directory
            hot = (by_degree_in_parts if hot == "degree" else listed)(directory, directory.parts)
        super().__init__(features, cache, policy, hot, look_ahead=look_ahead)
        self.read_ahead = (
            self.capacity if read_ahead is None else byte_size(read_ahead, "read_ahead")
        )
        self.path, self.snapshot = features.directory.path, features.directory.snapshot

    @classmethod
    def for_data(cls, data: Any) -> Disk:
        """The store for ``feature_store="disk"``.

        Raises:
            ValueError: If ``data`` was not opened from a graph directory.
        """
        directory = directory_of(data)
        if directory is None:
            raise ValueError(
                "feature_store='disk' takes its path from data that pyg_scale.open(path) returned, "
                "and data is something else: pass pyg_scale.store.Disk(path)"
            )
        return cls(directory)

    def _begin(self) -> None:
        super()._begin()
        self._ahead = ReadAhead()

    @property
    def asked_ahead(self) -> int:
        """Number of announced batches whose missing rows are read ahead."""
        return self.foresight

    @property
    def together(self) -> int:
        """Largest number of announced batches whose missing rows are read in one pass."""
        return (self.foresight + 1) // 2 or 1

    @property
    def group_bytes(self) -> int | None:
        """Largest size in bytes of the missing rows that one pass reads for several batches."""
        return self.read_ahead

    def read_together(
        self, missing: Mapping[Key, Sequence[Tensor]]
    ) -> Sequence[Sequence[PendingRead]]:
        """Start to read rows that are needed soon; errors are raised when they are needed."""
        if not self.asked_ahead:
            return super().read_together(missing)
        caches = self.row_caches()
        return [
            self._ahead.ask(
                rows,
                caches[key].row_bytes,
                partial(self.store.read_rows, TensorAttr(*key)),
                self.read_ahead,
            )
            for key, rows in missing.items()
        ]

    @property
    def direct(self) -> bool | None:
        """True if reads bypass the page cache; ``None`` before the first one."""
        known = [file.direct for file in self.store.files if file.direct is not None]
        return all(known) if known else None

    def stats(self) -> dict[str, Any]:
        """Those of :class:`~pyg_scale.store.cache.Cached`, and of the files: number of ``reads``,
        their ``read_bytes``, and ``direct`` (true if they bypass the page cache).
        """
        files = self.store.files
        return {
            **super().stats(),
            "reads": sum(file.reads for file in files),
            "read_bytes": sum(file.bytes for file in files),
            "direct": self.direct,
        }

    def close(self) -> None:
        """Close all files; later reads raise ``ValueError``."""
        self.store.close()

    def __repr__(self) -> str:
        through = {True: "direct", False: "through the page cache", None: "not read yet"}
        return (
            f"{type(self).__name__}({str(self.path)!r}, {self.capacity}, {self.policy!r}, "
            f"{through[self.direct]})"
        )

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_ahead"]  # reads stay in this process
        return state

    def _get_tensor(self, attr: TensorAttr) -> Any:
        self._check_open()
        return super()._get_tensor(attr)

    def lend_rows(self, attr: TensorAttr) -> LentRows | None:
        """See :meth:`Cached.lend_rows <pyg_scale.store.cache.Cached.lend_rows>`."""
        self._check_open()
        return super().lend_rows(attr)

    def _check_open(self) -> None:
        if any(file.closed for file in self.store.files):
            raise ValueError(f"{self!r} was closed: make another store")
