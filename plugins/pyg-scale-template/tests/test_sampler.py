import pytest

from pyg_scale.testing import SamplerTests
from pyg_scale_template.sampler import TemplateSampler


class TestTemplateSampler(SamplerTests):
    @pytest.fixture
    def sampler(self):
        return TemplateSampler()
