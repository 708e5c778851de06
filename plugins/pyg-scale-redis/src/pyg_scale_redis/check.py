"""The check of Redis in `pyg-scale doctor`."""

from __future__ import annotations

from pyg_scale.hookspecs import Check


def check() -> Check:
    """Check that there is a server at the default URL of the feature store."""
    from pyg_scale_redis.connection import Connection, default_url

    try:
        connection = Connection(default_url(), timeout=2, max_connections=1)
    except ValueError as error:
        return Check(False, str(error), "set PYG_SCALE_REDIS_URL to the URL of a server")
    try:
        with connection.client() as client:
            version = client.info("server")["redis_version"]
    except (OSError, RuntimeError) as error:
        return Check(
            None,
            f"no server at {connection.shown}: {type(error).__name__}",
            "start redis-server, or set PYG_SCALE_REDIS_URL",
        )
    return Check(True, f"Redis {version} at {connection.shown}")
