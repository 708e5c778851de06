"""Directories of tests need not survive a power cut."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_fsync() -> Iterator[None]:
    """Every small file of every part is flushed otherwise, which takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield
