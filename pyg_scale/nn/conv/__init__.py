"""PyG's message passing layers under PyG's names: ours if there is one, else PyG's own."""

from typing import Any

from torch_geometric.nn import conv as _pyg

from pyg_scale.nn.conv.base import FusedConv
from pyg_scale.nn.conv.gat_conv import GATConv
from pyg_scale.nn.conv.gatv2_conv import GATv2Conv
from pyg_scale.nn.conv.gcn_conv import GCNConv
from pyg_scale.nn.conv.gin_conv import GINConv
from pyg_scale.nn.conv.graph_conv import GraphConv
from pyg_scale.nn.conv.rgcn_conv import RGCNConv
from pyg_scale.nn.conv.sage_conv import SAGEConv
from pyg_scale.nn.conv.transformer_conv import TransformerConv

__all__ = [
    "FusedConv",
    "GATConv",
    "GATv2Conv",
    "GCNConv",
    "GINConv",
    "GraphConv",
    "RGCNConv",
    "SAGEConv",
    "TransformerConv",
]
__all__ += [name for name in _pyg.__all__ if name not in __all__]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_pyg, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_pyg)})
