"""Placing the graph and its features on the device of a loader when it is made."""

from __future__ import annotations

from typing import Any

import torch
from torch_geometric.data import FeatureStore
from torch_geometric.sampler import EdgeSamplerInput

from pyg_scale.graph.base import SuppliesSampler, needs_threads
from pyg_scale.loader.batch.features import Features
from pyg_scale.loader.batch.on_device import OnDevice
from pyg_scale.loader.batch.source import filled, sizes_of
from pyg_scale.ops import fused, library
from pyg_scale.sampler.base import CAPABILITIES
from pyg_scale.sampler.cuda import CudaSampler
from pyg_scale.sampler.device_graph import graph_bytes
from pyg_scale.sampler.native import NativeSampler
from pyg_scale.store.device import DeviceFeatures
from pyg_scale.store.device.target import budget_of
from pyg_scale.store.memory import MemoryFeatureStore


def placed(loader: Any, sampler: Any, features: Features | None) -> tuple[Any, Features | None]:
    """The sampler and the features of a loader, where ``device=`` wants them.

    The graph comes first, if it takes no more than half of the budget: a hop reads few bytes from
    many places. Features that come with sampled batches, or from a store that looks ahead, are not
    kept on the device: they are copied with each batch.

    Args:
        loader: The loader; its ``_any_sampler`` says that nobody asked for this one.
        sampler: Bound.
        features: As without a device.

    Raises:
        ValueError: If a budget is given, and nothing can be kept on the device; if a store or a
            sampler is on another device; or if a sampler there was asked for, and batches are made
            elsewhere.
    """
    target: OnDevice | None = loader._target
    if target is None:
        if isinstance(sampler, CudaSampler) and sampler.device.type != "cpu":
            raise ValueError(
                f"the sampler works on {sampler.device}: pass device={str(sampler.device)!r} too"
            )
        return sampler, features
    target.why_copied = _why_copied(loader.data, features)
    if target.why_copied and target.memory is not None:
        raise ValueError(f"device_memory= is of no use: {target.why_copied}; leave it out")
    given = _given(target, features)
    budget = budget_of(target.memory, target.device, "device_memory")
    if isinstance(sampler, CudaSampler):
        _check_sampler(loader, sampler)
        target.sampling = {"where": str(sampler.device), "why": "", "bytes": sampler.num_bytes}
    elif getattr(loader, "_any_sampler", False):
        why = why_not_there(loader, sampler, budget)
        if not why:
            sampler = CudaSampler.like(sampler, target.device)
        where = "cpu" if why else str(target.device)
        size = 0 if why else sampler.num_bytes
        target.sampling = {"where": where, "why": why, "bytes": size}
    else:
        target.sampling = {
            "where": "cpu",
            "why": f"{type(sampler).__name__} was asked for",
            "bytes": 0,
        }
    if given or target.why_copied or not loader.sampling.collect_features:
        return sampler, features
    left = max(0, budget - target.sampling["bytes"])
    topology = getattr(sampler, "topology", None)
    graph = topology if topology is not None and topology.router is None else None
    store: FeatureStore = (
        filled(MemoryFeatureStore(), loader.data) if features is None else features.store
    )
    made = DeviceFeatures(store, target.device, left, graph=graph)
    return sampler, Features(made, *sizes_of(loader.data, sampler))


def why_not_there(loader: Any, sampler: Any, budget: int) -> str:
    """The reason why a loader with a device samples on the CPU; empty if it need not.

    Args:
        loader: The loader.
        sampler: What it would sample with on the CPU.
        budget: Bytes of the device.
    """
    device = loader._target.device
    reason = _no_kernels(device)
    if reason:
        return reason
    if not isinstance(sampler, NativeSampler) or sampler.topology is None:
        return f"{type(sampler).__name__} comes with the data"
    if sampler.topology.router is not None:
        return "the graph is in several parts"
    links = isinstance(loader.input_data, EdgeSamplerInput)
    for name, wanted in {**sampler._wanted(), "links": links}.items():
        if wanted and name not in CudaSampler.supports:
            return f"the sampler for CUDA does not support {CAPABILITIES[name]}"
    reason = _why_not_made_there(loader)
    if reason:
        return reason
    size = graph_bytes(sampler.topology)
    if size > budget // 2:
        return f"the graph takes {size} bytes, more than half of device_memory ({budget})"
    return ""


def _no_kernels(device: torch.device) -> str:
    if device.type != "cuda":
        return "the device is the CPU"
    if fused.usable(torch.empty(0, device=device)):
        return ""
    return fused.why_not(device) or str(library.status()["reason"])


def _why_not_made_there(loader: Any) -> str:
    """The reason why a sample on the device would be of no use to the rest of a loader."""
    if loader._target.why_copied:
        return f"features are read on the CPU: {loader._target.why_copied}"
    if loader.num_workers > 0 and not loader._fetches_in_threads:
        return "the loader's threads sample only, and another one makes the batch"
    return ""


def _check_sampler(loader: Any, sampler: CudaSampler) -> None:
    if sampler.device != loader._target.device:
        raise ValueError(
            f"the sampler works on {sampler.device}, and device={str(loader._target.device)!r}"
        )
    reason = _why_not_made_there(loader)
    if reason:
        raise ValueError(f"neighbor_sampler='cuda' is of no use: {reason}")


def _given(target: OnDevice, features: Features | None) -> bool:
    """Return True if the loader was given a store on the device."""
    store = None if features is None else features.store
    if not isinstance(store, DeviceFeatures):
        return False
    if store.device != target.device:
        raise ValueError(f"device={str(target.device)!r}, but feature_store is on {store.device}")
    if target.memory is not None:
        raise ValueError(
            "device_memory= is given, and feature_store has memory= of its own: leave it out"
        )
    return True


def _why_copied(data: Any, features: Features | None) -> str:
    """The reason why features are copied with each batch; empty if the device keeps them."""
    if isinstance(data, SuppliesSampler):
        return "servers send features with what they sampled"
    if features is not None:
        store = features.store
        return f"{store!r} looks ahead, and keeps rows itself" if features.look_ahead else ""
    if needs_threads(data):
        return "other ranks have some of the features"
    return ""
