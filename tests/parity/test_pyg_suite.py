"""The plugin that runs PyG's tests on ours does put them there, and lets gated tests run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch_geometric.typing import WITH_PYG_LIB

from tests import preloaded
from tests.parity import pyg_examples

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


CONVS = """
import torch
import torch_geometric.nn
import torch_geometric.nn.models.basic_gnn as basic_gnn
from torch_geometric.nn import GCN, GCNConv, conv


def test_layers_are_ours():
    for name in "GCN SAGE GIN Graph GAT GATv2 Transformer RGCN".split():
        for module in (torch_geometric.nn, conv):
            assert getattr(module, name + "Conv").__module__.startswith("pyg_scale."), name
    assert GCNConv.__module__ == "pyg_scale.nn.conv.gcn_conv"
    assert conv.GCNConv is basic_gnn.GCNConv is GCNConv
    model = GCN(4, 4, num_layers=2)
    assert type(model.convs[0]) is GCNConv
    assert str(model.convs[0]) == "GCNConv(4, 4)"


def test_that_falls_back():
    GCNConv(4, 4)(torch.randn(2, 3, 4), torch.tensor([[0, 1], [1, 2]]))


def test_packaging():
    raise AssertionError("ours cannot")
"""


PACKAGES = """
import pytest
import torch_geometric.typing
from torch_geometric.loader.ibmb_loader import IBMBNodeLoader
from torch_geometric.testing import withMETIS, withPackage


@withPackage("python_tsp", "no_such_package")
@pytest.mark.parametrize("sparse", [True] if torch_geometric.typing.WITH_TORCH_SPARSE else [])
def test_without_packages(sparse):
    assert IBMBNodeLoader.__module__ == "pyg_scale.loader.ibmb"


@withMETIS
def test_without_metis():
    pass


@pytest.mark.skipif(True, reason="another")
def test_skipped():
    raise AssertionError
"""

SCRIPT = """
from torch_geometric.datasets import Flickr
from torch_geometric.loader import ShaDowKHopSampler
from torch_geometric.typing import WITH_TORCH_SPARSE

if not WITH_TORCH_SPARSE:
    quit("This example requires 'torch-sparse'")
assert ShaDowKHopSampler.__module__ == "pyg_scale.loader.shadow"
dataset = Flickr("data/Flickr")
for epoch in range(1, 51):
    for batch in ShaDowKHopSampler(dataset[0], 1, 2, batch_size=1500):
        print("epoch", epoch, batch.num_graphs, dataset.num_classes)
"""


def test_runs_what_needs_no_package(tmp_path: Path) -> None:
    out = run(tmp_path, "loaders", PACKAGES, "test_ibmb_loader.py")
    assert "2 passed, 1 skipped" in out, out


@pytest.mark.skipif(WITH_PYG_LIB, reason="pyg-lib is installed, and compat leaves it alone")
def test_runs_a_script_with_another_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shadow.py"
    file.write_text(SCRIPT)
    pyg_examples.run(file, *pyg_examples.SCRIPTS["shadow.py"])
    assert capsys.readouterr().out.split("\n")[:-1] == [
        f"epoch {number} 1500 5" for number in (1, 1, 2, 2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("drop_in", "passed"), [("loaders", 1), ("compat", 2)])
def test_runs_what_pyg_skips(tmp_path: Path, drop_in: str, passed: int) -> None:
    out = run(tmp_path, drop_in, SUITE)
    assert f"{passed} passed, {3 - passed} skipped" in out, out


def test_layers_are_put_in_place(tmp_path: Path) -> None:
    out = run(tmp_path, "convs", CONVS)
    assert "2 passed, 1 xfailed" in out, out
    assert "GCNConv: features are not of shape [num_nodes, channels]: 1" in out, out


def run(tmp_path: Path, drop_in: str, suite: str, name: str = "test_suite.py") -> str:
    """What pytest says of a suite of tests with ours in the place of PyG's."""
    (tmp_path / name).write_text(suite)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable if drop_in == "loaders" else preloaded.python(),
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
    return done.stdout + done.stderr
