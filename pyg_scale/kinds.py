"""The kinds of plugins, and the entries of each."""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from dataclasses import dataclass
from typing import Any

from pyg_scale.errors import PluginError, PluginLoadError
from pyg_scale.hookspecs import Check

KINDS = {
    "sampler": "pyg_scale_samplers",
    "feature_store": "pyg_scale_feature_stores",
    "graph_store": "pyg_scale_graph_stores",
    "partitioner": "pyg_scale_partitioners",
    "comm": "pyg_scale_comm_backends",
    "parallel": "pyg_scale_parallel_wrappers",
    "conv": "pyg_scale_convs",
    "reader": "pyg_scale_readers",
    "command": "pyg_scale_commands",
    "check": "pyg_scale_checks",
}
"""The hook of every kind."""

BUILTIN = "builtin"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class Entry:
    """A name of a kind, with its provider and its target."""

    kind: str
    name: str
    provider: str
    version: str
    target: Any

    def load(self) -> Any:
        """Import the target.

        Raises:
            PluginLoadError: If it cannot be imported.
        """
        if not isinstance(self.target, str):
            return self.target
        module, _, attribute = self.target.partition(":")
        try:
            loaded = functools.reduce(
                getattr, attribute.split("."), importlib.import_module(module)
            )
        except (Exception, SystemExit) as error:  # a module may end the process as it is imported
            raise PluginLoadError(
                f"{self.kind} {self.name!r} (from {self.provider} {self.version}, "
                f"{self.target}) could not be loaded: {type(error).__name__}: {error}"
            ) from error
        trace(f"{self.kind} {self.name!r} is {self.target} of {self.provider}")
        return loaded


@dataclass(frozen=True)
class Failure:
    """A plugin, or a hook of one, that was skipped."""

    provider: str
    version: str
    error: BaseException

    def __str__(self) -> str:
        return (
            f"{self.provider} {self.version}".rstrip()
            + f" was skipped: {type(self.error).__name__}: {self.error}"
        )


def checked_targets(hook: str, targets: Any) -> dict[str, Any]:
    """The ``{name: target}`` that a hook returned; raises ``PluginError`` if it is invalid."""
    if not isinstance(targets, dict):
        raise PluginError(f"{hook}() must return {{name: 'module:attribute'}} (got {targets!r})")
    for name, target in targets.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PluginError(
                f"{hook}() gives the name {name!r}: names are lower-case letters, digits, - and _"
            )
        if isinstance(target, str) and not _TARGET.fullmatch(target):
            raise PluginError(
                f"{hook}() gives {name!r} the target {target!r}: write 'module:attribute'"
            )
    return targets


def why_no_check(found: Any) -> str:
    """The fault of the result of a check of ``doctor``; empty if it can be printed."""
    if not isinstance(found, Check):
        return f"the check returned {found!r} instead of a pyg_scale.hookspecs.Check"
    if not (found.ok is None or isinstance(found.ok, bool)):
        return f"the check returned ok={found.ok!r} instead of True, False or None"
    for name in ("detail", "fix"):
        value = getattr(found, name)
        if not isinstance(value, str):
            return f"the check returned {name}={value!r} instead of a string"
    return ""


def known_kind(kind: str) -> None:
    """Raise ``ValueError`` if ``kind`` is not a kind."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; the kinds are {', '.join(KINDS)}")


def trace(message: str) -> None:
    """Print a step to stderr if ``PYG_SCALE_TRACE_PLUGINS=1``."""
    if os.environ.get("PYG_SCALE_TRACE_PLUGINS") == "1":
        print(f"pyg_scale.plugins: {message}", file=sys.stderr)
