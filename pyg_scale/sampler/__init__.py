"""Samplers: seeds and a key go in, a sampled subgraph comes out.

Names are loaded when they are first used. :class:`NeighborSampler` is the contract (PyG's class
of that name is :class:`NativeSampler`), :class:`HopSampler` the easiest way to write one.
"""

from typing import TYPE_CHECKING

from pyg_scale import lazy

if TYPE_CHECKING:
    from pyg_scale.sampler.base import HeteroSamplerOutput, NeighborSampler, Sample, SamplerOutput
    from pyg_scale.sampler.cuda import CudaSampler
    from pyg_scale.sampler.frontier import Chosen, Frontier
    from pyg_scale.sampler.hgt import HGTSampler
    from pyg_scale.sampler.hop import HopSampler
    from pyg_scale.sampler.importance import ImportanceSampler, edges_by_layer
    from pyg_scale.sampler.labor import Labor
    from pyg_scale.sampler.layer_wise import FastGCN, Ladies
    from pyg_scale.sampler.native import NativeSampler
    from pyg_scale.sampler.negative import NegativeSampling
    from pyg_scale.sampler.pagerank import Ranked, ppr
    from pyg_scale.sampler.ppr_sampler import PPRSampler
    from pyg_scale.sampler.reference import ReferenceSampler
    from pyg_scale.sampler.walks import random_walk

_HOME = {
    "Chosen": "frontier",
    "CudaSampler": "cuda",
    "FastGCN": "layer_wise",
    "Frontier": "frontier",
    "HGTSampler": "hgt",
    "HeteroSamplerOutput": "base",
    "HopSampler": "hop",
    "ImportanceSampler": "importance",
    "Labor": "labor",
    "Ladies": "layer_wise",
    "NativeSampler": "native",
    "NegativeSampling": "negative",
    "NeighborSampler": "base",
    "PPRSampler": "ppr_sampler",
    "Ranked": "pagerank",
    "ReferenceSampler": "reference",
    "Sample": "base",
    "SamplerOutput": "base",
    "edges_by_layer": "importance",
    "ppr": "pagerank",
    "random_walk": "walks",
}

__all__ = [
    "Chosen",
    "CudaSampler",
    "FastGCN",
    "Frontier",
    "HGTSampler",
    "HeteroSamplerOutput",
    "HopSampler",
    "ImportanceSampler",
    "Labor",
    "Ladies",
    "NativeSampler",
    "NegativeSampling",
    "NeighborSampler",
    "PPRSampler",
    "Ranked",
    "ReferenceSampler",
    "Sample",
    "SamplerOutput",
    "edges_by_layer",
    "ppr",
    "random_walk",
]

__getattr__, __dir__ = lazy.names(__name__, _HOME)
