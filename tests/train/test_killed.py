"""A run that is killed while it writes a checkpoint: the last good one always loads."""

from __future__ import annotations

import builtins
import multiprocessing
import os
import shutil
import zlib
from pathlib import Path

import pytest
import torch

from pyg_scale.train import Checkpoint

TOUCHED = ("mkdir", "rename", "fsync", "rmdir", "unlink", "open")
"""Functions of ``os`` between which, and in the middle of which, a process can die."""


class Numbers:
    """A state of which every part must be of one checkpoint."""

    def __init__(self, count):
        self.count, self.tensor = count, torch.full((1000,), count)

    def state_dict(self):
        return {"count": self.count, "tensor": self.tensor}

    def load_state_dict(self, state):
        self.count, self.tensor = state["count"], state["tensor"]


def save(path, point, calls):
    """Save two more, and die at a point: before a call, or in the middle of writing."""
    left = point

    def die():
        nonlocal left
        calls.value += 1
        if left == 0:
            os._exit(9)
        left -= 1

    def dying(function):
        def call(*args, **kwargs):
            die()
            return function(*args, **kwargs)

        return call

    for name in TOUCHED:
        setattr(os, name, dying(getattr(os, name)))
    opened, crc = builtins.open, zlib.crc32
    builtins.open = dying(opened)
    zlib.crc32 = dying(crc)
    numbers = Numbers(1)
    with Checkpoint(path, {"numbers": numbers}, keep_last=2, asynchronous=False) as checkpoint:
        checkpoint.load()
        for _ in range(2):
            numbers.__init__(numbers.count + 1)
            checkpoint.save(numbers.count)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_killed_at_any_point_the_last_good_one_loads(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    begun = tmp_path / "begun"
    with Checkpoint(begun, {"numbers": Numbers(1)}) as checkpoint:
        checkpoint.save(1)
    calls = context.Value("i", 0)
    found, point, ended = [1], 0, False
    while not ended:
        path = tmp_path / "run"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(begun, path)
        process = context.Process(target=save, args=(path, point, calls))
        process.start()
        process.join(30)
        assert process.exitcode in (0, 9), f"killed at {point}: {process.exitcode}"
        ended = process.exitcode == 0
        numbers = Numbers(0)
        with Checkpoint(path, {"numbers": numbers}) as checkpoint:
            step = checkpoint.load().step
            assert step == numbers.count >= 1 and (numbers.tensor == step).all(), f"at {point}"
            checkpoint.save(step + 1)  # and the run goes on
            checkpoint.wait()
            assert checkpoint.load().step == step + 1
        assert not [each for each in path.iterdir() if each.name.startswith(".")]
        assert step >= found[-1], "what was a checkpoint is one still"
        found.append(step)
        point += 1
    assert set(found) == {1, 2, 3} and point > 25, f"{point} points"
