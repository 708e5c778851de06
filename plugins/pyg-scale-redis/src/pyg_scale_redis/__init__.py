"""A feature store on a Redis server. Imports nothing heavy, as it is imported to list names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyg_scale import hookimpl

if TYPE_CHECKING:
    from pyg_scale_redis.feature_store import Redis as Redis

__all__ = ["Redis"]


@hookimpl
def pyg_scale_feature_stores() -> dict[str, str]:
    return {"redis": "pyg_scale_redis.feature_store:Redis"}


@hookimpl
def pyg_scale_checks() -> dict[str, str]:
    return {"redis": "pyg_scale_redis.check:check"}


def __getattr__(name: str) -> Any:
    if name == "Redis":
        from pyg_scale_redis.feature_store import Redis

        return Redis
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
