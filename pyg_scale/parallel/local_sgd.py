"""Ranks that make several steps of their own before they average their parameters.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019. Torch's
``PeriodicModelAverager`` gives every rank the same weight and needs every rank in every round;
here the mean is over seeds, and ranks may run out of batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from pyg_scale.comm.roll_call import RollCall
from pyg_scale.ops.raw_bytes import raw_bytes
from pyg_scale.parallel.base import Parallel, RankState, Waited
from pyg_scale.parallel.replica import (
    Replica,
    by_dtype,
    check_module,
    checked_group,
    functions_of,
)

_TRAINED = -1  # instead of a checksum


class LocalSGD(Parallel):
    """Averages parameters after every ``every`` steps, weighted by the seeds of each rank.

    With ``every=1`` and plain SGD it is what ``ddp`` is. Otherwise it is not exact: ranks compute
    gradients of parameters that have drifted apart. The moments of an optimizer stay those of its
    rank.

    Args:
        every: Number of steps of a rank between two averages.

    Raises:
        ValueError: If it is below 1.
    """

    exact = False

    def __init__(self, every: int = 8) -> None:
        if every < 1:
            raise ValueError(f"every must be 1 or more (got {every})")
        self.every = every

    def wrap(self, module: nn.Module, group: Any = None) -> LocalReplica:
        """Wrap a module; see :meth:`Parallel.wrap`.

        Raises:
            RuntimeError: If ``torch.distributed`` was not initialised.
            TypeError: If ``group`` is no process group.
            ValueError: If a parameter has no shape yet, or none needs a gradient.
        """
        found = checked_group(group)
        check_module(module)
        return LocalReplica(module, found, self.every)


class LocalReplica(Replica, Joinable):
    """A module of its own on each rank, which is averaged now and then.

    Ranks average at the beginning of a forward, once ``every`` steps were made, and at the end of
    :meth:`join`. Floating-point buffers are averaged, too; of others the largest is taken. Buffers
    and frozen parameters that are the same on all ranks stay as they are, to the bit.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, every: int) -> None:
        Replica.__init__(self, module)
        Joinable.__init__(self)
        self._group, self._every = group, every
        self._roll_call, self._waited = RollCall(group), Waited()
        self._joining = False
        with self._roll_call.explained(), torch.no_grad():
            first = dist.get_process_group_ranks(group)[0]
            for tensor in self._tensors():
                dist.broadcast(tensor, first, group=group)

    @property
    def rank_state(self) -> RankState:
        """See :class:`~pyg_scale.parallel.base.HasRankState`: how far this rank is in a round."""
        return _Round(self)

    @property
    def seconds_waited(self) -> float:
        """See :class:`~pyg_scale.parallel.base.CountsWaiting`: in averages over the ranks."""
        return self._waited.seconds

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As of the module; averages first if it is time to."""
        if self.steps >= self._every:
            self.average()
        return self.module(*inputs, **kwargs)

    def average(self) -> None:
        """Average now, as before an evaluation. Every rank calls it.

        Raises:
            CommError: If a rank is gone; names it (gloo).
            CommTimeoutError: If a rank does not come in time; names it (gloo).
        """
        with self._roll_call.explained():
            if self._joining:
                Join.notify_join_context(self)
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        tensors = self._tensors()
        own = [self.seeds, self.steps, *self._checksums()]
        gathered = self._gathered(
            torch.tensor(own, dtype=torch.float64, device=tensors[0].device)
        ).tolist()
        if not any(row[1] for row in gathered):
            return
        seeds = sum(row[0] for row in gathered)
        weight = self.seeds / seeds if seeds else 1 / len(gathered)
        # A mean of equal values need not be the value, to the bit.
        checksums = zip(*(row[2:] for row in gathered), strict=True)
        differ = [
            t
            for t, (first, *rest) in zip(tensors, checksums, strict=True)
            if first == _TRAINED or any(other != first for other in rest)
        ]
        for same in by_dtype(differ):
            flat = torch.cat([tensor.flatten() for tensor in same])
            if flat.is_floating_point() or flat.is_complex():
                flat.mul_(weight)
                self._all_reduce(flat)
            else:
                self._all_reduce(flat, dist.ReduceOp.MAX)
            for tensor, mean in zip(same, flat.split([tensor.numel() for tensor in same])):
                tensor.copy_(mean.view_as(tensor))
        self.seeds = self.steps = 0

    def _all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        with self._waited.counting():
            dist.all_reduce(tensor, op, group=self._group)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, in their order."""
        found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self._group))]
        with self._waited.counting():
            dist.all_gather(found, tensor, group=self._group)
        return torch.stack(found)

    def _checksums(self) -> list[int]:
        """Of each tensor that is not trained, as those may be the same on all ranks."""
        trained = [each.requires_grad for each in self.module.parameters()]
        trained += [False for _ in self.module.buffers()]
        return [
            _TRAINED if yes else _checksum(tensor)
            for yes, tensor in zip(trained, self._tensors(), strict=True)
        ]

    def _tensors(self) -> list[Tensor]:
        return [t.detach() for t in (*self.module.parameters(), *self.module.buffers())]

    @contextmanager
    def join(self, *steps: Any) -> Iterator[None]:
        """Within it, ranks without batches take part in the averages; at its end all are equal.

        Ranks without batches make no steps: ``steps`` are checked and not called.
        """
        functions_of(steps)
        if self._joining:
            raise RuntimeError("join() is under way already: enter it once for each epoch")
        self._joining = True
        try:
            with self._roll_call.explained(), Join([self]):
                yield
        finally:
            self._joining = False

    def join_hook(self, **_: Any) -> JoinHook:
        """The hook of a rank without batches, see torch."""
        return _Averages(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the counts of :class:`torch.distributed.algorithms.Join`."""
        return self._tensors()[0].device

    @property
    def join_process_group(self) -> Any:
        """The ranks."""
        return self._group


def _checksum(tensor: Tensor) -> int:
    """48 bits of its values, which a number of float64 holds."""
    values = raw_bytes(tensor.contiguous().cpu()).numpy()
    return int.from_bytes(hashlib.blake2b(values.data, digest_size=6).digest())


class _Averages(JoinHook):
    def __init__(self, replica: LocalReplica) -> None:
        self._replica = replica

    def main_hook(self) -> None:
        self._replica._average()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._replica._average()


class _Round:
    """The place of a rank in a round."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def state_dict(self) -> dict[str, Any]:
        return {"seeds": self._replica.seeds, "steps": self._replica.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._replica.seeds, self._replica.steps = state["seeds"], state["steps"]
