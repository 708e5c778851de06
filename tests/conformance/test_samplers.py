"""Every built-in sampler against the conformance kit."""

import pytest

from pyg_scale.ops import library
from pyg_scale.sampler import FastGCN, Labor
from pyg_scale.testing import ImportanceTests, SamplerTests

pytestmark = pytest.mark.matrix(3)


class TestReference(SamplerTests):
    @pytest.fixture
    def sampler(self):
        return "reference"


class TestNative(SamplerTests):
    @pytest.fixture
    def sampler(self):
        if not library.compiled():
            pytest.skip(f"needs the compiled kernels: {library.status()['command']}")
        return "native"


class TestLabor(ImportanceTests):
    @pytest.fixture
    def sampler(self):
        return "labor"


class TestLaborByDegrees(ImportanceTests):
    @pytest.fixture
    def sampler(self):
        return Labor(weights="gcn", layer_dependency=True)


class TestLaborThatConverges(ImportanceTests):
    by_node = False

    @pytest.fixture
    def sampler(self):
        return Labor(iterations="*", layer_dependency=True)


class TestLaborByHopAndDegrees(ImportanceTests):
    by_node = False

    @pytest.fixture
    def sampler(self):
        return Labor(iterations=2, weights="gcn")


class TestLadies(ImportanceTests):
    num_wanted = 12
    by_node = False

    @pytest.fixture
    def sampler(self):
        return "ladies"


class TestFastGCN(ImportanceTests):
    num_wanted = 25
    by_node = False

    @pytest.fixture
    def sampler(self):
        return FastGCN(weights="gcn")
