"""Arguments about workers, checked before any work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WORKER_TYPES: tuple[str | None, ...] = (None, "thread", "process", "ring")


def check_workers(worker_type: str | None, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of a loader that contradict each other.

    Args:
        worker_type: ``"thread"``, ``"process"``, ``"ring"`` or ``None``.
        kwargs: Arguments of ``DataLoader``.

    Raises:
        TypeError: If ``num_workers`` is no integer.
        ValueError: If an argument means nothing with the others, or is none of those allowed.
    """
    if worker_type not in _WORKER_TYPES:
        raise ValueError(
            f"worker_type must be 'thread', 'process', 'ring' or None (got {worker_type!r})"
        )
    num_workers = kwargs.get("num_workers", 0)
    if isinstance(num_workers, bool) or not isinstance(num_workers, int):
        raise TypeError(f"num_workers must be an integer (got {num_workers!r})")
    if num_workers > 0 and worker_type == "thread":
        for name in ("worker_init_fn", "multiprocessing_context"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name} is about worker processes: leave it out, or pass worker_type='process'"
                )
    if num_workers > 0 and worker_type == "ring":
        for name, wrong in (
            ("worker_init_fn", kwargs.get("worker_init_fn") is not None),
            ("persistent_workers", bool(kwargs.get("persistent_workers"))),
            ("in_order", not kwargs.get("in_order", True)),
        ):
            if wrong:
                raise ValueError(
                    f"{name}: sampler processes with a ring end with the epoch and deliver in "
                    "order; leave it out, or pass worker_type='process'"
                )
    if num_workers > 0 and kwargs.get("prefetch_factor") == 0:
        raise ValueError("prefetch_factor must be at least 1 with num_workers > 0 (got 0)")
    if num_workers == 0 and kwargs.get("timeout"):
        raise ValueError(
            f"timeout={kwargs['timeout']} is how long to wait for workers: pass num_workers > 0"
        )


def check_index_samplers(kwargs: Mapping[str, Any]) -> None:
    """Refuse names where torch's index samplers belong.

    Raises:
        TypeError: If ``sampler`` or ``batch_sampler`` is a string.
    """
    for name in ("sampler", "batch_sampler"):
        if isinstance(kwargs.get(name), str):
            raise TypeError(
                f"{name}= is torch's index sampler, which orders the seeds (got "
                f"{kwargs[name]!r}); neighbor_sampler= takes a name"
            )
