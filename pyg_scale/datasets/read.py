"""Graphs from ``.npz`` archives and PyG's data sets by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data, HeteroData

Array = NDArray[Any]

_PLANETOID = {name.lower(): f"Planetoid/{name}" for name in ("Cora", "CiteSeer", "PubMed")}


def load(name: str | PathLike[str], root: str | PathLike[str] = "data") -> Data | HeteroData:
    """Open a graph: an ``.npz`` archive by its path, or a data set of PyG by its name.

    Args:
        name: A path that ends in ``.npz`` (see :func:`read_npz`), or a class of
            ``torch_geometric.datasets``, with the name of one of its graphs after a slash where
            the class needs one: ``"Reddit"``, ``"Planetoid/Cora"``. ``"Cora"``, ``"CiteSeer"`` and
            ``"PubMed"`` are short for Planetoid's.
        root: Where PyG keeps what it downloads; each data set gets a folder in it.

    Raises:
        FileNotFoundError: If there is no such archive.
        ValueError: If PyG has no such data set.
    """
    if str(name).endswith(".npz"):
        return read_npz(name)
    return _pyg_dataset(str(name), Path(root))


def _pyg_dataset(text: str, root: Path) -> Data | HeteroData:
    from torch_geometric import datasets

    cls_name, _, graph_name = _PLANETOID.get(text.lower(), text).partition("/")
    names = [n for n in datasets.__all__ if inspect.isclass(getattr(datasets, n))]
    if cls_name not in names:
        close = difflib.get_close_matches(cls_name, names, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(
            f"there is no data set {text!r} in torch_geometric.datasets, "
            f"and it is no .npz file{hint}"
        )
    cls = getattr(datasets, cls_name)
    parameters = inspect.signature(cls.__init__).parameters
    kwargs: dict[str, Any] = {}
    if "root" in parameters:
        kwargs["root"] = str(root / cls_name)
    if graph_name:
        if "name" not in parameters:
            raise ValueError(f"{cls_name} has one graph: write {cls_name!r}, without a slash")
        kwargs["name"] = graph_name
    elif "name" in parameters and parameters["name"].default is inspect.Parameter.empty:
        raise ValueError(f"{cls_name} has several graphs: write '{cls_name}/NAME'")
    dataset = cls(**kwargs)
    if len(dataset) != 1:
        raise ValueError(f"{text!r} has {len(dataset)} graphs; neighbour loading takes one")
    return dataset[0]


def read_npz(
    path: str | PathLike[str], index_dtype: torch.dtype = torch.int64, reverse: bool = True
) -> Data | HeteroData:
    """Read a graph from a plain NumPy archive.

    A homogeneous archive has ``edge_index`` ``[2, num_edges]``, and ``num_nodes``, ``y`` or
    features, which all give the number of nodes. Features are either ``x`` or the CSR triple
    ``x_indptr``, ``x_indices``, ``x_data`` with ``x_shape`` (made dense here).

    A heterogeneous archive has ``SRC__DST`` or ``SRC__RELATION__DST`` ``[2, num_edges]`` for each
    edge type, ``num_TYPE`` for each node type, and ``TYPE_NAME`` for attributes (``_y`` labels,
    ``_x``, ``_time``). ``train_idx``, ``val_idx`` and ``test_idx`` become masks of the labelled
    nodes. Nothing is unpickled.

    Args:
        path: The archive.
        index_dtype: ``torch.int64`` or ``torch.int32``, of the edge indices.
        reverse: Add a type ``(DST, "rev_RELATION", SRC)`` to every heterogeneous edge type.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is no archive, or an archive of something else.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    try:
        with np.load(path, allow_pickle=False) as archive:
            # In rows, as data sets of PyG are: pyg-lib refuses others.
            arrays = {name: np.asarray(archive[name], order="C") for name in archive.files}
    except Exception as error:  # headers are parsed as Python, which fails in many ways
        raise ValueError(f"{str(path)!r} is no plain NumPy .npz archive: {error}") from error
    if "edge_index" in arrays:
        try:
            return _homogeneous(arrays, index_dtype)
        except ValueError as error:
            raise ValueError(f"{str(path)!r}: {error}") from None
    if not any("__" in name for name in arrays):
        raise ValueError(
            f"{str(path)!r} holds no graph: expected 'edge_index' or 'SRC__RELATION__DST' "
            f"(found {', '.join(sorted(arrays)) or 'nothing'})"
        )
    return _heterogeneous(arrays, index_dtype, reverse)


def _homogeneous(arrays: Mapping[str, Array], index_dtype: torch.dtype) -> Data:
    data = Data(edge_index=torch.from_numpy(arrays["edge_index"]).to(index_dtype))
    data.num_nodes = _num_nodes(arrays)
    if "x" in arrays:
        data.x = torch.from_numpy(arrays["x"])
    elif "x_indptr" in arrays:
        data.x = _dense(arrays)
    if "y" in arrays:
        data.y = torch.from_numpy(arrays["y"])
    for name, mask in _masks(arrays, data.num_nodes).items():
        data[name] = mask
    return data


def _num_nodes(arrays: Mapping[str, Array]) -> int:
    if "num_nodes" in arrays:
        return int(arrays["num_nodes"])
    for name in ("y", "x"):
        if name in arrays:
            return len(arrays[name])
    if "x_shape" in arrays:
        return int(arrays["x_shape"][0])
    raise ValueError(
        "the archive does not say how many nodes there are: add num_nodes, y or x (found "
        f"{', '.join(sorted(arrays))})"
    )


def _heterogeneous(
    arrays: Mapping[str, Array], index_dtype: torch.dtype, reverse: bool
) -> HeteroData:
    data = HeteroData()
    types = [name[4:] for name in arrays if name.startswith("num_")]
    for node_type in types:
        data[node_type].num_nodes = int(arrays[f"num_{node_type}"])
    for name, array in arrays.items():
        if "__" in name:
            parts = name.split("__")
            src, relation, dst = parts if len(parts) == 3 else (parts[0], "to", parts[1])
            edge_index = torch.from_numpy(array).to(index_dtype)
            data[src, relation, dst].edge_index = edge_index
            if reverse:
                data[dst, f"rev_{relation}", src].edge_index = edge_index.flip(0).contiguous()
            continue
        node_type, _, attribute = name.partition("_")
        if node_type not in types:
            continue
        data[node_type][attribute] = torch.from_numpy(array)
        if attribute == "y":
            for mask_name, mask in _masks(arrays, len(array)).items():
                data[node_type][mask_name] = mask
    return data


def _dense(arrays: Mapping[str, Array]) -> Tensor:
    indptr, columns = arrays["x_indptr"], arrays["x_indices"]
    out = np.zeros(tuple(arrays["x_shape"]), dtype=np.float32)
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    out[rows, columns] = arrays["x_data"]
    return torch.from_numpy(out)


def _masks(arrays: Mapping[str, Array], num_nodes: int) -> dict[str, Tensor]:
    masks = {}
    for split in ("train", "val", "test"):
        if f"{split}_idx" in arrays:
            mask = torch.zeros(num_nodes, dtype=torch.bool)
            mask[torch.from_numpy(arrays[f"{split}_idx"])] = True
            masks[f"{split}_mask"] = mask
    return masks
