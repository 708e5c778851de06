"""Every built-in fused layer against the conformance kit."""

import pytest
import torch
from torch import nn

from pyg_scale import plugins
from pyg_scale.testing import ConvTests

pytestmark = pytest.mark.matrix(3)


class TestGCN(ConvTests):
    @pytest.fixture
    def conv(self):
        return plugins.get("conv", "gcn")


class TestSAGE(ConvTests):
    @pytest.fixture
    def conv(self):
        return plugins.get("conv", "sage")


class TestGIN(ConvTests):
    @pytest.fixture
    def conv(self):
        return plugins.get("conv", "gin")

    def make(self, cls):
        torch.manual_seed(5)  # the kit cannot load the state of a module that is an argument
        return cls(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5)), train_eps=True)


class TestGraph(ConvTests):
    @pytest.fixture
    def conv(self):
        return plugins.get("conv", "graph")

    def arguments(self, x, edge_index):
        weight = torch.linspace(-1, 2, edge_index.size(1), dtype=x.dtype)
        return x, edge_index, weight


class TestGAT(ConvTests):
    @pytest.fixture
    def conv(self):
        return plugins.get("conv", "gat")

    def make(self, cls):
        return cls(8, 5, heads=3)


class TestGATv2(ConvTests):
    @pytest.fixture
    def conv(self):
        return plugins.get("conv", "gatv2")

    def make(self, cls):
        return cls(8, 5, heads=3)


class TestTransformer(ConvTests):
    @pytest.fixture
    def conv(self):
        return plugins.get("conv", "transformer")

    def make(self, cls):
        return cls(8, 5, heads=3)


class TestRGCN(ConvTests):
    @pytest.fixture
    def conv(self):
        return plugins.get("conv", "rgcn")

    def make(self, cls):
        return cls(8, 5, num_relations=4)

    def arguments(self, x, edge_index):
        return x, edge_index, torch.arange(edge_index.size(1)) % 3
