"""PyG's layers under PyG's names: ours if there is one, else PyG's own.

Every name of ``torch_geometric.nn`` can be imported from here. Eight layers are ours
(:mod:`pyg_scale.nn.conv`), and :func:`accelerate` fuses those of an existing model, and any other.
:func:`trim_to_layer` replaces the one of ``torch_geometric.utils``.
:func:`fallbacks` counts the calls that took PyG's own path, by reason.
"""

from typing import Any

from torch_geometric import nn as _pyg

from pyg_scale.nn import conv
from pyg_scale.nn.conv import (
    FusedConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    RGCNConv,
    SAGEConv,
    TransformerConv,
)
from pyg_scale.nn.fallback import fallbacks, forget_fallbacks
from pyg_scale.nn.switch import Acceleration, accelerate, restore
from pyg_scale.nn.trim import trim_to_layer

__all__ = [
    "Acceleration",
    "FusedConv",
    "GATConv",
    "GATv2Conv",
    "GCNConv",
    "GINConv",
    "GraphConv",
    "RGCNConv",
    "SAGEConv",
    "TransformerConv",
    "accelerate",
    "conv",
    "fallbacks",
    "forget_fallbacks",
    "restore",
    "trim_to_layer",
]
__all__ += [name for name in dir(_pyg) if name not in __all__ and not name.startswith("_")]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_pyg, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_pyg)})
