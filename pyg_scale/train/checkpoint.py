"""Everything that a run consists of, saved and loaded as one."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from pyg_scale.comm import Communicator, connect
from pyg_scale.comm.connect import num_ranks
from pyg_scale.errors import CheckpointError, CommError
from pyg_scale.ops.library import renew_pool_after_fork
from pyg_scale.parallel import is_parallel_module
from pyg_scale.parallel.base import (
    ChangedByOthers,
    HasOwnParameters,
    HasRankState,
    RankState,
)
from pyg_scale.train.randomness import RandomState
from pyg_scale.train.reading import RANDOM, VALUES, layouts_of, newest, read_states
from pyg_scale.train.replicas import fingerprint
from pyg_scale.train.stopping import EXIT_CODE, Stopping
from pyg_scale.train.tgn import TGNMessages, memories_of
from pyg_scale.train.tree import Piece, flatten
from pyg_scale.train.writing import Staged, write

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Resumed:
    """The point at which a run goes on.

    Attributes:
        step: The number that was given to ``save``; 0 if nothing was saved yet.
        values: The values that were given to it.
        path: The checkpoint that was loaded; ``None`` if there was none.
    """

    step: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None


class Checkpoint:
    """Saves a run, so that it can be killed at any time and goes on as if it had not been.

    Every rank makes one with the same arguments, and calls the same methods in the same order.
    What is saved is written to disk beside the training, by a thread of each rank, and is a
    checkpoint from the moment when the parts of all ranks are there. The folder must be one that
    all ranks see.

    Modules (also as ``DistributedDataParallel``), optimizers and schedulers are the same on all
    ranks, and those of rank 0 are saved. Of parameters that are sharded (``fully_shard``, or other
    ``DTensor``) and their moments every rank saves what it has. Everything else, such as a loader,
    is saved for each rank; with another number of ranks it can be loaded if it was the same on all.
    What a wrapper keeps for each rank, such as gradients that were not sent, belongs to it: give
    the wrapped module, and it is saved as ``NAME-of-rank``. The messages of a ``TGNMemory``
    (:class:`TGNMessages`) are saved as ``NAME-messages``. Wrappers of which each rank has
    parameters of its own have everything saved for each rank. Of a server that ranks change at any
    time (``async_ps``) one moment is saved: ranks wait until all are in :meth:`save`, and have
    copied what they have.

    Args:
        path: The folder of the run.
        state: What the run consists of, by name: anything with ``state_dict`` and
            ``load_state_dict``.
        every: Have :meth:`step` save whenever the step is a multiple of it; ``None``: never.
        keep_last: How many checkpoints to keep, not counting those that :meth:`load` has found
            damaged.
        stop_on: Names of signals, such as ``["SIGTERM"]``. When one comes to any rank,
            :meth:`step` saves on all ranks and raises ``SystemExit`` with
            :data:`~pyg_scale.train.EXIT_CODE` (75).
        asynchronous: Whether to write beside the training. An error is raised by the next call.
        random_state: Whether torch's, NumPy's and Python's generators belong to it.
        comm: How ranks tell each other what they have done: a name of the kind ``comm`` that
            sends from the CPU, by default ``"gloo"``, or a communicator, which is not closed.
        timeout: Seconds that ranks wait for each other when they write or read.

    Raises:
        TypeError: If something in ``state`` has no ``state_dict`` or ``load_state_dict``.
        NotImplementedError: If a module is wrapped in torch's older ``FullyShardedDataParallel``.
        ValueError: If a name or number cannot be.
        CommTimeoutError: If not all ranks make one in time.
    """

    def __init__(
        self,
        path: str | Path,
        state: Mapping[str, Any],
        *,
        every: int | None = None,
        keep_last: int = 2,
        stop_on: Iterable[str] = (),
        asynchronous: bool = True,
        random_state: bool = True,
        comm: str | Communicator | None = None,
        timeout: float = 300.0,
    ) -> None:
        _check(state, every, keep_last)
        self.path = Path(path)
        self.every, self.keep_last, self.asynchronous = every, keep_last, asynchronous
        self._state = {name: _unwrapped(part) for name, part in state.items()}
        for name, part in state.items():
            if (of_rank := _rank_state(part)) is not None:
                self._state[f"{name}-of-rank"] = of_rank
            if memories_of(self._state[name]):
                self._state[f"{name}-messages"] = TGNMessages(self._state[name])
        self._replicated = not any(_has_own_parameters(part) for part in state.values())
        self._meets = any(_is_changed_by_others(part) for part in state.values())
        if random_state:
            self._state[RANDOM] = RandomState()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._writes = 0
        self._damaged: set[str] = set()
        self._closed = False
        alone = num_ranks() == 1
        self._ranks = connect(comm or ("local" if alone else "gloo"), timeout=timeout)
        self._owns_ranks = self._ranks is not comm
        try:
            self._stopping = Stopping(stop_on, self._ranks)
        except BaseException:
            self._disconnect()
            raise

    # Saving ################################################################################

    def step(self, step: int, **values: Any) -> None:
        """Say that a step was made. Every rank says it as often as the others.

        Saves if it is time to, and stops the process, on all ranks after the same step, if a
        signal of ``stop_on`` came to one of them.

        Args:
            step: How many steps were made.
            **values: See :meth:`save`.

        Raises:
            SystemExit: If the run was told to stop; everything is saved.
            CheckpointError: See :meth:`save`.
        """
        self._raise_error()
        stop = self._stopping.agreed()
        if stop or (self.every is not None and step % self.every == 0):
            self.save(step, **values)
        if stop:
            self.close()
            raise SystemExit(EXIT_CODE)

    def save(self, step: int, **values: Any) -> None:
        """Save everything as it is now. Every rank calls it, with the same ``step``.

        The state is copied; if ``asynchronous``, writing goes on after this returned.

        Args:
            step: How many steps were made.
            **values: What else is to come back with :meth:`load`: numbers, strings, tensors,
                arrays, and lists, tuples and dictionaries of them. Rank 0's are saved.

        Raises:
            CheckpointError: If this one, or the one before, cannot be written; says by which rank.
                Also if the parameters of a module are not the same on all ranks, or ranks are to
                save at the same time and one does not come.
            TypeError: If something cannot be saved; says what. On several ranks this, as whatever
                a ``state_dict()`` raises, is a :class:`CheckpointError` of all of them.
            ValueError: If ``step`` is negative.
        """
        if step < 0:
            raise ValueError(f"step must not be negative (got {step})")
        self.wait()
        self._writes += 1
        staged: Staged | Exception
        self._meet()
        try:
            staged = self._stage(values)
        except Exception as error:
            if self._ranks.world_size == 1:
                raise
            staged = error  # raised where the others hear of it, and so by the same call of all
        self._meet()
        if not self.asynchronous:
            self._write(step, staged)
            self._raise_error()
            return
        renew_pool_after_fork()
        self._thread = threading.Thread(
            target=self._write, args=(step, staged), name="pyg_scale-checkpoint"
        )
        self._thread.start()

    def _meet(self) -> None:
        """Wait for all ranks if one could change what another one saves or loads."""
        if not self._meets or self._ranks.world_size == 1:
            return
        try:
            self._ranks.barrier()
        except CommError as error:
            raise CheckpointError(
                f"ranks save to {self.path}, and load from it, at the same time, and not all "
                f"came: {error}"
            ) from error

    def wait(self) -> None:
        """Wait until what was saved is on disk.

        Raises:
            CheckpointError: If it could not be written.
        """
        if self._thread is not None:
            self._thread.join()  # it ends: whatever it waits for has a time limit
            self._thread = None
        self._raise_error()

    def _stage(self, values: dict[str, Any]) -> Staged:
        states: dict[str, Any] = {}
        tensors: dict[str, Piece] = {}
        rank = self._ranks.rank
        parts = {name: part.state_dict() for name, part in self._state.items()}
        for name, part in [*parts.items(), (VALUES, values)]:
            shared = name == VALUES or self._is_shared(self._state[name])
            elsewhere = shared and rank != 0
            where = name if shared else f"rank-{rank}/{name}"
            state, found = flatten(part, where, shards_only=elsewhere)
            tensors.update(found)
            if not elsewhere:
                states[name] = state
        modules = {n: part for n, part in self._state.items() if isinstance(part, nn.Module)}
        several = self._replicated and self._ranks.world_size > 1
        prints = {n: fingerprint(part) for n, part in modules.items()} if several else {}
        return Staged(states, tensors, prints)

    def _write(self, step: int, staged: Staged | Exception) -> None:
        try:
            number, keep = self._writes, self.keep_last
            write(self.path, step, staged, self._ranks, number, keep, self._damaged)
        except BaseException as error:
            self._error = error

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if isinstance(error, CheckpointError) or (
            error is not None and not isinstance(error, Exception)
        ):
            raise error
        if error is not None:
            raise CheckpointError(
                f"the checkpoint could not be written to {self.path}: {error}"
            ) from error

    # Loading ###############################################################################

    def load(self, only: Iterable[str] | None = None) -> Resumed:
        """Load the newest checkpoint that is whole. Every rank calls it.

        One that is damaged is passed over with a warning that names it.

        Args:
            only: Names of the parts to load; all if ``None``, the random generators included.

        Returns:
            Where the run goes on; step 0 if nothing was saved yet.

        Raises:
            CheckpointError: If there are checkpoints but none is whole, or one does not have the
                parts of this run, or has a part for each rank and was saved by another number of
                ranks. Also if ranks are to load at the same time and one does not come.
            ValueError: If ``only`` names a part that this run has not.
        """
        self.wait()
        parts = self._parts(only)
        found, damaged = newest(self.path, self._ranks)
        self._damaged.update(damaged)
        if found is None:
            return Resumed()
        layouts = {k: v for name in parts for k, v in layouts_of(name, self._state[name]).items()}
        exactly = only is None
        states = read_states(found.path, parts, self._ranks, exactly=exactly, layouts=layouts)
        for name in parts:
            if name in states:
                self._state[name].load_state_dict(states[name])
        self._meet()
        return Resumed(found.step, states[VALUES], found.path)

    def _parts(self, only: Iterable[str] | None) -> dict[str, bool]:
        """The states to load, each with True if all ranks share it."""
        names = list(self._state) if only is None else list(only)
        for name in names:
            if name not in self._state:
                raise ValueError(f"only: this run has no {name!r}; it has {', '.join(self._state)}")
        return {name: self._is_shared(self._state[name]) for name in names}

    def _is_shared(self, part: Any) -> bool:
        """Return True if a value is the same on all ranks."""
        replicas = (nn.Module, torch.optim.Optimizer, LRScheduler)
        return self._replicated and isinstance(part, replicas)

    # Ending ################################################################################

    def close(self) -> None:
        """Wait until everything is on disk and all ranks are here; may be called again.

        Raises:
            CheckpointError: If something could not be written.
        """
        self._stopping.close()
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
            self._stopping.settle()
            self._ranks.barrier()
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._owns_ranks:
            self._ranks.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
            return
        self._stopping.close()  # the others may be gone: only what is being written is waited for
        if not self._closed:
            self._closed = True
            try:
                self.wait()
            except CheckpointError as failed:
                warnings.warn(str(failed), RuntimeWarning, stacklevel=2)
            self._disconnect()


def _check(state: Mapping[str, Any], every: int | None, keep_last: int) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state must be a dictionary, such as {{'model': model}} (got {type(state).__name__})"
        )
    for name, part in state.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (VALUES, RANDOM):
            raise ValueError(
                f"state: {name!r} cannot be a name: use letters, digits, - and _, and not "
                f"{VALUES!r} or {RANDOM!r}"
            )
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(part, method, None)):
                raise TypeError(f"state: {name!r}, a {type(part).__name__}, has no {method}()")
        if isinstance(part, nn.Module) and any(
            isinstance(each, FullyShardedDataParallel) for each in part.modules()
        ):
            raise NotImplementedError(
                f"state: {name!r} is wrapped in FullyShardedDataParallel, whose flat parameters "
                "belong to one number of ranks: use torch.distributed.fsdp.fully_shard"
            )
    if every is not None and every < 1:
        raise ValueError(f"every must be 1 or more, or None (got {every})")
    if keep_last < 1:
        raise ValueError(f"keep_last must be 1 or more (got {keep_last})")


def _unwrapped(part: Any) -> Any:
    """The module itself: one rank alone has no wrapper, and shall read what many have saved."""
    return _layers_of(part)[-1]


def _rank_state(part: Any) -> RankState | None:
    for layer in _layers_of(part):
        if isinstance(layer, HasRankState) and layer.rank_state is not None:
            return layer.rank_state
    return None


def _has_own_parameters(part: Any) -> bool:
    return any(
        isinstance(layer, HasOwnParameters) and layer.own_parameters for layer in _layers_of(part)
    )


def _is_changed_by_others(part: Any) -> bool:
    return any(
        isinstance(layer, ChangedByOthers) and layer.changed_by_others for layer in _layers_of(part)
    )


def _layers_of(part: Any) -> list[Any]:
    """A wrapped module, what is in it, and so on to the module itself."""
    layers = [part]
    while isinstance(part, nn.Module):
        if isinstance(part, DistributedDataParallel) or is_parallel_module(part):
            part = part.module
        elif hasattr(part, "_orig_mod"):  # torch.compile
            part = part._orig_mod
        else:
            break
        layers.append(part)
    return layers
