"""Caches against the conformance kit: over a store in memory, too small for what it holds."""

import pytest

from pyg_scale.ops.row_cache import check_rows  # noqa: F401
from pyg_scale.store import MemoryFeatureStore
from pyg_scale.store.cache import Cached
from pyg_scale.testing import FeatureStoreTests


class TestCached(FeatureStoreTests):
    @pytest.fixture(params=["belady", "sieve", "placed"])
    def feature_store(self, request):
        hot = {"hot": [0, 3, 1]} if request.param == "placed" else {}
        return Cached(MemoryFeatureStore(), capacity=300, policy=request.param, **hot)
