"""The sampler for devices (here on the CPU, by the same code) against the conformance kit."""

import pytest

from pyg_scale.sampler import CudaSampler
from pyg_scale.testing import SamplerTests


class TestCudaSampler(SamplerTests):
    @pytest.fixture
    def sampler(self):
        return CudaSampler(device="cpu")
