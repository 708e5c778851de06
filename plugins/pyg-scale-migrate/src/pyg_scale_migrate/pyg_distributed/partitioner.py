"""``torch_geometric.distributed.Partitioner``: a graph in memory becomes a directory of parts."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch_geometric.data import Data, HeteroData

from pyg_scale.errors import UnknownPluginError
from pyg_scale.partitioner import Partitioner as Method
from pyg_scale.partitioner import partition
from pyg_scale.store.directory.saving import save

_METHOD = "multilevel"  # like METIS, which PyG uses, but without a plugin


class Partitioner:
    """Cuts a graph and its features into parts, and writes them as a graph directory.

    It replaces ``torch_geometric.distributed.Partitioner``, but ``root`` becomes a graph directory:
    plain ``.npy`` files and ``META.json``, no pickle (``docs/graph-directory.md``).
    :func:`pyg_scale.partition` does the same with more options.

    Args:
        data: ``Data`` or ``HeteroData``.
        num_parts: Number of parts, at least 1.
        root: The directory to write; it may exist if empty.
        recursive: If True, cut by METIS's recursive bisection, which needs
            ``plugins/pyg-scale-metis``.
        method: The name of a partitioner or an instance; ``"multilevel"`` unless ``recursive``.
        seed: Seed of the partitioner.
        time_attr: The attribute that holds times. Loaders of the parts must use the same
            ``time_attr``, as directories store in-edges in this order.
        weight_attr: The attribute of edges that holds weights, for loaders with the same.
        index_sets: Named sets of nodes, as for :func:`pyg_scale.save`.
        overwrite: If True, a graph directory at ``root`` may be replaced.
        options: Options of :func:`pyg_scale.partition`.

    Raises:
        TypeError: If ``data`` is something else.
        ValueError: If ``num_parts`` is below 1, or ``recursive`` is given with another method.
    """

    def __init__(
        self,
        data: Data | HeteroData,
        num_parts: int,
        root: str | PathLike[str],
        recursive: bool = False,
        *,
        method: str | Method | None = None,
        seed: int = 0,
        time_attr: str | None = None,
        weight_attr: str | None = None,
        index_sets: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(data, Data | HeteroData):
            raise TypeError(f"data must be Data or HeteroData (got {type(data).__name__})")
        if isinstance(num_parts, bool) or not isinstance(num_parts, int) or num_parts < 1:
            raise ValueError(f"num_parts must be a number of at least 1 (got {num_parts!r})")
        if recursive and method not in (None, "metis"):
            raise ValueError(
                f"recursive=True is METIS's recursive bisection, method={method!r} is not: leave "
                "one of them out"
            )
        if recursive:
            method, options = "metis", options | {"algorithm": "recursive"}
        self.data, self.num_parts, self.root = data, num_parts, Path(root)
        self.recursive = recursive
        self.method: str | Method = _METHOD if method is None else method
        self.seed, self.overwrite = seed, overwrite
        self._saved: dict[str, Any] = {
            "time_attr": time_attr,
            "weight_attr": weight_attr,
            "index_sets": index_sets,
        }
        self._options = options

    @property
    def is_hetero(self) -> bool:
        """True if the graph has types."""
        return isinstance(self.data, HeteroData)

    @property
    def node_types(self) -> list[str] | None:
        """The types of the graph; ``None`` if it has none."""
        return self.data.node_types if isinstance(self.data, HeteroData) else None

    @property
    def edge_types(self) -> list[tuple[str, str, str]] | None:
        """The types of the graph; ``None`` if it has none."""
        return self.data.edge_types if isinstance(self.data, HeteroData) else None

    def generate_partition(self) -> None:
        """Write the parts. ``root`` appears only when it is complete.

        Raises:
            FileExistsError: If something is at ``root``, and ``overwrite`` is not set.
            UnknownPluginError: If the method does not exist; ``recursive`` needs a plugin.
            ValueError: If there are more parts than nodes, or times or weights do not fit.
            TypeError: If the graph has an attribute that a directory cannot hold; names it.
            GraphDirectoryError: If the disk is full or cannot be written to.
        """
        self._make_room()
        self.root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".whole-", dir=self.root.parent) as folder:
            whole = save(self.data, Path(folder) / "graph", **self._saved)
            try:
                partition(
                    whole,
                    self.num_parts,
                    self.method,
                    self.root,
                    self.seed,
                    overwrite=self.overwrite,
                    **self._options,
                )
            except UnknownPluginError as error:
                if self.recursive:
                    error.add_note(
                        "recursive=True needs METIS: pip install ./plugins/pyg-scale-metis"
                    )
                raise

    def _make_room(self) -> None:
        if not self.root.exists() or self.overwrite:
            return
        if self.root.is_dir() and not any(self.root.iterdir()):
            self.root.rmdir()
            return
        raise FileExistsError(
            f"root={self.root} is there already: take another path, or overwrite=True if it is a "
            "graph directory to be replaced"
        )
