"""One checkpoint, written by all ranks: nothing is one before everything of it is on disk."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pyg_scale.comm import Communicator
from pyg_scale.errors import CheckpointError
from pyg_scale.train import folders
from pyg_scale.train.replicas import differing
from pyg_scale.train.storage import Writer
from pyg_scale.train.tree import Piece

_FIRST_TAG = 1 << 20  # below are those of the training's own thread


@dataclass(frozen=True)
class Staged:
    """The data that a rank has to write.

    Attributes:
        states: What is JSON, by the name of the part.
        tensors: Its tensors, and what it has of those that are sharded.
        fingerprints: Of the modules, see :mod:`pyg_scale.train.replicas`.
    """

    states: dict[str, Any]
    tensors: dict[str, Piece]
    fingerprints: dict[str, int]


def write(
    path: Path,
    step: int,
    staged: Staged | Exception,
    ranks: Communicator,
    number: int,
    keep_last: int,
    damaged: set[str],
) -> None:
    """Write a checkpoint. Every rank calls it, on any thread.

    What cannot be finished is removed, as a full disk may be why. Before an older one goes, those
    that stay are read and compared with their checksums; if one is damaged, none goes this time.

    Args:
        path: The folder of the run.
        step: The same on all ranks.
        staged: What this rank has, or why it has nothing.
        ranks: All of them.
        number: How many were begun through ``ranks``, for its tags.
        keep_last: How many to keep.
        damaged: Names of those that do not count; those that are found damaged now come to it.

    Raises:
        CheckpointError: If some rank has nothing or cannot write, or the steps or parameters
            differ.
        CommError: If a rank is gone or does not answer in time.
    """
    tag = _FIRST_TAG + 4 * (number % _FIRST_TAG)
    made = ""
    with _told(path, ranks, tag) as begun:
        if isinstance(staged, Exception):
            raise staged
        begun.mine.update(step=step, fingerprints=staged.fingerprints)
        if ranks.rank == 0:
            begun.mine["folder"] = made = folders.begin(path, step).name
            begun.mine["stay"] = folders.staying(path, keep_last, damaged)
    steps = [each["step"] for each in begun.all]
    if len(set(steps)) > 1:
        raise CheckpointError(f"the ranks are at different steps: {steps}")
    if wrong := differing([each["fingerprints"] for each in begun.all]):
        raise CheckpointError(wrong)
    made = begun.all[0]["folder"]
    try:
        with _told(path, ranks, tag + 1) as done:
            done.mine["files"] = _write_part(path / made, staged, ranks.rank)
        stay = begun.all[0]["stay"]
        with _told(path, ranks, tag + 2) as read:
            read.mine["damaged"] = {}
            if stay is not None:
                folders.compare(path / made, done.mine["files"])
                read.mine["damaged"] = _damaged(path, stay, ranks)
        found = {name: why for each in read.all for name, why in each["damaged"].items()}
        damaged.update(found)
        with _told(path, ranks, tag + 3):
            if ranks.rank == 0:
                files = {name: each for rank in done.all for name, each in rank["files"].items()}
                folders.commit(path / made, ranks.world_size, files)
                if stay is not None and not found:
                    folders.prune(path, keep_last, damaged)
    except CheckpointError:  # which all ranks have told: nobody writes any more
        if ranks.rank == 0:
            shutil.rmtree(path / made, ignore_errors=True)
        raise
    if found and ranks.rank == 0:
        warnings.warn(
            f"{len(found)} checkpoint(s) in {path} are damaged and no longer count, and no older "
            f"one was removed: {next(iter(found.values()))}",
            RuntimeWarning,
            stacklevel=2,
        )


def _damaged(path: Path, names: list[str], ranks: Communicator) -> dict[str, str]:
    """Those of some checkpoints in which this rank's share of the files is damaged, and why."""
    found = {}
    for name in names:
        try:
            folders.verify(path / name, ranks.rank, ranks.world_size)
        except CheckpointError as error:
            found[name] = str(error)
    return found


def _write_part(folder: Path, staged: Staged, rank: int) -> dict[str, dict[str, int]]:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}, which rank 0 has made, is not there: the folder of a run must be one that "
            f"all ranks see"
        )
    writer = Writer(folder, rank, staged.states)
    writer.write(staged.tensors)
    return writer.files


class _told:
    """A step of which every rank learns how it went on the others.

    Attributes:
        mine: What this rank has to say, as JSON.
        all: What each rank said, afterwards.
    """

    def __init__(self, path: Path, ranks: Communicator, tag: int | None = None) -> None:
        self._path, self._ranks, self._tag = path, ranks, tag
        self.mine: dict[str, Any] = {}
        self.all: list[dict[str, Any]] = []

    def __enter__(self) -> _told:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            self.mine = {"error": str(error) or type(error).__name__}
        self.all = tell(self.mine, self._ranks, self._tag)
        wrong = {r: each["error"] for r, each in enumerate(self.all) if "error" in each}
        if wrong:
            raise CheckpointError(
                f"the checkpoint could not be written to {self._path}: "
                + "; ".join(f"rank {rank}: {text}" for rank, text in wrong.items())
            ) from error


def tell(content: Any, ranks: Communicator, tag: int | None = None) -> list[Any]:
    """The messages of all ranks, as JSON."""
    data = bytearray(json.dumps(content).encode())
    answers = ranks.all_gather(torch.frombuffer(data, dtype=torch.uint8), tag=tag)
    return [json.loads(answer.numpy().tobytes()) for answer in answers]
