"""Small graphs, and what their in-edges must be."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from pyg_scale.store import CSC

N, E = 40, 300
WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")


def edge_index(num_src: int = N, num_dst: int = N, seed: int = 0, dtype: Any = None) -> Tensor:
    rng = np.random.default_rng(seed)
    edges = np.stack([rng.integers(0, num_src, E), rng.integers(0, num_dst - 3, E)])
    return torch.from_numpy(edges).to(dtype or torch.int64)


def in_edges(csc: CSC, dst: int) -> list[tuple[int, int]]:
    """(edge id, source) of each in-edge, in order."""
    at = torch.arange(int(csc.indptr[dst]), int(csc.indptr[dst + 1]))
    return list(zip(csc.original_id(at).tolist(), csc.indices[at].tolist()))


def assert_is(csc: CSC, src: Tensor, dst: Tensor, num_dst: int, when: Any = None) -> None:
    """That the CSC holds these edges, of each node in the order of (time, id)."""
    assert csc.indptr.numel() == num_dst + 1 and int(csc.indptr[-1]) == src.numel()
    for v in range(num_dst):
        expected = [e for e in range(src.numel()) if int(dst[e]) == v]
        if when is not None:
            expected.sort(key=lambda e: (when[e], e))
        assert in_edges(csc, v) == [(e, int(src[e])) for e in expected]


def sparse(matrix_rows: Tensor, matrix_cols: Tensor, size: tuple[int, int], layout: Any) -> Tensor:
    values = torch.ones(matrix_rows.numel())
    coo = torch.sparse_coo_tensor(torch.stack([matrix_rows, matrix_cols]), values, size)
    return coo if layout == torch.sparse_coo else coo.coalesce().to_sparse(layout=layout)


def hetero(dtype: Any = None) -> HeteroData:
    data = HeteroData()
    data["paper"].num_nodes = N
    data["author"].num_nodes = 25
    data[WRITES].edge_index = edge_index(25, N, 1, dtype)
    data[CITES].edge_index = edge_index(N, N, 2, dtype)
    return data
