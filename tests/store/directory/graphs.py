"""Graphs with everything in them that a directory can hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import pyg_scale
from pyg_scale.testing import graphs


def opened(data: Data | HeteroData, path: Any, **options: Any) -> Any:
    """A graph, saved and opened."""
    return pyg_scale.open(pyg_scale.save(data, path, **options))


def edge_list_was_made(data: Any) -> bool:
    """Whether an opened graph has made the edge list of any type."""
    return any(store._mapping.entry("edge_index").made for store in data.edge_stores)


def everything(index_dtype: torch.dtype = torch.int64) -> Data:
    """A homogeneous graph: masks, labels of several shapes, many dtypes, some graph attributes."""
    data = graphs.hostile(index_dtype)
    size, edges = data.num_nodes, data.num_edges
    generator = torch.Generator().manual_seed(3)
    data.train_mask = torch.rand(size, generator=generator) < 0.5
    data.multi_label = torch.rand(size, 3, generator=generator) < 0.5
    data.column = torch.arange(size).view(-1, 1)
    data.image = torch.arange(size * 8, dtype=torch.int16).view(size, 2, 2, 2)
    data.half = torch.randn(size, 4, generator=generator).to(torch.float16)
    data.brain = torch.randn(size, 4, generator=generator).to(torch.bfloat16)
    data.eighth = torch.randn(size, 4, generator=generator).to(torch.float8_e4m3fn)
    data.double = torch.randn(size, generator=generator).to(torch.float64)
    data.bytes = torch.arange(size, dtype=torch.uint8)
    data.complex = torch.randn(size, generator=generator).to(torch.complex64)
    data.edge_features = torch.randn(edges, 2, generator=generator).to(torch.bfloat16)
    data.edge_flag = torch.arange(edges) % 2 == 0
    data.name, data.num_classes, data.ratio, data.done = "made up", 3, 0.25, True
    return data


def bits(value: Tensor) -> Tensor:
    """A tensor whose equality is that of bits, also where the dtype has no equality."""
    value = value.contiguous()
    return value.view(torch.uint8) if value.is_floating_point() and value.numel() else value
