"""Assignments made by another tool: one number per node, in a text or ``.npy`` file."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale import lazy
from pyg_scale.files.plain_pickle import load_plain
from pyg_scale.graph.source import of
from pyg_scale.graph.topology import NodeType


def read_assignment(
    given: Any, offsets: Mapping[NodeType, tuple[int, int]], num_parts: int
) -> Tensor:
    """Read and check the parts of the nodes of all types.

    A text file has the part of node ``i`` in line ``i + 1`` (as METIS, KaHIP and DistDGL write it).
    An ``.npy`` file is an integer array ``[num_nodes]``. A ``.pt`` file is such a tensor or, with
    pyg-scale-migrate, a partition book of GraphLearn-for-PyTorch (its ``node_pb.pt``).

    Args:
        given: A tensor or array ``[num_nodes]`` or a file, or one of these by node type.
        offsets: The first node of each type and the one after the last.
        num_parts: Number of parts.

    Returns:
        The parts of the nodes of all types, ``int32``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If there are too few or too many entries, or one is not a part; names the file
            and the line or entry.
        TypeError: If it is something else, or not given by node type for a graph with types.
    """
    out = torch.empty(max((end for _, end in offsets.values()), default=0), dtype=torch.int32)
    if not isinstance(given, Mapping):
        if len(offsets) > 1:
            names = ", ".join(map(repr, offsets))
            raise TypeError(f"the graph has several node types: give an assignment for {names}")
        given = {next(iter(offsets)): given}
    for node_type in given:
        if node_type not in offsets:
            known = ", ".join(map(repr, offsets))
            raise ValueError(f"the assignment names the type {node_type!r}, the graph has {known}")
    for node_type, (begin, end) in offsets.items():
        if node_type not in given:
            raise ValueError(f"there is no assignment{of(node_type)}")
        out[begin:end] = _one(given[node_type], of(node_type), end - begin, num_parts)
    return out


def _one(given: Any, of_type: str, num_nodes: int, num_parts: int) -> Tensor:
    what, unit, first = f"the assignment{of_type}", "entry", 0
    if isinstance(given, (str, PathLike)):
        path = Path(given)
        what = str(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no assignment file {what!r}")
        if path.suffix == ".npy":
            values = _array(path)
        elif path.suffix == ".pt":
            values = _pickled(path)
        else:
            values, unit, first = _text(path), "line", 1
    elif isinstance(given, (Tensor, np.ndarray)):
        values = torch.as_tensor(given).detach().cpu()
    else:
        raise TypeError(f"{what} must be a tensor, an array or a file (got {type(given).__name__})")
    if values.dim() != 1 or values.is_complex() or values.dtype == torch.bool:
        raise TypeError(
            f"{what} must hold integers of shape [num_nodes] (got {values.dtype} of shape "
            f"{list(values.shape)})"
        )
    if values.numel() != num_nodes:
        raise ValueError(
            f"{what} has {values.numel()} {_plural(unit)}, expected {num_nodes}, one for each "
            f"node{of_type}"
        )
    bad = (values < 0) | (values >= num_parts)
    if values.is_floating_point():
        bad |= values != values.floor()  # NaN too
    if bool(bad.any()):
        wrong = int(bad.nonzero()[0])
        value = values[wrong].item()
        raise ValueError(
            f"{what}: {unit} {wrong + first} is {value}, expected a part from 0 to {num_parts - 1}"
        )
    return values.to(torch.int32)


def _plural(unit: str) -> str:
    return "entries" if unit == "entry" else f"{unit}s"


def _array(path: Path) -> Tensor:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # the header is parsed as Python, which fails in many ways
        raise ValueError(f"{path} is not a plain .npy file: {error}") from None
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{path} must hold integers (got {array.dtype})")
    if array.dtype.kind == "f":
        return torch.from_numpy(array.astype(np.float64))
    if array.dtype == np.uint64:  # torch cannot compare it; larger than int64 is no part
        array = np.minimum(array, np.uint64(2**63 - 1))
    return torch.from_numpy(array.astype(np.int64))


def _pickled(path: Path) -> Tensor:
    """The tensor in a ``.pt`` file. Partition books of GLT are read by pyg-scale-migrate."""
    modules: list[str] = []

    def note(module: str, _: str) -> None:
        modules.append(module.partition(".")[0])

    try:
        found = load_plain(path, stand_in=note)
    except ValueError:
        if "graphlearn_torch" not in modules:
            raise
        found = lazy.plugin_module(str(path), "pyg_scale_migrate.glt").read_book(path)
    if not isinstance(found, Tensor):
        raise ValueError(f"{path} must hold the part of each node (got {type(found).__name__})")
    return found


def _text(path: Path) -> Tensor:
    """The integers of a text file, one per line; empty lines at its end are ignored."""
    try:
        lines = path.read_bytes().rstrip().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if lines == [b""]:
        return torch.empty(0, dtype=torch.int64)
    try:  # int() would also take 1_000
        if any(b"_" in line for line in lines):
            raise ValueError
        return torch.tensor([int(line) for line in lines], dtype=torch.int64)
    except (ValueError, OverflowError, RuntimeError):
        for number, line in enumerate(lines, 1):
            text = line.strip().removeprefix(b"+").removeprefix(b"-")
            if not text.isdigit() or len(text) > 18:
                shown = line[:40].decode("utf-8", "replace").strip()
                raise ValueError(
                    f"{path}: line {number} is {shown!r}, expected the part of node {number - 1}"
                ) from None
        raise
