"""Any graph to a graph directory, in bounded memory."""

import importlib
from typing import Any

_MODULES = {
    "Column": "table",
    "Converted": "run",
    "Description": "base",
    "EdgeList": "base",
    "Nodes": "base",
    "Reader": "base",
    "Table": "table",
    "Tables": "tables",
    "Workspace": "base",
    "convert": "run",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
