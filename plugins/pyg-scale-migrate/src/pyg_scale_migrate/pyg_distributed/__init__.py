"""The names of ``torch_geometric.distributed``, for scripts with only an import changed.

Names are loaded on first use. They can also be imported from ``pyg_scale.distributed``.
"""

from typing import TYPE_CHECKING

from pyg_scale import lazy

if TYPE_CHECKING:
    from pyg_scale_migrate.pyg_distributed.feature_store import LocalFeatureStore
    from pyg_scale_migrate.pyg_distributed.graph_store import LocalGraphStore
    from pyg_scale_migrate.pyg_distributed.loaders import DistLinkNeighborLoader, DistNeighborLoader
    from pyg_scale_migrate.pyg_distributed.partitioner import Partitioner

_HOME = {
    "DistLinkNeighborLoader": "loaders",
    "DistNeighborLoader": "loaders",
    "LocalFeatureStore": "feature_store",
    "LocalGraphStore": "graph_store",
    "Partitioner": "partitioner",
}

__all__ = [
    "DistLinkNeighborLoader",
    "DistNeighborLoader",
    "LocalFeatureStore",
    "LocalGraphStore",
    "Partitioner",
]

__getattr__, __dir__ = lazy.names(__name__, _HOME)
