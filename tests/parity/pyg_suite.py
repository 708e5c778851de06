"""PyG's own tests of its loaders, run on ours without changing a line of them.

A pytest plugin, to be loaded before the tests are collected, as they import their loaders then:

    python -m pytest -o addopts= -p tests.parity.pyg_suite --drop-in=loaders \
        /path/to/pytorch_geometric/test/loader/test_neighbor_loader.py

``--drop-in=loaders`` puts our loaders in the place of PyG's in every module of PyG,
``--drop-in=compat`` leaves PyG's and puts our sampler behind them. Either way tests that PyG skips
where pyg-lib is missing run, as do those on Zachary's karate club, which need no network.
``make pyg-suite PYG=/path/to/pytorch_geometric`` runs both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch_geometric.loader
import torch_geometric.nn.models
import torch_geometric.testing
import torch_geometric.typing
from torch_geometric.testing import decorators

import pyg_scale.loader
from pyg_scale import compat

FLAGS = ("WITH_PYG_LIB", "WITH_EDGE_TIME_NEIGHBOR_SAMPLE", "WITH_WEIGHTED_NEIGHBOR_SAMPLE")


def ours() -> dict[Any, Any]:
    """Every class of PyG that has one of ours in its place."""
    names = torch_geometric.loader.__all__
    pairs = {getattr(torch_geometric.loader, n): getattr(pyg_scale.loader, n) for n in names}
    return {theirs: our for theirs, our in pairs.items() if theirs is not our}


def rebind(classes: dict[Any, Any]) -> int:
    """Put classes in the place of PyG's, whatever module of PyG has imported them.

    Returns:
        How many names mean something else now.
    """
    count = 0
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "torch_geometric":
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value in classes:
                setattr(module, name, classes[value])
                count += 1
    return count


def run_what_needs_a_sampler() -> None:
    """Let PyG's tests think that pyg-lib is there, and that karate clubs need no network."""
    for flag in FLAGS:
        setattr(torch_geometric.typing, flag, True)
    decorators.WITH_PYG_LIB = True
    is_installed: Callable[[str], bool] = decorators.has_package
    decorators.has_package = lambda name: name == "pyg_lib" or is_installed(name)
    torch_geometric.testing.onlyOnline = lambda function: function


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--drop-in",
        choices=("loaders", "compat"),
        default="loaders",
        help="our loaders instead of PyG's, or PyG's with our sampler behind them",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--drop-in") == "loaders":
        rebind(ours())
    else:
        compat.install(force=True)
    run_what_needs_a_sampler()


def pytest_report_header(config: pytest.Config) -> str:
    drop_in = {"loaders": "pyg_scale.loader", "compat": "pyg_scale.compat"}
    return (
        f"drop-in: {drop_in[config.getoption('--drop-in')]} "
        f"on torch_geometric {torch_geometric.__version__}"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Do not let tests of induced subgraphs, for which PyG wants torch-sparse, pass unseen."""
    if config.getoption("--drop-in") != "loaders":
        return
    of_ops = pytest.mark.skip(reason="calls pyg-lib's op, which is there with --drop-in=compat")
    for item in items:
        if isinstance(item, pytest.Function):
            if hasattr(item.module, "WITH_TORCH_SPARSE"):
                item.module.WITH_TORCH_SPARSE = True
            if item.name.startswith("test_pyg_lib_and_torch_sparse"):
                item.add_marker(of_ops)
