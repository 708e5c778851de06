"""Every built-in partitioner against the conformance kit."""

import pytest

from pyg_scale import plugins
from pyg_scale.partitioner.stream import LDG, Fennel
from pyg_scale.testing import PartitionerTests


class TestRandom(PartitionerTests):
    @pytest.fixture
    def partitioner(self):
        return plugins.get("partitioner", "random")()


class TestHash(PartitionerTests):
    @pytest.fixture
    def partitioner(self):
        return plugins.get("partitioner", "hash")()


class TestRange(PartitionerTests):
    @pytest.fixture
    def partitioner(self):
        return plugins.get("partitioner", "range")()


class TestLDG(PartitionerTests):
    @pytest.fixture
    def partitioner(self):
        return plugins.get("partitioner", "ldg")()


class TestFennel(PartitionerTests):
    @pytest.fixture
    def partitioner(self):
        return plugins.get("partitioner", "fennel")()


class TestMultilevel(PartitionerTests):
    @pytest.fixture
    def partitioner(self):
        return plugins.get("partitioner", "multilevel")()


class TestFrequency(PartitionerTests):
    @pytest.fixture
    def partitioner(self):
        return plugins.get("partitioner", "frequency")()


class TestSpectral(PartitionerTests):
    @pytest.fixture
    def partitioner(self):
        return plugins.get("partitioner", "spectral")()


class TestFennelByDegree(PartitionerTests):
    @pytest.fixture
    def partitioner(self):
        return Fennel(order=["degree", "random"], passes=3)


class TestLDGTight(PartitionerTests):
    @pytest.fixture
    def partitioner(self):
        return LDG(max_imbalance=1.02)


class TestRandomWalk(PartitionerTests):
    @pytest.fixture
    def partitioner(self):
        return plugins.get("partitioner", "random_walk")()
