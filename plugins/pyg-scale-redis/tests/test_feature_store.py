"""The store against the conformance kit, on a real server."""

import pytest

from pyg_scale.testing import FeatureStoreTests
from pyg_scale_redis import Redis


class TestRedis(FeatureStoreTests):
    @pytest.fixture
    def feature_store(self, server):
        return Redis(server.url)

    def reopen(self, store):
        return Redis(store.connection.url, prefix=store.prefix)


class TestRedisInSmallCommands(FeatureStoreTests):
    """Two rows of the tests in a command."""

    @pytest.fixture
    def feature_store(self, server):
        return Redis(server.url, prefix="other:graph", batch_bytes=24, max_connections=3)

    @pytest.mark.slow
    def test_eight_threads_read(self, feature_store):
        super().test_eight_threads_read(feature_store)

    @pytest.mark.slow
    def test_readers_see_the_old_or_the_new(self, feature_store):
        super().test_readers_see_the_old_or_the_new(feature_store)
