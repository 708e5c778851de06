"""Caches against the conformance kit: too small for what they hold, over memory and over files."""

from itertools import count

import pytest
import torch

from pyg_scale.store import Cached, Disk, MemoryFeatureStore
from pyg_scale.testing import FeatureStoreTests
from tests.store.feature_directories import write_features

BUYS = ("user", "buys", "item")


class TestCached(FeatureStoreTests):
    @pytest.fixture(params=["belady", "sieve", "placed"])
    def feature_store(self, request):
        hot = {"hot": {"user": [0, 3, 1], BUYS: [2]}} if request.param == "placed" else {}
        return Cached(MemoryFeatureStore(), capacity=300, policy=request.param, **hot)


class TestDisk(FeatureStoreTests):
    @pytest.fixture(params=["belady", "placed"])
    def feature_store(self, request, tmp_path):
        self.policy, self.folder, self.number = request.param, tmp_path, count()
        return self.fill(None, {})

    def fill(self, store, content):
        path = write_features(self.folder / str(next(self.number)), content)
        hot = {"hot": {"user": [0, 3]}} if self.policy == "placed" else {}
        return Disk(path, 300, self.policy, **hot)

    def reopen(self, store):
        return Disk(store.path, 300)

    def test_groups(self, feature_store):
        """A graph has types or it has none, but not both."""
        contents = [
            {
                ("user", "x"): torch.rand(4, 2),
                ("item", "x"): torch.rand(5, 2),
                ("user", "y"): torch.arange(4),
                (BUYS, "edge_attr"): torch.rand(9, 1),
            },
            {(None, "x"): torch.rand(3), ((None, None), "edge_attr"): torch.rand(6, 2)},
        ]
        for content in contents:
            store = self.fill(feature_store, content)
            for (group, name), tensor in content.items():
                assert torch.equal(store[group, name, None], tensor)
                rows = torch.tensor([2, 0])
                assert torch.equal(store[group, name, rows], tensor[rows])
            assert {(a.group_name, a.attr_name) for a in store.get_all_tensor_attrs()} == set(
                content
            )
