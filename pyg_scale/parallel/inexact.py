"""Exchanges of halo rows that trade exactness for fewer bytes, or for time.

* :class:`SampledExchange`: a sample of the boundary in every step (BNS-GCN, Wan et al., MLSys
  2022).
* :class:`StaleExchange`: the rows and gradients of the step before, so that nobody waits for them
  (PipeGCN, Wan et al., ICLR 2022).
* :class:`Quantized`: rows in fewer bits, rounded at random so that they are right in the mean
  (AdaQP, Wan et al., MLSys 2023).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric import nn as pyg

from pyg_scale.graph.topology import NodeType
from pyg_scale.ops.raw_bytes import raw_bytes
from pyg_scale.parallel.exchange import Extension, HaloExchange, Rows, Wire, whole_gradients
from pyg_scale.parallel.peers import Peers
from pyg_scale.parallel.shard import Halo

BITS = ("int8", "bf16")
"""The forms of rows on a quantized wire."""

LINEAR: tuple[type, ...] = (
    pyg.APPNP,
    pyg.ARMAConv,
    pyg.GCN2Conv,
    pyg.GCNConv,
    pyg.GINConv,
    pyg.GatedGraphConv,
    pyg.GraphConv,
    pyg.LGConv,
    pyg.MixHopConv,
    pyg.RGCNConv,
    pyg.SAGEConv,
    pyg.SGConv,
    pyg.SSGConv,
    pyg.TAGConv,
)
"""Layers whose aggregation is linear in the rows of neighbours, if it is a sum or a mean."""


class InexactExchange(HaloExchange):
    """An exchange of which a step of training depends on the number of the step, or on others.

    It is a :class:`~pyg_scale.parallel.base.RankState`, so that a run which is resumed goes on with
    the same bits.

    Args:
        halos: The halo of each node type.
        peers: The ranks.
        wire: Sends what is not sent exactly.
    """

    _entries: tuple[str, ...] = ("step",)

    def __init__(self, halos: dict[NodeType, Halo], peers: Peers, wire: Wire) -> None:
        super().__init__(halos, peers)
        self._inexact, self._training, self._step = wire, True, 0

    @property
    def rank_state(self) -> InexactExchange:
        return self

    def begin(self, training: bool) -> None:
        self._training = training
        if training:
            self._step += 1
            self._inexact.begin(self._step)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and what else the next one depends on.

        Raises:
            CommError: If rows are under way, and a rank is gone or late; names it.
        """
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Every rank calls it.

        Raises:
            ValueError: If it is of other options, its step counts no steps, or its rows are of
                other nodes or not as many as those. The same on all ranks.
            CommError: If a rank is gone or late; names it.
        """
        with self.peers.together():
            self._check(state)
        self._step = state["step"]

    def _check(self, state: Mapping[str, Any]) -> None:
        if state.keys() != set(self._entries):
            raise ValueError(
                f"the state of the halo has {', '.join(sorted(state))}, as it was saved with other "
                "options: give the same ones, or say what to load with only="
            )
        step = state["step"]
        if type(step) is not int or step < 0:
            raise ValueError(
                f"the step of a state must be the number of steps so far, at least 0 (got {step!r})"
            )


# A sample of the boundary ######################################################################


class SampledExchange(InexactExchange):
    """Exchanges ``round(p n)`` of the ``n`` rows of each pair of ranks, times ``n / round(p n)``.

    The draw is keyed by the step and the pair, so that both ends know it. Rows that were not drawn
    are 0, so that sums and means are right in the mean over draws. Degrees, the graph's own
    features and evaluations (``model.eval()``) are exact.

    Args:
        halos: The halo of each node type.
        peers: The ranks.
        share: The share of rows, above 0 and at most 1.
        seed: Seed of the draws, the same on all ranks.
    """

    def __init__(self, halos: dict[NodeType, Halo], peers: Peers, share: float, seed: int) -> None:
        super().__init__(halos, peers, Wire(peers))
        self._share, self._seed = share, seed
        self._drawn: dict[NodeType, Rows] = {}

    def begin(self, training: bool) -> None:
        super().begin(training)
        self._drawn = {}

    def extend(self, node_type: NodeType, tensors: Sequence[Tensor]) -> Extension:
        if not self._training:
            return self.exactly(node_type, tensors)
        if node_type not in self._drawn:
            self._drawn[node_type] = self._draw(node_type)
        return self.swapped(self._drawn[node_type], self._inexact, tensors)

    def _draw(self, node_type: NodeType) -> Rows:
        halo, own = self.halos[node_type], self.peers.rank
        place, num_received = self._chosen(
            node_type, halo.num_received, [(rank, own) for rank in range(self.peers.size)]
        )
        chosen, num_sent = self._chosen(
            node_type, halo.num_sent, [(own, rank) for rank in range(self.peers.size)]
        )
        factors = [n / max(1, m) for n, m in zip(halo.num_received, num_received, strict=True)]
        scale = torch.tensor(factors, dtype=torch.float64).repeat_interleave(
            torch.tensor(num_received)
        )
        device = halo.send.device
        return Rows(
            halo.num_own,
            halo.num_halo,
            halo.send[chosen.to(device)],
            num_sent,
            num_received,
            place.to(device),
            scale.to(device),
        )

    def _chosen(
        self, node_type: NodeType, sizes: list[int], pairs: list[tuple[int, int]]
    ) -> tuple[Tensor, list[int]]:
        """Positions of the rows that are drawn, by rank, and how many those are."""
        found, counts, begin = [], [], 0
        number = list(self.halos).index(node_type)
        for size, (sender, receiver) in zip(sizes, pairs, strict=True):
            counts.append(round(self._share * size))
            key = (self._seed, self._step, number, sender, receiver)
            draw = torch.randperm(size, generator=generator_of(*key))[: counts[-1]]
            found.append(begin + draw.sort().values)
            begin += size
        return torch.cat(found), counts


def generator_of(*key: int) -> torch.Generator:
    """A generator on the CPU whose draws are a function of integers."""
    state = 0
    for part in key:  # SplitMix64, a bijection of each part
        state = (state + part + 0x9E3779B97F4A7C15) % 2**64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return torch.Generator().manual_seed(state >> 1)


# Rows of the step before #######################################################################


class StaleExchange(InexactExchange):
    """Uses the rows that were sent in the step before, and gradients likewise.

    What is sent in a step is waited for in the next one, so it goes while ranks compute. In the
    first step the halo is 0. Without changes of parameters, inputs and dropout, gradients of a
    model with ``L`` exchanges a step are exact after ``2 L - 1`` steps. Evaluations are exact, and
    change nothing.

    Args:
        halos: The halo of each node type.
        peers: The ranks.
        smoothing: What is kept of older rows and gradients, at least 0 and below 1: values are
            ``smoothing * old + (1 - smoothing) * new``.
        wire: Sends them.
    """

    _entries = ("step", "nodes", "rows", "gradients")

    def __init__(
        self, halos: dict[NodeType, Halo], peers: Peers, smoothing: float, wire: Wire
    ) -> None:
        super().__init__(halos, peers, wire)
        self._rows = Delayed(wire, smoothing)
        self._gradients = Delayed(wire, smoothing)
        self._place = 0

    def begin(self, training: bool) -> None:
        super().begin(training)
        self._place = 0

    def extend(self, node_type: NodeType, tensors: Sequence[Tensor]) -> Extension:
        if not self._training or self.peers.size == 1:
            return self.exactly(node_type, tensors)
        place, self._place = self._place, self._place + 1
        rows = self._all[node_type]
        whole = list(_ExtendStale.apply(rows, self._rows, self._gradients, place, *tensors))
        return Extension(whole)

    def state_dict(self) -> dict[str, Any]:
        rows, gradients = self._rows.state_dict(), self._gradients.state_dict()
        nodes = self._nodes() if rows else ""
        return {**super().state_dict(), "nodes": nodes, "rows": rows, "gradients": gradients}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._rows.load_state_dict(state["rows"], self.peers.device)
        self._gradients.load_state_dict(state["gradients"], self.peers.device)

    def _check(self, state: Mapping[str, Any]) -> None:
        super()._check(state)
        if state["rows"] and state["nodes"] != self._nodes():
            raise ValueError(
                "the state has rows of other halo nodes than those of this rank, as the graph was "
                "partitioned otherwise: to begin without rows, say what to load with only="
            )
        received = {sum(halo.num_received) for halo in self.halos.values()}
        sent = {sum(halo.num_sent) for halo in self.halos.values()}
        for name, sizes in (("rows", received), ("gradients", sent)):
            kept = [
                row for each in state[name].values() for rows in each.values() for row in rows or ()
            ]
            if any(row.size(0) not in sizes for row in kept):
                raise ValueError(
                    f"the {name} of the state are not as many as the halo of this rank has: load "
                    "the state that it saved, or say what to load with only="
                )

    def _nodes(self) -> str:
        """A digest of the nodes whose rows come and go, in their order."""
        digest = hashlib.blake2b(digest_size=16)
        for halo in self.halos.values():
            sizes = torch.tensor([halo.num_received, halo.num_sent])
            for each in (sizes, halo.halo_ids, halo.own_ids[halo.send.cpu()]):
                digest.update(raw_bytes(each.contiguous()).numpy().data)
        return digest.hexdigest()


class Delayed:
    """Messages that are used in the step after the one in which they were sent.

    Args:
        wire: Sends them.
        smoothing: See :class:`StaleExchange`.
    """

    def __init__(self, wire: Wire, smoothing: float) -> None:
        self._wire, self._smoothing = wire, smoothing
        self._under_way: dict[int, Callable[[], list[Tensor]]] = {}
        self._used: dict[int, list[Tensor]] = {}

    def swap(
        self, place: int, tensors: Sequence[Tensor], num_received: list[int], num_sent: list[int]
    ) -> list[Tensor]:
        """Send rows, and return what was received for those of the step before.

        Args:
            place: The place of the exchange among those of a step.
            tensors: See :meth:`~pyg_scale.parallel.exchange.Wire.start`, as all others.
            num_received: Number of rows from each rank.
            num_sent: Number of rows to each rank.
        """
        finish = self._under_way.pop(place, None)
        found = None if finish is None else finish()
        self._under_way[place] = self._wire.start(tensors, num_received, num_sent, later=True)
        size = sum(num_received)
        if found is None or not _are_alike(found, tensors):
            return [tensor.new_zeros(size, *tensor.shape[1:]) for tensor in tensors]
        if kept := self._smoothing:
            old = self._used.get(place)
            if old is not None and _are_alike(old, tensors):
                found = [kept * was + (1 - kept) * new for was, new in zip(old, found, strict=True)]
            self._used[place] = found
        return found

    def state_dict(self) -> dict[int, Any]:
        """By place the rows that are used next, and those used last, which smoothing needs.

        Raises:
            CommError: If a rank is gone or late; names it.
        """
        self._wait()
        return {
            place: {"next": finish(), "used": self._used.get(place)}
            for place, finish in self._under_way.items()
        }

    def load_state_dict(self, state: Mapping[int, Any], device: torch.device) -> None:
        """Go on from a state, in the place of all rows that there are.

        Args:
            state: Of as many rows.
            device: Where they are to be.

        Raises:
            CommError: If rows are under way, and a rank is gone or late; names it.
        """
        self._wait()
        here = {
            place: {name: rows and [row.to(device) for row in rows] for name, rows in each.items()}
            for place, each in state.items()
        }
        self._under_way = {place: partial(list, each["next"]) for place, each in here.items()}
        self._used = {place: each["used"] for place, each in here.items() if each["used"]}

    def _wait(self) -> None:
        """Wait for all rows that are under way; they stay here until they are used."""
        for place, finish in self._under_way.items():
            self._under_way[place] = partial(list, finish())


def _are_alike(rows: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """True if rows have the shapes of others, whatever their number."""
    return [each.shape[1:] for each in rows] == [each.shape[1:] for each in others]


class _ExtendStale(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Rows, values: Delayed, gradients: Delayed, place: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.rows, ctx.gradients, ctx.place = rows, gradients, place
        ctx.like = [(tensor.shape[1:], tensor.dtype) for tensor in tensors]
        ctx.set_materialize_grads(False)
        sent = [tensor.index_select(0, rows.send) for tensor in tensors]
        found = values.swap(place, sent, rows.num_received, rows.num_sent)
        return tuple(rows.joined(*both) for both in zip(tensors, found, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        rows = ctx.rows
        whole = whole_gradients(grads, ctx.like, rows)
        sent = [rows.returned(grad) for grad in whole]
        found = ctx.gradients.swap(ctx.place, sent, rows.num_sent, rows.num_received)
        added = (rows.added(*both) for both in zip(whole, found, strict=True))
        return None, None, None, None, *added


# Fewer bits ####################################################################################


class QuantizedExchange(InexactExchange):
    """Exchanges rows and gradients in fewer bits; degrees and the graph's own features as they are.

    Args:
        halos: The halo of each node type.
        peers: The ranks.
        wire: Sends them.
    """

    def extend(self, node_type: NodeType, tensors: Sequence[Tensor]) -> Extension:
        wire = self._inexact if self._training else self._wire
        return self.swapped(self._all[node_type], wire, tensors)


class Quantized(Wire):
    """Sends floating point rows in 8 or 16 bits a number, rounded at random up or down.

    ``"int8"``: each row has 255 equal steps from its least to its largest number, and two
    ``float32`` along. An error is below one step. ``"bf16"``: the first 16 bits of ``float32``; an
    error is below ``2**-7`` of the number. Both are right in the mean. Draws are keyed by the step
    and the rank.

    Args:
        peers: The ranks.
        bits: One of :data:`BITS`.
        seed: Seed of the rounding.
    """

    def __init__(self, peers: Peers, bits: str, seed: int) -> None:
        super().__init__(peers)
        self._bits, self._seed = bits, seed
        self._generator = torch.Generator(peers.device)

    def begin(self, step: int) -> None:
        key = generator_of(self._seed, self.peers.rank, step)
        self._generator.manual_seed(key.initial_seed())

    def encoded(self, tensor: Tensor) -> Tensor:
        rows = super().encoded(tensor)
        if not rows.is_floating_point():
            return rows
        draws = torch.rand(rows.shape, generator=self._generator, device=rows.device)
        return rounded_bf16(rows, draws) if self._bits == "bf16" else rounded_int8(rows, draws)

    def decoded(self, rows: Tensor, like: Tensor) -> Tensor:
        if not like.is_floating_point():
            return super().decoded(rows, like)
        if self._bits == "bf16":
            return super().decoded(rows.to(like.dtype), like)
        return super().decoded(values_of_int8(rows, like.dtype), like)


def rounded_int8(rows: Tensor, draws: Tensor) -> Tensor:
    """``uint8`` ``[n, width + 8]``: steps, and as bytes the least number of a row and its step.

    Args:
        rows: Finite numbers ``[n, width]``.
        draws: Uniform from 0 to 1, ``float32`` ``[n, width]``.
    """
    if not rows.numel():
        return torch.zeros(rows.size(0), rows.size(1) + 8, dtype=torch.uint8, device=rows.device)
    exact = rows.to(_widest(rows.dtype))
    least, most = (end.view(-1, 1) for end in exact.aminmax(dim=1))
    low = least.float()
    step = ((most - low.to(exact.dtype)) / 255).float()
    places = (exact - low.to(exact.dtype)) / step.to(exact.dtype).clamp(min=1e-38)
    steps = (places + draws).floor().clamp(0, 255).to(torch.uint8)
    return torch.cat([steps, torch.cat([low, step], dim=1).view(torch.uint8)], dim=1)


def values_of_int8(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers ``[n, width]`` of :func:`rounded_int8`."""
    ends = rows[:, -8:].contiguous().view(torch.float32).to(_widest(dtype))
    return (ends[:, :1] + rows[:, :-8].to(ends.dtype) * ends[:, 1:]).to(dtype)


def _widest(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def rounded_bf16(rows: Tensor, draws: Tensor) -> Tensor:
    """``bfloat16`` ``[n, width]``, one of the two next to each number.

    Args:
        rows: Finite numbers ``[n, width]``.
        draws: Uniform from 0 to 1, ``float32`` ``[n, width]``.
    """
    bits = rows.float().view(torch.int32)
    moved = bits + (draws * 65536).to(torch.int32).clamp(max=65535)
    return (moved & -65536).view(torch.float32).to(torch.bfloat16)
