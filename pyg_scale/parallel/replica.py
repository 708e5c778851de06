"""A model that each rank trains with parameters of its own, and what all wrappers check."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pyg_scale.parallel.base import differentiate, differentiating


class Replica(nn.Module):
    """A wrapped module whose ``backward`` stays on its rank; subclasses say how ranks agree.

    The gradient is that of the mean loss over the seeds of this rank since the last ``backward``
    outside of ``no_sync``.

    Attributes:
        module: The module that was wrapped.
        seeds: Number of seeds since the ranks last agreed.
        steps: Number of calls of ``backward`` since then, without those within ``no_sync``.
    """

    own_parameters = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.seeds = self.steps = 0
        self._accumulates = False
        self._accumulated: int | None = None
        self._versions: list[int | None] = []

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As of the module."""
        return self.module(*inputs, **kwargs)

    def backward(self, loss: Tensor, num_seeds: int) -> None:
        """Add the gradients of the mean loss over the seeds of this rank to ``grad``.

        Args and errors are those of :meth:`pyg_scale.parallel.ParallelModule.backward`.
        """
        num_seeds = checked_seeds(loss, num_seeds)
        if self._accumulated is not None and is_forgotten(self.module, self._versions):
            self._accumulated = None
        if self._accumulated is None:
            check_no_gradients(self.module)
        total = (self._accumulated or 0) + num_seeds
        self._accumulated = total
        with differentiating(self):
            differentiate(loss, num_seeds)
        if self._accumulates:
            self._versions = versions_of(self.module)
            return
        self._accumulated = None
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(max(1, total))
        self.seeds += total
        self.steps += 1

    @property
    def all_seeds(self) -> float:
        """See :class:`~pyg_scale.parallel.base.StepMean`.

        Raises:
            NotImplementedError: Always: ranks make steps of their own.
        """
        raise NotImplementedError(
            "ranks of this wrapper make steps of their own, so there is no mean over the seeds of "
            'all of them: what they share, such as a NodeEmbedding, needs parallel.wrap(..., "ddp")'
        )

    @abstractmethod
    def join(self, *steps: Any) -> AbstractContextManager[Any]:
        """See :meth:`pyg_scale.parallel.ParallelModule.join`."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See :meth:`pyg_scale.parallel.ParallelModule.no_sync`."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before


# Checks ########################################################################################


def check_module(module: nn.Module) -> None:
    """Check that a module can be trained.

    Raises:
        ValueError: If a parameter has no shape yet, or none needs a gradient.
    """
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} has no shape yet (in_channels=-1): call the model once, "
                f"with a batch of the loader, before it is wrapped"
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError("the model has no parameter that needs a gradient")


def checked_group(group: Any) -> dist.ProcessGroup:
    """The process group that ``group`` says, that of all ranks if ``None``.

    Raises:
        RuntimeError: If ``torch.distributed`` was not initialised.
        TypeError: If ``group`` is no process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "the ranks have not met: call pyg_scale.distributed.init() first, or torch's "
            "init_process_group (one process alone is a group, too)"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a process group of torch.distributed (got {type(group).__name__})"
        )
    found = dist.group.WORLD if group is None else group
    assert found is not None
    return found


def checked_seeds(loss: Tensor, num_seeds: int) -> int:
    """The number of seeds, if it and the loss can be.

    Raises:
        ValueError: If the number is negative, or the loss does not come from a model.
    """
    num_seeds = operator.index(num_seeds)
    if num_seeds < 0:
        raise ValueError(f"num_seeds must not be negative (got {num_seeds})")
    if not loss.requires_grad:
        raise ValueError(
            "loss does not come from the model: compute it from the model's output, also of "
            "an empty batch"
        )
    return num_seeds


def check_no_gradients(module: nn.Module) -> None:
    """Check that ``zero_grad`` was called.

    Raises:
        RuntimeError: If gradients of an earlier step are there.
    """
    if _has_gradients(module):
        raise RuntimeError(
            "gradients of an earlier step are still there: call optimizer.zero_grad() first; "
            "to add up gradients of several batches use no_sync()"
        )


def versions_of(module: nn.Module) -> list[int | None]:
    """The version of each gradient, as torch counts changes in place; ``None`` without one."""
    return [None if p.grad is None else p.grad._version for p in module.parameters()]


def is_forgotten(module: nn.Module, versions: Sequence[int | None]) -> bool:
    """True if ``zero_grad`` was called: gradients were changed, and none is left.

    Gradients may also be zero because the losses are flat there: seeds of such losses count.

    Args:
        module: The module.
        versions: Those of its gradients (:func:`versions_of`) when they were added up last.
    """
    return versions_of(module) != list(versions) and not _has_gradients(module)


def _has_gradients(module: nn.Module) -> bool:
    for parameter in module.parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if values.any():
            return True
    return False


def functions_of(steps: tuple[Any, ...]) -> list[Callable[[], Any]]:
    """The functions to call for each step.

    Raises:
        TypeError: If there are none, or one is no function and has no ``step()``.
    """
    if not steps:
        raise TypeError(
            "join() needs what follows backward(), such as the optimizer: join(optimizer). A rank "
            "without batches must make the steps of the others, or its moments are not theirs"
        )
    found = [getattr(step, "step", step) for step in steps]
    for step, function in zip(steps, found):
        if not callable(function):
            raise TypeError(f"join() takes optimizers and functions (got {type(step).__name__})")
    return found


def by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Tensors of one dtype and device together."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())
