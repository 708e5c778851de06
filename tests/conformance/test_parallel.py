"""Every built-in parallel wrapper passes the kit."""

from __future__ import annotations

import pytest
import torch

from pyg_scale.parallel.async_ps import AsyncPS
from pyg_scale.parallel.compression import Compression, Half, PowerSGD, TopK
from pyg_scale.parallel.ddp import DDP
from pyg_scale.parallel.feature import FeatureParallel
from pyg_scale.parallel.federated import Federated
from pyg_scale.parallel.fsdp import FSDP
from pyg_scale.parallel.halo import HaloParallel
from pyg_scale.parallel.layer import LayerParallel
from pyg_scale.parallel.local_sgd import LocalSGD
from pyg_scale.parallel.mesh import MeshParallel
from pyg_scale.testing import GraphParallelTests, ParallelTests
from pyg_scale.testing.graph_parallel import Mesh


class TestDDP(ParallelTests):
    @pytest.fixture
    def parallel(self) -> DDP:
        return DDP()


class TestTopK(ParallelTests):
    @pytest.fixture
    def parallel(self) -> DDP:
        return DDP(compress=TopK(0.05))


@pytest.mark.slow
@pytest.mark.parametrize("compression", [Half(torch.float16), PowerSGD(1, 2)], ids=["fp16", "low"])
class TestCompressed(ParallelTests):
    @pytest.fixture
    def parallel(self, compression: Compression) -> DDP:
        return DDP(compress=compression)


class TestLocalSGD(ParallelTests):
    momentum = 0.0

    @pytest.fixture
    def parallel(self) -> LocalSGD:
        return LocalSGD(every=2)


class TestFederated(ParallelTests):
    momentum = 0.0

    @pytest.fixture
    def parallel(self) -> Federated:
        return Federated(timeout=20)


class TestHalo(GraphParallelTests):
    @pytest.fixture
    def parallel(self) -> HaloParallel:
        return HaloParallel()


class TestAsyncPS(ParallelTests):
    momentum = 0.0

    @pytest.fixture
    def parallel(self) -> AsyncPS:
        return AsyncPS(timeout=20)


class TestFeature(GraphParallelTests):
    one_part_each = False

    @pytest.fixture
    def parallel(self) -> FeatureParallel:
        return FeatureParallel()


class TestMesh(GraphParallelTests):
    one_part_each = False
    mesh = Mesh(("partition", "feature"), {1: (1, 1), 2: (1, 2), 3: (3, 1)})

    @pytest.fixture
    def parallel(self) -> MeshParallel:
        return MeshParallel()


class TestLayer(ParallelTests):
    @pytest.fixture
    def parallel(self) -> LayerParallel:
        return LayerParallel()


class TestFSDP(ParallelTests):
    @pytest.fixture
    def parallel(self) -> FSDP:
        return FSDP()
