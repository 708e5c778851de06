"""The backend: servers listen at an address, clients connect to several."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from pyg_scale.comm import Communicator, Connection, Listener, Work
from pyg_scale.comm.connect import Group
from pyg_scale.comm.remote import MAX_REQUEST
from pyg_scale.comm.secret import checked_secret
from pyg_scale.comm.service import Handler

_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.%\w]+\]|[\w.*-]+):(\d{1,5}|\*)|ipc://.+")


class Zmq(Communicator):
    """Requests and replies by address, over ZeroMQ, encrypted by its CURVE (RFC 25 and 26).

    It has only :meth:`listen` and :meth:`connect`, as it connects servers and clients, not the
    ranks of a group.
    """

    @classmethod
    def join(cls, group: Group) -> Communicator:
        """Raise, as this backend has no groups.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "the backend 'zmq' connects servers and clients; ranks of a group need 'gloo', 'nccl' "
            "or 'hybrid'"
        )

    @classmethod
    def listen(
        cls,
        address: str,
        handlers: Mapping[str, Handler],
        *,
        token: str,
        num_threads: int = 2,
        max_bytes: int = MAX_REQUEST,
    ) -> Listener:
        """See :meth:`pyg_scale.comm.Communicator.listen`; also accepts ``ipc://`` and a path."""
        from pyg_scale_zmq.listener import ZmqListener

        if num_threads < 1 or max_bytes < 1:
            raise ValueError(
                f"num_threads and max_bytes must be at least 1 (got {num_threads}, {max_bytes})"
            )
        where, secret = _checked(address), checked_secret(token)
        return ZmqListener(where, handlers, secret, num_threads, max_bytes)

    @classmethod
    def connect(cls, addresses: Sequence[str], *, token: str, timeout: float = 60.0) -> Connection:
        """See :meth:`pyg_scale.comm.Communicator.connect`; also accepts ``ipc://`` and a path."""
        from pyg_scale_zmq.connection import ZmqConnection

        if not addresses:
            raise ValueError("addresses must name at least one server")
        if not timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds (got {timeout!r})")
        where = tuple(_checked(address, fixed=True) for address in addresses)
        return ZmqConnection(where, checked_secret(token), timeout)

    def _exchange(self, name: str, tensors: Sequence[Tensor], tag: int) -> Work[list[Tensor]]:
        raise NotImplementedError("the backend 'zmq' has no collectives")

    def close(self) -> None:
        """Do nothing, as there is nothing to close."""


def _checked(address: str, fixed: bool = False) -> str:
    found = _ADDRESS.fullmatch(address)
    port = found[2] if found else None
    if not found or (port not in (None, "*") and int(port) > 65535):
        raise ValueError(f"an address is like tcp://host:5555 (got {address!r})")
    if fixed and (port in ("*", "0") or found[1] in ("*", "0.0.0.0", "[::]")):
        raise ValueError(f"{address!r} is where to listen: give the server's name and its port")
    return address
