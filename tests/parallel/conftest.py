"""Ranks of the tests of wrappers that divide a graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyg_scale.testing.processes import WaitingProcesses


@pytest.fixture(scope="module")
def ranks() -> Iterator[WaitingProcesses]:
    """Four processes, or fewer with ``world_size``; modules with other needs have their own."""
    with WaitingProcesses(4, limit=120.0) as started:
        yield started
