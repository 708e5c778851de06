"""The contract of parallel wrappers: a module in, a module for one of many ranks out.

What a wrapper must get right is the mean. A step's gradient is that of the mean loss over the
seeds of *all* ranks, as if one process had all batches of the step as one. The mean over ranks of
each rank's mean is something else as soon as ranks have unequal numbers of seeds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn


class Parallel(ABC):
    """A way to train one module on many ranks.

    An instance holds the options of the method, each as an argument of the constructor; all have
    defaults. What a method needs besides the module, such as the graph where the graph is cut and
    not the batches, is such an option, too. :meth:`wrap` may be called any number of times.

    Attributes:
        exact: Whether the gradient of a step equals that of a single process, in float64 to
            1e-12. A method that trades it away (stale, compressed or sampled exchanges) says
            ``False`` here, and in its documentation what comes instead.
    """

    exact: bool = True

    @abstractmethod
    def wrap(self, module: nn.Module, group: Any = None) -> nn.Module:
        """Make ``module`` one of many. Every rank of ``group`` calls it, with equal modules.

        Parameters and buffers become those of rank 0 on every rank, to the bit, whatever each
        rank had: rank 0's seed is everyone's. The module is used, not copied.

        Args:
            module: On the device where it is to be trained.
            group: The ranks: a process group of ``torch.distributed``, or what else the method
                works on, such as a :class:`pyg_scale.comm.Communicator`; by default all ranks.

        Returns:
            A module with what :class:`ParallelModule` says.

        Raises:
            ValueError: If the module cannot be wrapped as it is; says which part of it.
            RuntimeError: If the ranks have not met.
        """


class ParallelModule(Protocol):
    """The contract of a wrapped module, besides ``forward`` with the arguments of the module.

    Attributes:
        module: The module that was wrapped. Use it for what one rank does alone, such as an
            evaluation on rank 0: a forward of the wrapper may wait for other ranks.
    """

    module: Any

    def backward(self, loss: Tensor, num_seeds: int) -> None:
        """Add the gradients of the mean loss over the seeds of all ranks to ``grad``.

        Every rank calls it once for every forward, also with an empty batch.

        Args:
            loss: The mean over the seeds of this rank's batch, ``[]``; of no seeds, anything.
            num_seeds: How many those are, 0 or more. Ranks may differ.

        Raises:
            RuntimeError: If gradients of an earlier exchange are still there: they are means
                already, and ``zero_grad`` was forgotten.
            ValueError: If ``num_seeds`` is negative, or ``loss`` does not come from the model.
        """
        ...

    def join(self, *steps: Any) -> AbstractContextManager[Any]:
        """Within it, ranks that have no batch left go on taking part until all are done.

        In a step in which some ranks have none, the mean is over the seeds of the others, and the
        ranks without get that gradient, too, and do ``steps``: so parameters and the optimizer's
        moments are the same bits on all ranks, always. A method whose ranks always make the same
        number of steps returns an empty context.

        Args:
            *steps: What the loop does after ``backward``: the optimizer, a scheduler (anything
                with ``step()``), or a function without arguments.

        Raises:
            TypeError: If there are none, or one is neither.
        """
        ...

    def no_sync(self) -> AbstractContextManager[Any]:
        """Within it, gradients are added up on each rank alone (gradient accumulation).

        The next ``backward`` outside makes them the mean over all seeds since the last exchange.
        """
        ...


def is_parallel_module(module: Any) -> bool:
    """Return True if a module has what :class:`ParallelModule` says."""
    # From Python 3.12 on a protocol would not see submodules, which are no attributes of theirs.
    return isinstance(module, nn.Module) and all(
        hasattr(module, name) for name in ("module", "backward", "join", "no_sync")
    )
