"""Every built-in parallel wrapper passes the kit."""

from __future__ import annotations

import pytest

from pyg_scale.parallel.ddp import DDP
from pyg_scale.testing import ParallelTests


class TestDDP(ParallelTests):
    @pytest.fixture
    def parallel(self) -> DDP:
        return DDP()
