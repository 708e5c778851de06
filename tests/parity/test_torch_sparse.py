"""PyG's loader on torch-sparse and ours give the same batches, but for what is documented.

torch-sparse does not count what hops added, so PyG's batches have no ``num_sampled_nodes`` and
``num_sampled_edges``. In-edges of a node are in the order in which a sort that is not stable leaves
them, and edge types in the order of a dictionary: unless edges are sorted already, nodes and edges
are compared as sets, ours being in the order of their ids.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.loader as pyg
import torch_geometric.typing
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_scale.datasets import read_npz
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader
from pyg_scale.testing import graphs
from tests.loader.batches import contents

if not torch_geometric.typing.WITH_TORCH_SPARSE or torch_geometric.typing.WITH_PYG_LIB:
    pytest.skip("PyG does not sample with torch-sparse here", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without a 'pyg-lib'")
COUNTS = {"num_sampled_nodes", "num_sampled_edges"}


def values(batch: Any) -> dict[Any, Any]:
    return {key: v for key, v in contents(batch).items() if key[1] not in COUNTS}


def assert_equal(ours: Any, theirs: Any) -> None:
    """Every attribute, with its type and its order."""
    ours, theirs = values(ours), values(theirs)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        if isinstance(value, Tensor):
            assert value.dtype == theirs[key].dtype, key
            assert torch.equal(value, theirs[key]), key
        else:
            assert value == theirs[key], key


def assert_equal_up_to_order(ours: Any, theirs: Any, data: Any) -> None:
    """The same nodes and edges of each type, with the same attributes."""
    assert values(ours).keys() == values(theirs).keys()
    is_hetero = isinstance(data, HeteroData)
    for node_type in data.node_types if is_hetero else [None]:
        left, right, original = (part(b, node_type) for b in (ours, theirs, data))
        (left_id, left_order), (right_id, right_order) = left.n_id.sort(), right.n_id.sort()
        assert torch.equal(left_id, right_id)
        for name, value in original.items():
            if isinstance(value, Tensor) and original.is_node_attr(name):
                assert torch.equal(left[name][left_order], right[name][right_order]), name
    for edge_type in data.edge_types if is_hetero else [None]:
        ends = (None, None) if edge_type is None else edge_type[::2]
        ids, pairs = [], []
        for batch in (ours, theirs):
            store = part(batch, edge_type)
            e_id, order = store.e_id.sort()
            ids.append(e_id)
            pairs.append(
                [part(batch, end).n_id[i[order]] for end, i in zip(ends, store.edge_index)]
            )
        assert torch.equal(*ids)
        assert torch.equal(torch.stack(pairs[0]), torch.stack(pairs[1]))


def part(data: Any, kind: Any) -> Any:
    return data._store if kind is None else data[kind]


def sorted_by_destination(data: Data) -> Data:
    """The same graph, its edges in an order that PyG leaves as it is."""
    order = data.edge_index[1].sort(stable=True).indices
    for name in data.edge_attrs():
        value = data[name]
        data[name] = value[:, order] if name == "edge_index" else value[order]
    return data


LOADERS = (NeighborLoader, pyg.NeighborLoader)


@pytest.mark.parametrize("hops", [1, 2])
def test_facebook_pages(data_dir: Path, hops: int) -> None:
    data = read_npz(data_dir / "facebook_pages.npz")
    data.x = data.x[:, :8].contiguous()
    data.edge_attr = torch.arange(data.num_edges)
    ours, theirs = (cls(data, [-1] * hops, data.train_mask, batch_size=100) for cls in LOADERS)
    for left, right in islice(zip(ours, theirs, strict=True), 10):
        assert_equal(left, right)


def test_parallel_edges_loops_and_hubs() -> None:
    data = graphs.hostile()
    ours, theirs = (cls(data, [-1, -1, -1], batch_size=7) for cls in LOADERS)
    for left, right in zip(ours, theirs, strict=True):
        assert_equal_up_to_order(left, right, data)
    data = sorted_by_destination(data)
    ours, theirs = (cls(data, [-1, -1, -1], batch_size=7, is_sorted=True) for cls in LOADERS)
    for left, right in zip(ours, theirs, strict=True):
        assert_equal(left, right)


@pytest.mark.parametrize("node_type", ["author", "conference"])
def test_dblp(data_dir: Path, node_type: str) -> None:
    data = read_npz(data_dir / "dblp.npz")
    ours, theirs = (cls(data, [-1, -1], node_type, batch_size=5) for cls in LOADERS)
    for left, right in islice(zip(ours, theirs, strict=True), 4):
        size = left[node_type].batch_size
        assert torch.equal(left[node_type].n_id[:size], right[node_type].n_id[:size])
        assert_equal_up_to_order(left, right, data)


def test_induced(data_dir: Path) -> None:
    data = read_npz(data_dir / "cora.npz")
    ours, theirs = (cls(data, [-1, -1], batch_size=50, subgraph_type="induced") for cls in LOADERS)
    for left, right in islice(zip(ours, theirs, strict=True), 10):
        assert_equal_up_to_order(left, right, data)


def test_links(data_dir: Path) -> None:
    data = sorted_by_destination(read_npz(data_dir / "cora.npz"))
    ours, theirs = (
        cls(data, [-1, -1], data.edge_index[:, ::50], batch_size=30, is_sorted=True)
        for cls in (LinkNeighborLoader, pyg.LinkNeighborLoader)
    )
    for left, right in zip(ours, theirs, strict=True):
        assert_equal(left, right)
