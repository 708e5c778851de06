"""The seeds of an epoch grouped by the part that holds them."""

from __future__ import annotations

import torch
from torch import Tensor


def order_by_part(part: Tensor, batch_size: int, ordered: Tensor | None) -> Tensor:
    """The order of an epoch whose batches hold seeds of one part each, as far as they fill.

    Each part cuts its seeds, in the order of the epoch, into full batches; what is left over of
    all parts, one part after the other, is cut into batches as well. There are thus as many batches
    as without parts, and but one that is not full. Full batches come in the order in which the
    epoch has their first seeds, so that parts alternate; the one that is not full comes last.

    It is a function of the seeds alone, whatever the number of ranks.

    Args:
        part: The part of every seed, ``int64`` ``[num_seeds]``, by its position in the input.
        batch_size: Seeds per batch.
        ordered: The order of the epoch ``int64`` ``[num_seeds]``; ``None`` for as given.

    Returns:
        ``int64`` ``[num_seeds]``: a permutation of the positions; batch ``b`` is what is at
        ``b * batch_size`` and after.
    """
    size = part.numel()
    if ordered is None:
        ordered = torch.arange(size)
    if size == 0:
        return ordered
    parts = part[ordered]
    at = parts.argsort(stable=True)  # places in the epoch, by part
    counts = torch.bincount(parts)
    first = counts.cumsum(0) - counts
    parts = parts[at]
    full = torch.arange(size) - first[parts] < (counts - counts % batch_size)[parts]
    at = torch.cat([at[full], at[~full]])
    cut = size - size % batch_size
    rows = at[:cut].view(-1, batch_size)
    rows = rows[rows[:, :1].flatten().argsort(stable=True)]
    return ordered[torch.cat([rows.flatten(), at[cut:]])]
