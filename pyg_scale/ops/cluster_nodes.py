"""Small clusters of connected nodes, by which a graph is coarsened.

Label propagation with a limit on sizes (Meyerhenke, Sanders, Schulz: "Partitioning complex networks
via size-constrained clustering", SEA 2014), which unlike the matching of edges also shrinks graphs
with hubs. It computes with integers only, one node after the other:

* Every node begins as a cluster. In a round the nodes are visited in ``order``, and each goes to
  the cluster to which its edges have the largest weight, if that has room and is joined to it more
  than its own is. Ties go to the cluster (named by the node that it began with) of the smallest
  ``fold(fold(key, node), cluster) >> 1``. Rounds end after one in which fewer than a fiftieth of
  the nodes moved.
* A node that is then alone joins the last node before it in ``order`` that is or was alone, would
  have joined the same cluster had there been room, and has room for it. This joins the leaves of a
  hub, and isolated nodes with each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops import keys, library


def cluster_nodes(
    indptr: Tensor,
    indices: Tensor,
    node_weights: Tensor,
    limit: Tensor,
    order: Tensor,
    *,
    edge_weights: Tensor | None = None,
    group: Tensor | None = None,
    rounds: int = 3,
    key: int = 0,
) -> Tensor:
    """Put the nodes of an undirected graph into clusters.

    Args:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``, each edge in both directions. May be
            strided.
        node_weights: ``int64`` ``[num_nodes, num_constraints]``, at least 0, together less than
            ``2**59``.
        limit: ``int64`` ``[num_constraints]``, the most that a cluster of several nodes may weigh.
        order: ``int64`` ``[num_nodes]``, the nodes in the order of the visits.
        edge_weights: ``int64`` ``[num_entries]``, above 0, together less than ``2**59``. ``None``:
            1 each.
        group: ``int32`` or ``int64`` ``[num_nodes]``, at least 0: nodes of different groups are
            never in one cluster. ``None``: a single group.
        rounds: The largest number of rounds, at most 10,000.
        key: Key of the choice among equal clusters (:mod:`pyg_scale.ops.keys`).

    Returns:
        ``int64`` ``[num_nodes]``: the cluster of each node. Clusters are numbered from 0, in the
        order of their smallest nodes.

    Raises:
        ValueError: If shapes, types or values are invalid.
    """
    none = torch.empty(0, dtype=torch.int64)
    path = torch.ops.pyg_scale.cluster_nodes if library.compiled() else cluster_nodes_plain
    return path(
        indptr,
        indices,
        none if edge_weights is None else edge_weights,
        node_weights.contiguous(),
        limit,
        none if group is None else group,
        order,
        rounds,
        keys.to_signed(key),
    )


def cluster_nodes_plain(
    indptr: Tensor,
    indices: Tensor,
    edge_weights: Tensor,
    node_weights: Tensor,
    limit: Tensor,
    group: Tensor,
    order: Tensor,
    rounds: int,
    key: int,
) -> Tensor:
    """The meaning of the compiled op, with its arguments (empty ones: none)."""
    begin, neighbor = indptr.tolist(), indices.tolist()
    weight = edge_weights.tolist() or [1] * len(neighbor)
    size = len(begin) - 1
    groups = group.tolist() or [0] * size
    most, weights = limit.tolist(), node_weights.tolist()
    cluster, members = list(range(size)), [1] * size
    held = [list(row) for row in weights]

    def fits(v: int, to: int) -> bool:
        return all(not w or h + w <= m for w, h, m in zip(weights[v], held[to], most))

    def favourite(v: int, with_room: bool) -> int:
        joined: dict[int, int] = {}
        for e in range(begin[v], begin[v + 1]):
            u = neighbor[e]
            if u != v and groups[u] == groups[v]:
                joined[cluster[u]] = joined.get(cluster[u], 0) + weight[e]
        mine, base = cluster[v], keys.fold(key, v)
        others = [
            (-w, keys.fold(base, c) >> 1, c)
            for c, w in joined.items()
            if c != mine and w > joined.get(mine, 0) and (not with_room or fits(v, c))
        ]
        return min(others)[2] if others else mine

    def move(v: int, to: int) -> None:
        mine = cluster[v]
        for c, w in enumerate(weights[v]):
            held[mine][c] -= w
            held[to][c] += w
        members[mine] -= 1
        members[to] += 1
        cluster[v] = to

    visits = order.tolist()
    for _ in range(rounds):
        moved = 0
        for v in visits:
            best = favourite(v, True)
            if best != cluster[v]:
                move(v, best)
                moved += 1
        if moved * 50 < size:
            break
    waiting: dict[tuple[str, int], int] = {}
    for v in visits:
        if members[cluster[v]] != 1:
            continue
        wish = favourite(v, False)
        place = ("cluster", wish) if wish != cluster[v] else ("group", groups[v])
        if place in waiting and fits(v, waiting[place]):
            move(v, waiting[place])
        else:
            waiting[place] = cluster[v]
    number: dict[int, int] = {}
    return torch.tensor([number.setdefault(c, len(number)) for c in cluster], dtype=torch.int64)
