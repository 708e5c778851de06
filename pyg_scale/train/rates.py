"""Learning rates for larger steps, and the way there."""

from __future__ import annotations

import math
import operator
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

RULES = ("linear", "sqrt")


def scale_learning_rate(
    optimizer: Optimizer,
    by: float,
    num_steps: int,
    *,
    rule: str = "linear",
    warm_up: float = 0.05,
) -> LambdaLR:
    """Raise the learning rates of an optimizer for steps of more seeds, and warm up to them.

    The rate of a parameter group is multiplied by ``by`` (``"linear"``, for SGD: Goyal et al.,
    "Accurate, Large Minibatch SGD", 2017, sections 2.1 and 2.2) or by its square root (``"sqrt"``,
    for Adam and its like: Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient
    Algorithms", NeurIPS 2022). It begins with ``1 / by`` of that and grows by the same amount in
    every step. After ``t`` steps, with ``w = max(1, floor(warm_up * num_steps))``, it is ::

        rate * s * (1 / by + (1 - 1 / by) * min(t / w, 1)),     s = by or sqrt(by)

    It is no default of anything here: seeds are one of two things that make a batch of a sampled
    graph larger, and fan-outs, the other one, act differently.

    Args:
        optimizer: Its rates are those for steps of the usual size.
        by: By how much steps are larger: with a loader that gives every rank ``batch_size`` seeds
            the number of ranks, times how many batches an
            :class:`~pyg_scale.train.Accumulation` adds up.
        num_steps: How many steps of the optimizer the run makes: ``epochs * len(loader)``.
        rule: ``"linear"`` or ``"sqrt"``.
        warm_up: The share of these steps in which the rate grows, from 0 to 1.

    Returns:
        A scheduler, whose ``step()`` is called after each step of the optimizer.

    Raises:
        TypeError: If ``num_steps`` is no integer.
        ValueError: If a number or the rule cannot be.
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)} (got {rule!r})")
    if not (math.isfinite(by) and by >= 1):
        raise ValueError(f"by must be 1 or more, the growth of a step (got {by})")
    if not 0 <= warm_up <= 1:
        raise ValueError(f"warm_up must be from 0 to 1, a share of the steps (got {warm_up})")
    steps = max(1, math.floor(warm_up * _whole(num_steps)))
    for group in optimizer.param_groups:
        # Out of place, as a tensor may be that of several groups, and is the caller's.
        group["lr"] = group["lr"] * (by if rule == "linear" else math.sqrt(by))
        group.pop("initial_lr", None)

    def factor(step: int) -> float:
        return 1 / by + (1 - 1 / by) * min(step / steps, 1.0)

    return LambdaLR(optimizer, factor)


def _whole(num_steps: Any) -> int:
    advice = (
        "num_steps must say how many steps of the optimizer the run makes, such as "
        "epochs * len(loader)"
    )
    try:
        found = operator.index(num_steps)
    except TypeError:
        raise TypeError(f"{advice} (got {num_steps!r})") from None
    if found < 1:
        raise ValueError(f"{advice}, 1 or more (got {found})")
    return found
