"""Reproducible, fast neighbour loading for PyTorch Geometric, with parts replaceable by name.

Importing the package loads neither torch nor PyG; a submodule is loaded when it is first used.
"""

import importlib
from typing import Any

import pluggy

__version__ = "0.2.0"

hookimpl = pluggy.HookimplMarker("pyg_scale")
"""Marks a function of a plugin as the implementation of a hook of :mod:`pyg_scale.hookspecs`."""

_SUBMODULES = (
    "comm",
    "compat",
    "convert",
    "datasets",
    "distributed",
    "errors",
    "loader",
    "nn",
    "ops",
    "parallel",
    "partitioner",
    "plugins",
    "sampler",
    "serving",
    "store",
    "testing",
    "train",
)

_FUNCTIONS = {
    "Appender": "store.directory.appending:Appender",
    "append": "store.directory.appending:append",
    "compact": "store.directory.compacting:compact",
    "layerwise_inference": "inference.layerwise:layerwise_inference",
    "open": "distributed.opening:open_graph",
    "partition": "partitioner:partition",
    "save": "store.directory.saving:save",
}
"""Functions and classes of submodules, which are loaded on first use."""

__all__ = ["__version__", "hookimpl"]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _FUNCTIONS:
        module, _, attribute = _FUNCTIONS[name].partition(":")
        return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES, *_FUNCTIONS})
