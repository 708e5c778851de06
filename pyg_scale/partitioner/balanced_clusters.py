"""k-means with capacities: clusters of points of limited size.

Lloyd's method (IEEE Trans. Inf. Theory 1982) with the initial centres of Arthur and Vassilvitskii
("k-means++", SODA 2007) and capacities as in Bradley, Bennett, Demiriz ("Constrained k-means
clustering", MSR-TR-2000-65), but with points placed by deferred acceptance (Gale and Shapley, 1962)
rather than by a flow. Points are on the unit sphere, and are close if their product is large.

Sums are in a fixed order, so that the result is the same for any number of threads.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pyg_scale.ops import keys
from pyg_scale.ops.neighbor_sum import neighbor_sum

_SAMPLE = 20_000  # points among which centres are searched
_TRIES = 4  # initial choices, of which the best is taken
_LLOYD = 12  # steps for each choice
_BALANCED = 4  # steps with capacities
_ROUNDS = 40  # of requests for room; clusters that are still too full then stay so
_CHUNK = 1 << 22  # numbers compared at a time


def balanced_clusters(points: np.ndarray, weights: Tensor, capacity: Tensor, key: int) -> Tensor:
    """Assign points to clusters of approximately limited size.

    Args:
        points: ``float64`` ``[num_points, dim]``, of length 1 (or 0).
        weights: ``int64`` ``[num_points, num_constraints]``.
        capacity: ``int64`` ``[num_clusters, num_constraints]``, the largest load of each.
        key: Key of all draws.

    Returns:
        ``int32`` ``[num_points]``. If room is scarce, a cluster may slightly exceed its capacity.
    """
    num_clusters = capacity.size(0)
    centres = _find_centres(points, num_clusters, key)
    # The largest cluster gets the largest capacity.
    free = torch.zeros(num_clusters, weights.size(1), dtype=torch.int64)
    free.index_add_(0, torch.from_numpy(_closest(points, centres)), weights)
    share = (free / weights.sum(0).clamp(min=1)).sum(1)
    room = (capacity / weights.sum(0).clamp(min=1)).sum(1)
    ranked = np.empty_like(centres)
    ranked[room.argsort(descending=True, stable=True).numpy()] = centres[
        share.argsort(descending=True, stable=True).numpy()
    ]
    centres = ranked
    for _ in range(_BALANCED):
        assignment = _place(points, centres, weights, capacity)
        centres = _means(points, assignment.numpy(), centres)
    return _place(points, centres, weights, capacity).to(torch.int32)


def _find_centres(points: np.ndarray, num_clusters: int, key: int) -> np.ndarray:
    sample = keys.permutation(keys.fold(key, 0), len(points))[: max(_SAMPLE, 20 * num_clusters)]
    some = points[sample.sort().values.numpy()]
    best: tuple[float, np.ndarray] | None = None
    for number in range(_TRIES):
        centres = _start(some, num_clusters, keys.fold(key, 1, number))
        for _ in range(_LLOYD):
            centres = _means(some, _closest(some, centres), centres)
        loss = -float(_products(some, centres).max(1).sum())
        if best is None or loss < best[0]:
            best = loss, centres
    assert best is not None
    return best[1]


def _start(points: np.ndarray, num_clusters: int, key: int) -> np.ndarray:
    """k-means++: the next centre is a point, more likely the farther it is from earlier ones."""
    chosen = [keys.mix(key) % len(points)]
    far = np.full(len(points), np.inf)
    for number in range(1, num_clusters):
        far = np.minimum(far, 1 - np.einsum("nd,d->n", points, points[chosen[-1]]))
        until = np.cumsum(np.maximum(far, 0) + 1e-12)
        drawn = (keys.fold(key, number) >> 11) / 2**53 * until[-1]
        chosen.append(min(int(np.searchsorted(until, drawn)), len(points) - 1))
    return points[chosen]


def _means(points: np.ndarray, assignment: np.ndarray, before: np.ndarray) -> np.ndarray:
    """The direction of the sum of each cluster; that of an empty one does not change."""
    order = np.argsort(assignment, kind="stable")
    count = np.bincount(assignment, minlength=len(before))
    pointers = torch.from_numpy(np.concatenate([[0], np.cumsum(count)]))
    summed = neighbor_sum(pointers, torch.from_numpy(order), torch.from_numpy(points)).numpy()
    length = np.sqrt((summed * summed).sum(1, keepdims=True))
    return np.where(length > 1e-12, summed / np.maximum(length, 1e-12), before)


def _products(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    return np.einsum("nd,kd->nk", points, centres)  # no BLAS, as its order of sums varies


def _closest(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    rows = max(1, _CHUNK // len(centres))
    parts = [
        _products(points[begin : begin + rows], centres).argmax(1)
        for begin in range(0, len(points), rows)
    ]
    return np.concatenate(parts)


def _place(points: np.ndarray, centres: np.ndarray, weights: Tensor, capacity: Tensor) -> Tensor:
    """Deferred acceptance: a point requests clusters in the order of their closeness.

    A cluster with more requests than room keeps the points that would lose most elsewhere.
    """
    num_clusters = len(centres)
    closeness = torch.from_numpy(_products(points, centres))
    ranked = closeness.sort(dim=1, descending=True, stable=True)
    asked = torch.zeros(len(points), dtype=torch.int64)
    wanted = ranked.indices[:, 0].clone()
    held = torch.zeros_like(capacity).index_add_(0, wanted, weights)
    for _ in range(_ROUNDS):
        full = (held > capacity).any(1)
        if not bool(full.any()):
            break
        points_there = full[wanted].nonzero().view(-1)
        place = asked[points_there].view(-1, 1)
        here = ranked.values[points_there].gather(1, place)
        # The loss of a point that has to request the next cluster; largest after all were
        # requested.
        following = (place + 1).clamp(max=num_clusters - 1)
        loss = (here - ranked.values[points_there].gather(1, following)).view(-1)
        loss[place.view(-1) == num_clusters - 1] = 4.0
        order = loss.argsort(descending=True, stable=True)
        order = order[wanted[points_there[order]].argsort(stable=True)]
        queue = points_there[order]
        cluster = wanted[queue]
        ahead = weights[queue].cumsum(0)
        before = torch.zeros_like(capacity).index_add_(0, cluster, weights[queue])
        before = before.cumsum(0) - before
        over = (ahead - before[cluster] > capacity[cluster]).any(1)
        over &= asked[queue] < num_clusters - 1
        refused = queue[over]
        if refused.numel() == 0:
            break
        asked[refused] += 1
        held.index_add_(0, wanted[refused], -weights[refused])
        wanted[refused] = ranked.indices[refused].gather(1, asked[refused].view(-1, 1)).view(-1)
        held.index_add_(0, wanted[refused], weights[refused])
    return wanted
