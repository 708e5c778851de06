"""Statistics over the nodes of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from pyg_scale.parallel.peers import Peers


class _Sum(torch.autograd.Function):
    """The sum over ranks, every one of which uses it: so its gradient is a sum over ranks, too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return peers.sum(tensor.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.sum(grad.clone()), None


def sum_over_ranks(tensor: Tensor, peers: Peers) -> Tensor:
    """The sum of a tensor of equal shape over the ranks, with its gradient. Every rank calls it."""
    return _Sum.apply(tensor, peers)


def global_batch_norm(norm: _BatchNorm, peers: Peers, x: Tensor) -> Tensor:
    """``norm(x)`` with the mean and the variance of the rows of all ranks.

    Running statistics are updated as by torch in one process. Every rank calls it.

    Args:
        norm: A layer of torch.
        peers: The ranks.
        x: Rows ``[n, channels, ...]`` of this rank, also none.

    Raises:
        ValueError: If there is one row in all ranks together.
    """
    if not norm.training and norm.running_mean is not None:
        return F.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps
        )
    axes = [0, *range(2, x.dim())]
    count = x.new_full((1,), x.numel() // max(1, x.size(1)))
    total = sum_over_ranks(torch.cat([x.sum(axes), count]), peers)
    number = total[-1].detach()
    if norm.training and float(number) == 1:
        raise ValueError("BatchNorm: expected more than 1 row in training, all ranks together")
    shape = [1, -1, *[1] * (x.dim() - 2)]
    mean = total[:-1] / number
    centred = x - mean.view(shape)
    variance = sum_over_ranks(centred.square().sum(axes), peers) / number
    if norm.training and norm.track_running_stats and norm.running_mean is not None:
        _track(norm, mean.detach(), variance.detach() * number / (number - 1))
    out = centred * (variance + norm.eps).rsqrt().view(shape)
    if norm.weight is not None:
        out = out * norm.weight.view(shape) + norm.bias.view(shape)
    return out


def _track(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    momentum = norm.momentum
    if momentum is None:  # a plain average
        momentum = 1.0 / float(norm.num_batches_tracked)
    for running, found in ((norm.running_mean, mean), (norm.running_var, variance)):
        assert running is not None
        running.mul_(1 - momentum).add_(found.to(running.dtype), alpha=momentum)
