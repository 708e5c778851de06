"""Every built-in store against the conformance kit."""

import pytest

from pyg_scale import plugins
from pyg_scale.store import MemoryFeatureStore, Mmap, MmapGraph, Quantized, Shared, SharedGraph
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

    def reopen(self, store):
        return Mmap(store.path)


class TestShared(FeatureStoreTests):
    @pytest.fixture
    def feature_store(self):
        return plugins.get("feature_store", "shared")()

    def reopen(self, store):
        return Shared(store.name)


class TestMmapGraph(GraphStoreTests):
    @pytest.fixture
    def graph_store(self):
        return plugins.get("graph_store", "mmap")()

    def reopen(self, store):
        return MmapGraph(store.path)


class TestSharedGraph(GraphStoreTests):
    @pytest.fixture
    def graph_store(self):
        return plugins.get("graph_store", "shared")()

    def reopen(self, store):
        return SharedGraph(store.name)


class TestQuantized(FeatureStoreTests):
    @pytest.fixture(params=["int8", "int8 columns", "fp16", "bf16"])
    def feature_store(self, request):
        code, _, axis = request.param.partition(" ")
        cls = plugins.get("feature_store", "quantized")
        return cls(dtype=code, axis="column" if axis else "row")


class TestQuantizedMmap(FeatureStoreTests):
    @pytest.fixture(params=["row", "column"])
    def feature_store(self, request):
        return Quantized(Mmap(), axis=request.param)

    def reopen(self, store):
        return Quantized(Mmap(store.store.path))


class Copies(MemoryFeatureStore):
    """Gives rows only, as stores on disks and servers do."""

    returns_views = False

    def _get_tensor(self, attr):
        return super()._get_tensor(attr).clone()


class TestQuantizedCopies(FeatureStoreTests):
    @pytest.fixture(params=["row", "column"])
    def feature_store(self, request):
        return Quantized(Copies(), axis=request.param)
