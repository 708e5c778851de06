"""One tensor of a store: some rows on a device, the others on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pyg_scale.ops.gather import gather
from pyg_scale.ops.gather_cached import gather_cached
from pyg_scale.ops.mapped_rows import MappedRows
from pyg_scale.store.device.placement import DeviceShare
from pyg_scale.store.device.target import host_rows, read_here, send, send_large
from pyg_scale.store.rows import TensorRows

Read = Callable[[Tensor], Tensor]
"""Rows ``[n, ...]`` on the host, by ids ``int64`` ``[n]``."""

_CHUNK_BYTES = 64 << 20


class DeviceSplit(NamedTuple):
    """The places of the rows of a request.

    Attributes:
        place: For :func:`~pyg_scale.ops.gather_cached.gather_cached`, ``int64`` ``[n]``: the slot
            of each row, or ``-1 - p`` for the missing row number ``p``.
        missing: The ids of the missing rows, ``int64``, in order of the request.
    """

    place: Tensor
    missing: Tensor


class DeviceTable:
    """Reads rows of one tensor to a device. Immutable, for any number of threads.

    Args:
        rows: The number, shape and dtype of its rows.
        place: The share of it that is on the device.
        device: The device.
        hot: The ids on the device, ``int64`` ``[place.rows]``, if not all.
        read: Reads rows on the host.
        mapped: The tensor, if the device itself reads the other rows.
        whole: The tensor, if it is already on the device.
    """

    def __init__(
        self,
        rows: TensorRows,
        place: DeviceShare,
        device: torch.device,
        hot: Tensor | None,
        read: Read,
        mapped: MappedRows | None = None,
        whole: Tensor | None = None,
    ) -> None:
        self.rows, self.place, self.device = rows, place, device
        self._mapped = None if place.whole else mapped
        ids = None if place.whole else hot
        self._slot_of: Tensor | None = None  # on the host
        self._slots: Tensor | None = None  # on the device
        if not place.whole and ids is not None and place.rows:
            self._slot_of = torch.full((rows.num_rows,), -1, dtype=torch.int32)
            self._slot_of[ids] = torch.arange(place.rows, dtype=torch.int32)
            if self._mapped is not None:
                self._slots = send_large(self._slot_of, device)
        self._held = self._bring(ids, read) if whole is None else whole

    @property
    def where(self) -> str:
        """The source of rows that are not cached: ``"device"``, ``"mapped"`` or ``"staged"``."""
        if self.place.whole:
            return "device"
        return "staged" if self._mapped is None else "mapped"

    @property
    def num_bytes(self) -> int:
        """Size in bytes of its tensors on the device."""
        return self._held.nbytes + (0 if self._slots is None else self._slots.nbytes)

    def check(self, index: Tensor) -> None:
        """Refuse ids on the host that are not rows.

        Raises:
            IndexError: If there are such ids; names the first.
        """
        if index.device.type != "cpu" or index.numel() == 0:
            return
        low, high = torch.aminmax(index)
        if low < 0 or high >= self.rows.num_rows:
            at = int(((index < 0) | (index >= self.rows.num_rows)).nonzero()[0])
            raise IndexError(
                f"index[{at}] is {int(index[at])}, but there are only {self.rows.num_rows} rows"
            )

    def split(self, index: Tensor) -> DeviceSplit | None:
        """Find the rows that must be read on the host; ``None`` if the device reads all itself.

        Args:
            index: Ids, ``int64`` ``[n]``, on the host.
        """
        if self.where != "staged":
            return None
        # NumPy, as torch would start threads for this in every worker thread of a loader.
        if self._slot_of is None:
            place = np.full(index.numel(), -1, dtype=np.int64)
        else:
            place = gather(self._slot_of, index).numpy().astype(np.int64)
        missing = np.flatnonzero(place < 0)
        place[missing] = -1 - np.arange(missing.size)
        return DeviceSplit(torch.from_numpy(place), torch.from_numpy(index.numpy()[missing]))

    def hits(self, index: Tensor, split: DeviceSplit | None) -> int:
        """Number of the rows that are on the device.

        Args:
            index: Ids on the host.
            split: The result of :meth:`split` for them.
        """
        if split is not None:
            return index.numel() - split.missing.numel()
        if self.place.whole or self._slot_of is None:
            return index.numel() if self.place.whole else 0
        return int(np.count_nonzero(gather(self._slot_of, index).numpy() >= 0))

    def take(self, index: Tensor, split: DeviceSplit | None, staged: Tensor | None) -> Tensor:
        """Return the rows ``[n, ...]`` on the device.

        Args:
            index: Ids, ``int64`` ``[n]``.
            split: The result of :meth:`split` for them.
            staged: The rows ``split.missing``, on the host.
        """
        read_here(self._held, self._slots)
        if split is not None:
            assert staged is not None
            if split.missing.numel() == index.numel():  # none of the rows is cached
                return send(staged, self.device)
            place = send(split.place, self.device)
            return gather_cached(self._held, send(staged, self.device), place)
        index = send(index, self.device)
        if self._mapped is None:
            return gather(self._held, index)
        if self._slots is None:
            return gather_cached(self._held, self._mapped, -1 - index)
        return gather_cached(self._held, self._mapped, index, self._slots)

    def _bring(self, ids: Tensor | None, read: Read) -> Tensor:
        """Copy rows to the device."""
        count = self.place.rows
        held = torch.empty([count, *self.rows.row], dtype=self.rows.dtype, device=self.device)
        if not count or not self.rows.row_bytes:
            return held
        step = max(1, _CHUNK_BYTES // self.rows.row_bytes)
        total = count * self.rows.row_bytes
        with tqdm(
            total=total, desc=f"features to {self.device}", unit="B", unit_scale=True,
            disable=None, delay=1,
        ) as bar:  # fmt: skip
            for begin in range(0, count, step):
                end = min(count, begin + step)
                wanted = torch.arange(begin, end) if ids is None else ids[begin:end]
                piece = host_rows([end - begin, *self.rows.row], self.rows.dtype, self.device)
                held[begin:end].copy_(piece.copy_(read(wanted)), non_blocking=True)
                bar.update((end - begin) * self.rows.row_bytes)
        return held
