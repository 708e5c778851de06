"""Mini-batches of output nodes and of the nodes that influence them most, fixed before training.

The method of Gasteiger, Qian, Guennemann: "Influence-Based Mini-Batching for Graph Neural
Networks", LoG 2022. Output nodes are grouped once, by a partition of the graph or by their scores
of personalised PageRank, and each group gets the nodes of the largest scores. A batch has the
groups that its epoch's order puts next to each other, and all edges among their nodes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import ibmb_loader
from torch_geometric.utils import is_undirected

from pyg_scale.loader.base import SubgraphLoader
from pyg_scale.loader.batch.source import rows_in_huge_pages
from pyg_scale.loader.cluster import cutter_of
from pyg_scale.loader.induced import Grouped, batch_of
from pyg_scale.loader.seeds.epoch import BatchIndex, Cut, EqualNumbers, listed_order
from pyg_scale.loader.seeds.nodes import seed_nodes_of
from pyg_scale.loader.stats import Stats
from pyg_scale.ops import keys
from pyg_scale.ops.induced_edges import Induced
from pyg_scale.ops.neighbor_sum import neighbor_sum
from pyg_scale.partitioner import Partitioner, partition
from pyg_scale.partitioner.base import check_num_parts
from pyg_scale.sampler.base import one_of
from pyg_scale.sampler.pagerank import Ranked, ppr

_CELLS = 1 << 26  # scores that are computed at a time
_SWEEPS = 50
_ONE = 1 << 20  # fixed point of distances
_TINY = 1e-5  # so that batches with the same labels can follow each other


class _Influence(SubgraphLoader):
    """The base of both loaders: a subclass groups the output nodes."""

    def _begin(
        self,
        data: Any,
        batch_order: str,
        input_nodes: Any,
        return_edge_index_type: str,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Check what both loaders take; the distinct output nodes, ascending."""
        name = type(self).__name__
        if isinstance(data, HeteroData):
            raise NotImplementedError(
                f"{name} does not take HeteroData: pass data.to_homogeneous()"
            )
        if not isinstance(data, Data):
            raise TypeError(f"data must be a Data (got {type(data).__name__})")
        one_of("batch_order", batch_order, ("rand", "sample", "order"))
        if one_of("return_edge_index_type", return_edge_index_type, ("edge_index", "adj")) == "adj":
            raise NotImplementedError(
                "return_edge_index_type='adj' is not written, batches have an edge_index: take "
                "'edge_index', and T.ToSparseTensor() on batches"
            )
        for other in ("shuffle", "sampler", "batch_sampler"):
            if kwargs.get(other):
                raise ValueError(
                    f"batch_order= says in which order batches come: leave {other} out"
                )
        for other in ("sampling", "feature_store", "transform", "batch_cost"):
            if kwargs.get(other) is not None:
                raise NotImplementedError(f"{other}= is not for {name}: leave it out")
        if kwargs.get("split_seeds") == "part":
            raise ValueError("split_seeds='part' is for seeds of a graph in parts: use 'global'")
        if not isinstance(data.get("edge_index"), Tensor):
            raise ValueError(f"{name} needs data.edge_index [2, num_edges]")
        if batch_order != "rand" and not isinstance(data.get("y"), Tensor):
            raise ValueError(f"batch_order={batch_order!r} compares labels, and data has no y")
        if not is_undirected(data.edge_index, num_nodes=data.num_nodes):
            raise ValueError(
                f"{name} needs every edge in both directions: T.ToUndirected() adds it"
            )
        nodes = seed_nodes_of(data, input_nodes, None, None).node.to(torch.int64)
        if not nodes.numel():
            raise ValueError("input_nodes has no nodes: there are no batches to make")
        self.data, self.batch_order = data, batch_order
        self.return_edge_index_type = return_edge_index_type
        self._graph = Grouped.of(data.edge_index, int(data.num_nodes or 0))
        rows_in_huge_pages(data)
        return nodes.unique()

    def _end(self, pairs: list[tuple[Tensor, Tensor]], kwargs: dict[str, Any]) -> None:
        """Start the loader of pairs of output nodes and of all nodes of their group, ascending."""
        self._pairs = pairs
        self._order: Callable[[int, int], Tensor] = self._ordered()
        seed, worker_type = kwargs.pop("seed", None), kwargs.pop("worker_type", None)
        kwargs.setdefault("batch_size", 1)
        self._start(len(pairs), seed=seed, worker_type=worker_type, **kwargs)
        self._publish()

    def _ordered(self) -> Callable[[int, int], Tensor]:
        number = len(self._pairs)
        if number <= 2:
            return partial(_same_order, torch.arange(number))
        if self.batch_order == "rand":
            return partial(listed_order, number)
        distance = label_distances([self.data.y[out] for out, _ in self._pairs])
        if self.batch_order == "order":
            return partial(_same_order, short_tour(distance))
        return partial(_drawn_order, (distance * _ONE).round().to(torch.int64))

    def _cut(self) -> Cut:
        size = self.batch_size
        numbers = EqualNumbers(len(self._pairs), size, drop_last=self.drop_last, shuffle=False)
        return _Ordered(numbers, self._order)

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {"batch_order": self.batch_order}

    def _seed_tensors(self) -> list[Tensor]:
        sums = [[part.numel(), int(part.sum())] for pair in self._pairs for part in pair]
        return [torch.tensor(sums).view(len(self._pairs), -1)]

    def _parts_of_seeds(self) -> Tensor | None:
        return None

    def _draws(self) -> dict[str, str]:
        return {"batch_order": self.batch_order}

    def _sample(self, batch: BatchIndex) -> tuple[Induced, Tensor]:
        pairs = [self._pairs[number] for number in batch.index.tolist()]
        none = torch.empty(0, dtype=torch.int64)  # for a rank without a group in a step
        out = torch.cat([none, *(each for each, _ in pairs)])
        found = self._graph.among(torch.cat([none, *(each for _, each in pairs)]))
        assert found.edge is not None
        order = found.edge.argsort()
        found = Induced(found.node, found.edge_index[:, order], found.edge[order])
        return found, torch.isin(found.node, out)

    def _fetch(self, out: tuple[Induced, Tensor], stats: Stats) -> Data:
        batch = batch_of(self.data, out[0], stats)
        batch.output_node_mask = out[1]
        return batch


class IBMBBatchLoader(_Influence, ibmb_loader.IBMBBatchLoader):
    """Loads the output nodes of a part of the graph, and the nodes of most influence on them.

    As :class:`torch_geometric.loader.ibmb_loader.IBMBBatchLoader`, and a subclass of it, but needs
    nothing besides this package. Batches have the rows of all attributes of nodes and edges, edges
    in the order of ``data``, and ``output_node_mask`` ``[num_nodes]``. Influence is PageRank with
    jumps to the output nodes of the part. ``num_workers=k`` means k threads.

    Args:
        data: Undirected ``Data`` with ``edge_index`` ``[2, num_edges]``, on the CPU.
        batch_order: ``"rand"``: shuffled. ``"order"``: always the same, in which batches that
            follow each other have labels as alike as a short tour makes them (nearest neighbours,
            then 2-opt). ``"sample"``: the next batch is drawn in proportion to how much its labels
            differ from the last one's. Labels are compared by Kullback-Leibler divergence.
        num_partitions: Number of parts; those without output nodes give none.
        input_nodes: The output nodes, ids ``[n]`` or a mask ``[num_nodes]``.
        batch_expand_ratio: A group has this times ``num_nodes / num_partitions`` nodes at most,
            and its output nodes.
        metis_input_node_weight: ``None`` or 1; others raise ``NotImplementedError``.
        alpha: The probability of a jump.
        approximate_ppr_iterations: Number of steps of the power method.
        return_edge_index_type: ``"edge_index"``; ``"adj"`` raises ``NotImplementedError``.
        method: The name of a partitioner or an instance, see :class:`ClusterData`.
        kwargs: ``seed``, ``worker_type``, ``split_seeds`` (but ``"part"``), ``uneven``,
            ``split_batches``, ``comm``, see :class:`NodeLoader`, and arguments of
            :class:`torch.utils.data.DataLoader`; ``batch_size`` counts groups (default: 1).

    Raises:
        NotImplementedError: If the graph has types, or an argument asks for what is not there.
        TypeError: If an argument has a wrong type.
        ValueError: If the graph is directed, or an argument is out of range.
        IndexError: If an output node does not exist.
    """

    def __init__(
        self,
        data: Data,
        batch_order: str,
        num_partitions: int,
        input_nodes: Tensor,
        batch_expand_ratio: float | None = 1.0,
        metis_input_node_weight: float | None = None,
        alpha: float | None = 0.2,
        approximate_ppr_iterations: int | None = 50,
        return_edge_index_type: str = "edge_index",
        *,
        method: str | Partitioner | None = None,
        **kwargs: Any,
    ):
        nodes = self._begin(data, batch_order, input_nodes, return_edge_index_type, kwargs)
        number = int(data.num_nodes or 0)
        check_num_parts(num_partitions, number)
        if metis_input_node_weight not in (None, 1):
            raise NotImplementedError(
                "metis_input_node_weight= weighs nodes, and partitioners here take no weights: "
                "leave it out"
            )
        ratio = _within("batch_expand_ratio", batch_expand_ratio, 1.0, math.inf)
        jump = _within("alpha", alpha, 0.2, 1.0)
        steps = 50 if approximate_ppr_iterations is None else approximate_ppr_iterations
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"approximate_ppr_iterations must be 1 or more (got {steps!r})")
        graph = Data(edge_index=data.edge_index, num_nodes=number)
        cluster = partition(graph, num_partitions, cutter_of(method, False)[1])
        assert isinstance(cluster, Tensor)
        groups = [nodes[cluster[nodes] == part] for part in cluster[nodes].unique().tolist()]
        most = math.ceil(ratio * number / num_partitions)
        around = most_influential(self._graph, groups, most, jump, steps)
        pairs = [(out, torch.cat([out, more]).unique()) for out, more in zip(groups, around)]
        self.num_partitions = num_partitions
        self._end(pairs, kwargs)


class IBMBNodeLoader(_Influence, ibmb_loader.IBMBNodeLoader):
    """Loads output nodes that are near each other, and for each the nodes of most influence on it.

    As :class:`torch_geometric.loader.ibmb_loader.IBMBNodeLoader`, and a subclass of it, but needs
    nothing besides this package. Influence is the score of :func:`pyg_scale.sampler.ppr`. Two
    groups of output nodes are merged in the order of the scores that nodes of theirs have for each
    other, if together they are not too many, and at last the smallest ones. Of each output node,
    the scores of the ``max(num_auxiliary_nodes, num_nodes_per_batch)`` best nodes are known.

    Args:
        data: See :class:`IBMBBatchLoader`, as for ``batch_order`` and ``input_nodes``.
        num_auxiliary_nodes: Number of nodes for each output node, itself counted.
        num_nodes_per_batch: The most output nodes of a group.
        alpha: See :func:`pyg_scale.sampler.ppr`.
        eps: See there.
        return_edge_index_type: See :class:`IBMBBatchLoader`, as for ``kwargs`` and errors.
    """

    def __init__(
        self,
        data: Data,
        batch_order: str,
        input_nodes: Tensor,
        num_auxiliary_nodes: int,
        num_nodes_per_batch: int,
        alpha: float = 0.2,
        eps: float = 1e-5,
        return_edge_index_type: str = "edge_index",
        **kwargs: Any,
    ):
        nodes = self._begin(data, batch_order, input_nodes, return_edge_index_type, kwargs)
        for name, value in (
            ("num_auxiliary_nodes", num_auxiliary_nodes),
            ("num_nodes_per_batch", num_nodes_per_batch),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of 1 or more (got {value!r})")
        graph = Data(edge_index=data.edge_index, num_nodes=data.num_nodes)
        found = ppr(graph, nodes, max(num_auxiliary_nodes, num_nodes_per_batch), alpha, eps)
        assert isinstance(found, Ranked)
        groups = near_each_other(found, nodes, num_nodes_per_batch)
        pairs = []
        for group in groups:
            place = torch.tensor(group)
            more = found.node[place, :num_auxiliary_nodes].reshape(-1)
            out = nodes[place].sort().values
            pairs.append((out, torch.cat([out, more[more >= 0]]).unique()))
        self._end(pairs, kwargs)


def _within(name: str, value: Any, default: float, end: float) -> float:
    """A number above 0 and below ``end``; ``None`` is the default."""
    value = default if value is None else value
    if not isinstance(value, int | float) or not 0 < value < end:
        raise ValueError(f"{name} must be above 0 and below {end} (got {value!r})")
    return float(value)


class _Ordered:
    """Batches of equal numbers of groups, in an order of every epoch; see :class:`Cut`."""

    def __init__(self, numbers: EqualNumbers, order: Callable[[int, int], Tensor]) -> None:
        self._numbers, self._order = numbers, order
        self.count = numbers.count

    def of_epoch(self, seed: int, epoch: int) -> Callable[[int], Tensor]:
        """See :class:`~pyg_scale.loader.seeds.epoch.Cut`."""
        place, order = self._numbers.of_epoch(seed, epoch), self._order(seed, epoch)
        return lambda number: order[place(number)]


def _same_order(order: Tensor, seed: int, epoch: int) -> Tensor:
    return order


def _drawn_order(weight: Tensor, seed: int, epoch: int) -> Tensor:
    return drawn_tour(weight, keys.fold(0, seed, epoch, keys.SHUFFLE, 2))


# Groups ###################################################################################


def most_influential(
    graph: Grouped, groups: Sequence[Tensor], most: int, alpha: float, steps: int
) -> list[Tensor]:
    """The nodes of the largest PageRank with jumps to each group, the smaller of equals first.

    Args:
        graph: An undirected graph of ``n`` nodes.
        groups: Node ids of each.
        most: How many nodes at most; those of score 0 are none.
        alpha: The probability of a jump.
        steps: Number of steps of the power method, in ``float64``.

    Returns:
        Node ids of each, ascending.
    """
    degree = graph.indptr.diff().clamp(min=1).to(torch.float64)
    size, found = degree.numel(), []
    weights = 1 / degree[graph.row]
    at_once = max(1, _CELLS // max(size, 1))
    for begin in range(0, len(groups), at_once):
        part = groups[begin : begin + at_once]
        jump = torch.zeros(size, len(part), dtype=torch.float64)
        for column, group in enumerate(part):
            jump[group, column] = 1 / group.numel()
        score = jump
        for _ in range(steps):
            stepped = neighbor_sum(graph.indptr, graph.col, score, weights=weights)
            score = stepped * (1 - alpha) + alpha * jump
        found += [_largest(column, most) for column in score.t().contiguous()]
    return found


def _largest(score: Tensor, most: int) -> Tensor:
    """The places of the ``most`` largest positive numbers of ``[n]``, ascending."""
    positive = (score > 0).nonzero().view(-1)
    if positive.numel() <= most:
        return positive
    least = score.topk(most).values[-1]
    above, equal = (score > least).nonzero().view(-1), (score == least).nonzero().view(-1)
    return torch.cat([above, equal[: most - above.numel()]]).sort().values


def near_each_other(found: Ranked, nodes: Tensor, most: int) -> list[list[int]]:
    """Groups of at most so many output nodes, which have large scores for each other.

    Args:
        found: The nodes of the largest scores of each output node.
        nodes: The output nodes ``[n]``, ascending.
        most: The most of a group.

    Returns:
        Places in ``nodes``; each is in one group.
    """
    size = nodes.numel()
    row = torch.arange(size).repeat_interleave(found.node.size(1))
    node, score = found.node.reshape(-1), found.score.reshape(-1)
    place = torch.searchsorted(nodes, node).clamp(max=size - 1)
    kept = (nodes[place] == node) & (place != row)
    row, place, score = row[kept], place[kept], score[kept]
    pair, where = (torch.maximum(row, place) * size + torch.minimum(row, place)).unique(
        return_inverse=True
    )
    together = torch.zeros(pair.numel(), dtype=torch.float64).index_add_(0, where, score)
    pair = pair[together.argsort(descending=True, stable=True)]
    group, members = list(range(size)), [[number] for number in range(size)]
    for one, other in zip((pair // size).tolist(), (pair % size).tolist()):
        first, second = sorted((group[one], group[other]))
        if first == second or len(members[first]) + len(members[second]) > most:
            continue
        for each in members[second]:
            group[each] = first
        members[first] += members[second]
        members[second] = []
    return _smallest_merged([each for each in members if each], most)


def _smallest_merged(groups: list[list[int]], most: int) -> list[list[int]]:
    heap = [(len(group), group) for group in groups]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        if first[0] + second[0] > most:
            heapq.heappush(heap, first)
            heapq.heappush(heap, second)
            break
        heapq.heappush(heap, (first[0] + second[0], first[1] + second[1]))
    return [heapq.heappop(heap)[1] for _ in range(len(heap))]


# Orders ###################################################################################


def label_distances(labels: Sequence[Tensor]) -> Tensor:
    """The symmetric Kullback-Leibler divergences of batches' labels, ``float64`` ``[b, b]``.

    Every class is counted once more than it is there.

    Raises:
        ValueError: If a label is no class: an integer of 0 or more ``[n]``.
    """
    every = torch.cat([each.view(-1) for each in labels])
    if every.is_floating_point() or every.numel() != sum(each.size(0) for each in labels):
        raise ValueError("batch_order= compares classes: y must be integers [num_nodes]")
    if int(every.min()) < 0:
        raise ValueError("batch_order= compares classes: y must be 0 or more for input_nodes")
    classes = int(every.max()) + 1
    count = torch.stack([torch.bincount(each.view(-1), minlength=classes) for each in labels]) + 1
    share = count.to(torch.float64) / count.sum(1, keepdim=True)
    cross = share @ share.log().t()
    own = cross.diagonal()
    distance = (own[:, None] + own[None, :] - cross - cross.t()).clamp(min=0) + _TINY
    return distance.fill_diagonal_(0)


def short_tour(distance: Tensor) -> Tensor:
    """An order in which neighbours are near: nearest neighbours, then 2-opt, ``int64`` ``[b]``."""
    number = distance.size(0)
    tour, left = [0], torch.ones(number, dtype=torch.bool)
    left[0] = False
    for _ in range(number - 1):
        tour.append(int(torch.where(left, distance[tour[-1]], math.inf).argmin()))
        left[tour[-1]] = False
    found = torch.tensor(tour)
    for _ in range(_SWEEPS):
        better = False
        for i in range(number - 2):
            a, b = found[i], found[i + 1]
            c, d = found[i + 2 :], found[i + 2 :].roll(-1)
            d[-1] = found[0]  # the tour is closed, as epochs follow each other
            gain = distance[a, b] + distance[c, d] - distance[a, c] - distance[b, d]
            best = int(gain.argmax())
            if float(gain[best]) > 1e-12:
                end = i + 3 + best
                found[i + 1 : end] = found[i + 1 : end].flip(0)
                better = True
        if not better:
            break
    return found


def drawn_tour(weight: Tensor, key: int) -> Tensor:
    """An order in which each is drawn in proportion to its weight beside the last, ``[b]``.

    Args:
        weight: ``int64`` ``[b, b]``, above 0 but for the diagonal.
        key: Decides all draws: word 0 of ``fold(key, i)`` for place ``i``.
    """
    number = weight.size(0)
    left = torch.ones(number, dtype=torch.int64)
    each, tour = keys.fold_tensor(key, torch.arange(number)), list[int]()
    for place in range(number):
        sums = ((weight[tour[-1]] if tour else 1) * left).cumsum(0)
        word = keys.bounded(each[place : place + 1], 0, sums[-1:])
        tour.append(int(torch.searchsorted(sums, word, right=True)))
        left[tour[-1]] = 0
    return torch.tensor(tour)
