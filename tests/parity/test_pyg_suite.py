"""The plugin that runs PyG's tests on our loaders does put them there, and lets gated tests run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SUITE = """
import pytest
import torch
import torch_geometric.nn.models.basic_gnn as basic_gnn
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.testing import onlyNeighborSampler, onlyOnline, withPackage
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE


@onlyOnline
@onlyNeighborSampler
@withPackage("pyg_lib")
def test_samples(request):
    ours = request.config.getoption("--drop-in") == "loaders"
    assert NeighborLoader.__module__.startswith("pyg_scale.") == ours
    assert basic_gnn.NeighborLoader is NeighborLoader and WITH_PYG_LIB
    data = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    kwargs = dict(subgraph_type="induced") if ours else {}
    (batch,) = NeighborLoader(data, [1], torch.tensor([2]), **kwargs)
    assert batch.n_id.tolist() == [2, 1]
    if ours:
        assert WITH_TORCH_SPARSE


@withPackage("no_such_package")
def test_of_another_package():
    raise AssertionError


def test_pyg_lib_and_torch_sparse_agree():
    assert torch.ops.pyg.neighbor_sample is not None
"""


@pytest.mark.parametrize(("drop_in", "passed"), [("loaders", 1), ("compat", 2)])
def test_runs_what_pyg_skips(tmp_path: Path, drop_in: str, passed: int) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.parity.pyg_suite",
        f"--drop-in={drop_in}",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert f"{passed} passed, {3 - passed} skipped" in done.stdout, done.stdout + done.stderr
