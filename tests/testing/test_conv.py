"""The kit for fused layers finds what is wrong with one."""

import pytest
import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import OptTensor

from pyg_scale.nn import FusedConv
from pyg_scale.nn.conv.base import check_features, check_weight
from pyg_scale.nn.fallback import NotFused
from pyg_scale.nn.graph import edges_of, is_sparse
from pyg_scale.ops.aggregate import aggregate
from pyg_scale.testing import ConvTests
from pyg_scale.testing.run import failures


def lightgcn(x, edge_index, edge_weight, flow):
    check_features(x)
    if is_sparse(edge_index):
        raise NotFused("a sparse matrix")
    graph = edges_of(edge_index, x.size(0), x.size(0), flow)
    check_weight(edge_weight, graph.num_edges, x.dtype)
    _, weight = gcn_norm(edge_index, edge_weight, x.size(0), False, False, flow, x.dtype)
    return aggregate(graph, x, weight, "sum")


def right(self, x, edge_index, edge_weight=None):
    return lightgcn(x, edge_index, edge_weight, self.flow)


def ignores_weights(self, x, edge_index, edge_weight=None):
    return lightgcn(x, edge_index, None, self.flow)


def weights_without_gradient(self, x, edge_index, edge_weight=None):
    weight = None if edge_weight is None else edge_weight.detach()
    return lightgcn(x, edge_index, weight, self.flow)


def one_direction(self, x, edge_index, edge_weight=None):
    return lightgcn(x, edge_index, edge_weight, "source_to_target")


def nothing_for_matrices(self, x, edge_index, edge_weight=None):
    if is_sparse(edge_index):
        return torch.zeros_like(x)
    return lightgcn(x, edge_index, edge_weight, self.flow)


def sorts_what_it_gets(self, x, edge_index, edge_weight=None):
    if not is_sparse(edge_index) and edge_weight is None:
        edge_index.copy_(edge_index[:, edge_index[1].argsort(stable=True)])
    return lightgcn(x, edge_index, edge_weight, self.flow)


def layer(fused):
    def forward(self, x, edge_index, edge_weight=None):
        return self.run(x, edge_index, edge_weight)

    content = {
        "replaces": torch_geometric.nn.LGConv,
        "propagate_type": {"x": Tensor, "edge_weight": OptTensor},
        "forward": forward,
        "fused": fused,
    }
    return type("LightGCN", (FusedConv, torch_geometric.nn.LGConv), content)


@pytest.mark.parametrize(
    ("fused", "test", "message"),
    [
        (ignores_weights, "test_edge_weights", "edge_weight gets no gradient"),
        (weights_without_gradient, "test_edge_weights", "edge_weight gets no gradient"),
        (one_direction, "test_edges_that_are_followed_backwards", "differs from PyG"),
        (nothing_for_matrices, "test_sparse_matrices", "differs from PyG"),
        (sorts_what_it_gets, "test_leaves_its_arguments_alone", "changed one of its arguments"),
    ],
)
def test_is_found(fused, test, message):
    assert not list(failures(ConvTests, test, conv=layer(right)))
    assert message in str(next(failures(ConvTests, test, conv=layer(fused)))[1])
