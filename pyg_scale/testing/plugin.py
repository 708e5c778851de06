"""Conformance of a whole plugin: it is found, is light, and its targets are of the right kinds."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from typing import Any

import pytest

from pyg_scale import plugins
from pyg_scale.kinds import why_no_check

CONTRACTS = {
    "sampler": "torch_geometric.sampler:BaseSampler",
    "feature_store": "torch_geometric.data:FeatureStore",
    "graph_store": "torch_geometric.data:GraphStore",
    "partitioner": "pyg_scale.partitioner.base:Partitioner",
    "reader": "pyg_scale.convert.base:Reader",
    "comm": "pyg_scale.comm.base:Communicator",
    "parallel": "pyg_scale.parallel.base:Parallel",
    "conv": "pyg_scale.nn.conv.base:FusedConv",
}
"""The base class of targets, for each kind."""

HEAVY = ("torch", "torch_geometric", "numpy", "scipy", "pandas")
"""The packages that the module of an entry point must not import."""


class PluginTests:
    """Tests of an installed plugin.

    Example::

        class TestPlugin(PluginTests):
            @pytest.fixture
            def plugin(self):
                return "pyg-scale-mine"
    """

    @pytest.fixture
    def plugin(self) -> str:
        """The name of the distribution that adds the plugin."""
        raise NotImplementedError("return the name of your distribution, such as 'pyg-scale-mine'")

    @pytest.fixture
    def provided(self, plugin: str) -> list[plugins.Entry]:
        """The entries that the plugin adds."""
        return [entry for entry in plugins.entries() if owner(entry) == plugins.normal(plugin)]

    def test_is_found_and_not_skipped(self, plugin: str, provided: list[plugins.Entry]) -> None:
        skipped = [
            str(failure)
            for failure in plugins.failures()
            if failure.provider.partition("/")[0] == plugins.normal(plugin)
        ]
        assert not skipped
        assert provided, (
            f"{plugin} adds nothing: is it installed, does its pyproject.toml have an entry "
            f"point of the group 'pyg_scale', and do its hooks return names?"
        )

    def test_listing_imports_nothing_heavy(self, plugin: str) -> None:
        code = (
            "import sys; from pyg_scale import plugins; plugins.entries(); "
            f"print(*[m for m in {HEAVY!r} if m in sys.modules])"
        )
        out = subprocess.run(
            [sys.executable, "-c", code],
            env={**_environment(), "PYG_SCALE_PLUGINS": plugin},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout.split()
        assert not out, (
            f"the module of the entry point imports {', '.join(out)}: let it import "
            f"pyg_scale.hookimpl alone, and name everything else as 'module:attribute'"
        )

    def test_every_target_can_be_loaded(self, provided: list[plugins.Entry]) -> None:
        for entry in provided:
            entry.load()

    def test_every_target_fulfils_its_contract(self, provided: list[plugins.Entry]) -> None:
        for entry in provided:
            target = entry.load()
            if entry.kind in CONTRACTS:
                contract = _load(CONTRACTS[entry.kind])
                assert contract in getattr(target, "__mro__", ()), (
                    f"{entry.kind} {entry.name!r}: {entry.target} must be a subclass of "
                    f"{CONTRACTS[entry.kind]}"
                )
            else:
                assert callable(target), f"{entry.kind} {entry.name!r} must be a function"
            if entry.kind == "check":
                wrong = why_no_check(target())
                assert not wrong, f"check {entry.name!r}: {wrong}"

    def test_every_name_is_reachable(self, provided: list[plugins.Entry]) -> None:
        for entry in provided:
            assert plugins.entry(entry.kind, f"{entry.provider}:{entry.name}") == entry
            if plugins.entry(entry.kind, entry.name) != entry:
                warnings.warn(
                    f"{entry.kind} {entry.name!r} is built in: users have to write "
                    f"'{entry.provider}:{entry.name}'",
                    stacklevel=1,
                )

    def test_distribution_is_named_as_usual(self, plugin: str) -> None:
        if not plugins.normal(plugin).startswith("pyg-scale-"):
            warnings.warn(
                f"plugins are named pyg-scale-<thing>, but this one {plugin}: it is harder to find",
                stacklevel=1,
            )


def owner(entry: plugins.Entry) -> str:
    """The distribution of an entry."""
    return entry.provider.partition("/")[0]


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
