"""A module on one graph that ranks share: inputs, and gradients that are a mean over all seeds."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pyg_scale.parallel.base import (
    GraphParallel,
    RankState,
    differentiate,
    differentiating,
    marked,
)
from pyg_scale.parallel.compression import Compressor
from pyg_scale.parallel.exchange import HaloExchange
from pyg_scale.parallel.layers import GraphLayers, check_module
from pyg_scale.parallel.mean import MeanModule, mean_over_seeds
from pyg_scale.parallel.peers import Peers
from pyg_scale.parallel.replica import is_forgotten, versions_of
from pyg_scale.parallel.shard import Shard


class SharedGraph(GraphParallel):
    """A method whose ranks meet, agree on the module and the options, and take their shares."""

    def wrap(
        self,
        module: nn.Module,
        group: Any = None,
        *,
        graph: Any = None,
        inputs: Sequence[str] | None = None,
        mesh: Any = None,
    ) -> GraphModule:
        """Wrap a module; see :meth:`GraphParallel.wrap`.

        Raises:
            RuntimeError: If ``torch.distributed`` was not initialised.
            TypeError: If ``graph`` is not an opened graph, or ``mesh`` is of no use.
            ValueError: If the module has layers that the method cannot divide, the graph does not
                suit it or the ranks, or ranks have different options. The same on all ranks.
            CommError: If a rank is gone or late; names it.
        """
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        peers = Peers(group, device)
        with peers.together():
            self.check(module, peers, mesh)
        said = peers.gather(self.options())
        if any(each != said[0] for each in said):
            raise ValueError(f"ranks have different options: {said}")
        return self.divided(module, peers, graph, inputs, mesh)

    def check(self, module: nn.Module, peers: Peers, mesh: Any) -> None:
        """Refuse what the method cannot do. No collective may be called.

        Raises:
            TypeError: If ``mesh`` is of no use.
            ValueError: If the module has layers that the method cannot divide.
        """
        if mesh is not None:
            raise TypeError(
                f"{type(self).__name__} divides one dimension: give it group= and not mesh=, or "
                "use 'mesh'"
            )
        check_module(module)

    def options(self) -> list[Any]:
        """The options, which all ranks must have in common, as JSON knows them."""
        return []

    @abstractmethod
    def divided(
        self,
        module: nn.Module,
        peers: Peers,
        graph: Any,
        inputs: Sequence[str] | None,
        mesh: Any,
    ) -> GraphModule:
        """The wrapped module, of a module that :meth:`check` has accepted on every rank."""


class GraphModule(MeanModule):
    """A wrapped module; see :class:`~pyg_scale.parallel.GraphParallelModule`.

    A subclass makes :attr:`layers` at the end of its constructor.

    Args:
        module: The module.
        shard: The share of this rank.
        peers: The ranks.
        inputs: See :meth:`~pyg_scale.parallel.GraphParallel.wrap`.
        exchange: The exchange of halo rows.
        compressor: Adds up gradients instead of an all-reduce.

    Raises:
        ValueError: If the graph has no such input. The same on all ranks.

    Attributes:
        layers: The layers of the module.
    """

    layers: GraphLayers

    def __init__(
        self,
        module: nn.Module,
        shard: Shard,
        peers: Peers,
        inputs: Sequence[str] | None,
        exchange: HaloExchange,
        compressor: Compressor | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.shard, self.peers, self.exchange = shard, peers, exchange
        self._compressor = compressor
        default = ("x_dict", "edge_index_dict") if shard.is_hetero else ("x", "edge_index")
        with peers.together():
            names = default if inputs is None else tuple(inputs)
            self.inputs = {name: _moved(shard.input(name), peers.device) for name in names}
        peers.broadcast([*module.parameters(), *module.buffers()])

    def constant(self) -> list[Tensor]:
        """The tensors that never change."""
        return [each for value in self.inputs.values() for each in _tensors_of(value)]

    @property
    def seconds_waited(self) -> float:
        """See :class:`~pyg_scale.parallel.base.CountsWaiting`: in exchanges with other ranks."""
        return self.peers.waited.seconds

    @property
    def own_nodes(self) -> Any:
        """The original ids of this rank's nodes; see the contract."""
        ids = self.shard.own_ids
        return ids if self.shard.is_hetero else ids[None]

    def attached(self) -> AbstractContextManager[Any]:
        """The context in which the layers of the module are those of the whole graph."""
        return self.layers.attached()

    def forward(self, **replaced: Any) -> Any:
        """The outputs of own nodes.

        Args:
            **replaced: Inputs by name, with rows of own nodes as in :attr:`own_nodes`.

        Raises:
            TypeError: If the name is not one of the inputs.
            ValueError: If there is not a row for each own node.
            CommError: If a rank is gone or late; names it.
        """
        self.exchange.begin(self.training)
        values = {**self.inputs, **replaced}
        for name, value in replaced.items():
            if name not in self.inputs:
                raise TypeError(
                    f"{name} is not one of the inputs {', '.join(self.inputs)}: see wrap(inputs=)"
                )
            _check_rows(name, value, self.inputs[name])
        with self.peers.announced(), self.attached():
            return marked(self.module(*values.values()))

    def backward(self, loss: Tensor, num_seeds: int) -> None:
        """See :meth:`~pyg_scale.parallel.ParallelModule.backward`.

        Raises:
            RuntimeError: If ``zero_grad`` was forgotten.
            ValueError: If ``num_seeds`` is negative, or ``loss`` does not come from the model.
            CommError: If a rank is gone or late; names it.
        """
        num_seeds = operator.index(num_seeds)
        if num_seeds < 0:
            raise ValueError(f"num_seeds must not be negative (got {num_seeds})")
        if not loss.requires_grad:
            raise ValueError(
                "loss does not come from the model: compute it from the model's output, also on a "
                "rank without seeds"
            )
        if self._seeds is not None and is_forgotten(self.module, self._versions):
            self._seeds = None
        if self._seeds is None and any(
            p.grad is not None and bool(p.grad.any()) for p in self.module.parameters()
        ):
            raise RuntimeError(
                "gradients of an earlier step are still there: call optimizer.zero_grad() first; "
                "to add up gradients of several steps use no_sync()"
            )
        with self.peers.announced(), self.attached(), differentiating(self):
            differentiate(loss, num_seeds, is_marked=True)
        self._seeds = (self._seeds or 0) + num_seeds
        if self._exchanges:
            self._average()
        else:
            self._versions = versions_of(self.module)

    def _average(self) -> None:
        """Sums of gradients over the ranks, by the number of all seeds."""
        seeds, self._seeds = self._seeds or 0, None
        self.all_seeds = mean_over_seeds(self.module, seeds, self.peers, self._compressor)

    @property
    def rank_state(self) -> RankState | None:
        """See :class:`~pyg_scale.parallel.base.HasRankState`: of gradients, of the halo, or both.

        It is what this rank has not sent of gradients, and what the exchange of the halo keeps.
        """
        gradients, halo = self._compressor, self.exchange.rank_state
        if gradients is None or halo is None:
            return halo if gradients is None else gradients
        return _Both(gradients, halo)

    def join(self, *steps: Any) -> AbstractContextManager[Any]:
        """An empty context: all ranks make the same number of steps.

        Raises:
            TypeError: If ``steps`` are not what follows ``backward``.
        """
        if not steps or not all(callable(getattr(step, "step", step)) for step in steps):
            raise TypeError("join() takes what follows backward(): the optimizer, or functions")
        return nullcontext()


class _Both:
    """The states of gradients and of the halo; see :class:`~pyg_scale.parallel.base.RankState`."""

    def __init__(self, gradients: RankState, halo: RankState) -> None:
        self._parts = {"gradients": gradients, "halo": halo}

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != self._parts.keys():
            raise ValueError(
                f"the state has {', '.join(sorted(state))} and not both gradients and halo, as it "
                "was saved with other options: give the same ones, or say what to load with only="
            )
        for name, part in self._parts.items():
            part.load_state_dict(state[name])


def _tensors_of(value: Any) -> list[Tensor]:
    """The tensors of an input."""
    return [value] if isinstance(value, Tensor) else list(value.values())


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return {kind: tensor.to(device) for kind, tensor in value.items()}


def _check_rows(name: str, value: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        if not isinstance(value, dict) or value.keys() != expected.keys():
            raise ValueError(f"{name} must be a dictionary of {', '.join(map(str, expected))}")
        for kind, each in value.items():
            _check_rows(f"{name}[{kind!r}]", each, expected[kind])
    elif not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != expected.shape[0]:
        found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"{name} must have rows of own nodes only, {expected.shape[0]} of them (got {found})"
        )
