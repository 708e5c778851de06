"""METIS against the conformance kit, as any partitioner."""

import pytest

from pyg_scale.testing import PartitionerTests
from pyg_scale_metis.partitioner import MetisPartitioner


class TestMetis(PartitionerTests):
    @pytest.fixture
    def partitioner(self):
        return MetisPartitioner()


class TestMetisKWay(PartitionerTests):
    @pytest.fixture
    def partitioner(self):
        return MetisPartitioner(algorithm="k-way")
