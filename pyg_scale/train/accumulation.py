"""Gradients of several batches, added up before a step of the optimizer."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pyg_scale.parallel import is_parallel_module
from pyg_scale.parallel.base import differentiate
from pyg_scale.parallel.replica import is_forgotten, versions_of


@runtime_checkable
class KnowsEnd(Protocol):
    """An iterator that can say that its last batch was handed out, without making another.

    Those of our loaders can. Ranks that share seeds get the same answer in the same step.
    """

    @property
    def at_end(self) -> bool:
        """True if no batch follows the one that was handed out last."""
        ...


@runtime_checkable
class _HasState(Protocol):
    def state_dict(self) -> Any: ...


class Accumulation:
    """Steps of an optimizer that take several batches each.

    ```python
    accumulation = Accumulation(model, 4)
    for batch in accumulation(loader):
        with accumulation.syncing():                        # ranks exchange gradients if due
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            accumulation.backward(loss, batch.batch_size)
        if accumulation.due:
            optimizer.step()
            optimizer.zero_grad()
    ```

    The gradient of a step is that of the mean loss over the seeds of all its batches, on all ranks,
    as if they had been one batch. The batches that are left at the end of an epoch make a step.
    Where some ranks run out of batches before others (``uneven="join"``), a step ends with the last
    batch that all ranks have. Batches whose gradients ``zero_grad()`` has cleared do not count, as
    where an epoch is left early; those of ``fully_shard`` stay. A checkpoint is to be saved where a
    step is due: gradients that wait for more are no part of it.

    Args:
        model: What is trained: a module, alone or as :func:`pyg_scale.parallel.wrap`,
            ``DistributedDataParallel`` or ``fully_shard`` made it.
        every: How many batches a step takes.

    Attributes:
        due: Whether the batch that was handed out last completes a step.

    Raises:
        TypeError: If ``model`` is no module, or ``every`` no integer.
        ValueError: If ``every`` is less than 1.
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module (got {type(model).__name__})")
        self.every = operator.index(every)
        if self.every < 1:
            raise ValueError(f"every must be 1 or more (got {every})")
        self.due = False
        self._model = model
        self._weighs_seeds = is_parallel_module(model)
        self._averages_ranks = isinstance(model, DistributedDataParallel | FSDPModule)
        self._seeds = 0
        self._versions: list[int | None] = []

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, with :attr:`due` set for each one that is handed out.

        An iterator that does not know its end (:class:`KnowsEnd`) is asked for one batch more.

        Args:
            batches: A loader, or anything else that can be iterated over.

        Raises:
            TypeError: If it can be resumed and does not know its end: its state would count a batch
                that was not handed out.
        """
        iterator = iter(batches)
        if isinstance(iterator, KnowsEnd):
            return self._grouped((batch, iterator.at_end) for batch in iterator)
        if isinstance(batches, _HasState):
            raise TypeError(
                f"{type(batches).__name__} has a state, and its iterator does not say at_end: to "
                "know the last batch it would have to be asked for one more, which its state would "
                "count. Iterate over a loader of pyg_scale"
            )
        return self._grouped(_with_end(iterator))

    def _grouped(self, pairs: Iterator[tuple[Any, bool]]) -> Iterator[Any]:
        count = 0
        for batch, at_end in pairs:
            count += 1
            self.due = at_end or count == self.every
            count = 0 if self.due else count
            yield batch

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Within it, ``forward`` and ``backward`` of a batch exchange gradients only if due."""
        model: Any = self._model
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(self.due)
            yield
            return
        apart = not self.due and (self._weighs_seeds or self._averages_ranks)
        with model.no_sync() if apart else nullcontext():
            yield

    def backward(self, loss: Tensor, num_seeds: int) -> None:
        """Add the gradients of a batch to ``grad``; when due, make them the mean over all seeds.

        Args:
            loss: The mean over the seeds of the batch ``[]``, also scaled by a
                :class:`~pyg_scale.train.Precision`.
            num_seeds: How many those are, 0 or more.

        Raises:
            ValueError: If ``num_seeds`` is negative.
            RuntimeError: See :meth:`pyg_scale.parallel.ParallelModule.backward`.
        """
        num_seeds = operator.index(num_seeds)
        if num_seeds < 0:
            raise ValueError(f"num_seeds must not be negative (got {num_seeds})")
        if self._weighs_seeds:
            model: Any = self._model
            model.backward(loss, num_seeds)
            return
        # `fully_shard` keeps gradients that wait elsewhere, where zero_grad() does not reach them.
        keeps = self._seeds == 0 or isinstance(self._model, FSDPModule)
        if not keeps and is_forgotten(self._model, self._versions):
            self._seeds = 0
        differentiate(loss, num_seeds)
        self._seeds += num_seeds
        if not self.due:
            self._versions = versions_of(self._model)
            return
        total, ranks = torch.tensor(float(self._seeds), dtype=torch.float64), 1
        self._seeds = 0
        if self._averages_ranks:
            ranks = dist.get_world_size()
            total = total.to(next(self._model.parameters()).device)
            dist.all_reduce(total)
        factor = ranks / max(1.0, float(total))
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def _with_end(iterator: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and True with the last one."""
    for batch in iterator:
        before = batch
        for batch in iterator:
            yield before, False
            before = batch
        yield before, True
