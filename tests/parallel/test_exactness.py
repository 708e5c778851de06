"""Every exact wrapper of a shared graph, with every kind of cut and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyg_scale.parallel.feature import FeatureParallel
from pyg_scale.parallel.halo import HaloParallel
from pyg_scale.testing.graph_parallel import CUTS
from pyg_scale.testing.processes import WaitingProcesses
from tests.parallel import models

ALL = ["gcn", "sage mean", "sage max", "gin", "gat", "gatv2", "transformer", "rgcn"]
BY_CHANNEL = ["gcn", "sage mean", "sage max", "gin", "rgcn"]

METHODS: dict[str, tuple[Any, list[str], tuple[int, ...]]] = {
    "halo": (HaloParallel(), ALL, ()),
    "remat": (HaloParallel(remat=True), ALL, ()),
    "feature": (FeatureParallel(), [*BY_CHANNEL, *models.BY_HEAD], ()),
    "mesh": ("mesh", [*BY_CHANNEL, *models.BY_HEAD], (2, 2, 1)),
}
"""Methods, models, and the shape of a mesh."""


def cases() -> list[tuple[str, str, int]]:
    """Methods, cuts and numbers of ranks that there can be."""
    found = []
    for method, (_, _, shape) in METHODS.items():
        for cut in CUTS:
            most = 4 if cut == "random" or method == "feature" else 3
            sizes = (4,) if shape else tuple(range(1, most + 1))
            found += [(method, cut, size) for size in sizes]
    return found


@pytest.mark.matrix(20)
@pytest.mark.parametrize(("method", "cut", "size"), cases())
def test_outputs_gradients_and_steps_are_those_of_one_process(
    ranks: WaitingProcesses, tmp_path: Path, method: str, cut: str, size: int
) -> None:
    made, names, shape = METHODS[method]
    path = models.write(tmp_path, cut)
    found = ranks.run(models.compare, path, cut, names, made, False, shape, world_size=size)
    assert found == [{}] * size
