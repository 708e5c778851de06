"""The contract of communicators: one primitive, and the collectives built on it.

Every rank gives every rank a tensor, each of its own shape and dtype: a ragged all-to-all. The
other collectives are built on it, so that a backend has one method to write. Names and semantics
are those of ``torch.distributed``.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from pyg_scale.errors import CommError

if TYPE_CHECKING:
    from pyg_scale.comm.connect import Group
    from pyg_scale.comm.landing import Landing
    from pyg_scale.comm.remote import Connection, Listener
    from pyg_scale.comm.service import Handler, Service

T = TypeVar("T")
MAX_DIMS = 8
MAX_TAG = 1 << 28
"""Tags that a caller may choose are below this."""

REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


class Work(ABC, Generic[T]):
    """A collective under way."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> T:
        """Wait for the result and return it; may be called again.

        Args:
            timeout: Seconds, by default those of the communicator.

        Raises:
            CommTimeoutError: If a rank did not answer in time; names it.
            CommError: If a rank is gone, or called another collective.
        """

    def land(self, landings: Sequence[Landing | None]) -> None:
        """Say where rows of the result may be written as they arrive: a hint, for requests.

        Args:
            landings: For each tensor of the result, in its order, or ``None``. Read
                :attr:`~pyg_scale.comm.landing.Landing.landed` of each once the result has arrived:
                where it is false, the tensor of the result has the rows.
        """

    def withdraw(self) -> None:
        """From now on, write nothing to the places given to :meth:`land`."""


class Done(Work[T]):
    """Work that needs no waiting."""

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self, timeout: float | None = None) -> T:
        return self._result


class Then(Work[T]):
    """Work whose result is computed from the result of another."""

    def __init__(self, work: Work[Any], function: Callable[[Any], T]) -> None:
        self._work = work
        self._function: Callable[[Any], T] | None = function
        self._result: list[T] = []

    def wait(self, timeout: float | None = None) -> T:
        if self._function is not None:
            self._result = [self._function(self._work.wait(timeout))]
            self._function = None
        return self._result[0]


@runtime_checkable
class JoinsRanks(Protocol):
    """A kind of communicator, a class, for ranks; those for servers and clients lack it."""

    def join(self, group: Group) -> Communicator:
        """The communicator of this rank; a class method.

        Args:
            group: The ranks, and the store where they meet.
        """


class Communicator(ABC):
    """Ranks that exchange tensors.

    All ranks call the same collectives in the same order, or give calls a ``tag``: calls with tags
    are matched by them, so threads with several batches in flight need no order. Inputs are not
    changed, and must not be until the work is done. A tensor that a rank gives itself is returned
    without a copy.

    A subclass defines :meth:`_exchange` and :meth:`close`.

    Attributes:
        rank: From 0 to ``world_size - 1``.
        world_size: Number of ranks.
        timeout: Seconds that a collective may take.
        devices: The types of device whose tensors can be sent.
        group: The group by which the ranks found each other, or ``None``.
    """

    rank: int = 0
    world_size: int = 1
    timeout: float = 300.0
    devices: frozenset[str] = frozenset(["cpu"])
    group: Group | None = None

    def __init__(self) -> None:
        self._calls = itertools.count()
        self._counting = threading.Lock()
        self._broken: str | None = None

    # Supplied by the subclass ##############################################################

    @abstractmethod
    def _exchange(self, name: str, tensors: Sequence[Tensor], tag: int) -> Work[list[Tensor]]:
        """Start to send ``tensors[r]`` to rank ``r`` and to receive a tensor from each.

        Args:
            name: The collective that the user called; ranks that disagree raise.
            tensors: One for each rank, contiguous, on one of :attr:`devices`.
            tag: The same on all ranks for the same call, different for calls in flight.

        Returns:
            Work whose result is the tensor that each rank sent to this one, on the device of the
            tensors that this one sent.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all resources; may be called again. No rank waits for another."""

    # Collectives ###########################################################################

    def all_to_all(
        self, tensors: Sequence[Tensor], *, tag: int | None = None, async_op: bool = False
    ) -> Any:
        """Give ``tensors[r]`` to rank ``r``.

        Args:
            tensors: One for each rank, of any shape and dtype, also empty.
            tag: See the class.
            async_op: Return :class:`Work` instead of waiting.

        Returns:
            The tensor that each rank gave this one, in the order of the ranks.

        Raises:
            ValueError: If there is not one tensor for each rank, or one has too many dimensions.
            TypeError: If an item is not a dense tensor on a device that the backend can send from.
            CommError: See :meth:`Work.wait`.
        """
        return self._result(self._start("all_to_all", tensors, tag), async_op)

    def all_gather(self, tensor: Tensor, *, tag: int | None = None, async_op: bool = False) -> Any:
        """Give ``tensor`` to every rank; ranks may have different shapes.

        Returns:
            The tensor of each rank.
        """
        work = self._start("all_gather", [tensor] * self.world_size, tag)
        return self._result(work, async_op)

    def broadcast(
        self, tensor: Tensor | None, src: int = 0, *, tag: int | None = None, async_op: bool = False
    ) -> Any:
        """Give the tensor of rank ``src`` to every rank.

        Args:
            tensor: Needed on ``src`` only.
            src: The rank that broadcasts.
            tag: See the class.
            async_op: See :meth:`all_to_all`.

        Returns:
            The tensor of ``src``; on ``src``, ``tensor`` itself.
        """
        if not 0 <= src < self.world_size:
            raise ValueError(f"src must be from 0 to {self.world_size - 1} (got {src})")
        if self.rank == src and tensor is None:
            raise ValueError(f"rank {src} broadcasts, so it must have a tensor")
        mine = tensor if self.rank == src and tensor is not None else torch.empty(0)
        work = self._start("broadcast", [mine] * self.world_size, tag)
        return self._result(Then(work, lambda found: found[src]), async_op)

    def all_reduce(
        self, tensor: Tensor, op: str = "sum", *, tag: int | None = None, async_op: bool = False
    ) -> Any:
        """Reduce the tensors of all ranks, which share one shape, in the order of the ranks.

        Args:
            tensor: Not changed, unlike in ``torch.distributed``.
            op: ``"sum"``, ``"min"`` or ``"max"``.
            tag: See the class; two calls in flight need tags that differ by more than one.
            async_op: See :meth:`all_to_all`.

        Returns:
            The same bits on every rank.
        """
        if op not in REDUCTIONS:
            raise ValueError(f"op must be one of {', '.join(REDUCTIONS)} (got {op!r})")
        flat = tensor.contiguous().view(-1)
        pieces = list(flat.tensor_split(self.world_size))
        first = self._start("all_reduce", pieces, tag)
        second = None if tag is None else tag + 1

        def reduce(found: list[Tensor]) -> Tensor:
            for rank, piece in enumerate(found):
                if piece.shape != found[self.rank].shape or piece.dtype != tensor.dtype:
                    raise CommError(
                        f"all_reduce: rank {rank} has {piece.dtype} of another size than rank "
                        f"{self.rank}; all ranks must have one shape and dtype"
                    )
            total = found[0].clone()
            for piece in found[1:]:
                total = REDUCTIONS[op](total, piece)
            whole = self._start("all_reduce", [total] * self.world_size, second).wait()
            return torch.cat(whole).view(tensor.shape)

        return self._result(Then(first, reduce), async_op)

    def barrier(self, *, tag: int | None = None) -> None:
        """Wait until every rank has called this.

        Raises:
            CommTimeoutError: If one did not in time; names it.
        """
        self._start("barrier", [torch.empty(0)] * self.world_size, tag).wait()

    # Requests ##############################################################################

    def serve(self, handlers: Mapping[str, Handler], *, num_threads: int = 2) -> Service:
        """Start to answer requests of other ranks, and to send them. Every rank calls it.

        Args:
            handlers: The handlers of this rank, by name.
            num_threads: Number of requests that it answers at a time.

        Raises:
            NotImplementedError: If the backend has collectives only.
        """
        raise NotImplementedError(f"{type(self).__name__} has no requests: use 'gloo' instead")

    # Without a group #######################################################################

    @classmethod
    def listen(
        cls,
        address: str,
        handlers: Mapping[str, Handler],
        *,
        token: str,
        num_threads: int = 2,
        max_bytes: int = 1 << 30,
    ) -> Listener:
        """Answer processes that are not ranks of a group.

        Args:
            address: The address to listen at, such as ``"tcp://0.0.0.0:5555"``; port 0 or ``*`` is
                any free one.
            handlers: The handlers, by name.
            token: The secret of servers and clients, which is proved and never sent. Processes
                without it are not listened to.
            num_threads: Number of requests that are answered at a time.
            max_bytes: The largest size of a request; a larger one is refused.

        Raises:
            NotImplementedError: If the backend only connects the ranks of a group.
            ValueError: If the address is not valid, or the token too short.
            CommError: If it is not possible to listen at the address.
        """
        raise NotImplementedError(f"{cls.__name__} has no addresses: use 'zmq' for servers")

    @classmethod
    def connect(cls, addresses: Sequence[str], *, token: str, timeout: float = 60.0) -> Connection:
        """Connect to servers that :meth:`listen`. Returns at once, reachable or not.

        Args:
            addresses: Addresses of the servers.
            token: Their secret. They must prove that they have it, too.
            timeout: Seconds that an answer may take.

        Raises:
            NotImplementedError: If the backend only connects the ranks of a group.
            ValueError: If an address is not valid, or the token too short.
        """
        raise NotImplementedError(f"{cls.__name__} has no addresses: use 'zmq' for servers")

    # Parts #################################################################################

    def _start(self, name: str, tensors: Sequence[Tensor], tag: int | None) -> Work[list[Tensor]]:
        if self._broken is not None:
            raise CommError(f"this communicator cannot be used any more: {self._broken}")
        if len(tensors) != self.world_size:
            raise ValueError(
                f"{name} needs one tensor for each of the {self.world_size} ranks "
                f"(got {len(tensors)})"
            )
        tensors = [
            self._empty(t) if isinstance(t, Tensor) and t.numel() == 0 else t for t in tensors
        ]
        for tensor in tensors:
            self._check(name, tensor)
        if tag is not None and not 0 <= tag < MAX_TAG:
            raise ValueError(f"tag must be from 0 to {MAX_TAG - 1} (got {tag})")
        if tag is None:
            with self._counting:
                tag = MAX_TAG + next(self._calls) % MAX_TAG
        return self._exchange(name, [tensor.detach().contiguous() for tensor in tensors], tag)

    def _empty(self, tensor: Tensor) -> Tensor:
        """A tensor without numbers, such as that of a barrier, where this can send it from."""
        return tensor

    def _check(self, name: str, tensor: Any) -> None:
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise TypeError(f"{name} sends dense tensors (got {type(tensor).__name__})")
        if tensor.device.type not in self.devices:
            raise TypeError(
                f"{name}: {type(self).__name__} sends tensors on {', '.join(sorted(self.devices))} "
                f"(got one on {tensor.device}); the backend 'hybrid' routes by device"
            )
        if tensor.dim() > MAX_DIMS:
            raise ValueError(f"{name}: a tensor may have {MAX_DIMS} dimensions ({tensor.dim()})")

    def _result(self, work: Work[Any], async_op: bool) -> Any:
        return work if async_op else work.wait()

    def _break(self, reason: str) -> None:
        """Refuse every exchange from now on."""
        self._broken = self._broken or reason

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, world_size={self.world_size})"
