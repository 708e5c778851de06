"""Sources of a whole hop by the norms of their columns (LADIES) or by given shares (FastGCN).

The methods are those of :mod:`pyg_scale.sampler.layer_wise`. This module has the meaning in plain
torch, ``csrc/layer_take.cpp`` the same bits, compiled; ``docs/draws.md`` specifies both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops import keys, library

_CERTAIN = float(1 << 32)
_WEIGHTS = (None, "sum", "mean", "gcn")
"""In the order of the compiled op."""


def layer_take(
    counts: Tensor,
    neighbor: Tensor,
    num_nodes: int,
    k: int,
    weights: str | None,
    key: int,
    theirs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose about ``k`` sources among all in-edges of the nodes that a hop expands.

    Args:
        counts: Numbers of in-edges, ``int64`` ``[n]``.
        neighbor: Their sources, node after node, ``int64`` ``[m]``.
        num_nodes: Nodes of the graph.
        k: Sources that are expected, at least 0.
        weights: The weights of edges, see :class:`~pyg_scale.sampler.ImportanceSampler`.
        key: The key of the numbers of sources.
        theirs: Degrees of the sources of edges, ``int64`` ``[m]``, for ``"gcn"`` alone.

    Returns:
        The places of the in-edges that are taken, rising, ``int64`` ``[t]``, and their
        probabilities as numbers of ``2**32``, ``float64`` ``[t]``.

    Raises:
        ValueError: If numbers do not fit each other, or a source is not a node.
    """
    if library.compiled():
        position, share = torch.ops.pyg_scale.layer_take(
            counts.contiguous(),
            neighbor.contiguous(),
            None if theirs is None else theirs.contiguous(),
            num_nodes,
            k,
            _WEIGHTS.index(weights),
            keys.to_signed(key),
        )
        return position, share
    source, place = torch.unique(neighbor, return_inverse=True)
    degree = counts.repeat_interleave(counts, output_size=neighbor.numel())
    norm = torch.zeros_like(source).index_add_(0, place, squares(weights, degree, theirs))
    return _below(neighbor, layer_shares(norm, k)[place], key)


def layer_take_by(neighbor: Tensor, share: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Choose sources among in-edges by shares that nodes have.

    Args:
        neighbor: The sources of edges, ``int64`` ``[m]``.
        share: The probability of every node as a number of ``2**32``, ``float64``
            ``[num_nodes]``.
        key: The key of the numbers of sources.

    Returns:
        See :func:`layer_take`.

    Raises:
        ValueError: If a source is not a node.
    """
    if library.compiled():
        position, of_taken = torch.ops.pyg_scale.layer_take_by(
            neighbor.contiguous(), share, keys.to_signed(key)
        )
        return position, of_taken
    return _below(neighbor, share[neighbor], key)


def _below(neighbor: Tensor, share: Tensor, key: int) -> tuple[Tensor, Tensor]:
    drawn = keys.source_number(key, neighbor).to(torch.float64)
    taken = (drawn < share).nonzero().view(-1)
    return taken, share[taken]


def squares(weights: str | None, degree: Tensor, theirs: Tensor | None) -> Tensor:
    """Squared weights of edges in fixed point, ``int64`` ``[m]``, at least 1.

    Args:
        weights: See :class:`~pyg_scale.sampler.ImportanceSampler`.
        degree: Degrees of their destinations, ``int64`` ``[m]``.
        theirs: Degrees of their sources, for ``"gcn"``.
    """
    if weights == "sum":
        return torch.full_like(degree, 1 << 32)
    other = degree if theirs is None else theirs.clamp(min=1)
    product = degree.to(torch.float64) * other.to(torch.float64)
    return (_CERTAIN / product).floor().clamp(min=1).to(torch.int64)


def layer_shares(norm: Tensor, k: int) -> Tensor:
    """Shares in proportion to ``norm`` ``int64`` ``[n]``, of sum ``k``, ``float64`` ``[n]``."""
    one = torch.zeros_like(norm)
    everything = (norm > 0).sum() <= k
    return fill(norm, one, torch.tensor([k]), (norm > 0) & everything)


def fill(weight: Tensor, group: Tensor, wanted: Tensor, certain: Tensor) -> Tensor:
    """Shares in proportion to weights, of a given sum in each group, none above ``2**32``.

    Those that would be are ``2**32``, and the others share what is left.

    Args:
        weight: ``int64`` ``[m]``.
        group: The group of each, ``int64`` ``[m]``.
        wanted: The sum of each group, in units of ``2**32``, ``int64`` ``[g]``.
        certain: Which of them are ``2**32`` whatever their weight, ``bool`` ``[m]``; all of a
            group or none.

    Returns:
        ``float64`` ``[m]``; at least 1 where there is a weight, and 0 in groups that want nothing.
    """
    nothing, some = (wanted <= 0)[group] & ~certain, ~certain
    while True:
        left = torch.zeros_like(wanted).index_add_(0, group, torch.where(certain, 0, weight))
        rate = (wanted.to(torch.float64) * _CERTAIN / left.clamp(min=1).to(torch.float64))[group]
        scaled = weight.to(torch.float64) * rate
        more = some & ~certain & (weight > 0) & (scaled >= _CERTAIN)
        if not bool(more.any()):
            break
        certain = certain | more
        wanted = wanted - torch.zeros_like(wanted).index_add_(0, group, more.to(torch.int64))
    share = torch.where(weight > 0, scaled.ceil().clamp(min=1), 0)
    return torch.where(nothing, 0.0, torch.where(certain, _CERTAIN, share))
