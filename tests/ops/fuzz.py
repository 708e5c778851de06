"""Compiled ops with arguments that make no sense: each call returns or raises, whatever they are.

:func:`run` makes the calls in other processes, of which one that dies or hangs gives away what it
was called with. A call's number alone says what its arguments are; :func:`describe` tells.

As a program, ``python -m tests.ops.fuzz LIBRARY NOTE MEMORY ROUNDS BEGIN END`` makes the calls
``BEGIN`` to ``END - 1`` and writes into the file ``NOTE`` where it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.ops.op_calls import CALLS, NEED_A_DEVICE, Arguments

SECONDS = 60
"""That one call may take."""
SLOW = 8
"""Calls of which there is one for so many of others: those with many edges."""
NUMBERS = (-1, 0, 1, 2, 7, 100, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), -(2**31))
REALS = (0.0, -1.0, 2.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"))
TYPES = (
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
)
KINDS = (*TYPES, torch.uint16, torch.uint64, torch.complex32, torch.float8_e4m3fn, torch.qint8)
RAISED = (
    *(ValueError, IndexError, TypeError, RuntimeError, MemoryError, OverflowError),
    *(NotImplementedError,),
)


_libc = ctypes.CDLL(None, use_errno=True)


# What is done to arguments ######################################################################


def _numbers(rng: random.Random, tensor: Tensor) -> Tensor:
    """Other numbers in the same places."""
    tensor = tensor.clone()
    if not tensor.numel() or tensor.dtype == torch.bool:
        return ~tensor if tensor.dtype == torch.bool else tensor
    flat = tensor.view(-1)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        numbers: Sequence[float] = REALS
    else:
        info = torch.iinfo(tensor.dtype)
        near = int(flat[rng.randrange(flat.numel())])
        numbers = [*NUMBERS, near - 1, near + 1, flat.numel(), info.max, info.min]
        numbers = [n for n in numbers if info.min <= n <= info.max]
    number = rng.choice(numbers)
    how = rng.randrange(5)
    if how == 0:
        flat.fill_(number)
    elif how == 1:
        flat.copy_(flat.flip(0))
    elif how == 2:
        flat.copy_(flat[torch.tensor(rng.choices(range(flat.numel()), k=flat.numel()))])
    else:
        for _ in range(rng.randint(1, 2)):
            flat[rng.randrange(flat.numel())] = number
    return tensor


def _shape(rng: random.Random, tensor: Tensor) -> Tensor:
    """Fewer, more, or other dimensions, from the beginning of memory or its middle."""
    how = rng.randrange(9)
    if tensor.dim() == 0 or how == 0:
        return tensor.unsqueeze(0)
    if how == 1:
        return tensor[:-1]
    if how == 2:
        return tensor[1:]
    if how == 3:
        return torch.cat([tensor, tensor[-1:]])
    if how == 4:
        return tensor[:0]
    if how == 5:
        return tensor.unsqueeze(-1)
    if how == 6:
        return tensor.reshape(-1)
    if how == 7 and tensor.numel():
        return tensor.reshape(-1)[0]
    return tensor.new_empty([0, *tensor.shape[1:]])


def _layout(rng: random.Random, tensor: Tensor) -> Tensor:
    """The same numbers elsewhere in memory, or a tensor of another kind."""
    how = rng.randrange(7)
    if tensor.dim() and how == 0:
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    if tensor.dim() and how == 1:
        return tensor[:1].expand_as(tensor)
    if how == 2:
        return tensor.to("meta")
    if how == 3 and tensor.dim():
        return tensor.to_sparse()
    if how == 4 and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if how == 5 and tensor.dtype.is_floating_point:
        return tensor.clone().requires_grad_()
    return tensor.clone()[..., 1:] if tensor.dim() else tensor


def _tensor(rng: random.Random, tensor: Tensor, others: Sequence[Tensor]) -> Any:
    if tensor.is_meta or tensor.layout != torch.strided:
        return tensor  # torch would import much to change it
    how = rng.randrange(10)
    if how < 5:
        return _numbers(rng, tensor)
    if how < 7:
        return _shape(rng, tensor)
    if how == 7:
        return _layout(rng, tensor)
    if how == 8:
        return tensor.to(rng.choice(TYPES))
    alike = [other for other in others if other.dtype == tensor.dtype] or list(others)
    return rng.choice(alike)


def _number(rng: random.Random, number: int) -> int:
    number = rng.choice([*NUMBERS, number - 1, number + 1, 2 * number])
    return max(-(2**63), min(number, 2**63 - 1))


def _changed(rng: random.Random, name: str, value: Any, tensors: Sequence[Tensor]) -> Any:
    """What an argument becomes."""
    if name == "fd":  # never another open file
        return rng.choice([value, -1, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63), 2**32 + value])
    if isinstance(value, Tensor):
        return _tensor(rng, value, tensors)
    if value is None:
        return rng.choice([None, *tensors])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return _number(rng, value)
    if isinstance(value, float):
        return rng.choice(REALS)
    if isinstance(value, torch.dtype):
        return rng.choice(KINDS)
    if isinstance(value, str):
        return rng.choice(["", value[1:], 2 * value, 4096 * value])
    assert isinstance(value, list)
    how = rng.randrange(6)
    if value and how > 2:
        place = rng.randrange(len(value))
        new = _changed(rng, "", value[place], tensors)
        return [new if i == place else each for i, each in enumerate(value)]
    if how == 0:
        return value[:-1]
    return value + value[-1:] if how == 1 else value[::-1]


def _all_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for each in value for t in _all_tensors(each)] if isinstance(value, list) else []


def arguments(name: str, number: int) -> Arguments:
    """The arguments of a call; those of number 0 make sense."""
    given = CALLS[name]()
    rng = random.Random(f"{name} {number}")
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3)) if number and given else 0):
        changed = rng.choice(list(given))
        tensors = _all_tensors(given)
        with contextlib.suppress(*RAISED):  # by torch, of what cannot be done to what was changed
            given[changed] = _changed(rng, changed, given[changed], tensors)
    return given


def schedule(rounds: int) -> list[tuple[str, int]]:
    """The calls in their order: the first of each makes sense."""
    slow = ("many", "long rows")
    return [
        (name, number)
        for name in CALLS
        for number in range(1 + (rounds // SLOW if name.partition(", ")[2] in slow else rounds))
    ]


def describe(name: str, number: int) -> str:
    """A call, to be read by who mends it."""

    def text(value: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(text, value))}]"
        if not isinstance(value, Tensor):
            return repr(value)
        kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if value.layout != torch.strided or value.device.type != "cpu":
            return f"{kind} {value.layout} on {value.device}"
        numbers = str(value.flatten()[:12].tolist())
        return kind + f" strides {list(value.stride())} {numbers}"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = arguments(name, number)
    inner = "\n".join(f"    {key}={text(value)}" for key, value in given.items())
    return f"{name}, call {number}:\n{inner}"


def _before_the_end(value: Tensor) -> Tensor:
    """A copy that ends where memory does: one byte further is a segmentation fault."""
    plain = value.layout == torch.strided and value.is_cpu and not value.is_quantized
    if not plain or value.requires_grad or not value.numel():
        return value
    steps = zip(value.shape, value.stride(), strict=True)
    source = value.as_strided((1 + sum((size - 1) * stride for size, stride in steps),), (1,))
    size, page = source.numel() * source.element_size(), mmap.PAGESIZE
    room = -(-size // page) * page
    memory = torch.frombuffer(mmap.mmap(-1, room + page), dtype=torch.uint8)
    if _libc.mprotect(ctypes.c_void_p(memory.data_ptr() + room), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = memory[room - size : room].view(value.dtype)
    copy.copy_(source)
    return copy.as_strided(value.shape, value.stride(), copy.storage_offset())


def _guarded(given: Arguments) -> Arguments:
    """The same arguments in memory that ends with each; what was one tensor is one still."""
    tensors = {id(tensor): tensor for tensor in _all_tensors(given)}
    seen = {key: _before_the_end(tensor) for key, tensor in tensors.items()}

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(each) for each in value]
        return seen.get(id(value), value)

    return {key: moved(value) for key, value in given.items()}


# The processes ##################################################################################


class Death(NamedTuple):
    """A process that did not come to its end."""

    name: str
    number: int
    how: str
    said: str

    def __str__(self) -> str:
        return f"{describe(self.name, self.number)}\n  {self.how}\n{self.said[-3000:]}"


def run(
    python: str,
    library: Path,
    rounds: int,
    *,
    environ: Mapping[str, str] | None = None,
    memory: int = 0,
    most: int = 5,
) -> list[Death]:
    """Make all calls, in a new process after each that died; the first ``most`` that did.

    Args:
        python: What runs this module.
        library: The compiled ops.
        rounds: Calls of each entry of ``CALLS`` besides the one that makes sense.
        environ: More for the environment.
        memory: Bytes that the process may map in addition to what it has; 0 for any.
        most: Deaths after which it is enough.
    """
    calls, begin, deaths = schedule(rounds), 0, []
    with TemporaryDirectory() as folder:
        note = Path(folder) / "note"
        while begin < len(calls) and len(deaths) < most:
            note.write_text(str(begin))
            options = [str(library), str(note), memory, rounds, begin, len(calls)]
            process = subprocess.run(
                [python, "-m", "tests.ops.fuzz", *map(str, options)],
                capture_output=True,
                text=True,
                errors="replace",
                env={**os.environ, **(environ or {})},
                cwd=Path(__file__).resolve().parents[2],
                timeout=3000,
            )
            if process.returncode == 0:
                break
            at = int(note.read_text())
            how = f"the process ended with {process.returncode}"
            if process.returncode == -signal.SIGALRM:
                how = f"did not return in {SECONDS} s"
            deaths.append(Death(*calls[at], how, process.stderr))
            begin = at + 1
    return deaths


def _main(library: str, note: str, memory: int, rounds: int, begin: int, end: int) -> None:
    warnings.simplefilter("ignore")
    torch.ops.load_library(library)
    torch.set_num_threads(2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory, mapped + memory))
    file = os.open(note, os.O_WRONLY)
    calls = schedule(rounds)
    ops = torch.ops.pyg_scale
    for at in range(begin, end):
        os.pwrite(file, b"%12d" % at, 0)
        name, number = calls[at]
        given = _guarded(arguments(name, number))
        op = getattr(ops, name.partition(", ")[0])
        signal.alarm(SECONDS)
        try:
            op(**given)
        except RAISED as error:
            if number == 0 and name not in NEED_A_DEVICE:
                raise AssertionError(f"{name}: a call that makes sense raises") from error
        signal.alarm(0)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
