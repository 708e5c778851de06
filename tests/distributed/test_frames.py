"""Batches over ranks and from servers have the rows of a ``TensorFrame``, as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.loader import NeighborLoader
from tests.distributed.across import in_parts, on_ranks, shares, spread

pytest.importorskip("torch_frame")
from tests.frames import SIZES, framed

pytestmark = pytest.mark.filterwarnings("ignore:all . ranks iterate over the same")
ARGUMENTS: dict[str, Any] = {
    "num_neighbors": [3, 3], "input_nodes": "u", "batch_size": 10, "seed": 3, "split_seeds": False
}  # fmt: skip


def same_batches(expected: list[Any], loader: Any) -> None:
    for own, other in zip(expected, loader, strict=True):
        for name in SIZES:
            assert torch.equal(own[name].n_id, other[name].n_id)
            assert own[name].tf == other[name].tf
            assert "tf_numerical" not in other[name]


@pytest.mark.parametrize("options", [{}, {"cache_ratio": 0.2}], ids=str)
def test_ranks(tmp_path: Path, options: dict[str, Any]) -> None:
    expected = list(NeighborLoader(framed(), **ARGUMENTS))

    def work(opened: Any) -> None:
        for workers in (0, 2):
            same_batches(expected, NeighborLoader(opened, **ARGUMENTS, num_workers=workers))
        with pytest.raises(GraphDirectoryError, match="'tf_numerical' of 'u' is spread over ranks"):
            opened["u"].tf  # noqa: B018
        assert "tf=TensorFrame([50, 8])" in repr(opened)

    on_ranks(spread(in_parts(framed(), tmp_path, 3), shares(2, 3)), work, **options)


def test_servers(serve: Callable[..., Any]) -> None:
    expected = list(NeighborLoader(framed(), **ARGUMENTS))
    opened = serve(framed(), 2).open()
    for workers in (0, 2):
        same_batches(expected, NeighborLoader(opened, **ARGUMENTS, num_workers=workers))
