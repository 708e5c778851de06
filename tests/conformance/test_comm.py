"""Every built-in communicator passes the kit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyg_scale.comm import Communicator, Group
from pyg_scale.comm.gloo import Gloo
from pyg_scale.comm.hybrid import Hybrid
from pyg_scale.comm.local import Local
from pyg_scale.comm.nccl import Nccl
from pyg_scale.testing import CommTests
from tests.comm.queued import Event, QueuedNccl

pytestmark = pytest.mark.matrix(3)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
NUM_GPUS = min(4, torch.cuda.device_count())


def on_its_gpu(kind: type[Communicator]) -> Any:
    """Joins on the GPU with the number of the rank, as NCCL wants one for each."""

    def join(group: Group) -> Communicator:
        torch.cuda.set_device(group.rank)
        return kind.join(group)

    return join


class TestLocal(CommTests):
    world_sizes = (1,)

    @pytest.fixture
    def comm(self) -> Any:
        return Local


class TestGloo(CommTests):
    @pytest.fixture
    def comm(self) -> Any:
        return Gloo


class TestNcclButForNccl(CommTests):
    """On the CPU: what is queued, and waited for, for something that does it later, in order."""

    names_who_is_missing = matches_by_tag = False
    serves = False

    @pytest.fixture
    def comm(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setattr(torch.cuda, "Event", Event)
        return QueuedNccl


@pytest.mark.cuda
@needs_gpu
class TestNccl(CommTests):
    world_sizes = tuple(range(1, NUM_GPUS + 1))
    device = "cuda"
    names_who_is_missing = matches_by_tag = False
    serves = False

    @pytest.fixture
    def comm(self) -> Any:
        return on_its_gpu(Nccl)


@pytest.mark.cuda
@needs_gpu
class TestHybrid(CommTests):
    world_sizes = tuple(range(1, NUM_GPUS + 1))

    @pytest.fixture
    def comm(self) -> Any:
        return on_its_gpu(Hybrid)


@pytest.mark.cuda
@needs_gpu
class TestHybridOnTheGPU(TestHybrid):
    device = "cuda"
    matches_by_tag = False
