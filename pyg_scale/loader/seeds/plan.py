"""Batches of nearly equal cost: planned from degrees, cut where one exceeds its budget.

The plan of an epoch is a function of its seed and number. Seeds with a large estimate are dealt out
first, each to the batch that has the least so far (Graham: "Bounds on multiprocessing timing
anomalies", 1969); all others fill up the batches in shuffled order. How many batches there are is
found when the loader is made: some batches of epoch 0 of seed 0 are sampled, and their number
changes until the largest of them is just within the budget. Beside a hub, a seed that is a large
part of its batch, others are fewer, and share less than estimated: its batch is sampled, too, and
its weight corrected by how much more than others the batch cost.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import TensorAttr
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from pyg_scale.errors import BudgetError
from pyg_scale.graph.topology import NodeType
from pyg_scale.loader.batch.features import Features
from pyg_scale.loader.seeds.budget import Budget, Costs, costs_of
from pyg_scale.loader.seeds.epoch import BatchIndex, listed_order
from pyg_scale.loader.seeds.estimate import CostEstimate
from pyg_scale.loader.seeds.sharding import fingerprint
from pyg_scale.ops import keys
from pyg_scale.sampler.base import NeighborSampler, graph_of

_AIM, _LOW, _HIGH = 0.93, 0.87, 0.96  # of the budget, for the largest batch that is tried
_ROUNDS = 8
_TRIED = 8  # batches
_ALONE = 16  # seeds whose own neighbourhood is tried
_PIECE = 0.9  # of the budget, for pieces
_HEAVY = 64  # a seed is heavy if so many of it make a batch
_HUB = 8  # a seed is a hub if so many of it make a batch, and it costs as much as so many others
_MOST_HUBS = 4  # of which the batches are tried
_LEVEL = 1.05  # a batch with a hub costs no more of others' than this
_FIXED_POINT = 256


class Piece(NamedTuple):
    """A piece of a planned batch, from a place in its seeds to another.

    Attributes:
        begin: The place of its first seed.
        end: The place after its last one.
        out: What was sampled of it, and then its batch.
    """

    begin: int
    end: int
    out: Any


class Pieces(tuple[Piece, ...]):
    """All pieces of a planned batch, in order; one, if it was within its budget."""

    def plain(self) -> tuple[tuple[int, int, Any], ...]:
        """Tuples, which any process can send."""
        return tuple(tuple(piece) for piece in self)

    @staticmethod
    def apart(batch: BatchIndex, made: Sequence[Any]) -> Iterator[tuple[BatchIndex, Any]]:
        """The seeds and the result of each piece.

        Args:
            batch: The planned batch.
            made: :class:`Pieces`, or what :meth:`plain` made of them.
        """
        for number, (begin, end, out) in enumerate(made):
            piece = batch.part(begin, end, number, len(made))
            if isinstance(out, SamplerOutput | HeteroSamplerOutput):
                out._batch_key = piece.piece_key  # which rings do not send
                if number == 0 and hasattr(made, "_announced"):
                    out._announced = made._announced
            yield piece, out


class _Tried(NamedTuple):
    """Batches that were sampled to see what they cost.

    Attributes:
        num_batches: How many batches there would be.
        cost: The cost of each that was sampled, by its number.
        hubs: The batch of each seed that is a large part of it.
    """

    num_batches: int
    cost: dict[int, int]
    hubs: dict[int, int]

    def correct(self, extra: Tensor) -> bool:
        """Add to the weights of hubs what their batches cost more than usual ones.

        Args:
            extra: What is added to the weight of each seed so far, ``int64`` ``[num_seeds]``.

        Returns:
            True if it was little.
        """
        usual = sorted(each for n, each in self.cost.items() if n not in self.hubs.values())
        if not usual:
            return True
        middle, level = usual[len(usual) // 2], True
        for hub, number in self.hubs.items():
            more = self.cost[number] - middle
            extra[hub] += more * _FIXED_POINT // list(self.hubs.values()).count(number)
            level = level and more <= (_LEVEL - 1) * middle
        return level


class CostPlan:
    """The plan of a loader's batches.

    Args:
        budget: Of a batch.
        costs: The cost of what was sampled.
        estimate: The expected costs of the seeds.
        num_seeds: How many there are.
        shuffle: Whether seeds are shuffled. Otherwise batches are runs of them as they were given.
        sample: Samples a batch.
        name: Returns a seed, by its position, as text.

    Raises:
        BudgetError: If a seed's own neighbourhood exceeds the budget.
    """

    def __init__(
        self,
        budget: Budget,
        costs: Costs,
        estimate: CostEstimate,
        *,
        num_seeds: int,
        shuffle: bool,
        sample: Callable[[BatchIndex], Any],
        name: Callable[[int], str],
    ) -> None:
        self._budget, self._costs, self._name = budget, costs, name
        self._num_seeds, self._shuffle = num_seeds, shuffle
        self._weight = torch.ones(num_seeds, dtype=torch.int64)
        self.count = 0
        if num_seeds:
            self._check_alone(estimate.of_seeds(0.0), sample)
            self._find_count(estimate, sample)

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """The properties in which other plans differ."""
        return {"batch_cost": str(self._budget), "plan": f"{self.count} {self._digest}"}

    @functools.cached_property
    def _digest(self) -> str:
        return fingerprint([self._weight])

    # Planning ##############################################################################

    def of_epoch(self, seed: int, epoch: int) -> Callable[[int], Tensor]:
        """See :class:`~pyg_scale.loader.seeds.epoch.Cut`."""
        if not self._num_seeds:
            return lambda number: torch.empty(0, dtype=torch.int64)
        begin, seeds = self._planned(self._weight, self.count, seed, epoch)
        return lambda number: seeds[begin[number] : begin[number + 1]]

    def _planned(
        self, weight: Tensor, count: int, seed: int, epoch: int
    ) -> tuple[list[int], Tensor]:
        """The begins of ``count`` batches, and the end, in a list of the seeds."""
        if not self._shuffle:
            return runs(weight, count), torch.arange(self._num_seeds)
        ordered = listed_order(self._num_seeds, seed, epoch)
        batch = pack(weight[ordered], count)
        # Those with heavy seeds come in between the others.
        place = keys.permutation(keys.fold(0, seed, epoch, keys.SHUFFLE, 1), count).argsort()
        batch = place[batch]
        begin = torch.zeros(count + 1, dtype=torch.int64)
        begin[1:] = torch.bincount(batch, minlength=count).cumsum(0)
        return begin.tolist(), ordered[batch.argsort(stable=True)]

    def _check_alone(self, alone: Tensor, sample: Callable[[BatchIndex], Any]) -> None:
        costly = alone.argsort(descending=True, stable=True)[:_ALONE].tolist()
        for place in costly:
            if float(alone[place]) <= self._budget.most and self._costs.measure is None:
                return
            batch = BatchIndex(torch.tensor([place]), keys.batch_key(0, 0, 0))
            cost = self._costs.of(sample(batch))
            if cost > self._budget.most:
                raise self._too_much(place, cost)

    def _find_count(self, estimate: CostEstimate, sample: Callable[[BatchIndex], Any]) -> None:
        """Find the number of batches, and the weights of the seeds in batches of that size."""
        aim = _AIM * self._budget.most
        share = 1.0
        if self._costs.measure is not None:
            share = min(1.0, 32 / self._num_seeds)  # what a unit of it is worth is not known yet
        else:
            for _ in range(_ROUNDS):  # from above: twice the seeds cost at most twice as much
                total = float(_sum(estimate.of_seeds(share))) * share
                if total <= 1.05 * aim:
                    break
                share = max(share * aim / total, 0.5 / self._num_seeds)
        most, number = self._budget.most, self._num_seeds
        count, too_few = min(max(1, round(1 / share)), number), 0
        fits: tuple[int, Tensor] | None = None
        extra = torch.zeros(number, dtype=torch.int64)
        for _ in range(_ROUNDS):
            weight = (_fixed_point(estimate.of_seeds(1 / count)) + extra).clamp(min=1)
            asked, tried = count, self._tried(weight, count, sample)
            count, largest, level = (
                tried.num_batches,
                max(tried.cost.values()),
                tried.correct(extra),
            )
            if largest <= _HIGH * most or count == number:
                fits = count, weight
                if level and (largest >= _LOW * most or count <= too_few + 1):
                    break
            else:
                too_few = max(too_few, asked)  # of equal seeds, more may make as many batches
            fewer = number if fits is None else fits[0] - level
            count = min(max(math.ceil(count * largest / aim), too_few + 1), fewer)
        if fits is None:  # batches are split where they exceed the budget
            fits = len(self._planned(weight, count, 0, 0)[0]) - 1, weight
        self.count, self._weight = fits

    def _tried(self, weight: Tensor, count: int, sample: Callable[[BatchIndex], Any]) -> _Tried:
        """Sample some batches if there were ``count``, and those with hubs."""
        begin, seeds = self._planned(weight, count, 0, 0)
        count = len(begin) - 1
        some = torch.linspace(0, count - 1, min(count, _TRIED)).round().long().unique().tolist()
        total = int(weight.sum())
        least = total * max(1.0 / (_HUB * count), _HUB / self._num_seeds)
        heavy = (weight > int(least)).nonzero().view(-1)
        heavy = heavy[weight[heavy].argsort(descending=True, stable=True)][:_MOST_HUBS]
        hubs = {}
        for hub in heavy.tolist():
            number = bisect.bisect_right(begin, int((seeds == hub).nonzero())) - 1
            if begin[number + 1] - begin[number] > 1:  # one that is alone cannot have less
                hubs[hub] = number
        cost = {}
        for number in sorted({*some, *hubs.values()}):
            index = seeds[begin[number] : begin[number + 1]]
            batch = BatchIndex(index, keys.batch_key(0, 0, number))
            cost[number] = self._costs.of(sample(batch))
        return _Tried(count, cost, hubs)

    # Sampling ##############################################################################

    def sampled(self, batch: BatchIndex, sample: Callable[[BatchIndex], Any]) -> Pieces:
        """Sample a planned batch, and the pieces of it if it exceeds the budget.

        Raises:
            BudgetError: If a seed's own neighbourhood does.
        """
        return Pieces(self._within(batch, 0, len(batch), sample))

    def _within(
        self, batch: BatchIndex, begin: int, end: int, sample: Callable[[BatchIndex], Any]
    ) -> list[Piece]:
        out = sample(batch.part(begin, end))
        cost = self._costs.of(out)
        if cost <= self._budget.most:
            return [Piece(begin, end, out)]
        if end - begin == 1:
            raise self._too_much(int(batch.index[begin]), cost)
        del out
        wanted = -(-cost // max(1, int(_PIECE * self._budget.most)))
        cuts = runs(self._weight[batch.index[begin:end]], min(max(2, wanted), end - begin))
        pieces: list[Piece] = []
        for first, last in itertools.pairwise(cuts):
            pieces += self._within(batch, begin + first, begin + last, sample)
        return pieces

    def _too_much(self, place: int, cost: int) -> BudgetError:
        return BudgetError(
            f"the neighbourhood of {self._name(place)} alone costs {cost}, more than "
            f"batch_cost={self._budget}: raise the budget, or sample fewer neighbours"
        )


def pack(weight: Tensor, count: int) -> Tensor:
    """Deal out seeds to batches with nearly equal sums of weights.

    Args:
        weight: ``int64`` ``[num_seeds]``, at least 1, in the order in which seeds fill up batches.
        count: Number of batches, at most that of seeds.

    Returns:
        ``int64`` ``[num_seeds]``, the batch of each; none is empty.
    """
    total = int(weight.sum())
    heavy = weight * (count * _HEAVY) > total
    batch = torch.empty_like(weight)
    load = _deal_heavy(weight, heavy.nonzero().view(-1), count, batch)
    light = (~heavy).nonzero().view(-1)
    room = _room(load, int(weight[light].sum()))
    middle = weight[light].cumsum(0) * 2 - weight[light]
    batch[light] = torch.searchsorted(room.cumsum(0) * 2, middle, right=True).clamp(max=count - 1)
    return _fill_empty(batch, count)


def _deal_heavy(weight: Tensor, heavy: Tensor, count: int, batch: Tensor) -> Tensor:
    """Deal out heavy seeds, the heaviest first, and return the loads ``[count]``."""
    heavy = heavy[weight[heavy].argsort(descending=True, stable=True)]
    loads = [(0, number) for number in range(count)]
    dealt = []
    for each in weight[heavy].tolist():
        load, number = loads[0]
        heapq.heapreplace(loads, (load + each, number))
        dealt.append(number)
    batch[heavy] = torch.tensor(dealt, dtype=torch.int64)
    return torch.tensor([load for load, _ in sorted(loads, key=lambda pair: pair[1])])


def _room(load: Tensor, weight: int) -> Tensor:
    """The room of each batch if a weight levels them, as water does: ``int64`` ``[count]``."""
    ordered = load.sort().values
    number = torch.arange(1, load.numel() + 1)
    needed = ordered * number - ordered.cumsum(0)  # to fill those before up to each
    below = int((needed <= weight).sum())
    level = (weight + int(ordered[:below].sum())) // below
    room = (level - load).clamp(min=0)
    rest = weight - int(room.sum())
    room[(load <= level).nonzero().view(-1)[:rest]] += 1
    return room


def _fill_empty(batch: Tensor, count: int) -> Tensor:
    sizes = torch.bincount(batch, minlength=count)
    for number in (sizes == 0).nonzero().view(-1).tolist():
        donor = int(sizes.argmax())
        batch[(batch == donor).nonzero().view(-1)[-1]] = number
        sizes[donor] -= 1
        sizes[number] += 1
    return batch


def runs(weight: Tensor, count: int) -> list[int]:
    """Cut seeds into runs whose largest sum of weights is as small as can be.

    Args:
        weight: ``int64`` ``[num_seeds]``, at least 1.
        count: The most runs, at least 1.

    Returns:
        The begin of each run, and the end of the last one.
    """
    total = weight.cumsum(0)
    low, high = max(int(weight.max()), -(-int(total[-1]) // count)), int(total[-1])
    while low < high:
        middle = (low + high) // 2
        if len(_greedy(total, middle, count)) <= count + 1:
            high = middle
        else:
            low = middle + 1
    return _greedy(total, low, count)


def _greedy(total: Tensor, most: int, count: int) -> list[int]:
    """Runs of at most a weight each, as long as can be; stops when there are too many."""
    begin = [0]
    while begin[-1] < total.numel() and len(begin) <= count + 1:
        before = int(total[begin[-1] - 1]) if begin[-1] else 0
        begin.append(int(torch.searchsorted(total, before + most, right=True)))
    return begin


def _fixed_point(weight: Tensor) -> Tensor:
    """Weights as integers; what costs nothing counts a little, too."""
    return (weight * _FIXED_POINT).round().to(torch.int64) + 1


def _sum(weight: Tensor) -> Tensor:
    """The sum, added up one after the other, which every machine does alike."""
    return weight.cumsum(0)[-1]


# Loaders ###################################################################################


def each_piece(out: Any, function: Callable[[Any], Any]) -> Any:
    """The result of a function for each of some :class:`Pieces`, or for what is none."""
    if not isinstance(out, Pieces):
        return function(out)
    return Pieces(Piece(piece.begin, piece.end, function(piece.out)) for piece in out)


def wanted_of(wanted: Callable[[Any], list[TensorAttr]], out: Any) -> list[TensorAttr]:
    """The rows to announce of what was sampled: none of a batch that was cut, which is rare."""
    if not isinstance(out, Pieces):
        return wanted(out)
    return wanted(out[0].out) if len(out) == 1 else []


def refuse_beside_cost(
    budget: Any, kwargs: Mapping[str, Any], split_seeds: Any, split_batches: bool, own_stages: bool
) -> None:
    """Refuse arguments of a loader that mean nothing beside ``batch_cost=``.

    Args:
        budget: What was given as that.
        kwargs: Arguments of ``DataLoader``.
        split_seeds: The loader's.
        split_batches: The loader's.
        own_stages: Whether it has a ``collate_fn`` or ``filter_fn`` of its own.

    Raises:
        TypeError: If it is no :class:`Budget`.
        ValueError: If another argument says how seeds are cut into batches.
        NotImplementedError: If nobody knows what the loader's batches cost.
    """
    if not isinstance(budget, Budget):
        raise TypeError(
            f"batch_cost must be a Budget, such as Budget('edges', 50_000) (got {budget!r})"
        )
    for name in ("batch_size", "sampler", "batch_sampler", "drop_last"):
        if kwargs.get(name):
            raise ValueError(
                f"{name}={kwargs[name]!r} and batch_cost={budget} both say how seeds are cut into "
                "batches: leave out one of them"
            )
    if "batch_size" in kwargs:
        raise ValueError("batch_size=None makes no batches, but batch_cost= does: leave out one")
    if split_batches:
        raise ValueError(
            "split_batches=True shares the seeds of a step, but with batch_cost= each rank has a "
            "batch of that cost in every step: leave out one of them"
        )
    if split_seeds == "part":
        raise ValueError(
            "split_seeds='part' groups seeds by part, and batch_cost= by cost: use "
            "split_seeds='global'"
        )
    if own_stages:
        raise NotImplementedError(
            "batch_cost= cuts what is sampled, but this loader has a collate_fn or filter_fn of "
            "its own: pass transform= instead"
        )


def plan_of(
    budget: Budget,
    data: Any,
    features: Features | None,
    sampler: Any,
    seeds: Sequence[tuple[NodeType, Tensor]],
    *,
    shuffle: bool,
    collect: bool,
    sample: Callable[[BatchIndex], Any],
) -> CostPlan:
    """The plan of a loader.

    Args:
        budget: Of a batch.
        data: The loader's graph.
        features: Its features that come from a store.
        sampler: Its sampler.
        seeds: The nodes of its seeds: types and ids ``[num_seeds]``, several for links.
        shuffle: Whether seeds are shuffled.
        collect: Whether batches have features.
        sample: Samples a batch.

    Raises:
        NotImplementedError: If the sampler does not say how many neighbours it takes, or the graph
            is elsewhere.
        BudgetError: If a seed's own neighbourhood exceeds the budget.
    """
    graph = graph_of(sampler)
    known = isinstance(sampler, NeighborSampler) and sampler.num_neighbors is not None
    if not known or graph is None:
        raise NotImplementedError(
            f"batch_cost= estimates costs from degrees and num_neighbors, which a "
            f"{type(sampler).__name__} does not tell: use neighbor_sampler='native', or batch_size="
        )
    if graph.router is not None:
        raise NotImplementedError(
            "batch_cost= needs the degrees of all nodes in this process, and this graph is in "
            "several parts: open a graph directory of one part, or use batch_size="
        )
    costs = costs_of(budget, data, features, graph, collect=collect)
    estimate = CostEstimate(
        graph,
        sampler.hops(),
        replace=sampler.replace,
        disjoint=sampler.disjoint,
        seeds=seeds,
        costs=costs,
    )
    return CostPlan(
        budget,
        costs,
        estimate,
        num_seeds=seeds[0][1].numel(),
        shuffle=shuffle,
        sample=sample,
        name=functools.partial(_named, seeds),
    )


def _named(seeds: Sequence[tuple[NodeType, Tensor]], place: int) -> str:
    ends = [(kind, int(node[place])) for kind, node in seeds]
    return " to ".join(f"node {n}" + ("" if t is None else f" of type {t!r}") for t, n in ends)
