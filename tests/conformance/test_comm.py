"""Every built-in communicator passes the kit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyg_scale.comm.gloo import Gloo
from pyg_scale.comm.hybrid import Hybrid
from pyg_scale.comm.local import Local
from pyg_scale.comm.nccl import Nccl
from pyg_scale.testing import CommTests

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


class TestLocal(CommTests):
    world_sizes = (1,)

    @pytest.fixture
    def comm(self) -> Any:
        return Local


class TestGloo(CommTests):
    @pytest.fixture
    def comm(self) -> Any:
        return Gloo


@needs_gpu
class TestNccl(CommTests):
    world_sizes = (1,)
    device = "cuda"
    names_who_is_missing = False
    serves = False

    @pytest.fixture
    def comm(self) -> Any:
        return Nccl


@needs_gpu
class TestHybrid(CommTests):
    world_sizes = (1,)

    @pytest.fixture
    def comm(self) -> Any:
        return Hybrid


@needs_gpu
class TestHybridOnTheGPU(TestHybrid):
    device = "cuda"
