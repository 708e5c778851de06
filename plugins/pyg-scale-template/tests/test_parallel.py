import pytest

from pyg_scale.testing import ParallelTests
from pyg_scale_template.parallel import TemplateParallel


class TestTemplateParallel(ParallelTests):
    @pytest.fixture
    def parallel(self):
        return TemplateParallel()
