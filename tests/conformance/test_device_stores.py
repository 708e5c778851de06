"""A feature store on a device (here the CPU, by the same code) passes the conformance kit."""

import pytest

from pyg_scale.store import DeviceFeatures, MemoryFeatureStore
from pyg_scale.testing import FeatureStoreTests

BUYS = ("user", "buys", "item")


class TestDeviceFeatures(FeatureStoreTests):
    @pytest.fixture(params=[0, 1024, "1MB"], ids=str)
    def feature_store(self, request):
        self.memory = request.param
        return self.fill(MemoryFeatureStore(), {})

    def fill(self, store, content):
        store = MemoryFeatureStore()
        for (group, name), tensor in content.items():
            store.put_tensor(tensor, group_name=group, attr_name=name, index=None)
        return DeviceFeatures(store, "cpu", self.memory, hot={"user": [0, 3, 1], BUYS: [2]})
