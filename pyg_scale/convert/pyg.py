"""PyG's data sets by name."""

from __future__ import annotations

from os import PathLike

from pyg_scale.convert.data import DataReader
from pyg_scale.datasets.read import load


class PyGReader(DataReader):
    """``pyg:Cora``, ``pyg:Amazon/Photo``: a data set of PyG, which holds it in memory.

    Args:
        source: A class of ``torch_geometric.datasets``, with the name of one of its graphs after a
            slash where it has several; see :func:`pyg_scale.datasets.load`.
        root: Where PyG keeps what it downloads; each data set gets a folder in it.

    Raises:
        ValueError: If PyG has no such data set, or it has many graphs.
    """

    def __init__(self, source: str, root: str | PathLike[str] = "data") -> None:
        self._source = source
        super().__init__(load(source, root))
