"""``torch.compile`` in tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def in_this_process() -> Iterator[None]:
    """Within it Inductor starts no processes to compile in; nothing of it is left afterwards."""
    from torch._inductor import config

    torch._dynamo.reset()
    before = set(os.environ)
    try:
        with config.patch(compile_threads=1):
            yield
    finally:
        for written in set(os.environ) - before:  # by torch, for its compiler
            del os.environ[written]
        torch._dynamo.reset()
