"""Every built-in store against the conformance kit."""

import pytest

from pyg_scale import plugins
from pyg_scale.testing import FeatureStoreTests, GraphStoreTests


class TestMemoryFeatures(FeatureStoreTests):
    @pytest.fixture
    def feature_store(self):
        return plugins.get("feature_store", "memory")()


class TestMemoryGraph(GraphStoreTests):
    @pytest.fixture
    def graph_store(self):
        return plugins.get("graph_store", "memory")()


class TestMmap(FeatureStoreTests):
    @pytest.fixture
    def feature_store(self):
        return plugins.get("feature_store", "mmap")()


class TestShared(FeatureStoreTests):
    @pytest.fixture
    def feature_store(self):
        return plugins.get("feature_store", "shared")()


class TestMmapGraph(GraphStoreTests):
    @pytest.fixture
    def graph_store(self):
        return plugins.get("graph_store", "mmap")()


class TestSharedGraph(GraphStoreTests):
    @pytest.fixture
    def graph_store(self):
        return plugins.get("graph_store", "shared")()
