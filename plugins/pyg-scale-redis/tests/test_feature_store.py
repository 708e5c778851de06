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
    """Few rows of the tests in a command."""

    @pytest.fixture
    def feature_store(self, server):
        return Redis(server.url, prefix="other:graph", batch_bytes=240, max_connections=3)
