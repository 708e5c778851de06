"""The stores in memory against the conformance kit."""

import pytest

from pyg_scale.store import MemoryFeatureStore, MemoryGraphStore
from pyg_scale.testing import FeatureStoreTests, GraphStoreTests


class TestMemoryFeatureStore(FeatureStoreTests):
    @pytest.fixture
    def feature_store(self):
        return MemoryFeatureStore()


class TestMemoryGraphStore(GraphStoreTests):
    @pytest.fixture
    def graph_store(self):
        return MemoryGraphStore()
