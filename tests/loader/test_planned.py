"""A loader with other num_neighbors than the partition was made for warns."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch_geometric.data import HeteroData

import pyg_scale
from pyg_scale.datasets import planted_communities
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    path = tmp_path_factory.mktemp("planned") / "parts"
    data = planted_communities(200, 1_000, 4, 4, progress=False)
    pyg_scale.partition(data, 2, "frequency", path, num_neighbors=[5, 3])
    return pyg_scale.open(path)


def test_the_same_numbers_are_fine(opened):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NeighborLoader(opened, [5, 3])


def test_other_numbers_are_said(opened):
    with pytest.warns(UserWarning, match=r"'frequency' for num_neighbors=\[5, 3\].*has \[5, 4\]"):
        NeighborLoader(opened, [5, 4])
    with pytest.warns(UserWarning, match=r"has \[5\]"):
        LinkNeighborLoader(opened, [5])


def test_types(tmp_path):
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 6, 4
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1, 2], [0, 1, 2]])
    pyg_scale.partition(data, 2, "frequency", tmp_path / "p", num_neighbors=[2])
    opened = pyg_scale.open(tmp_path / "p")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NeighborLoader(opened, {("a", "to", "b"): [2]}, input_nodes="b")
    with pytest.warns(UserWarning, match=r"has \[3\]"):
        NeighborLoader(opened, {("a", "to", "b"): [3]}, input_nodes="b")


def test_graphs_that_nobody_cut_say_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NeighborLoader(planted_communities(50, 100, 2, 2, progress=False), [7])
