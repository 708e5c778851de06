"""Ray on this machine alone, and checks of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyg_scale.hookspecs import Check


def check() -> Check:
    """Report the version of Ray, for `pyg-scale doctor`."""
    import ray

    return Check(True, f"ray {ray.__version__}")


@contextmanager
def local(num_cpus: int, **options: Any) -> Iterator[None]:
    """Start Ray on this machine, and end it and all that runs on it at the end.

    Nothing is sent to anyone: there is no dashboard, and no usage report.

    Args:
        num_cpus: CPUs that Ray may hand out, one for each worker or server. It does not bind
            processes to them, so there may be more than the machine has.
        **options: Of ``ray.init``.

    Raises:
        RuntimeError: If this process uses Ray already.
        ValueError: If ``num_cpus`` is less than 1.
    """
    import ray

    if num_cpus < 1:
        raise ValueError(f"num_cpus must be 1 or more (got {num_cpus})")
    if ray.is_initialized():
        raise RuntimeError("this process uses Ray already: leave local() out, or ray.shutdown()")
    before = os.environ.get("RAY_USAGE_STATS_ENABLED")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        ray.init(num_cpus=num_cpus, include_dashboard=False, **options)
        yield
    finally:
        ray.shutdown()
        if before is None:
            del os.environ["RAY_USAGE_STATS_ENABLED"]
        else:
            os.environ["RAY_USAGE_STATS_ENABLED"] = before


def require_ray(what: str) -> Any:
    """The module ``ray``, which this process must have connected to a cluster.

    Args:
        what: The caller, in the error.

    Raises:
        RuntimeError: If it has not.
    """
    import ray

    if not ray.is_initialized():
        raise RuntimeError(
            f'{what} needs a Ray cluster: call ray.init(address="auto") on one of its machines, or '
            "use pyg_scale_ray.local(num_cpus=4) for one on this machine"
        )
    return ray
