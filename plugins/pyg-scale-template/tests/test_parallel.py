import pytest

from pyg_scale.testing import GraphParallelTests, ParallelTests
from pyg_scale_template.parallel import TemplateGraphParallel, TemplateParallel


class TestTemplateParallel(ParallelTests):
    @pytest.fixture
    def parallel(self):
        return TemplateParallel()


class TestTemplateGraphParallel(GraphParallelTests):
    @pytest.fixture
    def parallel(self):
        return TemplateGraphParallel()
