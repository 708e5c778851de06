"""Options about workers and sampler servers: who samples, and how far ahead."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from pyg_scale.files.byte_size import byte_size
from pyg_scale.graph.base import SuppliesSampler
from pyg_scale.sampler.base import NeighborSampler

_WORKER_TYPES: tuple[str | None, ...] = (None, "thread", "process", "ring")
_KNOWN = {*inspect.signature(DataLoader).parameters, "device", "device_memory"}
_RING_BYTES = 64 << 20  # for each worker


@dataclass(frozen=True)
class SamplingOptions:
    """Deployment of samplers: ``NeighborLoader(..., sampling=SamplingOptions(...))``.

    The words are those of GraphLearn-for-PyTorch. Some belong to *worker mode* (sampler processes
    beside training, on a graph that this process has opened), some to *server mode* (the graph was
    opened as ``tcp://...``, and its servers sample); what does not belong to the graph that a
    loader is given raises. Batches are the same whatever the options are, but for
    ``collect_features``.

    Attributes:
        num_workers: Worker mode: sampler processes, as ``num_workers=`` of the loader with
            ``worker_type="ring"``. Server mode: how many of this loader's batches each server
            makes at a time is ``num_workers * worker_concurrency``; ``None`` for no other limit
            than ``prefetch_size``.
        worker_devices: Where samplers work, one for all or a list with one for each worker:
            ``None`` or ``"cpu"``. There is no sampler for other devices.
        worker_concurrency: Batches that a worker makes at a time (threads in its process).
        channel_size: Worker mode: bytes of the shared memory through which a worker's batches
            come, such as ``"64MB"`` (for each worker). A worker waits while it is full.
        buffer_size: Server mode: bytes of batches that may have come and not been used; no
            further one is asked for while there are more. ``None`` for no other limit than
            ``prefetch_size``.
        prefetch_size: Server mode: batches that are asked for ahead of the one in use.
        pin_memory: Whether batches are copied to pinned memory, as ``pin_memory=`` of the loader.
        server_rank: Server mode: which servers this loader asks, by their place in the address
            (a number or a list); ``None`` for all.
        to_device: The device of batches; ``None`` leaves them where they were made.
        collect_features: Whether batches have the features of their nodes and edges. Without,
            they have ``n_id``, ``e_id`` and the edges, and no other attribute with a row for each
            node or edge.

    Raises:
        TypeError: If an option is of another type.
        ValueError: If it is out of its range, or there is no such device.
        NotImplementedError: If samplers are to work on another device than the CPU.
    """

    num_workers: int | None = None
    worker_devices: Any = None
    worker_concurrency: int = 1
    channel_size: int | str | None = None
    buffer_size: int | str | None = None
    prefetch_size: int = 4
    pin_memory: bool = False
    server_rank: int | Sequence[int] | None = None
    to_device: Any = None
    collect_features: bool = True

    def __post_init__(self) -> None:
        for name in ("num_workers", "worker_concurrency", "prefetch_size"):
            value = getattr(self, name)
            if value is None and name == "num_workers":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer (got {value!r})")
            if value < 1:
                raise ValueError(f"{name} must be at least 1 (got {value})")
        for name in ("channel_size", "buffer_size"):
            if getattr(self, name) is not None:
                byte_size(getattr(self, name), name)
        for name in ("pin_memory", "collect_features"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False (got {getattr(self, name)!r})")
        self._check_workers()
        if self.to_device is not None:
            check_device(self.to_device)
        self.servers_of(None)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the shared memory of each worker."""
        if self.channel_size is None:
            return _RING_BYTES
        return byte_size(self.channel_size, "channel_size")

    @property
    def buffer_bytes(self) -> int | None:
        """Bytes that may wait to be used, ``None`` for any."""
        return None if self.buffer_size is None else byte_size(self.buffer_size, "buffer_size")

    def servers_of(self, count: int | None) -> list[int] | None:
        """The servers that are asked, out of so many; ``None`` for all.

        Raises:
            TypeError: If ``server_rank`` is no integer.
            ValueError: If there is no such server.
        """
        if self.server_rank is None:
            return None
        given: Any = self.server_rank
        ranks = list(given) if isinstance(given, list | tuple | range) else [given]
        if not ranks or any(isinstance(r, bool) or not isinstance(r, int) for r in ranks):
            raise TypeError(f"server_rank must be an integer or a list of them (got {given!r})")
        wrong = [r for r in ranks if r < 0 or (count is not None and r >= count)]
        if wrong:
            known = "" if count is None else f": there are {count}, from 0 to {count - 1}"
            raise ValueError(f"server_rank={wrong[0]} is no server{known}")
        return list(dict.fromkeys(ranks))

    def makes_processes(self, data: Any) -> bool:
        """Return True if ``num_workers`` are sampler processes of a graph of this process."""
        return self.num_workers is not None and not _is_served(data)

    def worker_type(self, given: str | None) -> str:
        """That of a loader whose ``num_workers`` are sampler processes.

        Raises:
            ValueError: If another one was given.
        """
        if given not in (None, "ring"):
            raise ValueError(
                f"sampling.num_workers are sampler processes, and worker_type={given!r} is given: "
                "leave one of them out"
            )
        return "ring"

    def refuse(self, *, served: bool, num_workers: int) -> None:
        """Refuse options that mean nothing for the graph of a loader.

        Args:
            served: Whether servers sample.
            num_workers: Of the loader.

        Raises:
            ValueError: Names the option.
        """
        default = SamplingOptions()
        theirs = ("channel_size",) if served else ("server_rank", "buffer_size", "prefetch_size")
        for name in theirs:
            if getattr(self, name) != getattr(default, name):
                where = "opened as tcp://..." if served else "of this process"
                raise ValueError(f"{name} means nothing for a graph {where}: leave it out")
        if self.worker_concurrency != 1 and self.num_workers is None:
            raise ValueError(
                "worker_concurrency is how many batches each of num_workers makes: give that too"
            )
        if self.channel_size is not None and num_workers == 0 and self.num_workers is None:
            raise ValueError("channel_size is of worker processes: give num_workers too")

    def _check_workers(self) -> None:
        if self.worker_devices is None:
            return
        several = isinstance(self.worker_devices, list | tuple)
        devices = list(self.worker_devices) if several else [self.worker_devices]
        if several and len(devices) != (self.num_workers or 1):
            raise ValueError(
                f"worker_devices must have one entry for each of {self.num_workers or 1} workers "
                f"(got {len(devices)})"
            )
        for device in devices:
            if torch.device(device).type != "cpu":
                raise NotImplementedError(
                    f"worker_devices={device!r}: samplers work on the CPU; to_device= says where "
                    "batches go"
                )


def check_device(device: Any) -> torch.device:
    """A device that is there.

    Raises:
        ValueError: If it is not.
    """
    found = torch.device(device)
    if found.type == "cpu":
        return found
    module: Any = getattr(torch, found.type, None)
    there = hasattr(module, "device_count") and module.is_available()
    if not there or (found.index or 0) >= module.device_count():
        raise ValueError(f"to_device={device!r}: there is no such device here")
    return found


def checked(
    sampling: Any,
    data: Any,
    worker_type: str | None,
    seed: Any,
    kwargs: dict[str, Any],
    loader: str,
) -> tuple[SamplingOptions, str | None, int | None]:
    """The options of a loader, its type of workers and its seed, after checks of all of them.

    What they say of ``DataLoader``'s own arguments is put there.

    Args:
        sampling: What the loader was given.
        data: Its graph.
        worker_type: The type of workers that it was given.
        seed: The seed that it was given.
        kwargs: Arguments of ``DataLoader``; changed.
        loader: The name of its class.

    Raises:
        TypeError: If ``sampling`` are no options, ``seed`` is no integer, or there is no such
            argument.
        ValueError: If one means nothing for this graph; see also :func:`check_workers`.
    """
    for name in kwargs.keys() - _KNOWN:
        way = "leave it out"
        if name in inspect.signature(NeighborSampler).parameters:
            way += ", or use NeighborLoader, which samples with it"
        raise TypeError(f"{loader} takes no {name}=: {way}")
    if seed is not None:
        try:
            seed = operator.index(seed)
        except TypeError:
            raise TypeError(f"seed must be an integer or None (got {seed!r})") from None
    if sampling is None:
        check_workers(worker_type, kwargs)
        return SamplingOptions(), worker_type, seed
    if not isinstance(sampling, SamplingOptions):
        raise TypeError(f"sampling must be SamplingOptions (got {type(sampling).__name__})")
    sampling.refuse(served=_is_served(data), num_workers=kwargs.get("num_workers", 0))
    if sampling.makes_processes(data):
        if kwargs.get("num_workers", 0) not in (0, sampling.num_workers):
            raise ValueError(
                f"num_workers={kwargs['num_workers']}, and sampling has "
                f"num_workers={sampling.num_workers}: leave one of them out"
            )
        kwargs["num_workers"] = sampling.num_workers
        worker_type = sampling.worker_type(worker_type)
    if sampling.pin_memory:
        kwargs["pin_memory"] = True
    check_workers(worker_type, kwargs)
    return sampling, worker_type, seed


def _is_served(data: Any) -> bool:
    return isinstance(data, SuppliesSampler)


def check_workers(worker_type: str | None, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of a loader that contradict each other.

    Args:
        worker_type: ``"thread"``, ``"process"``, ``"ring"`` or ``None``.
        kwargs: Arguments of ``DataLoader``.

    Raises:
        TypeError: If ``num_workers`` is no integer, or ``sampler`` or ``batch_sampler`` is a name,
            where torch's index samplers belong.
        ValueError: If an argument means nothing with the others, or is none of those allowed.
    """
    if worker_type not in _WORKER_TYPES:
        raise ValueError(
            f"worker_type must be 'thread', 'process', 'ring' or None (got {worker_type!r})"
        )
    num_workers = kwargs.get("num_workers", 0)
    if isinstance(num_workers, bool) or not isinstance(num_workers, int):
        raise TypeError(f"num_workers must be an integer (got {num_workers!r})")
    if num_workers > 0 and worker_type == "thread":
        for name in ("worker_init_fn", "multiprocessing_context"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name} is about worker processes: leave it out, or pass worker_type='process'"
                )
    if num_workers > 0 and worker_type == "ring":
        for name, wrong in (
            ("worker_init_fn", kwargs.get("worker_init_fn") is not None),
            ("persistent_workers", bool(kwargs.get("persistent_workers"))),
            ("in_order", not kwargs.get("in_order", True)),
        ):
            if wrong:
                raise ValueError(
                    f"{name}: sampler processes with a ring end with the epoch and deliver in "
                    "order; leave it out, or pass worker_type='process'"
                )
    if num_workers > 0 and kwargs.get("prefetch_factor") == 0:
        raise ValueError("prefetch_factor must be at least 1 with num_workers > 0 (got 0)")
    if num_workers == 0 and kwargs.get("timeout"):
        raise ValueError(
            f"timeout={kwargs['timeout']} is how long to wait for workers: pass num_workers > 0"
        )
    for name in ("sampler", "batch_sampler"):
        if isinstance(kwargs.get(name), str):
            raise TypeError(
                f"{name}= is torch's index sampler, which orders the seeds (got "
                f"{kwargs[name]!r}); neighbor_sampler= takes a name"
            )
