"""The contract of parallel wrappers: a module in, a module for one of many ranks out.

What a wrapper must get right is the mean. A step's gradient is that of the mean loss over the
seeds of *all* ranks, as if one process had all batches of the step as one. The mean over ranks of
each rank's mean is something else as soon as ranks have unequal numbers of seeds.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class Parallel(ABC):
    """A way to train one module on many ranks.

    An instance holds the options of the method, each as an argument of the constructor; all have
    defaults. It is not bound to a module: :meth:`wrap` may be called any number of times. A method
    that divides one graph, and not batches, is a :class:`GraphParallel`.

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


class GraphParallel(Parallel):
    """A way to train one module on one graph that many ranks share.

    The whole graph is the batch of every step: each rank computes the outputs of its own nodes, and
    the loss of those among them that have labels.
    """

    @abstractmethod
    def wrap(
        self,
        module: nn.Module,
        group: Any = None,
        *,
        graph: Any = None,
        inputs: Sequence[str] | None = None,
        mesh: Any = None,
    ) -> nn.Module:
        """Make ``module`` one of many on a graph. Every rank calls it; see :meth:`Parallel.wrap`.

        Args:
            module: On the device where it is to be trained.
            group: The ranks, by default all of them.
            graph: What :func:`pyg_scale.open` returned on this rank. It must have at least as many
                parts as there are ranks that share it; a rank may own several, or an empty one.
            inputs: Names of attributes of the graph, in the order of the arguments of the module's
                ``forward``; by default ``("x", "edge_index")``, of a heterogeneous graph
                ``("x_dict", "edge_index_dict")``. ``n_id`` is the original ids of own nodes.
            mesh: A ``DeviceMesh`` instead of ``group``, for methods with several dimensions.

        Returns:
            A module with what :class:`GraphParallelModule` says.

        Raises:
            TypeError: If ``graph`` is not an opened graph, or ``mesh`` is of no use to the method.
            ValueError: If the module, the inputs or the number of parts do not suit the method.
                The same on all ranks; names the rank.
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
            loss: The mean over the seeds of this rank's batch, ``[]``; of no seeds, anything that
                comes from the model, also NaN.
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


class GraphParallelModule(ParallelModule, Protocol):
    """The contract of a module that was wrapped with a graph.

    ``forward()`` takes no arguments, or replaces inputs by name: ``model(x=own_rows)`` takes rows
    of this rank's own nodes, in the order of :attr:`own_nodes`. It returns what the module returns,
    with a row for each own node. ``backward`` gets the mean loss of own nodes, and how many those
    are. ``state_dict`` is that of ``module``, with the same keys.

    Attributes:
        own_nodes: The original ids ``int64`` ``[num_own]`` of the nodes of this rank; of a
            heterogeneous graph by node type. Every node is one rank's own.
    """

    own_nodes: Any


class RankState(Protocol):
    """A part of a run that each rank has for itself, such as the gradients that it did not send."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything, in dictionaries, lists, tensors and numbers."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Go on from what ``state_dict`` of the same rank returned."""
        ...


@runtime_checkable
class HasRankState(Protocol):
    """A wrapped module that has more to save than the parameters, which all ranks share.

    :class:`pyg_scale.train.Checkpoint` saves it for each rank.
    """

    @property
    def rank_state(self) -> RankState | None:
        """That; ``None`` if there is none."""
        ...


@runtime_checkable
class HasOwnParameters(Protocol):
    """A wrapped module of which each rank has parameters of its own.

    Attributes:
        own_parameters: True if ranks' parameters, and so the moments of their optimizers, differ.
            :class:`pyg_scale.train.Checkpoint` then saves modules, optimizers and schedulers of
            each rank.
    """

    own_parameters: bool


@runtime_checkable
class ChangedByOthers(Protocol):
    """A wrapped module whose state other ranks change at any time, as that of a server.

    Attributes:
        changed_by_others: True if they do. :class:`pyg_scale.train.Checkpoint` then lets ranks wait
            for each other, so that no rank goes on while another one saves or loads.
    """

    changed_by_others: bool


@runtime_checkable
class CountsWaiting(Protocol):
    """A wrapped module that counts how long it waited for other ranks."""

    @property
    def seconds_waited(self) -> float:
        """Seconds since it was made in which nothing else was done."""
        ...


class Waited:
    """A count of the time in which a rank did nothing but wait for others.

    Attributes:
        seconds: So far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the time within it."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


class StepMean(Protocol):
    """The mean of a step, by which a wrapper divides gradients of sums.

    :meth:`ParallelModule.backward` differentiates the sum over the seeds of this rank. A gradient
    that leaves the wrapped module, as that of its input, is that of the sum; who uses it divides by
    the number of all seeds, once the ranks have exchanged it.
    """

    @property
    def all_seeds(self) -> float:
        """The number of seeds of all ranks since the exchange before the last, at least 1.

        Raises:
            NotImplementedError: If the wrapper has no such mean.
        """


_differentiated: list[StepMean] = []  # not by thread: gradients on a device are made in others


@contextmanager
def differentiating(mean: StepMean) -> Iterator[None]:
    """While a loss that was multiplied by a number of seeds is differentiated."""
    _differentiated.append(mean)
    try:
        yield
    finally:
        _differentiated.remove(mean)


def means_under_way() -> tuple[StepMean, ...]:
    """The means of the losses that are being differentiated, the innermost last."""
    return tuple(_differentiated)


_END = "pyg_scale: end"
"""A key in the metadata of a node of autograd, there if :func:`marked` was called."""

_SHARED = ("torch.nn.modules._functions", "torch.distributed.nn.functional")
"""Modules of torch with functions through which gradients of other ranks' losses come."""


def marked(out: Any) -> Any:
    """The output of a module in which ranks exchange rows, for :func:`differentiate`."""
    for each in tree_leaves(out):
        if isinstance(each, Tensor) and each.grad_fn is not None:
            _metadata(each.grad_fn)[_END] = True
    return out


def differentiate(loss: Tensor, num_seeds: int, is_marked: bool = False) -> None:
    """Add the gradient of a mean loss times the number of its seeds to ``grad``.

    A loss of no seeds brings zeros, whatever it is: a mean over none is NaN, and 0 times that, too.
    Every parameter that it depends on gets some. What other ranks send back stays as it is.

    Args:
        loss: The loss.
        num_seeds: The number.
        is_marked: Whether the output of the module was :func:`marked`.

    Raises:
        ValueError: If it was, and a loss of no seeds does not come from that output.
    """
    total = loss * num_seeds
    if num_seeds:
        total.backward()
        return
    nodes = nodes_before([total.grad_fn])
    ends = [node for node in nodes if _END in _metadata(node)]
    if is_marked and not ends:
        raise ValueError(
            "loss does not come from the model: compute it from the tensors that the model "
            "returned, alone or in lists, tuples or dictionaries"
        )
    ends += [node for node in nodes if _module_of(node) in _SHARED]
    own = nodes - nodes_before(ends)
    handles = [node.register_hook(_nothing) for node in own if not hasattr(node, "variable")]
    try:
        total.backward()
    finally:
        for handle in handles:
            handle.remove()


def nodes_before(ends: Iterable[Any]) -> set[Any]:
    """The nodes of autograd that some depend on, and these."""
    found: set[Any] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return found


def _metadata(node: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = node.metadata  # a property, other than torch's stub says
    return found


def _module_of(node: Any) -> str:
    return getattr(getattr(node, "_forward_cls", None), "__module__", "")


def _nothing(found: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if each is None else torch.zeros_like(each) for each in found)


def is_parallel_module(module: Any) -> bool:
    """Return True if a module has what :class:`ParallelModule` says."""
    # From Python 3.12 on a protocol would not see submodules, which are no attributes of theirs.
    return isinstance(module, nn.Module) and all(
        hasattr(module, name) for name in ("module", "backward", "join", "no_sync")
    )
