"""Gradients that are sent in fewer bytes: the largest entries, half precision, low rank.

A rank brings its gradient of the mean over the seeds of all ranks: the sum over its own seeds,
divided by the number of all before anything is rounded or left out. Ranks add these up. What a
rank leaves out stays with it and is added to its next gradient (error feedback; Seide et al.,
Interspeech 2014; Stich et al., NeurIPS 2018). A rank without batches sends what is left, too.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

_FIRST_SHARE = 0.25
"""The share of entries that top-k sends in the first step of a warm-up."""


class Compression(ABC):
    """A way to send gradients in fewer bytes; an instance holds its options."""

    @abstractmethod
    def compressor(self, group: dist.ProcessGroup) -> Compressor:
        """Make the compressor of a wrapped module.

        Args:
            group: The ranks.
        """


class Bucket(Protocol):
    """Gradients that are sent together; torch's ``GradBucket`` is one."""

    def index(self) -> int:
        """The number of the bucket in a step."""
        ...

    def buffer(self) -> Tensor:
        """All gradients in a row, ``[n]``."""
        ...

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of their gradients."""
        ...

    def gradients(self) -> list[Tensor]:
        """The gradients, with the shapes of the parameters; views of the buffer."""
        ...

    def is_last(self) -> bool:
        """True for the last bucket of a step."""
        ...


class Flat:
    """A bucket of gradients that nobody else has put together.

    Args:
        buffer: ``[n]``.
        parameters: See :class:`Bucket`.
        number: The number of the bucket in a step.
        last: True for the last one of a step.
    """

    def __init__(self, buffer: Tensor, parameters: list[Any], number: int, last: bool) -> None:
        self._buffer, self._parameters = buffer, parameters
        self._number, self._last = number, last

    def index(self) -> int:
        """See :class:`Bucket`, as of all others."""
        return self._number

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        parts = self._buffer.split([each.numel() for each in self._parameters])
        return [part.view_as(each) for part, each in zip(parts, self._parameters, strict=True)]

    def is_last(self) -> bool:
        return self._last


class _Sent(NamedTuple):
    """A bucket under way.

    Attributes:
        wrong: The position of the first entry that is not finite, -1 if there is none, ``[]``.
        parameters: The parameters whose gradients are in it.
        buffer: Becomes the sum over ranks.
    """

    wrong: Tensor
    parameters: list[Tensor]
    buffer: Tensor


class Compressor(ABC):
    """Adds up the gradients of all ranks, bucket by bucket, and keeps what was left out.

    Args:
        group: The ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.world_size = group.size()
        self._sent: list[_Sent] = []

    @abstractmethod
    def reduce(self, bucket: Bucket) -> Future[Any]:
        """Begin to make a bucket the sum over ranks of what each sends of it, in place.

        Args:
            bucket: This rank's gradient of the mean over the seeds of all ranks.
        """

    @abstractmethod
    def keep(self, whole: bool) -> None:
        """End a step: what its buckets left out is kept, or forgotten if it is not ``whole``."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank has left out, and what else its next step depends on."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a module with the same parameters, buckets and ranks."""

    def finish(self, names: Mapping[int, str]) -> FloatingPointError | None:
        """End a step, once all buckets are there. Every rank calls it.

        Args:
            names: The name of each parameter, by its ``id``.

        Returns:
            The error of a step whose gradients are not finite, the same one on every rank. What
            was left out is then what it was before the step.
        """
        sent, self._sent = self._sent, []
        whole = all(bool(each.buffer.isfinite().all()) for each in sent)
        self.keep(whole)
        return None if whole else self._blame(sent, names)

    def _note(self, bucket: Bucket, values: Tensor) -> None:
        """Remember what is about to be sent of a bucket."""
        wrong = values.isfinite().logical_not_()
        first = wrong.to(torch.uint8).argmax()
        position = torch.where(wrong[first], first, -1)  # nothing is read: a device need not wait
        self._sent.append(_Sent(position, bucket.parameters(), bucket.buffer()))

    def _blame(self, sent: list[_Sent], names: Mapping[int, str]) -> FloatingPointError:
        own = torch.stack([each.wrong for each in sent])
        of_ranks = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(of_ranks, own, group=self.group)
        for rank, positions in zip(dist.get_process_group_ranks(self.group), of_ranks):
            for position, bucket in zip(positions.tolist(), sent):
                if position >= 0:
                    name = _name_at(position, bucket.parameters, names)
                    return FloatingPointError(
                        f"the gradient of parameter {name!r} on rank {rank} is NaN, infinite, or "
                        f"too large for the type that is sent: look at the loss of rank {rank}, "
                        f"or skip the step with zero_grad() on all ranks"
                    )
        return FloatingPointError(
            "the sum of the gradients of all ranks is too large for the type that is sent: scale "
            "the loss down, or skip the step with zero_grad() on all ranks"
        )


def _name_at(position: int, parameters: list[Tensor], names: Mapping[int, str]) -> str:
    for parameter in parameters:
        position -= parameter.numel()
        if position < 0:
            break
    return names[id(parameter)]


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Future[Any]:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    return work.get_future()


class TopK(Compression):
    """Sends the entries of largest magnitude, with their positions, by an all-gather.

    Of a bucket of n gradients every rank sends ceil(ratio n) values and as many int32 positions:
    from P ranks with float32, 8 ratio n P bytes come to each. From ``ratio >= 1 / P`` on, an
    all-reduce of the whole sends no more; it is made instead, and nothing is left out. See Aji and
    Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017.

    At first, when gradients are large and change fast, more is sent: the share falls from a quarter
    to ``ratio`` by equal factors (Lin et al., "Deep Gradient Compression", ICLR 2018, section 3.3).

    Args:
        ratio: The share of entries to send, above 0 and at most 1.
        warmup: Number of steps in which the share falls to ``ratio``.

    Raises:
        ValueError: If one of them is out of range.
    """

    def __init__(self, ratio: float = 0.01, warmup: int = 0) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1 (got {ratio})")
        if operator.index(warmup) < 0:
            raise ValueError(f"warmup must be at least 0 (got {warmup})")
        self.ratio, self.warmup = ratio, warmup

    def compressor(self, group: dist.ProcessGroup) -> Compressor:
        return _TopK(group, self)

    def share(self, step: int) -> float:
        """The share of entries that is sent in a step, counted from 0."""
        if step >= self.warmup:
            return self.ratio
        return max(self.ratio, _FIRST_SHARE * (self.ratio / _FIRST_SHARE) ** (step / self.warmup))


class _TopK(Compressor):
    def __init__(self, group: dist.ProcessGroup, options: TopK) -> None:
        super().__init__(group)
        self._options, self._step = options, 0
        self._left: dict[int, Tensor] = {}
        self._next: dict[int, Tensor] = {}

    def reduce(self, bucket: Bucket) -> Future[Any]:
        index, buffer = bucket.index(), bucket.buffer()
        if index in self._left:
            buffer.add_(self._left[index])
        self._note(bucket, buffer)
        share = self._options.share(self._step)
        if share >= 1 / self.world_size:
            self._next[index] = torch.zeros_like(buffer)
            return _all_reduce(buffer, self.group).then(lambda _: buffer)
        # NaN counts as the largest, so what is not finite is always sent.
        chosen = buffer.abs().topk(math.ceil(share * buffer.numel()), sorted=False).indices
        values = buffer[chosen]
        self._next[index] = buffer.index_fill(0, chosen, 0)
        fits = buffer.numel() <= torch.iinfo(torch.int32).max
        positions = chosen.to(torch.int32) if fits else chosen
        message = torch.cat([positions.view(torch.uint8), values.view(torch.uint8)])
        messages = [torch.empty_like(message) for _ in range(self.world_size)]
        work = dist.all_gather(messages, message, group=self.group, async_op=True)
        assert work is not None
        edge = positions.numel() * positions.element_size()

        def add_up(_: Future[Any]) -> Tensor:
            buffer.zero_()
            for each in messages:  # in the order of ranks: the same bits on all of them
                at = each[:edge].view(positions.dtype)
                # Copied, as 8-byte values may begin at a place that only 4 divide.
                buffer.index_add_(0, at, each[edge:].clone().view(values.dtype))
            return buffer

        return work.get_future().then(add_up)

    def keep(self, whole: bool) -> None:
        if whole:
            self._left.update(self._next)
            self._step += 1
        self._next.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"left": dict(self._left), "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step = state["step"]
        self._left = {index: left.clone() for index, left in state["left"].items()}


class Half(Compression):
    """Sends gradients in a type of two bytes, as torch's ``fp16_compress_hook`` does.

    Unlike there, they are divided before they are rounded, and bfloat16 goes over gloo, too.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype must be torch.float16 or torch.bfloat16 (got {dtype})")
        self.dtype = dtype

    def compressor(self, group: dist.ProcessGroup) -> Compressor:
        return _Half(group, self.dtype)


class _Half(Compressor):
    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        super().__init__(group)
        self._dtype = dtype

    def reduce(self, bucket: Bucket) -> Future[Any]:
        buffer = bucket.buffer()
        rounded = buffer.to(self._dtype)
        self._note(bucket, rounded)
        return _all_reduce(rounded, self.group).then(lambda _: buffer.copy_(rounded))

    def keep(self, whole: bool) -> None:
        """Nothing is left out."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing was left out."""


class PowerSGD(Compression):
    """Sends matrices of low rank: torch's ``powerSGD_hook`` (Vogels et al., NeurIPS 2019).

    Over gloo a bucket is sent before the next one is begun: the exchanges of the hook depend on
    each other, and those of two buckets would meet in another order on each rank.

    Args:
        matrix_approximation_rank: See torch, as of the others.
        start_powerSGD_iter: The number of steps before which gradients are sent whole.
        **options: Those of torch's ``PowerSGDState``.
    """

    def __init__(
        self,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        **options: Any,
    ) -> None:
        self.options = {
            "matrix_approximation_rank": matrix_approximation_rank,
            "start_powerSGD_iter": start_powerSGD_iter,
            **options,
        }
        PowerSGDState(None, **self.options)  # raises what is wrong with them

    def compressor(self, group: dist.ProcessGroup) -> Compressor:
        return _PowerSGD(group, self.options)


class _PowerSGD(Compressor):
    def __init__(self, group: dist.ProcessGroup, options: dict[str, Any]) -> None:
        super().__init__(group)
        self._state = PowerSGDState(group, **options)
        self._before: dict[int, Tensor] = {}

    def reduce(self, bucket: Bucket) -> Future[Any]:
        buffer = bucket.buffer()
        self._note(bucket, buffer)
        if bucket.index() == 0:
            self._before = dict(self._state.error_dict)
        buffer.mul_(self.world_size)  # the hook makes the mean over ranks
        future: Future[Any] = powerSGD_hook(self._state, bucket)
        if buffer.device.type == "cpu":
            future.wait()
        return future

    def keep(self, whole: bool) -> None:
        if not whole:
            self._state.error_dict = self._before
            self._state.p_memory_dict.clear()  # they are drawn again, the same on all ranks
            self._state.q_memory_dict.clear()
        self._before = {}

    def state_dict(self) -> dict[str, Any]:
        state = self._state
        return {
            "step": state.iter,
            "random": state.rng.get_state(),
            "left": dict(state.error_dict),
            "p": dict(state.p_memory_dict),
            "q": dict(state.q_memory_dict),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state.iter = state["step"]
        self._state.rng.set_state(state["random"])
        for name, into in (("left", "error_dict"), ("p", "p_memory_dict"), ("q", "q_memory_dict")):
            setattr(self._state, into, {i: each.clone() for i, each in state[name].items()})


_NAMES: dict[str, Callable[[], Compression]] = {
    "topk": TopK,
    "fp16": lambda: Half(torch.float16),
    "bf16": lambda: Half(torch.bfloat16),
    "powersgd": PowerSGD,
}


def compression_of(named: str | Compression, ratio: float | None) -> Compression:
    """The compression that ``compress`` and ``ratio`` say.

    Raises:
        TypeError: If ``named`` is neither a name nor an instance.
        ValueError: If there is no such name, or ``ratio`` is not for it.
    """
    if ratio is not None and named != "topk":
        raise ValueError(f"ratio is for compress='topk' (got compress={named!r})")
    if isinstance(named, Compression):
        return named
    if not isinstance(named, str):
        raise TypeError(
            f"compress must be a name or an instance, such as TopK(ratio=0.01) "
            f"(got {type(named).__name__})"
        )
    if named not in _NAMES:
        raise ValueError(f"compress must be one of {', '.join(_NAMES)} (got {named!r})")
    return TopK(ratio) if ratio is not None else _NAMES[named]()
