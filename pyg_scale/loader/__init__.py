"""PyG's loaders under PyG's names: ours where there is one, else PyG's own.

Every name of ``torch_geometric.loader`` can be imported from here.
"""

from torch_geometric import loader as _pyg
from torch_geometric.loader import (
    AffinityMixin,
    CachedLoader,
    DataListLoader,
    DataLoader,
    DenseDataLoader,
    DynamicBatchSampler,
    GraphSAINTSampler,
    ImbalancedSampler,
    NeighborSampler,
    PrefetchLoader,
)

from pyg_scale.loader.batch.padding import Buckets
from pyg_scale.loader.cluster import ClusterData, ClusterLoader
from pyg_scale.loader.graph_saint import (
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
)
from pyg_scale.loader.hgt_loader import HGTLoader
from pyg_scale.loader.ibmb import IBMBBatchLoader, IBMBNodeLoader
from pyg_scale.loader.last_neighbor import LastNeighborLoader
from pyg_scale.loader.link_loader import LinkLoader
from pyg_scale.loader.link_neighbor_loader import LinkNeighborLoader
from pyg_scale.loader.neighbor_loader import NeighborLoader
from pyg_scale.loader.node_loader import NodeLoader
from pyg_scale.loader.options import SamplingOptions
from pyg_scale.loader.random_node import RandomNodeLoader
from pyg_scale.loader.seeds.budget import Budget
from pyg_scale.loader.shadow import ShaDowKHopSampler
from pyg_scale.loader.temporal_data import TemporalDataLoader
from pyg_scale.loader.zip_loader import ZipLoader

RandomNodeSampler = _pyg.RandomNodeSampler  # PyG's deprecated alias; it has more than __all__ says

__all__ = [
    "AffinityMixin",
    "Buckets",
    "Budget",
    "CachedLoader",
    "ClusterData",
    "ClusterLoader",
    "DataListLoader",
    "DataLoader",
    "DenseDataLoader",
    "DynamicBatchSampler",
    "GraphSAINTEdgeSampler",
    "GraphSAINTNodeSampler",
    "GraphSAINTRandomWalkSampler",
    "GraphSAINTSampler",
    "HGTLoader",
    "IBMBBatchLoader",
    "IBMBNodeLoader",
    "ImbalancedSampler",
    "LastNeighborLoader",
    "LinkLoader",
    "LinkNeighborLoader",
    "NeighborLoader",
    "NeighborSampler",
    "NodeLoader",
    "PrefetchLoader",
    "RandomNodeLoader",
    "SamplingOptions",
    "ShaDowKHopSampler",
    "TemporalDataLoader",
    "ZipLoader",
]
