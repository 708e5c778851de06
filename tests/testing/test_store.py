"""The kit for stores: a plain store passes, and each of these faults is found."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch_geometric.data import EdgeAttr, FeatureStore, GraphStore

from pyg_scale.testing import FeatureStoreTests, GraphStoreTests
from pyg_scale.testing.run import failures


class Plain(FeatureStore):
    """Tensors in a dict."""

    returns_views = True

    def __init__(self):
        super().__init__()
        self.__dict__["tensors"] = {}

    def _put_tensor(self, tensor, attr):
        if attr.index is not None:
            raise NotImplementedError("rows cannot be put one by one")
        self.tensors[attr.group_name, attr.attr_name] = tensor
        return True

    def _get_tensor(self, attr):
        tensor, index = self.tensors[attr.group_name, attr.attr_name], attr.index
        if index is None:
            return tensor
        if isinstance(index, np.ndarray):
            index = torch.from_numpy(index)
        if isinstance(index, torch.Tensor):
            wrong = index[(index < 0) | (index >= tensor.size(0))]
            if wrong.numel():
                raise IndexError(f"row {int(wrong[0])} of {tensor.size(0)}")
        return tensor[index]

    def _remove_tensor(self, attr):
        if attr.index is not None:
            raise NotImplementedError("rows cannot be removed")
        return self.tensors.pop((attr.group_name, attr.attr_name), None) is not None

    def _get_tensor_size(self, attr):
        return tuple(self._get_tensor(attr).shape)

    def get_all_tensor_attrs(self):
        return [self._tensor_attr_cls(*key) for key in self.tensors]


class PlainEdges(GraphStore):
    """Edges in a dict."""

    def __init__(self):
        super().__init__()
        self.edges = {}

    def _put_edge_index(self, edge_index, edge_attr):
        self.edges[edge_attr.edge_type, edge_attr.layout] = edge_attr, edge_index
        return True

    def _get_edge_index(self, edge_attr):
        return self.edges.get((edge_attr.edge_type, edge_attr.layout), (None, None))[1]

    def _remove_edge_index(self, edge_attr):
        return self.edges.pop((edge_attr.edge_type, edge_attr.layout), None) is not None

    def get_all_edge_attrs(self):
        return [
            EdgeAttr(a.edge_type, a.layout, a.is_sorted, a.size) for a, _ in self.edges.values()
        ]


class TestPlain(FeatureStoreTests):
    @pytest.fixture
    def feature_store(self):
        return Plain()


class TestPlainEdges(GraphStoreTests):
    @pytest.fixture
    def graph_store(self):
        return PlainEdges()


class ReadOnly(Plain):
    """Is filled by other means than the contract."""

    read_only = True

    def _put_tensor(self, tensor, attr):
        raise PermissionError("read-only")

    def _remove_tensor(self, attr):
        raise PermissionError("read-only")


class TestReadOnly(FeatureStoreTests):
    @pytest.fixture
    def feature_store(self):
        return ReadOnly()

    def fill(self, store, content):
        store.tensors.update(content)
        return store


FAULTS = []


def caught_by(test):
    def register(store):
        FAULTS.append((store, test))
        return store

    return register


@pytest.mark.parametrize(("store", "test"), FAULTS, ids=lambda v: getattr(v, "__name__", v))
def test_is_found(store, test):
    kit = FeatureStoreTests if issubclass(store, FeatureStore) else GraphStoreTests
    fixture = "feature_store" if kit is FeatureStoreTests else "graph_store"
    failure = next(failures(kit, test, **{fixture: store}), None)
    assert failure is not None, f"{store.__name__} ({store.__doc__}) passes {test}"


@caught_by("test_gives_what_was_put")
class Widens(Plain):
    """Keeps everything as 32-bit floats."""

    def _put_tensor(self, tensor, attr):
        return super()._put_tensor(tensor.float(), attr)


@caught_by("test_gives_what_was_put")
class Flattens(Plain):
    """Keeps matrices only."""

    def _put_tensor(self, tensor, attr):
        return super()._put_tensor(tensor.view(tensor.size(0), -1), attr)


@caught_by("test_rows_that_do_not_exist")
class Clamps(Plain):
    """Gives the last row for what is out of range."""

    def _get_tensor(self, attr):
        if isinstance(attr.index, torch.Tensor):
            tensor = self.tensors[attr.group_name, attr.attr_name]
            attr.index = attr.index.clamp(max=len(tensor) - 1)
        return super()._get_tensor(attr)


@caught_by("test_rows_that_do_not_exist")
class WrapsRound(Plain):
    """Takes -1 for the last row, undeclared."""

    def _get_tensor(self, attr):
        return self.tensors[attr.group_name, attr.attr_name][attr.index]


@caught_by("test_indices")
class SortsRows(Plain):
    """Gives rows in ascending order, as a file is best read."""

    def _get_tensor(self, attr):
        if isinstance(attr.index, torch.Tensor):
            attr.index = attr.index.sort().values
        return super()._get_tensor(attr)


@caught_by("test_indices")
class RowsOnce(Plain):
    """Gives every row once."""

    def _get_tensor(self, attr):
        if isinstance(attr.index, torch.Tensor):
            attr.index = torch.tensor(list(dict.fromkeys(attr.index.tolist())), dtype=torch.int64)
        return super()._get_tensor(attr)


@caught_by("test_groups")
class ForgetsTheGroup(Plain):
    """Takes the name alone for the key."""

    def _put_tensor(self, tensor, attr):
        attr.group_name = "any"
        return super()._put_tensor(tensor, attr)

    def _get_tensor(self, attr):
        attr.group_name = "any"
        return super()._get_tensor(attr)


@caught_by("test_what_was_never_put")
class GivesNone(Plain):
    """Gives nothing for what it does not have."""

    def _get_tensor(self, attr):
        if (attr.group_name, attr.attr_name) not in self.tensors:
            return None
        return super()._get_tensor(attr)


@caught_by("test_rows_are_copies")
class UndeclaredViews(Plain):
    """Gives views of what it holds."""

    returns_views = False


@caught_by("test_listed_attributes_are_fresh")
class SameAttributes(Plain):
    """Hands out its own attribute objects."""

    def _put_tensor(self, tensor, attr):
        self.__dict__.setdefault("attrs", {})[attr.group_name] = self._tensor_attr_cls(
            attr.group_name, attr.attr_name
        )
        return super()._put_tensor(tensor, attr)

    def get_all_tensor_attrs(self):
        return list(self.__dict__.get("attrs", {}).values())


@caught_by("test_many_at_once")
class ManyInAnotherOrder(Plain):
    """Answers group by group."""

    def _multi_get_tensor(self, attrs):
        return super()._multi_get_tensor(sorted(attrs, key=lambda a: a.group_name))


@caught_by("test_removing")
class RemovesAlways(Plain):
    """Says that it removed what was not there."""

    def _remove_tensor(self, attr):
        super()._remove_tensor(attr)
        return True


@caught_by("test_updating_rows")
class UpdatesEverything(Plain):
    """Replaces the whole tensor when rows are updated."""

    def update_tensor(self, tensor, *args, **kwargs):
        attr = self._tensor_attr_cls.cast(*args, **kwargs)
        attr.index = None
        return super().update_tensor(tensor, attr)


@caught_by("test_eight_threads_read")
class SharesABuffer(Plain):
    """Gathers into a buffer of its own before it copies."""

    def _get_tensor(self, attr):
        self.__dict__["buffer"] = super()._get_tensor(attr)
        time.sleep(0.001)
        return self.buffer.clone()


@caught_by("test_readers_see_the_old_or_the_new")
class WritesInPlace(Plain):
    """Replaces a tensor of the same shape row by row."""

    def _put_tensor(self, tensor, attr):
        before = self.tensors.get((attr.group_name, attr.attr_name))
        if before is None or before.shape != tensor.shape:
            return super()._put_tensor(tensor.clone(), attr)
        for part in range(0, len(before), 50):
            before[part : part + 50] = tensor[part : part + 50]
            time.sleep(0.001)
        return True


@caught_by("test_any_sequence_of_calls")
class RemembersSizes(Plain):
    """Keeps the size of a tensor that was replaced."""

    def _get_tensor_size(self, attr):
        sizes = self.__dict__.setdefault("sizes", {})
        return sizes.setdefault((attr.group_name, attr.attr_name), super()._get_tensor_size(attr))


@caught_by("test_gives_what_was_put")
class LosesSizes(PlainEdges):
    """Does not keep the numbers of nodes."""

    def get_all_edge_attrs(self):
        return [EdgeAttr(a.edge_type, a.layout, a.is_sorted) for a, _ in self.edges.values()]


@caught_by("test_layouts")
class Simple(PlainEdges):
    """Drops parallel edges."""

    def _put_edge_index(self, edge_index, edge_attr):
        if edge_attr.layout.value == "coo":
            edge_index = tuple(torch.unique(torch.stack(edge_index), dim=1))
        return super()._put_edge_index(edge_index, edge_attr)


@caught_by("test_layouts")
class ForgetsThePermutation(PlainEdges):
    """Converts layouts without saying how it moved the edges."""

    def csc(self, *args, **kwargs):
        row, col, perm = super().csc(*args, **kwargs)
        return row, col, dict.fromkeys(perm)


@caught_by("test_says_that_nothing_is_sorted_that_is_not")
class AlwaysSorted(PlainEdges):
    """Says that edges are sorted."""

    def get_all_edge_attrs(self):
        return [EdgeAttr(a.edge_type, a.layout, True, a.size) for a, _ in self.edges.values()]


@caught_by("test_samplers_see_the_same_graph")
class Transposed(PlainEdges):
    """Exchanges sources and destinations."""

    def _get_edge_index(self, edge_attr):
        edges = super()._get_edge_index(edge_attr)
        if edges is not None and edge_attr.layout.value == "coo" and edge_attr.size[0] == 100:
            return edges[::-1]
        return edges
