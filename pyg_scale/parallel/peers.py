"""The ranks that share a graph: collectives of torch, and errors that name ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_scale.comm.roll_call import RollCall
from pyg_scale.errors import CommError, GraphDirectoryError
from pyg_scale.parallel.base import Waited

_RAISED = {
    kind.__name__: kind
    for kind in (GraphDirectoryError, NotImplementedError, TypeError, ValueError)
}


class Peers:
    """A process group, with errors that name the ranks that are gone or late.

    Every rank creates it, at the same time.

    Args:
        group: A process group of ``torch.distributed``; all ranks if ``None``.
        device: The device of the model.
        whole: The ranks of which these are some: an error then ends the waits of all of them.

    Raises:
        RuntimeError: If the ranks have not met.
        TypeError: If ``group`` is no process group.

    Attributes:
        waited: Counts the time in exchanges that this rank waits for, on the CPU.
    """

    def __init__(self, group: Any, device: torch.device, whole: Peers | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "the ranks have not met: call pyg_scale.distributed.init() first, or torch's "
                "init_process_group (one process alone is a group, too)"
            )
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"group must be a process group of torch.distributed (got {type(group).__name__})"
            )
        group = dist.group.WORLD if group is None else group
        assert group is not None, "torch.distributed is initialised"
        self.group: dist.ProcessGroup = group
        self.rank, self.size = group.rank(), group.size()
        self.device = device
        if whole is None:
            self._roll_call, self.waited = RollCall(group), Waited()
        else:
            self._roll_call, self.waited = whole._roll_call, whole.waited
            self._roll_call.include(group)

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Within it, an error of this rank ends the waits of the others, which name both.

        Raises:
            Exception: Of this rank, as it is.
        """
        try:
            yield
        except CommError:
            raise
        except Exception as error:
            self._roll_call.leave_word(error)
            raise

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Within it, an error of gloo becomes one that names the ranks that are gone or late."""
        try:
            yield
        except RuntimeError as error:
            if (found := self._roll_call.explain(error)) is not None:
                raise found from error
            raise

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        num_received: list[int],
        num_sent: list[int],
        later: bool = False,
    ) -> Callable[..., None]:
        """Give each rank its rows of ``sent``; the rows from each rank are written in order.

        Gloo's all-to-all begins the messages of rank ``r`` with that to ``r + 1``, then ``r + 2``
        and so on, so ranks do not all begin with the same one. It waits for none of them before the
        next: all are under way together.

        Args:
            received: ``[sum(num_received), ...]``, contiguous; written.
            sent: ``[sum(num_sent), ...]``, contiguous.
            num_received: Number of rows from each rank.
            num_sent: Number of rows to each rank.
            later: Whether to return while it is under way.

        Returns:
            A function that waits for it; its arguments are kept for as long as the function is.

        Raises:
            CommError: If a rank is gone or late; names it. Also raised by the function.
        """
        if self.size == 1:
            received.copy_(sent)
            return lambda *_: None
        with self.explained(), self.waited.counting():
            work = dist.all_to_all_single(
                received, sent, num_received, num_sent, group=self.group, async_op=later
            )

        def wait(*_: Any) -> None:
            if work is not None:
                with self.explained(), self.waited.counting():
                    work.wait()

        return wait

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor of equal shape over the ranks, in place.

        Raises:
            CommError: If a rank is gone or late; names it.
        """
        if self.size > 1:
            with self.explained(), self.waited.counting():
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with those of the first rank of the group.

        Raises:
            CommError: If a rank is gone or late; names it.
        """
        if self.size > 1:
            with self.explained(), self.waited.counting():
                for tensor in tensors:
                    sent = tensor.detach().contiguous()
                    dist.broadcast(sent, group=self.group, group_src=0)
                    tensor.detach().copy_(sent)

    def gather(self, record: Any) -> list[Any]:
        """The records of all ranks, as JSON on the wire.

        Raises:
            CommError: If a rank is gone or late; names it.
        """
        if self.size == 1:
            return [record]
        text = json.dumps(record).encode()
        own = torch.tensor(list(text), dtype=torch.uint8, device=self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        with self.explained(), self.waited.counting():
            dist.all_gather(sizes, torch.tensor([len(text)], device=self.device), group=self.group)
            longest = max(int(size) for size in sizes)
            rows = [own.new_empty(longest) for _ in range(self.size)]
            padded = torch.nn.functional.pad(own, (0, longest - len(text)))
            dist.all_gather(rows, padded, group=self.group)
        try:
            return [
                json.loads(bytes(row[: int(size)].tolist()))
                for row, size in zip(rows, sizes, strict=True)
            ]
        except ValueError:
            raise CommError(
                "ranks sent something else than records: did all call wrap()?"
            ) from None

    def meet(self, act: str, said: Any, error: Exception | None = None) -> tuple[str, list[Any]]:
        """Tell all ranks what this one is about to do. Every rank calls it.

        Args:
            act: What it does; ``"join"`` if it does what the others do.
            said: What the others need to know of it, as JSON knows it.
            error: The reason why it cannot.

        Returns:
            What the ranks do, ``"join"`` if none does anything else, and what each has said.

        Raises:
            Exception: ``error``.
            RuntimeError: If ranks do different things, or another rank had an error; names it.
            CommError: If a rank is gone or late; names it.
        """
        own = None if error is None else f"{type(error).__name__}: {error}"
        records = self.gather([act, said, own])
        if error is not None:
            raise error
        for rank, (_, _, text) in enumerate(records):
            if text is not None:
                raise RuntimeError(f"rank {rank} failed: {text}")
        acts = [each for each, _, _ in records]
        doing = sorted(set(acts) - {"join"})
        if len(doing) > 1:
            who = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(acts))
            raise RuntimeError(f"ranks do different things in a step ({who})")
        return (doing[0] if doing else "join"), [each for _, each, _ in records]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within it, an error of one rank becomes one of all, which names the rank.

        No collective may be called within it.

        Raises:
            ValueError: Or another standard error, as on the first rank that has one.
            CommError: If a rank is gone or late; names it.
        """
        error: Exception | None = None
        try:
            yield
        except (TypeError, ValueError, NotImplementedError) as found:
            error = found
        own = None if error is None else [type(error).__name__, str(error)]
        for rank, said in enumerate(self.gather(own)):
            if said is None:
                continue
            if error is not None:
                raise error
            kind, text = said
            raise _RAISED.get(kind, ValueError)(f"rank {rank}: {text}")


class Alone(Peers):
    """This rank and no other: nothing is sent.

    Args:
        device: The device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self.device, self.waited = 0, 1, device, Waited()
