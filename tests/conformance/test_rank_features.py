"""Features that several ranks have against the conformance kit."""

from __future__ import annotations

import pickle
from itertools import count

import pytest
import torch

from pyg_scale.partitioner.base import Partition
from pyg_scale.partitioner.write import write_partition
from pyg_scale.testing import FeatureStoreTests
from pyg_scale.testing.store_content import forked
from tests.distributed.rank_features import Ranks
from tests.store.feature_directories import write_features

pytestmark = pytest.mark.matrix(3)

BUYS = ("user", "buys", "item")


class TestRankFeatures(FeatureStoreTests):
    world_size, options = 2, {}

    @pytest.fixture
    def feature_store(self, tmp_path):
        self.folder, self.number, self.made = tmp_path, count(), []
        yield self.fill(None, {})
        for each in self.made:
            each.close()

    def fill(self, store, content):
        path = self.folder / str(next(self.number))
        write_features(path / "whole", content)
        groups = {group: t.size(0) for (group, _), t in content.items() if type(group) is not tuple}
        for group, _ in content:
            if type(group) is tuple:
                groups |= {end: groups.get(end, 1) for end in group[::2]}
        assignment = {
            group: (torch.arange(size) * 7 % 3).to(torch.int32) for group, size in groups.items()
        }
        parts = 3 if assignment else 1
        write_partition(path / "whole", Partition(assignment, parts, "m"), path / "parts")
        self.made.append(Ranks(path / "parts", self.world_size, asking=[1], **self.options))
        return self.made[-1].features[0]

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
                rows = torch.tensor([2, 0, 2])
                assert torch.equal(store[group, name, rows], tensor[rows])
                assert tuple(store.get_tensor_size(group, name)) == tuple(tensor.shape)
            listed = {(a.group_name, a.attr_name) for a in store.get_all_tensor_attrs()}
            assert listed == set(content)

    def test_can_be_pickled(self, feature_store):
        """It cannot: connections belong to a process."""
        with pytest.raises(TypeError, match="worker_type='thread'"):
            pickle.dumps(feature_store)

    def test_is_read_after_a_fork(self, feature_store):
        """What is here can be; the rest is refused at once, as nobody would answer."""
        tensor = torch.arange(30.0).view(-1, 1)
        store = self.fill(feature_store, {("user", "x"): tensor})
        index = torch.arange(30)
        here = index[index * 7 % 3 == 1]  # part 1 is that of rank 1
        assert forked(lambda: torch.equal(store["user", "x", here], tensor[here]))
        assert forked(lambda: _refused(store, index))
        assert torch.equal(store["user", "x", index], tensor)


class TestCachedRows(TestRankFeatures):
    world_size, options = 3, {"cache": 400, "policy": "belady"}


def _refused(store, index):
    try:
        store["user", "x", index]
    except RuntimeError as error:
        return "forked" in str(error)
    return False
