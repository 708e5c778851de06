"""An asynchronous parameter server: no rank waits for the batches of others.

Every rank is a worker. Rank 0 also serves the parameters: a worker sends it a gradient, and gets
the parameters that follow. In the meantime other workers have changed them; how often is the
staleness of its gradient.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pyg_scale.parallel.base import Parallel
from pyg_scale.parallel.replica import Replica, check_module, functions_of
from pyg_scale.parallel.rounds import Rounds, checked_timeout, packed, unpack

_RATES: dict[str, Callable[[int], float]] = {
    "linear": lambda staleness: 1 / (1 + 0.1 * staleness),
    "inverse": lambda staleness: 1 / (1 + staleness),
    "dc": lambda staleness: 1.0,
}

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class AsyncPS(Parallel):
    """Trains asynchronously, with an answer to gradients of parameters that have changed since.

    With one worker it is what the optimizer does alone. Otherwise it is not exact.

    Args:
        staleness: The answer to a gradient of staleness τ: ``"linear"`` takes lr / (1 + 0.1 τ),
            ``"inverse"`` lr / (1 + τ) (Zhang et al., "Staleness-aware Async-SGD", IJCAI 2016), and
            ``"dc"`` adds λ g ⊙ g ⊙ (θ - θ₀) to the gradient g of θ₀, where θ is what there is now
            (Zheng et al., "Asynchronous SGD with Delay Compensation", ICML 2017).
        optimizer: Makes the optimizer of the server of its parameters, such as
            ``partial(torch.optim.SGD, lr=0.1)``. Used on rank 0.
        compensation: λ of ``"dc"``.
        timeout: Seconds after the first rank has ended an epoch in which others may end it, too.

    Raises:
        ValueError: If there is no such answer, or ``compensation`` or ``timeout`` cannot be.
    """

    exact = False

    def __init__(
        self,
        staleness: str = "linear",
        optimizer: MakeOptimizer = torch.optim.SGD,
        compensation: float = 0.04,
        timeout: float = 300.0,
    ) -> None:
        if staleness not in _RATES:
            raise ValueError(f"staleness must be one of {', '.join(_RATES)} (got {staleness!r})")
        if not compensation >= 0:
            raise ValueError(f"compensation must not be negative (got {compensation})")
        self.staleness, self.optimizer = staleness, optimizer
        self.compensation, self.timeout = compensation, checked_timeout(timeout)

    def wrap(self, module: nn.Module, group: Any = None) -> Worker:
        """Wrap a module; see :meth:`Parallel.wrap`.

        Args:
            module: The module.
            group: A :class:`pyg_scale.comm.Communicator`, which is not closed; by default all
                ranks are connected.

        Raises:
            TypeError: If ``group`` is something else.
            ValueError: If a parameter has no shape yet, or none needs a gradient.
            CommError: If rank 0 cannot be reached.
        """
        check_module(module)
        return Worker(module, group, self)


class ParameterServer:
    """Parameters that workers change in the order in which their gradients come.

    Args:
        parameters: What they are at first; they are copied.
        method: The options.

    Raises:
        TypeError: If the rates of the optimizer cannot be scaled, as another one is within it.
    """

    def __init__(self, parameters: Iterable[Tensor], method: AsyncPS) -> None:
        self.parameters = [nn.Parameter(each.detach().clone()) for each in parameters]
        self.optimizer = method.optimizer(self.parameters)
        scales = method.staleness != "dc"
        if scales and any(isinstance(each, Optimizer) for each in vars(self.optimizer).values()):
            raise TypeError(
                f"optimizer must make an optimizer with no other within, as its rates are scaled "
                f"for single steps (got {type(self.optimizer).__name__}): use staleness='dc'"
            )
        self.version = 0
        self._method = method
        self._lock = threading.Lock()
        self._seen: dict[int, tuple[int, list[Tensor]]] = {}

    def pull(self, worker: int) -> tuple[int, list[Tensor]]:
        """The version and the parameters that there are now."""
        with self._lock:
            return self._pull(worker)

    def push(
        self, worker: int, gradients: Sequence[Tensor | None]
    ) -> tuple[int, int, list[Tensor]]:
        """Make a step.

        Args:
            worker: The worker, whose gradients are those of the parameters that it got last.
            gradients: One of each parameter, ``None`` if it was not used.

        Returns:
            The staleness of the gradients, and what :meth:`pull` returns.
        """
        with self._lock:
            seen, before = self._seen[worker]
            staleness = self.version - seen
            for parameter, gradient, old in zip(self.parameters, gradients, before, strict=True):
                if gradient is not None and self._method.staleness == "dc":
                    moved = parameter.detach() - old
                    gradient = gradient + self._method.compensation * gradient**2 * moved
                parameter.grad = gradient
            step(self.optimizer, _RATES[self._method.staleness](staleness))
            self.version += 1
            return (staleness, *self._pull(worker))

    def pull_all(self, workers: Iterable[int]) -> list[Tensor]:
        """The parameters that there are now, which all of these workers get."""
        with self._lock:
            values = self._values()
            self._seen |= dict.fromkeys(workers, (self.version, values))
            return values

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, the optimizer's state, and the versions that workers have.

        They are copies, of one moment.
        """
        with self._lock:
            return {
                "parameters": self._values(),
                "optimizer": deepcopy(self.optimizer.state_dict()),
                "version": self.version,
                # Nobody writes to what workers have got.
                "seen": {worker: (v, list(each)) for worker, (v, each) in self._seen.items()},
            }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        with self._lock:
            for parameter, value in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(value)
            self.optimizer.load_state_dict(state["optimizer"])
            self.version = state["version"]
            self._seen = {
                w: (v, [t.clone() for t in each]) for w, (v, each) in state["seen"].items()
            }

    def _pull(self, worker: int) -> tuple[int, list[Tensor]]:
        values = self._values()
        self._seen[worker] = self.version, values
        return self.version, values

    def _values(self) -> list[Tensor]:
        return [each.detach().clone() for each in self.parameters]


def step(optimizer: Optimizer, rate: float) -> None:
    """Make a step with all learning rates times ``rate``.

    Nobody sees these rates but the step itself: a scheduler may change those of the optimizer
    meanwhile, in another thread.
    """
    if rate == 1:
        optimizer.step()
        return
    args: tuple[Any, ...] = (optimizer,)
    kwargs: dict[str, Any] = {}
    for hook in optimizer._optimizer_step_pre_hooks.values():
        args, kwargs = hook(optimizer, args, kwargs) or (args, kwargs)
    # A twin makes the step: of the same parameters and state, and with copies of the groups.
    groups, before = list(optimizer.param_groups), dict(vars(optimizer))
    olds = [dict(group) for group in groups]
    news = [{**old, "lr": old["lr"] * rate} for old in olds]
    unset: dict[str, Any] = {each: OrderedDict() for each in _HOOKS}
    twin: Any = object.__new__(type(optimizer))
    vars(twin).update(before, param_groups=news, **unset)
    # A scheduler has put a step of its own here, which makes that of the optimizer and notes it.
    if vars(twin).pop("step", None) is not None:
        vars(twin)["_opt_called"] = True
    twin.step(*args[1:], **kwargs)
    for group, old, new in zip(groups, olds, news):
        group.update({k: v for k, v in new.items() if k != "lr" and v is not old.get(k, unset)})
    for name, value in vars(twin).items():
        if name not in ("param_groups", *unset) and value is not before.get(name, unset):
            setattr(optimizer, name, value)
    for hook in optimizer._optimizer_step_post_hooks.values():
        hook(optimizer, args, kwargs)


class Worker(Replica):
    """The model of a worker.

    Attributes:
        optimizer: Sends gradients and gets parameters: its ``zero_grad()`` and ``step()`` stand
            where those of an optimizer of torch do.
        server: The :class:`ParameterServer`, on rank 0; ``None`` on others.
        staleness: The staleness of the gradients of this worker that were sent last.
    """

    changed_by_others = True

    def __init__(self, module: nn.Module, group: Any, method: AsyncPS) -> None:
        super().__init__(module)
        self.staleness = 0
        self.optimizer = _RemoteOptimizer(self)
        tensors = [*module.parameters(), *module.buffers()]
        # Ranks end an epoch as a round to which they bring nothing. All get its result, as what
        # the server has may change before the slowest of them asks.
        served = _Served(module, method)
        self._rounds = Rounds(
            group, served.end, packed(tensors), handlers=served.handlers, timeout=method.timeout
        )
        self._finalizer = weakref.finalize(self, self._rounds.close)
        unpack(self._rounds.start(), tensors)
        self.server = served.server if self._rounds.rank == 0 else None
        self._pull()

    @property
    def rank_state(self) -> _WorkerState:
        """See :class:`~pyg_scale.parallel.base.HasRankState`; on rank 0 also of the server."""
        return _WorkerState(self._rounds, self.server)

    @property
    def seconds_waited(self) -> float:
        """See :class:`~pyg_scale.parallel.base.CountsWaiting`: for answers of rank 0."""
        return self._rounds.waited.seconds

    @property
    def gone(self) -> dict[int, str]:
        """The workers that are gone, with the reason of each. On rank 0, after an epoch."""
        return self._rounds.gone

    def push(self) -> None:
        """Send the gradients, and get the parameters that follow; without seeds only the latter.

        Raises:
            FloatingPointError: If a gradient is not finite; names it. It is not sent.
            CommError: If rank 0 is gone.
            CommTimeoutError: If it does not answer in time.
        """
        if not self.seeds:
            self._pull()
            return
        parameters = list(self.module.parameters())
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                raise FloatingPointError(
                    f"the gradient of parameter {name!r} on rank {self._rounds.rank} is NaN or "
                    f"infinite, and was not sent: look at the loss, or go on with zero_grad()"
                )
        used = torch.tensor([parameter.grad is not None for parameter in parameters])
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        about, *values = self._rounds.ask("push", [self._rank(), used, *packed(gradients)])
        self._take(values, int(about[0]))

    def _pull(self) -> None:
        self._take(self._rounds.ask("pull", [self._rank()]))

    def _take(self, values: list[Tensor], staleness: int = 0) -> None:
        self.staleness = staleness
        unpack(values, list(self.module.parameters()))
        self.seeds = self.steps = 0

    @contextmanager
    def join(self, *steps: Any) -> Iterator[None]:
        """At its end, ranks wait for each other, and all have the same parameters.

        Within it, nobody waits: ranks without batches make no steps. A rank that is gone, or is
        not there ``timeout`` seconds after the first, is not waited for; rank 0 warns. A rank that
        was late gets the parameters that there are when it comes.
        """
        functions_of(steps)
        yield
        ended = self._rounds.end([])
        if self._rounds.rank in ended.ranks:
            self._take(ended.result)
        else:
            self._pull()

    def close(self) -> None:
        """End. Rank 0 first waits, for a minute at most, until the others have ended.

        It is called when the module is no longer used, and at the end of the process.
        """
        self._finalizer()

    def _rank(self) -> Tensor:
        return torch.tensor([self._rounds.rank])


class _RemoteOptimizer:
    def __init__(self, worker: Worker) -> None:
        self._worker = weakref.ref(worker)

    def zero_grad(self) -> None:
        """Forget the gradients of this worker."""
        worker = self._worker()
        assert worker is not None
        for parameter in worker.module.parameters():
            parameter.grad = None

    def step(self) -> None:
        """See :meth:`Worker.push`."""
        worker = self._worker()
        assert worker is not None
        worker.push()


class _Served:
    """The server, as requests see it."""

    def __init__(self, module: nn.Module, method: AsyncPS) -> None:
        self.server = ParameterServer(module.parameters(), method)
        self.handlers = {"pull": self._pull, "push": self._push}

    def end(self, brought: Mapping[int, Any]) -> list[Tensor]:
        """The parameters that workers have after an epoch."""
        return packed(self.server.pull_all(brought))

    def _pull(self, tensors: list[Tensor]) -> list[Tensor]:
        _, values = self.server.pull(int(tensors[0]))
        return packed(values)

    def _push(self, tensors: list[Tensor]) -> list[Tensor]:
        worker, used, *packs = tensors
        gradients = [torch.empty_like(each) for each in self.server.parameters]
        unpack(packs, gradients)
        found = [each if yes else None for each, yes in zip(gradients, used.tolist(), strict=True)]
        staleness, _, values = self.server.push(int(worker), found)
        return [torch.tensor([staleness]), *packed(values)]


class _WorkerState:
    """The server and the number of the epoch."""

    def __init__(self, rounds: Rounds, server: ParameterServer | None) -> None:
        self._rounds, self._server = rounds, server

    def state_dict(self) -> dict[str, Any]:
        server = {} if self._server is None else self._server.state_dict()
        return {**self._rounds.state_dict(), "server": server}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rounds.load_state_dict(state)
        if self._server is not None:
            self._server.load_state_dict(state["server"])
