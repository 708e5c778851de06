"""Features of a graph directory on disk, behind a cache in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch_geometric.data import TensorAttr

from pyg_scale.graph.source import directory_of
from pyg_scale.store.byte_size import byte_size
from pyg_scale.store.cache.cached import Cached
from pyg_scale.store.cache.of_parts import by_degree, listed
from pyg_scale.store.cache.together import Together
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.disk_features import DiskFeatures
from pyg_scale.store.read_ahead import ReadAhead


class Disk(Cached):
    """Reads features from the files of a graph directory and keeps the useful ones in memory.

    Rows that are missing are sorted, neighbouring ones are read together, and many reads are
    under way at a time. They pass by the page cache of the system (``O_DIRECT``) where the file
    system can, so that memory is what ``cache`` says; :meth:`stats` and ``repr`` say whether they
    do. See :class:`~pyg_scale.store.cache.Cached` for what is kept and for ``look_ahead``.

    Args:
        path: A graph directory, or one that was opened; parts that are not here cannot be read.
        cache: Bytes, or text such as ``"2GB"``.
        policy: ``"belady"``, ``"sieve"`` or ``"placed"``.
        hot: For ``"placed"``: original ids, see :class:`~pyg_scale.store.cache.Cached`, or
            ``"degree"``: the nodes that most nodes of the parts here have as a neighbour, or
            ``"listed"``: those that the partitioner listed for the parts here.
        look_ahead: See :class:`~pyg_scale.store.cache.Cached`.
        read_ahead: Bytes, or text, for rows that announced batches miss, which are read while
            earlier batches are in use: what half of the announced ones miss is read in one pass
            over the file, if there is room for it, and as their rows are taken, those of the
            next pass come in. It is memory beside ``cache``; ``None`` for as much as that. For
            ``"belady"``.
        attributes: Names of the features to serve; ``None`` for all.
        direct: Whether reads pass by the page cache: ``True`` or an error, ``False``, or ``None``
            for where the file system can.
        threads: So many threads have a read under way each. ``None``: one has up to 128 under way
            by io_uring, where reads pass by the page cache and the kernel lets it; else 16.

    Raises:
        GraphDirectoryError: If it is no graph directory, or damaged.
        KeyError: If it has no attribute of a name.
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
            hot = (by_degree if hot == "degree" else listed)(directory, directory.parts)
        super().__init__(features, cache, policy, hot, look_ahead=look_ahead)
        self.read_ahead = (
            self.capacity if read_ahead is None else byte_size(read_ahead, "read_ahead")
        )
        self.path = features.directory.path

    @classmethod
    def for_data(cls, data: Any) -> Disk:
        """The store that ``feature_store="disk"`` means.

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
        """For how many announced batches missing rows are read before they are asked for."""
        return self.foresight

    @property
    def together(self) -> int:
        """For how many announced batches missing rows are read in one pass at most."""
        return (self.foresight + 1) // 2 or 1

    @property
    def group_bytes(self) -> int | None:
        """How many bytes of missing rows may be read in one pass for several announced batches."""
        return self.read_ahead

    def ask_ahead(self, wanted: list[tuple[TensorAttr, Together]]) -> None:
        """Begin to read rows that are needed soon; an error is raised when they are needed."""
        for attr, each in wanted:
            read = partial(self.store.read_rows, attr)
            each.each = self._ahead.ask(each.rows, each.row_bytes, read, self.read_ahead)

    @property
    def direct(self) -> bool | None:
        """Whether reads pass by the page cache; ``None`` before the first one."""
        known = [file.direct for file in self.store.files if file.direct is not None]
        return all(known) if known else None

    def stats(self) -> dict[str, Any]:
        """As of :class:`~pyg_scale.store.cache.Cached`, and of the files: ``reads`` that were
        issued, ``read_bytes`` that they brought, ``direct`` (whether past the page cache).
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
        if any(file.closed for file in self.store.files):
            raise ValueError(f"{self!r} was closed: make another store")
        return super()._get_tensor(attr)
