"""Budget sampling of the Heterogeneous Graph Transformer: the same number of nodes of each type.

Hu, Dong, Wang, Sun: "Heterogeneous Graph Transformer", WWW 2020, algorithms 1 and 2. Integers
replace real numbers, so that every implementation gives the same bits (``docs/draws.md`` has a test
vector):

* A node ``w`` that joins the sample adds ``max(1, floor(2**32 / d))`` to the score of the source of
  each of its in-edges, separately for every edge type; ``d`` is its number of in-edges of that
  type. The scores of the nodes that are not in the sample are the budget.
* Hop ``h`` takes nodes of every type from the budget, as it was before the hop: all, in order of
  id, if ``k < 0`` or there are at most ``k``; else ``k`` one after the other, each with probability
  proportional to its squared score among the remaining ones.
* Squares become weights: scores are shifted (left or right) such that the largest one of the type
  has 31 bits; a shifted score ``s`` has the weight ``q = max(1, s * s >> 30)``.
* With ``D = fold(K, HGT, h, node_type_hash)``, draw number ``i`` is ``t = bounded(D, i, R)``, where
  ``R`` is the sum of the remaining weights. It takes the first node, in order of id, at which the
  running sum of these weights exceeds ``t``.

The result has all edges of the graph among the sampled nodes, not only those that were traversed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import library
from pyg_scale.ops.is_edge import in_edges
from pyg_scale.ops.keys import HGT, bounded, fold, to_signed

_SCORE_BITS = 32
_SHIFTED_BITS = 31


class HGTTensors(NamedTuple):
    """The result of the op; one tensor per node type or per edge type.

    Attributes:
        node: Original node ids, the seeds first (repeats kept), then hop after hop in order of
            the draws.
        row: Position in ``node`` of the source of each edge (of its first occurrence).
        col: Position in ``node`` of the destination of each edge, never decreasing.
        edge: Original edge ids, ``int64``, increasing within a destination.
        colptr: The edges into row ``i`` are ``colptr[i]`` to ``colptr[i + 1] - 1``.
    """

    node: list[Tensor]
    row: list[Tensor]
    col: list[Tensor]
    edge: list[Tensor]
    colptr: list[Tensor]


def hgt_sample(
    *,
    indptr: Sequence[Tensor],
    indices: Sequence[Tensor],
    edge_id: Sequence[Tensor],
    num_nodes: Sequence[int],
    dst_type: Sequence[int],
    src_type: Sequence[int],
    node_type_hash: Sequence[int],
    seed: Sequence[Tensor],
    num_samples: Sequence[Sequence[int]],
    key: int,
    int32_output: bool = False,
) -> HGTTensors:
    """Sample a subgraph with about equally many nodes of each type.

    Tensors of the graph are as in :class:`pyg_scale.graph.topology.CSC`, one per edge type; an
    empty ``edge_id`` means that ids are positions.

    Args:
        dst_type: Index of the node type of the destinations of each edge type.
        src_type: Index of the node type of their sources.
        node_type_hash: Unsigned, one per node type.
        seed: ``int64`` node ids, one tensor per node type.
        num_samples: Per node type, one number per hop; negative for all.
        key: The key of the batch, unsigned.
        int32_output: If True, ``node``, ``row`` and ``col`` are ``int32``.
    """
    if library.compiled():
        out = torch.ops.pyg_scale.hgt_sample(
            list(indptr),
            list(indices),
            list(edge_id),
            list(num_nodes),
            list(dst_type),
            list(src_type),
            [to_signed(word) for word in node_type_hash],
            list(seed),
            [k for per_hop in num_samples for k in per_hop],
            to_signed(key),
            int32_output,
        )
        return HGTTensors(*out)
    return hgt_sample_reference(
        indptr=indptr,
        indices=indices,
        edge_id=edge_id,
        num_nodes=num_nodes,
        dst_type=dst_type,
        src_type=src_type,
        node_type_hash=node_type_hash,
        seed=seed,
        num_samples=num_samples,
        key=key,
        int32_output=int32_output,
    )


def hgt_sample_reference(
    *,
    indptr: Sequence[Tensor],
    indices: Sequence[Tensor],
    edge_id: Sequence[Tensor],
    num_nodes: Sequence[int],
    dst_type: Sequence[int],
    src_type: Sequence[int],
    node_type_hash: Sequence[int],
    seed: Sequence[Tensor],
    num_samples: Sequence[Sequence[int]],
    key: int,
    int32_output: bool = False,
) -> HGTTensors:
    """The plain-torch meaning of :func:`hgt_sample`."""
    node = [ids.to(torch.int64) for ids in seed]
    new = [ids.unique() for ids in node]
    budget = [_Budget() for _ in node]
    for hop in range(len(num_samples[0])):
        for r, pointers in enumerate(indptr):
            place, position = in_edges(pointers, new[dst_type[r]])
            degree = pointers.diff()[new[dst_type[r]]]
            budget[src_type[r]].add(indices[r][position], score_of(degree)[place])
        for t, word in enumerate(node_type_hash):
            budget[t].remove(node[t])
            new[t] = budget[t].pick(num_samples[t][hop], fold(key, HGT, hop, word))
            node[t] = torch.cat([node[t], new[t]])

    dtype = torch.int32 if int32_output else torch.int64
    out = HGTTensors([ids.to(dtype) for ids in node], [], [], [], [])
    for r, pointers in enumerate(indptr):
        col, position = in_edges(pointers, node[dst_type[r]])
        row = _first_row(node[src_type[r]], indices[r][position].to(torch.int64))
        row, col, position = row[row >= 0], col[row >= 0], position[row >= 0]
        count = torch.bincount(col, minlength=node[dst_type[r]].numel())
        out.row.append(row.to(dtype))
        out.col.append(col.to(dtype))
        out.edge.append((edge_id[r][position] if edge_id[r].numel() else position).to(torch.int64))
        out.colptr.append(torch.cat([count.new_zeros(1), count.cumsum(0)]))
    return out


def score_of(degree: Tensor) -> Tensor:
    """The score that a node adds to the source of each of its in-edges.

    Args:
        degree: Number of in-edges of the type of each node, ``int64`` ``[n]``.

    Returns:
        ``int64`` ``[n]``.
    """
    return (2**_SCORE_BITS // degree.clamp(min=1)).clamp(min=1)


def hgt_take(
    neighbor: Sequence[Tensor],
    counts: Sequence[Tensor],
    score: Sequence[Tensor],
    *,
    taken: Tensor,
    num_nodes: int,
    k: int,
    key: int,
) -> Tensor:
    """The nodes of a type that one hop takes: the draw of :func:`hgt_sample` among in-edges.

    The first three arguments have one entry for each edge type with this source type and each hop
    so far.

    Args:
        neighbor: Sources of the in-edges of some nodes, node after node, ``int64`` ``[m]``.
        counts: Number of in-edges of each of these nodes, ``int64`` ``[n]``.
        score: Score that each of them adds to its sources, ``int64`` ``[n]``: :func:`score_of`, or
            0 for one that counts elsewhere.
        taken: The nodes already in the sample, ``int64`` ``[size]``.
        num_nodes: Number of nodes of the type.
        k: Number of nodes to take; negative for all.
        key: Key of the hop and the type, unsigned: ``fold(K, HGT, h, node_type_hash)``.

    Returns:
        The nodes in order of the draws, ``int64`` ``[k]`` or fewer.
    """
    if library.compiled():
        out: Tensor = torch.ops.pyg_scale.hgt_take(
            list(neighbor), list(counts), list(score), taken, num_nodes, k, to_signed(key)
        )
        return out
    budget = _Budget()
    for source, count, adds in zip(neighbor, counts, score, strict=True):
        each = adds.repeat_interleave(count)
        budget.add(source[each > 0], each[each > 0])
    budget.remove(taken)
    return budget.pick(k, key)


class _Budget:
    """The nodes of one type that can be taken, in order of id, and their scores."""

    def __init__(self) -> None:
        self.node = self.score = torch.empty(0, dtype=torch.int64)

    def add(self, node: Tensor, score: Tensor) -> None:
        self.node, group = torch.unique(
            torch.cat([self.node, node.to(torch.int64)]), return_inverse=True
        )
        score = torch.cat([self.score, score])
        self.score = torch.zeros_like(self.node).scatter_add_(0, group, score)

    def remove(self, node: Tensor) -> None:
        keep = ~torch.isin(self.node, node)
        self.node, self.score = self.node[keep], self.score[keep]

    def pick(self, k: int, key: int) -> Tensor:
        """Up to ``k`` nodes, in order of the draws."""
        if k < 0 or k >= self.node.numel():
            return self.node
        shift = int(self.score.max()).bit_length() - _SHIFTED_BITS
        score = self.score >> shift if shift > 0 else self.score << -shift
        weight = (score * score >> (_SHIFTED_BITS - 1)).clamp(min=1)
        word = torch.tensor(to_signed(key))
        picks = torch.empty(k, dtype=torch.int64)
        for i in range(k):
            prefix = weight.cumsum(0)
            picks[i] = torch.searchsorted(prefix, bounded(word, i, prefix[-1]), right=True)
            weight[picks[i]] = 0
        return self.node[picks]


def _first_row(node: Tensor, wanted: Tensor) -> Tensor:
    """The first position of each wanted id in ``node``, -1 if it is missing."""
    if node.numel() == 0:
        return torch.full_like(wanted, -1)
    ids, order = node.sort(stable=True)
    place = torch.searchsorted(ids, wanted).clamp(max=ids.numel() - 1)
    return torch.where(ids[place] == wanted, order[place], -1)
