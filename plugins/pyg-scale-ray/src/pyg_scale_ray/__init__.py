"""Ranks of Ray Train, and sampler servers as Ray actors.

Imports nothing heavy, as it is imported to list names. These are loaded when they are first used:
:func:`~pyg_scale_ray.trainers.fit`, :func:`~pyg_scale_ray.servers.serve` and
:func:`~pyg_scale_ray.cluster.local`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyg_scale import hookimpl, lazy

if TYPE_CHECKING:
    from pyg_scale_ray.cluster import local
    from pyg_scale_ray.servers import Servers, serve
    from pyg_scale_ray.trainers import fit

__all__ = ["Servers", "fit", "local", "serve"]

__getattr__, __dir__ = lazy.names(
    __name__, {"Servers": "servers", "fit": "trainers", "local": "cluster", "serve": "servers"}
)


@hookimpl
def pyg_scale_checks() -> dict[str, str]:
    return {"ray": "pyg_scale_ray.cluster:check"}
