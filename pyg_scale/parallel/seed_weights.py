"""Gradients that are a mean over the seeds of all ranks: a communication hook of torch's DDP.

Each rank brings the gradient of its *sum*, and how many seeds that is. The gradients are added up
as usual; the counts go along, in one more all-reduce of four numbers for each step that nobody
waits for before the gradients are there. Then everything is divided by the number of seeds.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from pyg_scale.comm.roll_call import RollCall
from pyg_scale.parallel.base import Waited, means_under_way
from pyg_scale.parallel.compression import Compressor

MIXED = (
    "some ranks called backward(loss, num_seeds) in this step and others loss.backward(): "
    "all must do the same"
)
APART = (
    "the loss of backward(loss, num_seeds) comes from two modules that were wrapped apart, and the "
    "seeds are known to one of them only: wrap one module that holds both, as one, and call its "
    "backward"
)


class SeedWeights:
    """The weights of the gradients of this rank and of all.

    Args:
        group: The ranks.
        compressor: Adds up gradients instead of an all-reduce.
        names: The name of each parameter, by its ``id``.

    Attributes:
        roll_call: Says which ranks are gone or late when an exchange has failed.
        exchanged: Whether gradients of a batch of this rank were ever sent.
        joined: Whether this rank has no batch left, and brings zeros.
        plain_if_joined: What a rank without batch counts for in a mean over ranks.
        waited: Counts how long this rank waited for others.
        shadowed: The gradients of each parameter, once a rank without batch got them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        compressor: Compressor | None = None,
        names: Mapping[int, str] | None = None,
    ) -> None:
        self.group = group
        self.compressor = compressor
        self._names = names or {}
        self.roll_call = RollCall(group)
        self.exchanged = False
        self.joined = False
        self.plain_if_joined = 0
        self.waited = Waited()
        self.shadowed: list[tuple[list[Tensor], list[Tensor]]] = []
        self._seeds: int | None = None
        self._totals: Future[Any] | None = None
        self._under_way: list[Future[Any]] = []

    @property
    def is_first(self) -> bool:
        """True if nothing was counted since the last exchange."""
        return self._seeds is None

    @property
    def all_seeds(self) -> float:
        """See :class:`~pyg_scale.parallel.base.StepMean`."""
        assert self._totals is not None, "backward() exchanges gradients"
        return max(1.0, float(_tensor(self._totals.value())[0]))

    def add(self, num_seeds: int) -> None:
        """Count seeds whose gradients are on their way."""
        self._seeds = (self._seeds or 0) + num_seeds

    def forget(self) -> None:
        """Count no seeds whose gradients were not exchanged: they are gone."""
        self._seeds = None

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """The mean of a bucket, under way."""
        buffer = bucket.buffer()
        if bucket.index() == 0:
            others = means_under_way()
            if others and self not in others and not self.joined:
                raise RuntimeError(APART)
            self._totals = self._all_reduce(self._own(buffer.device))
            self._under_way = [self._totals]
            waits = buffer.device.type == "cpu" or self.compressor is not None
            if waits and not self.joined:
                # Before that of the reducer, whose errors have lost their type.
                Variable._execution_engine.queue_callback(self._wait)
        assert self._totals is not None
        if self.joined:
            self.shadowed.append((bucket.parameters(), bucket.gradients()))
        else:
            self.exchanged = True
        if self.compressor is not None:
            with self.roll_call.explained():
                self._totals.wait()
                _divide_by(_tensor(self._totals.value()), buffer)
                self._under_way.append(self.compressor.reduce(bucket))
            return self._under_way[-1]
        self._under_way.append(self._all_reduce(buffer))
        both = torch.futures.collect_all([self._totals, self._under_way[-1]])
        return both.then(_divide)

    def finish(self) -> None:
        """End a step of a compressor, once everything was waited for.

        Raises:
            FloatingPointError: If gradients of a rank are not finite; names it and the parameter.
        """
        if self.compressor is None:
            return
        with self.roll_call.explained():
            error = self.compressor.finish(self._names)
        if error is not None:
            raise error

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, []
        with self.roll_call.explained(), self.waited.counting():
            for future in under_way:
                future.wait()
        if self.compressor is not None:
            # After that of the reducer, which would otherwise refuse the next step.
            Variable._execution_engine.queue_callback(self.finish)

    def _own(self, device: torch.device) -> Tensor:
        """Seeds; whether they were counted; whether not; what this rank is worth in that case."""
        if self.joined:
            own = [0, 0, 0, self.plain_if_joined]
        elif self._seeds is None:
            own = [0, 0, 1, 1]
        else:
            own = [self._seeds, 1, 0, 0]
            self._seeds = None
        return torch.tensor(own, dtype=torch.float64, device=device)

    def _all_reduce(self, tensor: Tensor) -> Future[Any]:
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        return work.get_future()


# Annotations must not be strings: torch compares those of a hook with its own types.
def reduce(weights: SeedWeights, bucket: GradBucket) -> Future[Tensor]:
    """The hook, as torch wants it."""
    return weights.reduce(bucket)


def _divide(both: Future[list[Future[Any]]]) -> Tensor:
    totals, buffer = (_tensor(future.value()) for future in both.value())
    return _divide_by(totals, buffer)


def _divide_by(totals: Tensor, buffer: Tensor) -> Tensor:
    if totals.device.type != "cpu":
        return mean_unread(buffer, totals)
    seeds, counted, plain, worth = totals.tolist()
    if counted and plain:
        raise RuntimeError(MIXED)
    return buffer.div_(max(1.0, seeds if counted else worth))


def mean_unread(buffer: Tensor, totals: Tensor) -> Tensor:
    """Divide where reading a value would make the device wait: a mixture becomes NaN."""
    seeds, counted, plain, worth = totals.unbind()
    divisor = torch.where(counted > 0, seeds, worth).clamp(min=1)
    divisor = torch.where((counted > 0) & (plain > 0), torch.nan, divisor)
    if buffer.dtype in (torch.float16, torch.bfloat16):  # which do not have every number
        return buffer.copy_(buffer.float().div_(divisor.float()))
    return buffer.div_(divisor)


def _tensor(value: Any) -> Tensor:
    found: Tensor = value[0] if isinstance(value, list) else value
    return found
