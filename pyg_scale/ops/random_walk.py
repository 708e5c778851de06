"""Random walks: from a node to a neighbour, to one of its neighbours, and so on.

Step ``s`` of walk ``w``, at node ``v`` of degree ``d > 0``, goes to the neighbour at position
``bounded(fold(key, w, s, v), 0, d)`` (:mod:`pyg_scale.ops.keys`); a walk stays at a node without
neighbours. A walk is thus a function of integers, and does not depend on the other walks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops import keys, library
from pyg_scale.ops.threads import num_threads


def random_walk(
    indptr: Tensor,
    indices: Tensor,
    start: Tensor,
    length: int,
    *,
    walk: Tensor | None = None,
    key: int = 0,
) -> Tensor:
    """Walk along edges; all neighbours of a node are equally likely.

    Args:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``, the end of each edge. Walks depend on the
            order within a node. May be strided.
        start: ``int64`` ``[num_walks]``, the first node of each walk.
        length: Number of steps.
        walk: ``int64`` ``[num_walks]``, the number of each walk. ``None``: its position.
        key: Key of all draws.

    Returns:
        ``int64`` ``[num_walks, length + 1]``, the nodes of each walk, its start first.

    Raises:
        ValueError: If ``start`` or ``walk`` is of another type or shape, or ``length`` negative.
    """
    if walk is None:
        walk = torch.arange(start.numel())
    if start.dtype != torch.int64 or walk.dtype != torch.int64 or start.shape != walk.shape:
        raise ValueError(
            f"start and walk must be int64 of the same length (got {start.dtype} "
            f"{list(start.shape)}, {walk.dtype} {list(walk.shape)})"
        )
    if length < 0:
        raise ValueError(f"length must not be negative (got {length})")
    if library.compiled():
        return torch.ops.pyg_scale.random_walk(
            indptr,
            indices,
            start.contiguous(),
            walk.contiguous(),
            length,
            keys.to_signed(key),
            num_threads(),
        )
    return random_walk_plain(indptr, indices, start, walk, length, key)


def random_walk_plain(
    indptr: Tensor, indices: Tensor, start: Tensor, walk: Tensor, length: int, key: int
) -> Tensor:
    """The meaning of the compiled op."""
    base = keys.fold_tensor(key, walk)
    out = [start]
    for step in range(length):
        node = out[-1]
        degree = indptr[node + 1] - indptr[node]
        word = keys.fold_tensor(keys.fold_tensor(base, torch.tensor(step)), node)
        position = indptr[node] + keys.bounded(word, 0, degree.clamp(min=1))
        moves = degree > 0
        following = node.clone()
        following[moves] = indices[position[moves]].to(torch.int64)
        out.append(following)
    return torch.stack(out, dim=1)
