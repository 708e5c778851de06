"""The Temporal Graph Benchmark for `pyg-scale convert`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from pyg_scale.convert.array_file import save_array
from pyg_scale.convert.base import Description, EdgeList, Nodes, Reader, Workspace
from pyg_scale.files.place import flush, naming
from pyg_scale.graph.topology import EdgeType
from pyg_scale.store.directory.meta import Attribute
from pyg_scale_ogb.tgb_files import TGBTable, parts_of, tgb_facts, tgb_folder

_BYTES_PER_ROW = 2000  # as text, in pandas, and as the result
_COLUMNS = ("src", "dst", "t", "msg")
_HEADER = 128


class TGBReader(Reader):
    """Reads the events of one of TGB's data sets of links as the edges of a graph.

    Edges go from source to destination, in the order of the table, and have ``t`` ``int64``,
    ``msg`` ``float32`` and ``split`` ``uint8``: 0 for training, 1 for validation, 2 for test.
    Nodes are numbered as by TGB, so that its negatives belong to them.

    Args:
        source: Name of the data set, such as ``"tgbl-wiki"``.
        root: The folder of data sets, with ``tgbl_wiki``.

    Raises:
        ValueError: If the data set is unknown.
        FileNotFoundError: If it is not in ``root``.
    """

    def __init__(self, source: str, root: str | PathLike[str] = "datasets") -> None:
        facts = tgb_facts(source)
        self._table = TGBTable(facts, tgb_folder(facts, root))
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        self._shift = self._num_nodes = 0

    def files(self) -> list[Path]:
        return [self._table.path]

    def options(self) -> Mapping[str, Any]:
        return {"data set": self._table.facts.name, "version": self._table.facts.version}

    def prepare(self, work: Workspace) -> None:
        """Convert the table to arrays (on disk); texts of nodes are in memory meanwhile."""
        folder = work.folder / "events"
        rows = max(1, min(1 << 18, work.memory // _BYTES_PER_ROW))
        found = work.once("events", lambda: _to_arrays(self._table, folder, rows, work))
        self._shift, self._num_nodes = found["shift"], found["num_nodes"]
        for name in (*_COLUMNS, "split"):
            self._arrays[name] = np.load(folder / f"{name}.npy", mmap_mode="r")

    def describe(self) -> Description:
        attributes = {
            name: Attribute(str(self._arrays[name].dtype), self._arrays[name].shape[1:])
            for name in ("t", "msg", "split")
        }
        edges = EdgeList(len(self._arrays["t"]), "int64", attributes)
        return Description({None: Nodes(self._num_nodes)}, {None: edges})

    def edges(self, edge_type: EdgeType, begin: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        for src, dst in zip(
            self._rows("src", begin, rows), self._rows("dst", begin, rows), strict=True
        ):
            yield src, dst + self._shift

    def edge_attribute(
        self, edge_type: EdgeType, name: str, begin: int, rows: int
    ) -> Iterator[Tensor]:
        yield from self._rows(name, begin, rows)

    def _rows(self, name: str, begin: int, rows: int) -> Iterator[Tensor]:
        array = self._arrays[name]
        for first in range(begin, len(array), rows):
            yield torch.from_numpy(np.array(array[first : first + rows]))

    def close(self) -> None:
        self._arrays.clear()


def _to_arrays(table: TGBTable, folder: Path, rows: int, work: Workspace) -> dict[str, int]:
    """Write the events as arrays; what is returned is known only after reading them all."""
    folder.mkdir(parents=True, exist_ok=True)
    count, largest, shapes = 0, {"src": -1, "dst": -1}, {}
    opened = {name: (folder / f"{name}.npy").open("wb") for name in _COLUMNS}
    try:
        for file in opened.values():
            file.write(bytes(_HEADER))
        with work.progress("events", None, "events") as bar:
            for piece in table.pieces(rows):
                for name, values in piece._asdict().items():
                    shapes[name] = values.dtype, values.shape[1:]
                    with naming(folder / f"{name}.npy"):
                        opened[name].write(np.ascontiguousarray(values).data)
                for name in largest:
                    largest[name] = max(largest[name], int(getattr(piece, name).max(initial=-1)))
                count += len(piece.t)
                bar.update(len(piece.t))
        for name, file in opened.items():
            file.seek(0)
            dtype, shape = shapes[name]
            header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False}
            npy.write_array_header_1_0(file, header | {"shape": (count, *shape)})
            if file.tell() != _HEADER:
                raise AssertionError(f"the header of {name} has {file.tell()} bytes")
            with naming(folder / f"{name}.npy"):
                flush(file)
    finally:
        for file in opened.values():
            file.close()
    save_array(folder / "split.npy", parts_of(np.load(folder / "t.npy", mmap_mode="r")))
    shift = table.shift(largest["src"])
    return {"shift": shift, "num_nodes": max(largest["src"], largest["dst"] + shift) + 1}
