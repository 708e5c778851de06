"""Data sets of the Open Graph Benchmark. Imports nothing heavy, as it is imported to list names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyg_scale import hookimpl

if TYPE_CHECKING:
    from pyg_scale_ogb.evaluators import Evaluator as Evaluator
    from pyg_scale_ogb.in_memory import load as load
    from pyg_scale_ogb.splits import split as split

__all__ = ["Evaluator", "load", "split"]

_WHERE = {"Evaluator": "evaluators", "load": "in_memory", "split": "splits"}


@hookimpl
def pyg_scale_readers() -> dict[str, str]:
    return {
        "ogb": "pyg_scale_ogb.reader:OGBReader",
        "tgb": "pyg_scale_ogb.tgb_reader:TGBReader",
    }


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
