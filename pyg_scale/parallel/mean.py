"""The mean of gradients over the seeds of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pyg_scale.parallel.compression import Compressor, Flat
from pyg_scale.parallel.peers import Peers


class MeanModule(nn.Module):
    """A wrapped module that makes the mean over the seeds of all ranks in ``backward``.

    Attributes:
        module: The module that was wrapped.
        all_seeds: Number of seeds of the last step; see
            :class:`~pyg_scale.parallel.base.StepMean`.
    """

    module: Any

    def __init__(self) -> None:
        super().__init__()
        self.all_seeds = 1.0
        self._seeds: int | None = None
        self._versions: list[int | None] = []
        self._exchanges = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See :meth:`~pyg_scale.parallel.ParallelModule.no_sync`."""
        before, self._exchanges = self._exchanges, False
        try:
            yield
        finally:
            self._exchanges = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The ``state_dict`` of the wrapped module, with its keys."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of the wrapped module."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


def mean_over_seeds(
    module: nn.Module, seeds: int, peers: Peers, compressor: Compressor | None = None
) -> float:
    """Add up the gradients of all ranks and divide by the number of all seeds. Every rank calls it.

    A parameter without a gradient on any rank stays without.

    Args:
        module: Has gradients of the sum of the losses over the seeds of this rank.
        seeds: How many those are.
        peers: The ranks.
        compressor: Adds up gradients instead of an all-reduce.

    Returns:
        The number of all seeds, at least 1.

    Raises:
        FloatingPointError: If a gradient under compression is not finite; names rank and parameter.
        CommError: If a rank is gone or late; names it.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    used = [float(p.grad is not None) for p in trained]
    counts = torch.tensor([seeds, *used], dtype=torch.float64, device=peers.device)
    total, *anywhere = peers.sum(counts).tolist()
    total = max(1.0, total)
    by_dtype = dict.fromkeys(p.dtype for p in trained)
    for number, dtype in enumerate(by_dtype):
        some = [(p, n) for p, n in zip(trained, anywhere, strict=True) if p.dtype == dtype]
        if compressor is None:  # which must find the same entries at the same places
            some = [(p, n) for p, n in some if n]
        if not some:
            continue
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p, _ in some]
        flat = torch.cat([grad.reshape(-1) for grad in parts])
        if compressor is None:
            peers.sum(flat).div_(total)
        else:
            last = number == len(by_dtype) - 1
            bucket = Flat(flat.div_(total), [p for p, _ in some], number, last)
            with peers.explained():
                compressor.reduce(bucket).wait()
        for (p, n), grad in zip(some, flat.split([p.numel() for p, _ in some]), strict=True):
            if n or bool(grad.any()):  # what was left out before may come now
                p.grad = grad.view_as(p).clone()
    if compressor is not None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        with peers.explained():
            error = compressor.finish(names)
        if error is not None:
            raise error
    return total
