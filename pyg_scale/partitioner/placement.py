"""Placement of every node in the part that needs it most, as long as there is room."""

from __future__ import annotations

import torch
from torch import Tensor


def place(need: Tensor, weights: Tensor, capacity: Tensor, initial: Tensor) -> Tensor:
    """Assign nodes to parts; first those that lose most with their second choice.

    In each round, every remaining node requests the part that needs it most among those with room
    for it (ties go to its initial part, else to the first). Each part accepts requests, in order,
    up to the first node that does not fit. A node that fits nowhere goes to the part with the
    largest share of room left.

    Args:
        need: ``float32`` ``[num_parts, num_nodes]``.
        weights: ``int64`` ``[num_nodes, num_constraints]``, the room that nodes take.
        capacity: ``int64`` ``[num_parts, num_constraints]``.
        initial: ``int64`` ``[num_nodes]``, the part that wins ties.

    Returns:
        ``int32`` ``[num_nodes]``.
    """
    parts = need.size(0)
    out = initial.to(torch.int32).clone()
    top = need.topk(min(2, parts), dim=0).values
    left = (top[0] - top[-1]).argsort(descending=True, stable=True)
    room = capacity.clone()
    while left.numel():
        choice = _choices(need, weights, room, initial, left)
        lost = left[choice < 0]
        for node in lost.tolist():
            part = int((room / capacity.clamp(min=1)).amin(1).argmax())
            out[node] = part
            room[part] -= weights[node]
        left, choice = left[choice >= 0], choice[choice >= 0]
        taken = torch.zeros(left.numel(), dtype=torch.bool)
        for part in range(parts):
            asking = (choice == part).nonzero().view(-1)
            weight = weights[left[asking]]
            fits = ((weight.cumsum(0) <= room[part]) | (weight == 0)).all(1)
            fits = fits.to(torch.int64).cumprod(0).bool()
            mine = asking[fits]
            out[left[mine]] = part
            taken[mine] = True
            room[part] -= weight[fits].sum(0)
        left = left[~taken]
    return out


def _choices(need: Tensor, weights: Tensor, room: Tensor, initial: Tensor, left: Tensor) -> Tensor:
    """The part that each remaining node requests; -1 if it fits nowhere."""
    weight = weights[left]
    best = torch.full((left.numel(),), -1.0)
    choice = torch.full((left.numel(),), -1, dtype=torch.int64)
    for part in range(need.size(0)):
        mine, home = need[part, left], initial[left] == part
        fits = ((weight <= room[part]) | (weight == 0)).all(1)
        better = fits & ((mine > best) | ((mine == best) & home))
        best = torch.where(better, mine, best)
        choice = torch.where(better, part, choice)
    return choice
