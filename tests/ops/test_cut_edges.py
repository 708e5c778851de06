"""Edges between parts are those of a count over the edge list, compiled or not."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.utils import to_undirected

from pyg_scale.ops import library
from pyg_scale.ops.csc import build_csc
from pyg_scale.ops.cut_edges import cut_edges


@pytest.fixture(params=["never", "require"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "require" and not library.status()["loaded"]:
        pytest.skip("the kernels are not compiled")
    monkeypatch.setenv("PYG_SCALE_KERNELS", request.param)
    return request.param


@pytest.mark.parametrize("num_nodes", [0, 1, 7, 30_000])
@pytest.mark.parametrize(
    ("num_parts", "dtype"), [(3, torch.int32), (3, torch.int64), (300, torch.int64)]
)
def test_it_counts_edges_between_parts(num_nodes: int, num_parts: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_nodes)
    edges = torch.randint(max(1, num_nodes), (2, 5 * num_nodes), generator=generator)
    row, col = to_undirected(edges[:, edges[0] != edges[1]], num_nodes=num_nodes)
    part = torch.randint(num_parts, (num_nodes,), generator=generator).to(dtype)
    graph = build_csc(col, row, num_nodes, num_nodes)
    expected = int((part[row] != part[col]).sum()) // 2
    plain = graph.indices.to(dtype)
    strided = torch.stack([plain, plain], dim=1)[:, 0]
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for indices in (plain, strided):
                assert cut_edges(graph.indptr, indices, part) == expected
    finally:
        torch.set_num_threads(threads)


def test_what_is_no_graph_is_refused(kernels: str) -> None:
    if kernels == "never":
        pytest.skip("plain torch raises what it raises")
    indptr, indices = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    part = torch.zeros(2, dtype=torch.int32)
    for wrong in (
        (indptr, torch.tensor([1, 2]), part),
        (torch.tensor([0, 3, 2]), indices, part),
        (indptr, indices, part[:1]),
    ):
        with pytest.raises(ValueError):
            cut_edges(*wrong)
