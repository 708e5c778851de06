"""PyG's own tests of its loaders and layers, run on ours without changing a line of them.

A pytest plugin, to be loaded before the tests are collected, as they import their classes then:

    python -m pytest -o addopts= -p tests.parity.pyg_suite --drop-in=loaders \
        /path/to/pytorch_geometric/test/loader/test_neighbor_loader.py

``--drop-in=loaders`` puts our loaders in the place of PyG's in every module of PyG, and runs tests
that PyG skips where torch-sparse, METIS or what else ours do not need is missing.
``--drop-in=compat`` leaves PyG's and puts our sampler behind them. Either way tests that PyG skips
where pyg-lib is missing run, as do those on Zachary's karate club, which need no network.
``--drop-in=convs`` puts our layers in the place of PyG's, and our loaders, too, and says at the end
which calls took PyG's path. ``make pyg-suite PYG=/path/to/pytorch_geometric`` runs all three.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch_geometric.loader
import torch_geometric.nn
import torch_geometric.nn.models
import torch_geometric.testing
import torch_geometric.typing
from torch_geometric.loader import ibmb_loader
from torch_geometric.testing import decorators

import pyg_scale.loader
import pyg_scale.nn
from pyg_scale import compat


def fails(reason: str, raises: Any = None, strict: bool = True) -> pytest.MarkDecorator:
    """The mark of a test that ours cannot pass, and why; other errors are faults of ours."""
    return pytest.mark.xfail(reason=reason, raises=raises, strict=strict)


_ADJ = fails("batches have no SparseTensors", NotImplementedError)
_SCRIPTS = fails(
    "torch.jit.script does not take our attention layers: pyg_scale.nn.restore(model) before"
)
DEVIATIONS: dict[str, dict[str, pytest.MarkDecorator]] = {
    "convs": {
        "test_packaging": fails(
            "torch.package is told of torch_geometric's modules only, not of ours"
        ),
    },
    "loaders": {
        "test_shadow_k_hop_sampler": fails("its second half makes a SparseTensor", ImportError),
        **dict.fromkeys(
            (
                "test_ibmb_batch_loader[kwargs0-True]",
                "test_ibmb_batch_loader[kwargs1-True]",
                "test_ibmb_node_loader[kwargs0-True]",
                "test_ibmb_node_loader[kwargs1-True]",
            ),
            _ADJ,
        ),
        "test_ibmb_node_loader[kwargs0-False]": fails(
            "20 nodes in groups of at most 4 may be 6 groups: with PyG's way of merging, too",
            AssertionError,
            strict=False,
        ),
    },
    "compat": {
        "test_dropout_path": fails("it expects what pyg-lib draws after torch.manual_seed"),
    },
}
# With FULL_TEST=1 these compile the layer, too. PyG 2.8 itself fails the first two on torch 2.13.
DEVIATIONS_OF_SCRIPTS = dict.fromkeys(
    ("test_gat_conv", "test_gatv2_conv", "test_transformer_conv"), _SCRIPTS
)
# Tests that PyG skips without packages, although ours need none of them.
NEEDLESS = ("test_graph_saint", "test_shadow", "test_cluster", "test_ibmb_loader")

IBMB = {
    ibmb_loader.IBMBBatchLoader: pyg_scale.loader.IBMBBatchLoader,
    ibmb_loader.IBMBNodeLoader: pyg_scale.loader.IBMBNodeLoader,
}
"""Loaders that ``torch_geometric.loader`` does not export."""

FLAGS = ("WITH_PYG_LIB", "WITH_EDGE_TIME_NEIGHBOR_SAMPLE", "WITH_WEIGHTED_NEIGHBOR_SAMPLE")


def ours(theirs: Any, own: Any) -> dict[Any, Any]:
    """Every class of a module of PyG that has one in a module of ours in its place."""
    pairs = {getattr(theirs, name): getattr(own, name) for name in theirs.__all__}
    return {cls: our for cls, our in pairs.items() if cls is not our}


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
        choices=("loaders", "compat", "convs"),
        default="loaders",
        help="our loaders instead of PyG's, or PyG's with our sampler behind them; or our layers",
    )


def pytest_configure(config: pytest.Config) -> None:
    drop_in = config.getoption("--drop-in")
    if drop_in == "compat":
        compat.install(force=True)
    else:
        rebind(ours(torch_geometric.loader, pyg_scale.loader) | IBMB)
    if drop_in == "convs":
        rebind(ours(torch_geometric.nn.conv, pyg_scale.nn.conv))
        pyg_scale.nn.FusedConv.min_work = 0  # its graphs are small
    run_what_needs_a_sampler()


def pytest_report_header(config: pytest.Config) -> str:
    names = {
        "loaders": "pyg_scale.loader",
        "compat": "pyg_scale.compat",
        "convs": "pyg_scale.nn and pyg_scale.loader",
    }
    return (
        f"drop-in: {names[config.getoption('--drop-in')]} "
        f"on torch_geometric {torch_geometric.__version__}"
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Which calls of our layers took PyG's path: a suite that passes on that alone shows it."""
    if config.getoption("--drop-in") != "convs":
        return
    terminalreporter.section("calls that took PyG's path")
    for layer, reasons in sorted(pyg_scale.nn.fallbacks().items()):
        for reason, count in sorted(reasons.items()):
            terminalreporter.line(f"{layer}: {reason}: {count}")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Let tests of IBMB have their parameters, which PyG leaves out without torch-sparse."""
    if collector.name.rpartition("/")[2] != "test_ibmb_loader.py":
        return (yield)
    torch_geometric.typing.WITH_TORCH_SPARSE, given = True, torch_geometric.typing.WITH_TORCH_SPARSE
    try:
        return (yield)
    finally:
        torch_geometric.typing.WITH_TORCH_SPARSE = given


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what ours cannot pass, and let no test pass unseen that could run.

    Tests of subgraphs and of clusters, for which PyG wants other packages, are run on our loaders.
    """
    drop_in = config.getoption("--drop-in")
    known = dict(DEVIATIONS[drop_in])
    if drop_in == "convs" and decorators.is_full_test():
        known |= DEVIATIONS_OF_SCRIPTS
    for item in items:
        if drop_in == "loaders":
            run_without_packages(item)
        name = item.name if item.name in known else getattr(item, "originalname", item.name)
        if name in known:
            item.add_marker(known[name])


def run_without_packages(item: pytest.Item) -> None:
    """Run a test of our loaders that PyG skips where a package is missing."""
    if not isinstance(item, pytest.Function):
        return
    if hasattr(item.module, "WITH_TORCH_SPARSE"):
        item.module.WITH_TORCH_SPARSE = True
    if item.name.startswith("test_pyg_lib_and_torch_sparse"):
        reason = "calls pyg-lib's op, which is there with --drop-in=compat"
        item.add_marker(pytest.mark.skip(reason=reason))
    if item.module.__name__.rpartition(".")[2] in NEEDLESS:
        missing = ("METIS", "Package")
        item.own_markers = [
            mark
            for mark in item.own_markers
            if not str(mark.kwargs.get("reason")).startswith(missing)
        ]
