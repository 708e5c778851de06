"""A graph that sampler servers hold, as PyG's ``Data`` or ``HeteroData``.

It can be passed to loaders, which ask the servers for batches. Attributes, such as index sets and
labels, are fetched on first access; so are features and edges, which are large.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from pyg_scale.distributed.server.fingerprint import Fingerprint
from pyg_scale.distributed.server.served_sampler import ServedSampler
from pyg_scale.distributed.server.servers import ServerRequest, Servers, addresses_of, secret_of
from pyg_scale.errors import CommError
from pyg_scale.files.npy import torch_dtype
from pyg_scale.graph.topology import NodeType
from pyg_scale.loader.batch import wire
from pyg_scale.loader.options import SamplingOptions
from pyg_scale.store.directory.data import DirectoryData, DirectoryHeteroData
from pyg_scale.store.directory.lazy import EDGE_INDEX
from pyg_scale.store.directory.meta import Meta
from pyg_scale.store.directory.opening import fill_hetero, fill_homogeneous

_COLUMN_BYTES = 32 << 20  # of one answer, when a whole attribute is fetched
_GOODBYE_SECONDS = 2.0
_SECONDS = 60.0  # in which servers must answer


class ServedDirectory:
    """A client's view of the directory that its servers have.

    Args:
        servers: The servers.
        meta: Their ``META.json``.
        client: The name of this client, 16 random bytes.
    """

    parts: tuple[int, ...] = ()

    def __init__(self, servers: Servers, meta: Meta, client: bytes) -> None:
        self.servers, self.meta = servers, meta
        self.path = ",".join(servers.addresses)
        self.fingerprint = Fingerprint.of(meta)
        self.attributes: dict[Any, Tensor] = {}
        self._client, self._pid = client, os.getpid()
        self._finalizer = weakref.finalize(self, _say_goodbye, servers, client, self._pid)

    @property
    def grouped(self) -> Any:
        """Refused, as the client has no in-edges.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"the edges of {self.path} stay on its servers, which sample: pass the graph to "
            "loaders such as NeighborLoader, with the name of a sampler; data.edge_index fetches "
            "the edge list"
        )

    def index_set(self, name: str, node_type: NodeType = None) -> Tensor:
        """The ids ``int64`` ``[n]`` of a named set such as ``"train"``, from a server.

        Raises:
            KeyError: If the set does not exist.
            CommTimeoutError: If no server answers.
        """
        sets = self.meta.index_sets.get(node_type or "", {})
        if name not in sets:
            raise KeyError(f"{self.path} has no index set {name!r}, only: {', '.join(sets) or '-'}")
        check = _Expected((sets[name],), torch.int64)
        return self.ask("index_set", [wire.json_tensor([node_type, name])], check).wait()

    def array(self, file: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that is not an attribute of nodes or edges."""
        check = _Expected(shape, torch_dtype(dtype))
        message = [wire.json_tensor([file, dtype, list(shape)])]
        return self.ask("value", message, check).wait()

    def ask(self, name: str, tensors: list[Tensor], check: Any) -> ServerRequest:
        """Send a request to a server that has this graph."""
        return self.servers.ask(name, [self.fingerprint.pack(), *tensors], check=check)

    def close(self) -> None:
        """Say goodbye to the servers; may be called again."""
        self._finalizer()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.servers, self.meta.to_json(), self._client)

    def __copy__(self) -> ServedDirectory:
        return self

    def __deepcopy__(self, memo: Any) -> ServedDirectory:
        return self

    def __repr__(self) -> str:
        return f"ServedDirectory({self.path!r})"


class _Expected:
    """Takes the one tensor of an answer, if it has the expected shape and dtype."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape, self._dtype = tuple(shape), dtype

    def __call__(self, answer: list[Tensor]) -> Tensor:
        (found,) = answer
        if tuple(found.shape) != self._shape or found.dtype != self._dtype:
            raise ValueError(
                f"{found.dtype} of shape {list(found.shape)} was sent instead of {self._dtype} of "
                f"shape {list(self._shape)}"
            )
        return found


class _Reader:
    """Reads attributes that the servers have."""

    def __call__(self, directory: Any, of_edges: bool, kind: Any, name: str) -> Tensor:
        """A whole attribute, fetched piece by piece.

        Raises:
            CommTimeoutError: If no server answers.
        """
        across = name == EDGE_INDEX
        shape, dtype = _form(directory.meta, of_edges, kind, name)
        size = shape[1] if across else shape[0]
        out = torch.empty(shape, dtype=dtype)
        step = max(1, _COLUMN_BYTES // max(1, out.nbytes // max(1, size)))
        message = wire.json_tensor([of_edges, kind, name])
        under_way: deque[tuple[Tensor, ServerRequest]] = deque()
        for begin in range(0, size, step):
            end = min(size, begin + step)
            into = out[:, begin:end] if across else out[begin:end]
            check = _Expected(tuple(into.shape), dtype)
            asked = directory.ask("column", [message, torch.tensor([begin, end])], check)
            under_way.append((into, asked))
            if len(under_way) > 2:
                _take(*under_way.popleft())
        for each in under_way:
            _take(*each)
        return out

    def rows(
        self, directory: Any, of_edges: bool, kind: Any, name: str, index: Tensor
    ) -> Tensor | None:
        """Rows of an attribute by their original ids.

        Raises:
            CommTimeoutError: If no server answers.
        """
        shape, dtype = _form(directory.meta, of_edges, kind, name)
        check = _Expected((index.numel(), *shape[1:]), dtype)
        message = [wire.json_tensor([of_edges, kind, name]), index.to("cpu", torch.int64)]
        found: Tensor = directory.ask("rows", message, check).wait()
        return found


_read = _Reader()


def _form(meta: Meta, of_edges: bool, kind: Any, name: str) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and dtype of an attribute."""
    if of_edges and name == EDGE_INDEX:
        return (2, meta.edges[kind].num_edges), torch_dtype(meta.edges[kind].index_dtype)
    if of_edges:
        spec, size = meta.edges[kind].attributes[name], meta.edges[kind].num_edges
    else:
        spec, size = meta.nodes[kind].attributes[name], meta.nodes[kind].num_nodes
    return (size, *spec.row), torch_dtype(spec.dtype)


def _take(into: Tensor, asked: ServerRequest) -> None:
    into.copy_(asked.wait())


class _Served:
    """Mixin: members of a served graph in addition to those of an opened one."""

    def sampler_for(
        self, sampler: Any, options: dict[str, Any], sampling: SamplingOptions | None
    ) -> ServedSampler:
        """The sampler of a loader, which asks the servers.

        Args:
            sampler: The name of a sampler that the servers have.
            options: Arguments of the loader.
            sampling: The servers to ask, and the number of batches ahead.
        """
        return ServedSampler(self, sampler, options, sampling)

    def close(self, timeout: float | None = None) -> None:
        """Say goodbye to the servers; may be called again. Later requests fail.

        Args:
            timeout: Ignored: the call does not wait for unreachable servers.
        """
        self.graph_directory.close()  # type: ignore[attr-defined]


class ServedData(_Served, DirectoryData):
    """A ``Data`` that :func:`pyg_scale.open` makes of ``tcp://...``."""


class ServedHeteroData(_Served, DirectoryHeteroData):
    """A ``HeteroData`` that :func:`pyg_scale.open` makes of ``tcp://...``."""


def refuse_for_servers(**given: Any) -> None:
    """Refuse arguments of :func:`pyg_scale.open` that are for directories only.

    Raises:
        ValueError: If one is given; names it.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}= is for directories: leave it out for servers")


def connect_graph(
    address: str,
    *,
    token: str | None = None,
    timeout: float | None = None,
    transport: Any = None,
) -> ServedData | ServedHeteroData:
    """Open the graph that sampler servers hold.

    The graph is a ``Data`` or ``HeteroData``, can be passed to every loader, and gives the same
    batches as the graph in memory. Close it when done (or use ``with``): a server that was started
    with ``--clients N`` ends when N clients have said goodbye.

    Args:
        address: Addresses of the servers, ``tcp://host:port,tcp://host2:port``. All must have the
            same graph; if one does not answer, another is asked for its batch. Answers of a server
            with another graph than that of the first to answer are never used.
        token: Their secret; by default that of the variable ``PYG_SCALE_SECRET`` or of the file
            named by ``PYG_SCALE_SECRET_FILE``.
        timeout: Seconds after which a request raises because no server has answered, 60 by default.
            Each server gets a share of them before another is asked.
        transport: A name of the kind ``comm`` (``"zmq"`` by default), or such a class.

    Raises:
        UnknownPluginError: If the transport is not installed; says how to install it.
        ValueError: If an address is invalid, or there is no secret.
        PermissionError: If a server has another secret.
        CommTimeoutError: If no server answers in time; names them.
    """
    servers = Servers(
        addresses_of(address),
        secret_of(token),
        _SECONDS if timeout is None else timeout,
        "zmq" if transport is None else transport,
    )
    client = secrets.token_bytes(16)
    try:
        meta = servers.call("hello", [wire.bytes_tensor(client)], check=_meta)
        directory: Any = ServedDirectory(servers, meta, client)
        if meta.is_hetero:
            return fill_hetero(directory, ServedHeteroData(), _read)
        return fill_homogeneous(directory, ServedData(), _read)
    except BaseException:
        servers.close()
        raise


def _meta(answer: list[Tensor]) -> Meta:
    (text,) = answer
    return Meta.from_json(wire.tensor_bytes(text).decode(), "META.json")  # type: ignore[arg-type]


def _restored(servers: Servers, meta: str, client: bytes) -> ServedDirectory:
    made = ServedDirectory(servers, Meta.from_json(meta, "META.json"), client)  # type: ignore[arg-type]
    made._finalizer.detach()  # the process that made this copy says goodbye
    return made


def _say_goodbye(servers: Servers, client: bytes, pid: int) -> None:
    if pid != os.getpid():
        return
    asked = []
    for server in range(len(servers)):
        with contextlib.suppress(CommError):
            asked.append(servers.tell(server, "bye", [wire.bytes_tensor(client)]))
    deadline = time.monotonic() + _GOODBYE_SECONDS
    for reply in asked:
        with contextlib.suppress(CommError):
            reply.wait(max(0.0, deadline - time.monotonic()))
    servers.close()
