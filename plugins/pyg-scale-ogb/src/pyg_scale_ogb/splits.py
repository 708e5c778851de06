"""OGB's standard splits: ids of nodes, or edges."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.files.plain_pickle import load_plain
from pyg_scale_ogb.catalog import Facts, facts_of, folder_of
from pyg_scale_ogb.table import pieces, read_small

PARTS = ("train", "valid", "test")
"""OGB's names of the parts of a split and of their files."""

_MEMORY = 16 << 20


def split(name: str, root: str | PathLike[str] = "dataset") -> dict[str, Any]:
    """The standard split of a data set, as from ``get_idx_split()`` or ``get_edge_split()`` of OGB.

    Args:
        name: Name of the data set, such as ``"ogbn-arxiv"``.
        root: The folder of data sets.

    Returns:
        ``{"train": ..., "valid": ..., "test": ...}``. For nodes, ids ``int64`` ``[n]``, by node
        type in a heterogeneous graph. For links, OGB's tensors by name, such as ``edge`` ``[n, 2]``
        and ``edge_neg``.

    Raises:
        FileNotFoundError: If the data set or a file is missing; names it.
        ValueError: If the data set is unknown, or a file is damaged or could only be loaded by
            running code.
    """
    facts = facts_of(name)
    return read_split(facts, folder_of(facts, root))


def read_split(facts: Facts, folder: Path) -> dict[str, Any]:
    """The split in the folder of a data set."""
    where = folder / "split" / facts.split
    if (whole := where / "split_dict.pt").is_file():
        found = _tensors(load_plain(whole))
        if not isinstance(found, dict) or set(PARTS) - set(found):
            raise ValueError(f"{whole} must hold {', '.join(PARTS)}")
        return found
    if facts.of_links:
        return {part: _tensors(load_plain(where / f"{part}.pt")) for part in PARTS}
    if not facts.is_hetero:
        return {part: _ids(where / f"{part}.csv.gz") for part in PARTS}
    names, marks = read_small(where / "nodetype-has-split.csv.gz")
    types = [name for name, mark in zip(names, marks, strict=True) if mark == "True"]
    return {part: {name: _ids(where / name / f"{part}.csv.gz") for name in types} for part in PARTS}


def split_files(facts: Facts, folder: Path) -> list[Path]:
    """The files that :func:`read_split` reads."""
    where = folder / "split" / facts.split
    whole = where / "split_dict.pt"
    if whole.is_file():
        return [whole]
    return sorted(file for file in where.rglob("*") if file.name.endswith((".csv.gz", ".pt")))


def _tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value) if value.dtype.kind in "biufc" else value.tolist()
    if isinstance(value, dict):
        return {key: _tensors(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_tensors(each) for each in value]
    return value


def _ids(file: Path) -> Tensor:
    parts = [np.empty(0, np.int64)]
    for part in pieces(file, 1, _MEMORY):
        if part.dtype.kind != "i" or part.shape[1] != 1:
            raise ValueError(f"{file} must hold one id in each row")
        parts.append(part[:, 0].astype(np.int64))
    return torch.from_numpy(np.concatenate(parts))
