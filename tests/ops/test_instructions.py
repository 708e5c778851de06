"""Results do not depend on the instructions that a processor has: here are those of all it has.

``PYG_SCALE_INSTRUCTIONS`` is read once, so that each choice is a process of its own.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_scale.loader import ShaDowKHopSampler
from pyg_scale.ops import library, sample
from pyg_scale.ops.expand import ExpandedNodes, InEdges, expand_neighbors
from pyg_scale.ops.gather import gather
from pyg_scale.ops.induced_edges import induced_edges
from pyg_scale.ops.join_clusters import join_clusters
from tests import preloaded

ROWS = 150
"""Nodes with so many in-edges as their number says: rows of every length are read to their end."""


def columns() -> Iterator[tuple[Tensor, Tensor | None]]:
    """The other ends of edges with their ids, in the ways in which they are stored."""
    size = ROWS * (ROWS - 1) // 2
    end = torch.randint(ROWS, (size,), generator=torch.Generator().manual_seed(0))
    pairs = torch.stack([end, end.flip(0)], dim=1).to(torch.int32)
    narrow = end.to(torch.int32)
    yield narrow, None
    yield narrow, narrow.flip(0)
    yield pairs[:, 0], pairs[:, 1]
    yield pairs[:, 1], pairs[:, 0]
    yield pairs[:, 0], narrow
    yield narrow, end
    yield end, end.flip(0)
    yield end, None


def results() -> Iterator[Tensor | None]:
    """What ops return that have code of their own for some instructions."""
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(ROWS).cumsum(0)])
    node = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    partptr = torch.tensor([0, 20, 20, 90, ROWS])
    draw = torch.Generator().manual_seed(2)
    for row_bytes in (65, 128, 400, 832, 1600):  # more than the caches hold
        x = torch.randint(256, (300, row_bytes), dtype=torch.uint8, generator=draw)
        yield gather(x, torch.randint(300, ((9 << 20) // row_bytes,), generator=draw))
    for dtype in (torch.float32, torch.float64):  # of whole numbers, which are not rounded
        a, b = (torch.randint(9, size, generator=draw).to(dtype) for size in ((75, 300), (300, 90)))
        product = torch.full((75, 90), 3, dtype=dtype)
        torch.ops.pyg_scale.dense_product(a, b, None, product, True)
        yield product
    end = next(columns())[0].to(torch.int64)
    source = torch.arange(ROWS).repeat_interleave(indptr.diff())
    edges = torch.stack([end, source])
    for edge_index in (edges, edges.flip(1)):  # columns of their own, and of pairs with ids
        graph = Data(edge_index=edge_index, num_nodes=ROWS)
        for batch in ShaDowKHopSampler(graph, 2, 5, batch_size=40, seed=3):
            yield from (batch.edge_index, batch.batch, batch.root_n_id)
    for index, edge_id in columns():
        alike = edge_id is None or (edge_id.dtype, edge_id.stride()) == (
            index.dtype,
            index.stride(),
        )
        if alike:
            yield from induced_edges(indptr, index, edge_id, node[:70])
        if index.is_contiguous():
            yield from join_clusters(partptr, indptr, index, torch.tensor([3, 0, 1]))
        edges = InEdges(indptr, index, edge_id, None, None, ROWS)
        for k in (-1, 0, 3, 40):
            for renewed in (0, 1 << 31):
                by_source = sample.SourceDraws(weighting=2, next_key=12, renewed=renewed)
                yield from expand_neighbors(
                    edges, ExpandedNodes(node, node), 11, k, sample.Choice(by_source=by_source)
                )


def digest() -> str:
    out = hashlib.sha256()
    for each in results():
        out.update(b"none" if each is None else each.numpy().tobytes())
    return out.hexdigest()


def digest_with(instructions: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [preloaded.python(), "-m", "tests.ops.test_instructions"],
        env=os.environ | {"PYG_SCALE_INSTRUCTIONS": instructions},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize("instructions", ["portable", "avx2", "avx512"])
def test_bits_are_the_same(instructions: str) -> None:
    if not library.compiled():
        pytest.skip(f"needs the compiled kernels: {library.status()['command']}")
    found = digest_with(instructions)
    assert found.stdout.strip() == digest(), found.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="others have no choice of instructions")
def test_unknown_instructions_are_refused() -> None:
    if not library.compiled():
        pytest.skip(f"needs the compiled kernels: {library.status()['command']}")
    found = digest_with("sse")
    assert "ValueError: PYG_SCALE_INSTRUCTIONS must be portable, avx2 or avx512" in found.stderr


if __name__ == "__main__":
    print(digest())
