"""``pyg_scale.open``: a graph directory, by this process alone or by several ranks together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import torch.distributed as dist

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.store.directory import GraphDirectory, Part
from pyg_scale.store.directory import opening as alone
from pyg_scale.store.directory.data import DirectoryData, DirectoryHeteroData
from pyg_scale.store.directory.verify import verify as verify_directory

if TYPE_CHECKING:  # code for other ranks is loaded only if there are any
    from pyg_scale.comm import Communicator
    from pyg_scale.distributed.graph import RankData, RankHeteroData

SCHEMES = ("tcp://", "ipc://")
"""The prefix of the addresses of servers."""
THROUGH = ("mappings", "requests")
"""The ways of reading parts that another rank of this machine owns."""

Opened: TypeAlias = "DirectoryData | DirectoryHeteroData | RankData | RankHeteroData"


@overload
def open_graph(
    path: str | PathLike[str],
    part: None = None,
    *,
    verify: bool = False,
    snapshot: int | None = None,
    comm: str | Communicator | None = None,
    through: str = "mappings",
    timeout: float | None = None,
    num_threads: int = 2,
    token: str | None = None,
    transport: str | type[Communicator] | None = None,
    cache: int | str | None = None,
    cache_ratio: float | None = None,
    cache_policy: str = "placed",
) -> Opened: ...


@overload
def open_graph(
    path: str | PathLike[str], part: int, *, verify: bool = False, snapshot: int | None = None
) -> Part: ...


def open_graph(
    path: str | PathLike[str],
    part: int | None = None,
    *,
    verify: bool = False,
    snapshot: int | None = None,
    comm: str | Communicator | None = None,
    through: str = "mappings",
    timeout: float | None = None,
    num_threads: int = 2,
    token: str | None = None,
    transport: str | type[Communicator] | None = None,
    cache: int | str | None = None,
    cache_ratio: float | None = None,
    cache_policy: str = "placed",
) -> Opened | Part:
    """Open a graph directory, or the graph of sampler servers. Loaders take the result.

    One process: the graph is a ``Data`` or ``HeteroData`` whose tensors are memory-mapped,
    copy-on-write: the system reads only pages that are used, all processes of a machine share them,
    and a write stays in this process. The edge list is created on the first access to
    ``edge_index``. A directory of several parts is one graph too if all of them are present; its
    attributes and in-edges are joined in memory on first access. Ids are the original ones.

    Several ranks (``torch.distributed`` is initialised, or torchrun started this process): all of
    them call it, each with a directory that has ``META.json``, the partition book and at least the
    parts that it is to own. Loaders sample across all parts and give the same batches as a single
    process. Until the graph is closed on all ranks, each rank answers the others in threads of its
    own. Labels, masks and other attributes with one number per node can be read as usual; larger
    attributes of remote parts are available from loaders only. The graph has ``close()``, and is a
    context manager.

    Sampler servers (``pyg-scale serve``): they sample, and this process has no part of the graph,
    see :func:`pyg_scale.distributed.server.served_graph.connect_graph`.

    Args:
        path: The directory, or the addresses of servers, ``"tcp://host:port,tcp://host2:port"``.
        part: Open this part alone.
        verify: Read all files present, and check checksums, ids and orders; see
            :func:`pyg_scale.store.directory.verify.verify`.
        snapshot: The id of a snapshot, see :func:`pyg_scale.append`; ``None`` for the newest. What
            is appended later does not change the opened graph.
        comm: The ranks: a name of the kind ``comm`` or a communicator (which is then not closed
            with the graph). ``None``: all ranks of the job. ``"local"``: this process alone, even
            if there are others.
        through: ``"mappings"``: a rank reads all parts in its directory, whichever rank owns them.
            ``"requests"``: it reads only its own parts, and asks other ranks for all others, even
            ranks of the same machine (for a directory on a slow network file system).
        timeout: Seconds that the other ranks may take to come, and to answer (300 by default), or
            servers to answer (60 by default).
        num_threads: Number of requests of other ranks that this one answers at a time.
        token: The servers' secret; by default that of the variable ``PYG_SCALE_SECRET``, or of the
            file named by ``PYG_SCALE_SECRET_FILE``. Ranks take theirs only from these, see
            :func:`pyg_scale.distributed.init`.
        transport: The transport to servers: a name of the kind ``comm`` (``"zmq"`` by default), or
            such a class.
        cache: Bytes of features of other ranks to keep in memory, or text such as ``"2GB"``.
        cache_ratio: Instead of ``cache``, a share of all features of the graph. A single process
            needs no such cache.
        cache_policy: The choice of rows in the cache: ``"placed"`` (nodes that the partitioner
            listed, then halo nodes), ``"belady"`` or ``"sieve"``; see
            :class:`~pyg_scale.distributed.features.store.RankFeatures`.

    Returns:
        The graph, or with ``part`` a :class:`~pyg_scale.store.directory.Part`.

    Raises:
        GraphDirectoryError: If it is not a graph directory, has a newer version, is damaged, or no
            rank has a part; names the file, the part or the rank. All ranks raise it.
        IndexError: If the part does not exist.
        ValueError: If an argument is invalid.
        AccessError: If a rank has another secret; raised when it is first asked.
        CommTimeoutError: If not all ranks arrive in time; names those that did not.
    """
    options = {"cache": cache, "cache_ratio": cache_ratio, "policy": cache_policy}
    if options != {"cache": None, "cache_ratio": None, "policy": "placed"}:
        from pyg_scale.distributed.features.hot import check_cache

        check_cache(**options)
    if str(path).startswith(SCHEMES):
        from pyg_scale.distributed.server.served_graph import connect_graph, refuse_for_servers

        refuse_for_servers(part=part, verify=verify, comm=comm)
        if snapshot is not None:
            raise ValueError("snapshot= is for directories; servers have opened one already")
        if cache is not None or cache_ratio is not None:
            raise ValueError(
                "cache= and cache_ratio= keep features of other ranks, and servers send whole "
                "batches: leave them out"
            )
        return connect_graph(str(path), token=token, timeout=timeout, transport=transport)
    if token is not None or transport is not None:
        raise ValueError(f"token= and transport= are for servers, tcp://host:port (got {path})")
    timeout = 300.0 if timeout is None else timeout
    if through not in THROUGH:
        raise ValueError(f"through must be one of {', '.join(THROUGH)} (got {through!r})")
    if part is not None:
        return alone.open_graph(path, part, verify=verify, snapshot=snapshot)
    if comm == "local" or (comm is None and _num_ranks() == 1):
        return alone.open_graph(path, verify=verify, snapshot=snapshot)
    from pyg_scale.comm import connect

    ranks = connect(comm, timeout=timeout)
    if ranks.world_size == 1:
        return alone.open_graph(path, verify=verify, snapshot=snapshot)
    owns_comm = ranks is not comm
    try:
        return open_on_ranks(
            Path(path), ranks, verify, through, num_threads, owns_comm, options, snapshot
        )
    except BaseException:
        if owns_comm:
            ranks.close()
        raise


def _num_ranks() -> int:
    if "WORLD_SIZE" not in os.environ and not (dist.is_available() and dist.is_initialized()):
        return 1
    from pyg_scale.comm.connect import num_ranks

    return num_ranks()


def open_on_ranks(
    source: Path | GraphDirectory,
    comm: Communicator,
    verify: bool = False,
    through: str = "mappings",
    num_threads: int = 2,
    owns_comm: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
    snapshot: int | None = None,
) -> Opened:
    """Open a graph on several ranks, all of which call it; see :func:`open_graph`.

    Args:
        source: The directory, or its path.
        comm: The ranks.
        verify: See :func:`open_graph`.
        through: See :func:`open_graph`.
        num_threads: See :func:`open_graph`.
        owns_comm: Close ``comm`` with the graph.
        options: Options of :class:`~pyg_scale.distributed.features.store.RankFeatures`.
        snapshot: See :func:`open_graph`; for a path.

    Raises:
        GraphDirectoryError: See :func:`open_graph`.
        CommTimeoutError: See :func:`open_graph`.
    """
    from pyg_scale.distributed.graph import graph_of
    from pyg_scale.distributed.owners import Owners
    from pyg_scale.distributed.ranks import Ranks
    from pyg_scale.distributed.serving import handlers_of

    directory, error = None, ""
    try:
        directory = (
            source
            if isinstance(source, GraphDirectory)
            else GraphDirectory.shared(source, snapshot)
        )
        if verify:
            verify_directory(directory)
    except (GraphDirectoryError, OSError) as found:
        error = str(found) or type(found).__name__
    owners = Owners.agree(comm, directory, through=through, error=error)
    assert directory is not None, "agree raises otherwise"
    service = comm.serve(handlers_of(directory), num_threads=num_threads)
    ranks = Ranks(comm, service, owners, directory.path, owns_comm=owns_comm)
    try:
        comm.barrier()  # from now on all ranks serve
        return graph_of(directory, ranks, **options)
    except BaseException:
        ranks.close(0.0)
        raise
