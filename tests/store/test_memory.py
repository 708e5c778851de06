"""What the stores in memory do beyond the contract that the conformance kit tests."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import TensorAttr
from torch_geometric.data.graph_store import EdgeLayout
from torch_geometric.loader import NeighborLoader
from torch_geometric.sampler import BaseSampler, SamplerOutput

from pyg_scale import plugins
from pyg_scale.store import MemoryFeatureStore, MemoryGraphStore

CITES = ("paper", "cites", "paper")


def test_found_by_name() -> None:
    assert plugins.get("feature_store", "memory") is MemoryFeatureStore
    assert plugins.get("graph_store", "memory") is MemoryGraphStore


def test_a_read_only_memory_map_is_not_copied(tmp_path: Path) -> None:
    array = np.arange(3000.0, dtype=np.float32).reshape(1000, 3)
    np.save(tmp_path / "x.npy", array)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    store = MemoryFeatureStore()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store["paper", "x", None] = mapped
    whole = store["paper", "x", None]
    assert whole.data_ptr() == mapped.__array_interface__["data"][0]
    index = torch.tensor([999, 0, 5], dtype=torch.int32)
    assert torch.equal(store["paper", "x", index], torch.from_numpy(array)[index.long()])
    # rows are put into a copy: the file cannot be written to
    store.put_tensor(torch.zeros(1, 3), "paper", "x", torch.tensor([7]))
    assert store["paper", "x", 7].tolist() == [0, 0, 0] and mapped[7].tolist() == [21, 22, 23]


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (torch.tensor(1.0), ValueError, "'x' of 'paper' must have one row per node or edge"),
        (torch.zeros(3, 3).to_sparse(), TypeError, "dense tensor or an array .*sparse_coo"),
        ([1, 2], TypeError, "dense tensor or an array .*list"),
        (np.array([None]), TypeError, "numbers .*object"),
    ],
)
def test_wrong_tensors(value: Any, error: type[Exception], match: str) -> None:
    store = MemoryFeatureStore()
    with pytest.raises(error, match=match):
        store["paper", "x", None] = value
    assert store.get_all_tensor_attrs() == []


@pytest.mark.parametrize(
    ("index", "value", "error", "match"),
    [
        (torch.tensor([0, 5]), torch.zeros(2, 2), IndexError, "row 5 .* only 5 rows"),
        (torch.tensor([0]), torch.zeros(1, 3), ValueError, r"\[1, 2\] .*got .*\[1, 3\]"),
        (torch.tensor([0]), torch.zeros(1, 2).double(), ValueError, "float32 .*got .*float64"),
        (torch.tensor([True] * 5), torch.zeros(5, 2), TypeError, "int64 or int32, .*bool"),
        (torch.tensor([0.5]), torch.zeros(1, 2), TypeError, "float32"),
    ],
)
def test_wrong_rows(index: Any, value: Any, error: type[Exception], match: str) -> None:
    store = MemoryFeatureStore()
    store["paper", "x", None] = torch.ones(5, 2)
    with pytest.raises(error, match=match):
        store.put_tensor(value, "paper", "x", index)
    assert store["paper", "x", None].eq(1).all()
    if error is not ValueError:
        with pytest.raises(error):
            store["paper", "x", index]


def test_errors_name_what_there_is() -> None:
    store = MemoryFeatureStore()
    with pytest.raises(KeyError, match="'x' is not in the store, which has: nothing"):
        store[None, "x", None]
    store["paper", "x", None] = torch.ones(5, 2)
    with pytest.raises(KeyError, match="'y' of 'paper' is not .* has: 'x' of 'paper'"):
        store["paper", "y", None]
    with pytest.raises(KeyError, match="'y' of 'paper'"):
        store.update_tensor(torch.ones(1), "paper", "y", None)
    with pytest.raises(KeyError, match="'y' of 'paper'"):
        store.put_tensor(torch.ones(1), "paper", "y", torch.tensor([0]))
    with pytest.raises(IndexError, match=r"'x' of 'paper': index\[1\] is 9, .* only 5 rows"):
        store["paper", "x", torch.tensor([0, 9])]
    with pytest.raises(IndexError, match="'x' of 'paper': row 5 does not exist"):
        store["paper", "x", 5]
    assert store.get_tensor_size("paper", "y") is None


def test_views_and_copies() -> None:
    store = MemoryFeatureStore()
    x = torch.ones(5, 2)
    store["paper", "x", None] = x
    assert store["paper"].x[:] is not None and store["paper", "x", None] is x
    assert store["paper", "x", slice(1, 3)].data_ptr() == x[1].data_ptr()
    assert store["paper", "x", torch.arange(5)].data_ptr() != x.data_ptr()
    del store["paper", "x"]
    assert store.get_all_tensor_attrs() == []


def test_a_type_given_as_a_list() -> None:
    store = MemoryFeatureStore()
    store.put_tensor(torch.ones(5), TensorAttr(list(CITES), "w", None))
    assert store.get_tensor(TensorAttr(CITES, "w", None)).shape == (5,)


@pytest.mark.parametrize(
    ("pair", "options", "error", "match"),
    [
        (([0, 1], [1]), {}, ValueError, "2 sources and 1 destinations"),
        (([0, 9], [1, 1]), {"size": (5, 5)}, IndexError, "node 9, but size says 5"),
        (([0, -1], [1, 1]), {}, IndexError, "node -1"),
        (([0, 1], [1, 0]), {"is_sorted": True}, ValueError, "not sorted by destination"),
        (([0, 1], [0, 1, 3]), {"layout": "csc"}, ValueError, "pointers .* rise from 0 to 2"),
        (([0, 1], [0, 2]), {"layout": "csc", "size": (5, 5)}, ValueError, "2 pointers, .* 5 nodes"),
        (([0, 2, 1, 2], [0, 1]), {"layout": "csr"}, ValueError, "pointers"),
        (([0.5], [1]), {}, TypeError, "int64 or int32"),
        (([0],), {}, TypeError, "pair"),
    ],
)
def test_wrong_edges(pair: Any, options: Any, error: type[Exception], match: str) -> None:
    store = MemoryGraphStore()
    tensors = tuple(torch.tensor(part) for part in pair)
    with pytest.raises(error, match=match):
        store.put_edge_index(tensors, edge_type=CITES, **{"layout": "coo", **options})
    assert store.get_all_edge_attrs() == []


def test_layouts_live_side_by_side() -> None:
    store = MemoryGraphStore()
    row, col = np.array([0, 2, 1]), np.array([1, 0, 0])
    store.put_edge_index((row, col), edge_type=CITES, layout="coo", size=(3, 3))
    store.csc(store=True)
    assert [a.layout for a in store.get_all_edge_attrs()] == [EdgeLayout.COO, EdgeLayout.CSC]
    indices, pointers = store.get_edge_index(edge_type=CITES, layout="csc")
    assert pointers.tolist() == [0, 2, 3, 3] and indices.tolist() == [2, 1, 0]
    attr = store.get_all_edge_attrs()[0]
    attr.size = (9, 9)
    assert store.get_all_edge_attrs()[0].size == (3, 3)


def test_pygs_own_loader_reads_them() -> None:
    """PyG's loader, with a sampler that takes the seeds alone: no compiled sampler is needed."""

    class Seeds(BaseSampler):
        def sample_from_nodes(self, index: Any, **kwargs: Any) -> SamplerOutput:
            none = torch.empty(0, dtype=torch.int64)
            return SamplerOutput(index.node, none, none, none, metadata=(index.input_id, None))

        def sample_from_edges(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    features, graph = MemoryFeatureStore(), MemoryGraphStore()
    x = torch.randn(6, 3)
    features[None, "x", None] = x
    graph.put_edge_index(
        (torch.tensor([0]), torch.tensor([1])), edge_type=None, layout="coo", size=(6, 6)
    )
    loader = NeighborLoader(
        (features, graph), [1], torch.tensor([4, 1, 1]), batch_size=3, neighbor_sampler=Seeds()
    )
    (batch,) = loader
    assert torch.equal(batch.x, x[[4, 1, 1]])
