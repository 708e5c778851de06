"""The place where the batches of a loader arrive: as they are made, copied, or on a device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, HeteroData

from pyg_scale.errors import DeviceError
from pyg_scale.files.byte_size import byte_size
from pyg_scale.graph.base import SuppliesSampler, needs_threads
from pyg_scale.loader.batch.features import Features
from pyg_scale.loader.batch.pin import move_batch, pin_batch, pins
from pyg_scale.loader.batch.source import filled, sizes_of
from pyg_scale.loader.stats import Stats
from pyg_scale.ops import colptr, fused, library
from pyg_scale.sampler.base import graph_of
from pyg_scale.sampler.capabilities import CAPABILITIES
from pyg_scale.sampler.cuda import CudaSampler
from pyg_scale.sampler.device_graph import pointer_bytes
from pyg_scale.sampler.native import NativeSampler
from pyg_scale.store.device import DeviceFeatures
from pyg_scale.store.device.shares import SHARES
from pyg_scale.store.device.target import budget_of, device_of, send
from pyg_scale.store.memory import MemoryFeatureStore

_NOTHING = contextlib.nullcontext()


class Placement:
    """Leaves batches where they are made, or copies them to a device when they are handed out.

    Args:
        to_device: The device of ``sampling=``, or ``None``.
    """

    device: torch.device | None = None
    """The device on which features are kept, and which only threads share."""

    def __init__(self, to_device: Any = None) -> None:
        self._to_device = to_device

    def keep(
        self,
        data: Any,
        sampler: Any,
        features: Features | None,
        *,
        links: bool,
        any_sampler: bool,
        collect: bool,
        elsewhere: str,
    ) -> tuple[Any, Features | None]:
        """The sampler and the features of a loader, as they are kept for it.

        Args:
            data: The graph.
            sampler: A bound sampler.
            features: Those that are not attributes of ``data``.
            links: True if seeds are links.
            any_sampler: True if the user named no sampler.
            collect: True if batches have features.
            elsewhere: The reason why a sample on a device is of no use to the loader, or "".

        Raises:
            ValueError: If a budget is given, and nothing can be kept on the device; if a store or a
                sampler is on another device; or if a sampler there was asked for, and batches are
                made elsewhere.
        """
        if isinstance(sampler, CudaSampler) and sampler.device.type != "cpu":
            raise ValueError(
                f"the sampler works on {sampler.device}: pass device={str(sampler.device)!r} too"
            )
        return sampler, features

    def pins(self, loader: Any) -> bool:
        """Return True if batches of a ``DataLoader`` are to be pinned; warns as torch does."""
        return pins(loader)

    def beside_training(self) -> contextlib.AbstractContextManager[None]:
        """The context in which a worker thread makes a batch."""
        return _NOTHING

    def made(self, out: Any, stats: Stats, pin: bool) -> Any:
        """A batch made :meth:`beside_training`, as its thread hands it over; pinned if ``pin``."""
        return pin_batch(out, stats) if pin else out

    def bring(self, out: Any, pinned: bool) -> Any:
        """A batch where the consumer wants it."""
        return out if self._to_device is None else move_batch(out, self._to_device, pinned)

    def stats(self, features: Features | None) -> dict[str, Any]:
        """Statistics of the device, as ``"device"``; nothing without one."""
        return {}


class Landed:
    """A batch on a device, before anybody has waited for its copies.

    Args:
        out: The batch.
        event: Comes after its copies; ``None`` where nobody has to wait.
        device: Where it is.
        cuda: ``torch.cuda``.
    """

    def __init__(self, out: Any, event: Any, device: torch.device, cuda: Any) -> None:
        self._out, self._event, self._device, self._cuda = out, event, device, cuda

    def take(self) -> Any:
        """The batch, for the current stream: what it does from now on comes after the copies."""
        if self._event is None:
            return self._out
        current = self._cuda.current_stream(self._device)
        current.wait_event(self._event)
        # Its memory is of another stream, which must not get it back before this one is done.
        for tensor in tensors_of(self._out):
            if tensor.device == self._device:
                tensor.record_stream(current)
        return self._out


class OnDevice(Placement):
    """Keeps features and the graph on a device, and makes batches there beside the training.

    Each thread of a loader copies on a stream that no other uses meanwhile.

    Args:
        device: See :class:`~pyg_scale.loader.NodeLoader`.
        memory: ``device_memory`` there.
        cuda: ``torch.cuda``.

    Raises:
        DeviceError: If there is no such device; says what is missing.
        TypeError: If an argument has a wrong type.
        ValueError: If ``memory`` is no amount of memory.
    """

    def __init__(self, device: Any, memory: int | str | None = None, cuda: Any = None) -> None:
        super().__init__()
        if memory is not None and (memory != 0 or isinstance(memory, bool)):
            byte_size(memory, "device_memory")
        self.device: torch.device = device_of(device)
        self.memory = memory
        self.why_copied = ""
        self.sampling = _sampling("cpu")
        self._cuda = cuda if cuda is not None else torch.cuda
        self._streams_are_used = cuda is not None or self.device.type == "cuda"
        self._local = threading.local()
        # Streams outlive threads, which are new in every epoch: torch keeps the memory of each.
        self._free: list[Any] = []

    def keep(
        self,
        data: Any,
        sampler: Any,
        features: Features | None,
        *,
        links: bool,
        any_sampler: bool,
        collect: bool,
        elsewhere: str,
    ) -> tuple[Any, Features | None]:
        """Keep the graph and the features on the device.

        The graph comes first, with no more than half of the budget: a hop reads few bytes from many
        places. What of it does not fit stays on the host. Features that come with sampled batches,
        or from a store that looks ahead, are not kept on the device: they are copied with each
        batch.
        """
        self.why_copied = _why_copied(data, features)
        if self.why_copied and self.memory is not None:
            raise ValueError(f"device_memory= is of no use: {self.why_copied}; leave it out")
        given = self._is_given(features)
        budget = budget_of(self.memory, self.device, "device_memory")
        if self.why_copied:
            elsewhere = f"features are read on the CPU: {self.why_copied}"
        if isinstance(sampler, CudaSampler):
            if sampler.device != self.device:
                raise ValueError(
                    f"the sampler works on {sampler.device}, and device={str(self.device)!r}"
                )
            if elsewhere:
                raise ValueError(f"neighbor_sampler='cuda' is of no use: {elsewhere}")
            self.sampling = _sampling(str(sampler.device), sampler)
            if self.memory is None:  # what it takes is not in the budget
                budget += sampler.num_bytes
        elif any_sampler:
            why = self._why_not_there(sampler, links, elsewhere, budget)
            try:
                there = None if why else CudaSampler.like(sampler, self.device, budget // 2)
            except DeviceError as error:
                there, why = None, str(error)
            if there is not None:
                sampler = there
                self._take(sampler, sampler.num_bytes)
            where = "cpu" if there is None else str(self.device)
            self.sampling = _sampling(where, there, why)
        else:
            self.sampling = _sampling("cpu", why=f"{type(sampler).__name__} was asked for")
        if given or self.why_copied or not collect:
            return sampler, features
        left = max(0, budget - self.sampling["bytes"])
        topology = graph_of(sampler)
        graph = topology if topology is not None and topology.router is None else None
        store: FeatureStore = (
            filled(MemoryFeatureStore(), data) if features is None else features.store
        )
        made = DeviceFeatures(store, self.device, left, graph=graph)
        self._take(made, made.used)
        return sampler, Features(made, *sizes_of(data, sampler))

    def _take(self, owner: object, num_bytes: int) -> None:
        if self.memory is None:
            SHARES.take(owner, self.device, num_bytes)

    def _is_given(self, features: Features | None) -> bool:
        """Return True if the loader was given a store on the device."""
        store = None if features is None else features.store
        if not isinstance(store, DeviceFeatures):
            return False
        if store.device != self.device:
            raise ValueError(f"device={str(self.device)!r}, but feature_store is on {store.device}")
        if self.memory is not None:
            raise ValueError(
                "device_memory= is given, and feature_store has memory= of its own: leave it out"
            )
        return True

    def _why_not_there(self, sampler: Any, links: bool, elsewhere: str, budget: int) -> str:
        """The reason why batches are sampled on the CPU; empty if they need not be."""
        reason = _no_kernels(self.device)
        if reason:
            return reason
        if not isinstance(sampler, NativeSampler) or sampler.topology is None:
            return f"{type(sampler).__name__} comes with the data"
        if sampler.topology.router is not None:
            return "the graph is in several parts"
        for name, wanted in {**sampler.needs(), "links": links}.items():
            if wanted and name not in CudaSampler.supports:
                return f"the sampler for CUDA does not support {CAPABILITIES[name]}"
        if elsewhere:
            return elsewhere
        size = pointer_bytes(sampler.topology, rows=not sampler.disjoint)
        if size > budget // 2:
            return (
                f"the graph takes at least {size} bytes, more than half of device_memory ({budget})"
            )
        return ""

    def pins(self, loader: Any) -> bool:
        """Return False: copies have pinned memory of their own."""
        return False

    @contextlib.contextmanager
    def beside_training(self) -> Iterator[None]:
        """Within it, and on this thread, copies and kernels go to a stream beside the training."""
        if not self._streams_are_used:
            yield
            return
        outermost = not hasattr(self._local, "stream")
        if outermost:
            self._local.stream = self._free_stream()
        try:
            with self._cuda.device(self.device), self._cuda.stream(self._local.stream):
                yield
        finally:
            if outermost:
                self._free.append(self._local.stream)
                del self._local.stream

    def _free_stream(self) -> Any:
        try:
            return self._free.pop()
        except IndexError:
            return self._cuda.Stream(self.device)

    def made(self, out: Any, stats: Stats, pin: bool = False) -> Landed:
        """A batch on the device, as far as this thread is concerned; counts copies in ``stats``."""
        event = None
        out = self._copied(out, stats)
        if self._streams_are_used:
            event = self._cuda.Event()
            event.record(self._local.stream)
        return Landed(out, event, self.device, self._cuda)

    def bring(self, out: Any, pinned: bool = False) -> Any:
        """Copy what of a batch (or a tuple of them) is not on the device, by the current stream."""
        return self._copied(out, Stats())

    def stats(self, features: Features | None) -> dict[str, Any]:
        """The content of the device, as ``"device"``."""
        store = None if features is None else features.store
        found: dict[str, Any] = {"device": str(self.device), "tensors": {}}
        if isinstance(store, DeviceFeatures):
            found = store.stats()
        return {"device": found | {"why": self.why_copied, "sampling": self.sampling}}

    def _copied(self, out: Any, stats: Stats) -> Any:
        with stats.stage("copy"):
            count = _Count()
            brought = _bring(out, self.device, count)
        stats.count("copy", rows=1, num_bytes=count.num_bytes)
        return brought


def placement_of(device: Any, memory: Any, to_device: Any) -> Placement:
    """The placement that a loader's arguments ask for.

    Args:
        device: ``device=`` of the loader.
        memory: ``device_memory=``.
        to_device: ``to_device`` of ``sampling=``.

    Raises:
        DeviceError: If there is no such device.
        ValueError: If the arguments contradict each other.
    """
    if device is None:
        if memory is not None:
            raise ValueError("device_memory= is of a device: give device= too")
        return Placement(to_device)
    if to_device is not None:
        raise ValueError("device= and sampling.to_device are given: leave one of them out")
    return OnDevice(device, memory)


def _sampling(where: str, sampler: CudaSampler | None = None, why: str = "") -> dict[str, Any]:
    """The device that samples, the reason, and the bytes of the graph there and on the host."""
    size = 0 if sampler is None else sampler.num_bytes
    mapped = 0 if sampler is None else sampler.host_bytes
    return {"where": where, "why": why, "bytes": size, "mapped": mapped}


def _no_kernels(device: torch.device) -> str:
    if device.type != "cuda":
        return "the device is the CPU"
    if fused.usable(torch.empty(0, device=device)):
        return ""
    return fused.why_not(device) or str(library.status()["reason"])


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


class _Count:
    num_bytes = 0


def _bring(out: Any, device: torch.device, count: _Count) -> Any:
    if isinstance(out, tuple):
        return tuple(_bring(each, device, count) for each in out)
    if not isinstance(out, Data | HeteroData):
        return out.to(device) if hasattr(out, "to") else out
    stores = [store for store in out.edge_stores if "edge_index" in store]
    pointers = [colptr.recall(store.edge_index) for store in stores]
    out.apply(lambda value: _one(value, device, count))
    for store, known in zip(stores, pointers, strict=True):
        if known is not None:
            colptr.remember(store.edge_index, _one(known, device, count))
    return out


def _one(value: Any, device: torch.device, count: _Count) -> Any:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return value.to(device) if hasattr(value, "to") else value
    if value.device == device:
        return value
    count.num_bytes += value.nbytes
    return send(value, device) if type(value) is Tensor else value.to(device)


def tensors_of(out: Any) -> Iterator[Tensor]:
    """All tensors of a batch (or a tuple of them), and the pointers that are known of its edges."""
    found: list[Tensor] = []

    def note(value: Any) -> Any:
        if isinstance(value, Tensor):
            found.append(value)
        return value

    for each in out if isinstance(out, tuple) else (out,):
        if isinstance(each, Data | HeteroData):
            each.apply(note)
            for store in each.edge_stores:
                known = colptr.recall(store.edge_index) if "edge_index" in store else None
                found.extend([] if known is None else [known])
    return iter(found)
