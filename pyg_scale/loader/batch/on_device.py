"""Loading to a device: features that lie there, and copies beside the training."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_scale.files.byte_size import byte_size
from pyg_scale.loader.stats import Stats
from pyg_scale.ops import colptr
from pyg_scale.store.device import DeviceFeatures
from pyg_scale.store.device.target import device_of, send


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


class OnDevice:
    """The device of a loader's batches. Each of its threads copies on a stream that no other uses
    meanwhile.

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
        if memory is not None and (memory != 0 or isinstance(memory, bool)):
            byte_size(memory, "device_memory")
        self.device = device_of(device)
        self.memory = memory
        self.why_copied = ""
        self.sampling: dict[str, Any] = {"where": "cpu", "why": "", "bytes": 0}
        self._cuda = cuda if cuda is not None else torch.cuda
        self._streams_are_used = cuda is not None or self.device.type == "cuda"
        self._local = threading.local()
        # Streams outlive threads, which are new in every epoch: torch keeps the memory of each.
        self._free: list[Any] = []

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
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

    def made(self, fetch: Callable[[Stats], Any], stats: Stats) -> Landed:
        """A batch on the device, as far as this thread is concerned.

        Args:
            fetch: Makes the batch, and counts in ``stats``.
            stats: Where copies are counted too.
        """
        event = None
        with self.copying():
            out = self.bring(fetch(stats), stats)
            if self._streams_are_used:
                event = self._cuda.Event()
                event.record(self._local.stream)
        return Landed(out, event, self.device, self._cuda)

    def bring(self, out: Any, stats: Stats | None = None) -> Any:
        """Copy what of a batch (or a tuple of them) is not on the device, by the current stream."""
        stats = stats or Stats()
        with stats.stage("copy"):
            count = _Count()
            brought = _bring(out, self.device, count)
        stats.count("copy", rows=1, num_bytes=count.num_bytes)
        return brought


def refuse_processes_on_device(loader: Any) -> None:
    """Batches for a device are made by threads of this process.

    Raises:
        ValueError: If the loader's workers are processes.
    """
    if loader.num_workers > 0 and loader.worker_type != "thread":
        raise ValueError(
            f"device= needs threads as workers, which share the device (got "
            f"worker_type={loader.worker_type!r}): pass worker_type='thread', or leave device= out "
            "and copy batches yourself"
        )


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


def target_of(kwargs: dict[str, Any], sampling: Any) -> OnDevice | None:
    """The target of ``device=`` and ``device_memory=`` of a loader; ``None`` without them.

    Args:
        kwargs: Has them; loses them.
        sampling: The loader's options.

    Raises:
        DeviceError: If there is no such device.
        ValueError: If the arguments contradict each other.
    """
    device, memory = kwargs.pop("device", None), kwargs.pop("device_memory", None)
    if device is None:
        if memory is not None:
            raise ValueError("device_memory= is of a device: give device= too")
        return None
    if sampling.to_device is not None:
        raise ValueError("device= and sampling.to_device are given: leave one of them out")
    return OnDevice(device, memory)


def beside_training(loader: Any) -> contextlib.AbstractContextManager[None]:
    """The context in which a worker thread makes a batch.

    With a device it is a stream beside the training.
    """
    target: OnDevice | None = loader._target
    if target is None or not loader._fetches_in_threads:
        return contextlib.nullcontext()
    return target.copying()


def device_stats(loader: Any) -> dict[str, Any]:
    """Statistics of a loader with ``device=``, as ``"device"``; nothing without."""
    target: OnDevice | None = loader._target
    if target is None:
        return {}
    store = getattr(getattr(loader, "_features", None), "store", None)
    found: dict[str, Any] = {"device": str(target.device), "tensors": {}}
    if isinstance(store, DeviceFeatures):
        found = store.stats()
    return {"device": found | {"why": target.why_copied, "sampling": target.sampling}}
