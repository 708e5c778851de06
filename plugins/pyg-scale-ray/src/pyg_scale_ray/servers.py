"""Sampler servers as actors that Ray starts again when they die."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pyg_scale_ray.cluster import require_ray


class _Server:
    """The server of an actor.

    Args:
        path: The graph directory, as the actor's machine sees it.
        address: Where it listens; the same after each restart, as clients know no other.
        secret: Of servers and clients.
        num_threads: Batches that are made at a time.
        feature_store: See :class:`~pyg_scale.distributed.GraphServer`.
    """

    def __init__(
        self, path: str, address: str, secret: str, num_threads: int, feature_store: str | None
    ) -> None:
        from pyg_scale import plugins
        from pyg_scale.distributed import GraphServer
        from pyg_scale.distributed.opening import open_graph

        graph: Any = open_graph(path, comm="local")
        self._server = GraphServer(graph, feature_store=feature_store, parallel=num_threads > 1)
        self._listener = plugins.get("comm", "zmq").listen(
            address, self._server.handlers, token=secret, num_threads=num_threads
        )

    def counts(self) -> dict[str, int]:
        """Counts since it was started; see :meth:`~pyg_scale.distributed.GraphServer.counts`."""
        return self._server.counts()

    def process(self) -> int:
        """The id of its process."""
        return os.getpid()

    def close(self) -> None:
        """End the requests under way, and stop listening."""
        self._server.linger()
        self._listener.close()


class Servers:
    """Sampler servers that Ray watches.

    Attributes:
        addresses: All of them, as :func:`pyg_scale.open` takes them.
        secret: What clients must have: ``pyg_scale.open(servers.addresses, token=servers.secret)``.
        actors: The actors, each with ``counts`` and ``process``.
    """

    def __init__(self, actors: Sequence[Any], addresses: Sequence[str], secret: str) -> None:
        self.actors, self.addresses, self.secret = list(actors), ",".join(addresses), secret

    def counts(self, timeout: float = 60.0) -> list[dict[str, int]]:
        """The counts of each server since its last start.

        Args:
            timeout: Seconds to wait for those that are being started.

        Raises:
            ray.exceptions.GetTimeoutError: If one does not answer in time.
        """
        import ray

        return ray.get([actor.counts.remote() for actor in self.actors], timeout=timeout)

    def close(self, timeout: float = 10.0) -> None:
        """End all servers for good; may be called again.

        Args:
            timeout: Seconds that they have to finish what they are answering.
        """
        import ray

        actors, self.actors = self.actors, []
        if actors:
            closing = [actor.close.remote() for actor in actors]
            ray.wait(closing, num_returns=len(closing), timeout=timeout)
        for actor in actors:
            ray.kill(actor, no_restart=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    path: str | Path,
    num_servers: int,
    *,
    secret: str | None = None,
    num_threads: int = 2,
    feature_store: str | None = None,
    max_restarts: int = -1,
    num_cpus: float = 1.0,
    timeout: float = 120.0,
) -> Servers:
    """Start sampler servers on the machines of a Ray cluster, in turn.

    Each is an actor. If it dies, Ray starts it again on its machine, at the same address. Clients
    ask the other servers meanwhile, or the same one again until their time is over, so that no
    batch is lost: batches follow from keys, whoever makes them. A machine that is lost takes its
    servers with it, and the others go on.

    Args:
        path: A graph directory that all machines see at this path.
        num_servers: Their number.
        secret: Of servers and clients; a new one if ``None``.
        num_threads: Batches that each makes at a time.
        feature_store: The store to read with, as in loaders.
        max_restarts: How often each may be started again, -1 for ever.
        num_cpus: Of each, as Ray counts them.
        timeout: Seconds that they may take to start.

    Raises:
        RuntimeError: If Ray was not initialised, or has not enough CPUs.
        ValueError: If a number or the secret cannot be.
        GraphDirectoryError: If ``path`` is no graph directory, seen from here.
        UnknownPluginError: If pyg-scale-zmq, by which they are reached, is not installed here.
        TimeoutError: If they do not start in time.
    """
    from pyg_scale import plugins
    from pyg_scale.comm.secret import checked_secret
    from pyg_scale.store.directory import GraphDirectory

    plugins.get("comm", "zmq")
    if num_servers < 1:
        raise ValueError(f"num_servers must be 1 or more (got {num_servers})")
    if num_threads < 1:
        raise ValueError(f"num_threads must be 1 or more (got {num_threads})")
    if max_restarts < -1:
        raise ValueError(f"max_restarts must be -1 or more (got {max_restarts})")
    secret = secrets.token_hex(32) if secret is None else checked_secret(secret, "secret")
    ray = require_ray("serve()")
    GraphDirectory(path)
    there = ray.cluster_resources().get("CPU", 0)
    if there < num_servers * num_cpus:
        raise RuntimeError(
            f"{num_servers} servers need {num_servers * num_cpus:g} CPUs, and the Ray cluster has "
            f"{there:g}: start fewer, or give ray.init(num_cpus=) or the cluster more"
        )
    nodes = [node for node in ray.nodes() if node["Alive"]]
    actors, addresses = [], []
    for number in range(num_servers):
        node = nodes[number % len(nodes)]
        where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            node["NodeID"], soft=False
        )
        port = ray.get(
            ray.remote(_free_port).options(num_cpus=0, scheduling_strategy=where).remote(),
            timeout=timeout,
        )
        address = f"tcp://{node['NodeManagerAddress']}:{port}"
        actors.append(
            ray.remote(_Server)
            .options(
                num_cpus=num_cpus,
                max_restarts=max_restarts,
                max_task_retries=-1,  # counts() waits for one that is being started
                scheduling_strategy=where,
            )
            .remote(str(Path(path).absolute()), address, secret, num_threads, feature_store)
        )
        addresses.append(address)
    servers = Servers(actors, addresses, secret)
    try:
        servers.counts(timeout)
    except ray.exceptions.GetTimeoutError:
        servers.close(0.0)
        raise TimeoutError(
            f"the servers did not start within {timeout:g} seconds: are enough CPUs free?"
        ) from None
    except BaseException:
        servers.close(0.0)
        raise
    return servers


def _free_port() -> int:
    with socket.create_server(("", 0)) as found:
        return found.getsockname()[1]
