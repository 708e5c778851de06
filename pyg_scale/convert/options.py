"""The options of a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pyg_scale.files.npy import DTYPES, torch_dtype
from pyg_scale.graph.topology import NodeType

INDEX_DTYPES = ("int64", "int32")


@dataclass(frozen=True)
class Options:
    """Checked options, see :func:`pyg_scale.convert.convert`."""

    undirected: bool = False
    remove_self_loops: bool = False
    time_attr: str | None = None
    weight_attr: str | None = None
    num_nodes: Mapping[NodeType, int] = field(default_factory=dict)
    index_dtype: str | None = None
    feature_dtype: str | None = None
    link_features: bool = False
    index_sets: Mapping[tuple[NodeType, str], Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.index_dtype not in (*INDEX_DTYPES, None):
            raise ValueError(f"index_dtype must be int64 or int32 (got {self.index_dtype!r})")
        name = self.feature_dtype
        if name is not None and (name not in DTYPES or not torch_dtype(name).is_floating_point):
            raise ValueError(f"feature_dtype must be a floating point dtype (got {name!r})")
        if name is not None and self.link_features:
            raise ValueError(
                "link_features=True takes features as they are: leave feature_dtype out"
            )
        for node_type, size in self.num_nodes.items():
            if type(size) is not int or size < 0:
                raise ValueError(f"num_nodes must be 0 or more (got {size!r} for {node_type!r})")
        for path in self.index_sets.values():
            if not path.is_file():
                raise FileNotFoundError(f"there is no file {str(path)!r}")

    def identity(self) -> Any:
        """All of them as JSON."""
        plain = {k: v for k, v in vars(self).items() if k not in ("num_nodes", "index_sets")}
        sets = [[t, name, file_identity(path)] for (t, name), path in self.index_sets.items()]
        return {**plain, "num_nodes": [list(p) for p in self.num_nodes.items()], "sets": sets}


def dtype_option(value: str | torch.dtype | None) -> str | None:
    """``"float16"`` of itself, or of ``torch.float16``."""
    return None if value is None else str(value).removeprefix("torch.")


def file_identity(path: Path) -> list[Any]:
    """The identity of a file, which changes when it does: its path, length and time of change."""
    status = path.stat()
    return [str(path.absolute()), status.st_size, status.st_mtime_ns]
