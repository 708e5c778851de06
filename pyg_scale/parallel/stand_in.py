"""A step of one rank on a small stand-in of its share, of which all operations are counted.

A stand-in has a share's own nodes, halo nodes and edges in the same proportions, and its exchanges
bring zeros. So a step of any model makes the tensors of a real one, by a factor smaller.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.parallel import sequential
from pyg_scale.parallel.base import Waited
from pyg_scale.parallel.exchange import HaloExchange
from pyg_scale.parallel.feature import FeatureLayers
from pyg_scale.parallel.halo_layers import HaloLayers
from pyg_scale.parallel.live import LiveBytes, Operation
from pyg_scale.parallel.peers import Alone
from pyg_scale.parallel.remat import RematLayers
from pyg_scale.parallel.shard import Halo, sizes_of
from pyg_scale.parallel.shares import Sizes

_ROWS = 4_000  # nodes and edges of a stand-in
_MOST = 60_000


@dataclass(frozen=True)
class Division:
    """The numbers of ranks in dimensions of a mesh, and how the halo comes.

    Attributes:
        partition: Ranks that divide nodes and exchange halo rows.
        feature: Ranks that divide channels where edges are followed.
        remat: Whether the halo comes in blocks.
    """

    partition: int
    feature: int = 1
    remat: bool = False


@dataclass
class Step:
    """Everything that a rank does in a step, once it knows the graph's features.

    Attributes:
        memory: Bytes that live at most at a time, with those of the features and edges.
        sent: Bytes that it sends to others.
        messages: Number of exchanges.
        computing: Seconds that its operations take.
    """

    memory: float
    sent: float
    messages: float
    computing: float


def step_of(
    module: nn.Module,
    x: Tensor,
    sizes: Sizes,
    division: Division,
    seconds: Callable[[Operation], float],
) -> Step:
    """A step of a rank, from steps of stand-ins of two sizes, in a line.

    Args:
        module: Takes ``x`` and ``edge_index``; it is not changed.
        x: Rows of features: of these only width and dtype are used.
        sizes: The sizes of the share.
        division: How the ranks divide it.
        seconds: The time that an operation takes.
    """
    wanted = _ROWS
    if division.remat:  # pieces have one size, whatever that of the share
        wanted = min(_MOST, (division.partition + 1) * sequential.EDGES_AT_ONCE)
    if sizes.rows <= 2 * wanted:
        return _priced(_counted(module, x, sizes, division), seconds)
    by = sizes.rows / wanted
    base = sizes.scaled(1 / by)
    counted = [_counted(module, x, base.scaled(n), division) for n in (1, 2)]
    one, two = (_priced(each, seconds) for each in counted)

    def at(first: float, second: float) -> float:
        return first + (second - first) * (by - 1)

    first, second = (each.operations for each in counted)
    if [each.name for each in first] == [each.name for each in second]:
        # Each grows by itself: the time of one is no line where memory is made anew.
        grown = (
            Operation(a.name, *(int(at(*pair)) for pair in zip(a[1:], b[1:], strict=True)))
            for a, b in zip(first, second, strict=True)
        )
        computing = sum(map(seconds, grown))
    else:  # there are more of them, of one size each
        computing = at(one.computing, two.computing)
    return Step(
        at(one.memory, two.memory),
        at(one.sent, two.sent),
        at(one.messages, two.messages),
        computing,
    )


@dataclass
class _Counts:
    """Counts of a step of a stand-in; see :class:`Step`."""

    memory: float
    sent: float
    messages: float
    operations: list[Operation]


def _priced(counts: _Counts, seconds: Callable[[Operation], float]) -> Step:
    computing = sum(map(seconds, counts.operations))
    return Step(counts.memory, counts.sent, counts.messages, computing)


def _counted(module: nn.Module, x: Tensor, sizes: Sizes, division: Division) -> _Counts:
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        return _Rank(copy.deepcopy(module).train(), x, sizes, division).steps()


class _Silent(Alone):
    """Ranks of which nothing but zeros comes.

    Args:
        device: The device of the model.
        size: Number of ranks.

    Attributes:
        sent: Bytes that were sent to them.
        messages: Number of exchanges.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        super().__init__(device)
        self.size, self.sent, self.messages, self.waited = size, 0.0, 0, Waited()

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        num_received: list[int],
        num_sent: list[int],
        later: bool = False,
    ) -> Callable[..., None]:
        if self.size > 1:
            row = sent.nbytes / max(1, sum(num_sent))
            self.sent += row * (sum(num_sent) - num_sent[self.rank])
            self.messages += 1
        received.zero_()
        return lambda *_: None

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor


class _Rank:
    """A rank with a stand-in of its share; see :func:`step_of`."""

    def __init__(self, module: nn.Module, x: Tensor, sizes: Sizes, division: Division) -> None:
        self.module, self.division = module, division
        parameter = next(module.parameters())
        device = parameter.device
        own = sizes_of(sizes.own, division.feature)
        self.x = torch.zeros(own[0], *x.shape[1:], dtype=parameter.dtype, device=device)
        self.edges = _edges(sizes).to(device)
        self.rows = _Silent(device, division.partition)
        self.columns = _Silent(device, division.feature)
        halos: dict[NodeType, Halo] = {None: _halo(sizes, division.partition, device)}
        edges: dict[EdgeType, Tensor] = {None: self.edges}
        exchange, peers = HaloExchange(halos, self.rows), Alone(device)
        if division.feature > 1:
            self.layers: HaloLayers = FeatureLayers(
                module, edges, exchange, self.columns, peers, {None: own}, [self.x, self.edges]
            )
        else:
            kind = RematLayers if division.remat else HaloLayers
            self.layers = kind(module, edges, exchange, peers, [self.x, self.edges])

    def steps(self) -> _Counts:
        """Two steps, of which the second is counted; the memory is that of both."""
        given = self.x.nbytes + self.edges.nbytes
        with LiveBytes([self.x, self.edges, *self.module.parameters()]) as live:
            self._step()
            live.operations.clear()
            before = [(each.sent, each.messages) for each in (self.rows, self.columns)]
            self._step()
            after = [(each.sent, each.messages) for each in (self.rows, self.columns)]
        sent, messages = (
            float(sum(b[i] - a[i] for a, b in zip(before, after, strict=True))) for i in (0, 1)
        )
        return _Counts(given + live.most, sent, messages, live.operations)

    def _step(self) -> None:
        self.module.zero_grad()
        with self.layers.attached():
            out = self.module(self.x, self.edges)
            out.sum().backward()


def _edges(sizes: Sizes) -> Tensor:
    """Edges ``[2, num_edges]`` by destination, none of which is a self-loop of a large graph."""
    own, halo = max(1, sizes.own), max(1, sizes.halo)
    parts = []
    for first, nodes, number, crossing in (
        (0, sizes.outer, sizes.outer_edges, sizes.crossing),
        (sizes.outer, own - sizes.outer, sizes.inner_edges, 0),
    ):
        nth = torch.arange(number)
        end = (first + nth % max(1, nodes)) % own
        start = (end + 1 + nth // max(1, nodes)) % own
        parts.append(torch.stack([torch.where(nth < crossing, own + nth % halo, start), end]))
    edges = torch.cat(parts, dim=1)
    return edges[:, edges[1].argsort(stable=True)]


def _halo(sizes: Sizes, ranks: int, device: torch.device) -> Halo:
    others = max(1, ranks - 1)
    return Halo(
        sizes.own,
        sizes.halo,
        torch.arange(sizes.sent, device=device) % max(1, sizes.own),
        [0, *sizes_of(sizes.sent, others)][:ranks],
        [0, *sizes_of(sizes.halo, others)][:ranks],
        torch.arange(sizes.own),
        torch.arange(sizes.halo),
    )
