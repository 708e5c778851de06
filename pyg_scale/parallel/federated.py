"""Federated averaging: models visit private parts of a graph, whose nodes never leave their rank.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017. A rank is a client with a part of its own; rank 0 is one, too, and averages.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pyg_scale.errors import CommError
from pyg_scale.parallel.base import Parallel
from pyg_scale.parallel.client import ClientPart
from pyg_scale.parallel.replica import Replica, check_module, functions_of
from pyg_scale.parallel.rounds import Round, Rounds, checked_timeout, packed, unpack


class Federated(Parallel):
    """Averages the models of clients after each round, weighted by their numbers of samples.

    A client that leaves, or is late, is no error: the round goes on without it, and rank 0 warns.
    One local step of plain SGD gives the gradient of the union of the parts, without the edges
    between them; otherwise it is not exact.

    Args:
        timeout: Seconds after the first client has ended a round in which others may end it, too.
        part: The part of this client with sums of neighbours at other clients, for the first layer:
            the model is called with its ``data.x`` and ``data.edge_index``.

    Raises:
        TypeError: If ``part`` is something else.
        ValueError: If ``timeout`` is not above 0.
    """

    exact = False

    def __init__(self, timeout: float = 300.0, part: ClientPart | None = None) -> None:
        self.timeout = checked_timeout(timeout)
        if part is not None and not isinstance(part, ClientPart):
            raise TypeError(f"part must be a ClientPart (got {type(part).__name__})")
        self.part = part

    def wrap(self, module: nn.Module, group: Any = None) -> FederatedReplica:
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
        return FederatedReplica(module, group, self.timeout, self.part)


class FederatedReplica(Replica):
    """The model of a client.

    Attributes:
        last_round: The round that ended last, with the ranks that counted; ``None`` at first.
    """

    def __init__(
        self, module: nn.Module, group: Any, timeout: float, part: ClientPart | None = None
    ) -> None:
        super().__init__(module)
        self._part = part
        self.last_round: Round | None = None
        self._rounds = Rounds(group, _average, packed(self._tensors()), timeout=timeout)
        self._finalizer = weakref.finalize(self, self._rounds.close)
        unpack(self._rounds.start(), self._tensors())

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As of the module; with a ``part``, its first layer knows all neighbours.

        Raises:
            ValueError: If the first layer aggregates something else than the part has.
            RuntimeError: If there is a part, and no layer was given its features and edges.
        """
        with nullcontext() if self._part is None else self._part.within(self.module):
            return super().forward(*inputs, **kwargs)

    @property
    def rank_state(self) -> Rounds:
        """See :class:`~pyg_scale.parallel.base.HasRankState`: the number of the next round."""
        return self._rounds

    @property
    def seconds_waited(self) -> float:
        """See :class:`~pyg_scale.parallel.base.CountsWaiting`: for answers of rank 0."""
        return self._rounds.waited.seconds

    @property
    def gone(self) -> dict[int, str]:
        """The clients that have left, with the reason of each. On rank 0."""
        return self._rounds.gone

    @contextmanager
    def round(self, num_samples: int | None = None) -> Iterator[None]:
        """Within it, this client trains alone; at its end all get the average.

        Args:
            num_samples: The weight of this client; by default the number of seeds of all calls of
                ``backward`` within the round. A client with 0 only gets the average.

        Raises:
            ValueError: If ``num_samples`` is negative.
            CommError: If rank 0 is gone, or no client has brought a model.
            CommTimeoutError: If rank 0 does not answer in time.
        """
        if num_samples is not None and num_samples < 0:
            raise ValueError(f"num_samples must not be negative (got {num_samples})")
        self.seeds = self.steps = 0
        yield
        samples = self.seeds if num_samples is None else num_samples
        weight = torch.tensor([samples], dtype=torch.float64)
        self.last_round = self._rounds.end([weight, *packed(self._tensors())])
        unpack(self.last_round.result, self._tensors())
        self.seeds = self.steps = 0

    def join(self, *steps: Any) -> Any:
        """Return :meth:`round`, so that a loop for other wrappers makes one in each epoch."""
        functions_of(steps)
        return self.round()

    def leave(self) -> None:
        """Take part in no more rounds, as a client other than rank 0.

        Raises:
            ValueError: On rank 0.
        """
        self._rounds.leave()

    def close(self) -> None:
        """End. Rank 0 first waits, for a minute at most, until the others have ended.

        It is called when the module is no longer used, and at the end of the process.
        """
        self._finalizer()

    def _tensors(self) -> list[Tensor]:
        return [t.detach() for t in (*self.module.parameters(), *self.module.buffers())]


def _average(brought: dict[int, list[Tensor]]) -> list[Tensor]:
    """The mean of the models of clients, in the order of ranks."""
    if not brought:
        raise CommError("no client has brought a model")
    weights = {rank: float(tensors[0]) for rank, tensors in brought.items()}
    total = sum(weights.values())
    found: list[Tensor] = []
    for packs in zip(*(tensors[1:] for _, tensors in sorted(brought.items()))):
        if not packs[0].is_floating_point():
            found.append(torch.stack(packs).amax(0))
            continue
        mean = torch.zeros_like(packs[0], dtype=torch.float64)
        same = torch.ones_like(packs[0], dtype=torch.bool)
        for weight, pack in zip((weights[rank] for rank in sorted(weights)), packs):
            mean += pack.double() * (weight / total if total else 1 / len(weights))
            same &= pack == packs[0]
        # A mean of equal values need not be the value, to the bit; that of infinite ones is none.
        found.append(torch.where(same, packs[0], mean.to(packs[0].dtype)))
    return found
