"""Files are read and written in Python: most tests need no second run on the plain path."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def kernels() -> None:
    """In place of the one that runs every test of the stores twice."""
