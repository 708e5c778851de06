import pytest

from pyg_scale.testing import PartitionerTests
from pyg_scale_template.partitioner import TemplatePartitioner


class TestTemplatePartitioner(PartitionerTests):
    @pytest.fixture
    def partitioner(self):
        return TemplatePartitioner()
