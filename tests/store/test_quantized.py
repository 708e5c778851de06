"""What the quantised store does beyond the contract that the conformance kit tests."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from pyg_scale.loader import NeighborLoader
from pyg_scale.store import MemoryFeatureStore, Mmap, Quantized
from tests.store.edges import N, edge_index

pytestmark = pytest.mark.filterwarnings("ignore:.*plain-torch path.*:RuntimeWarning")

FORMS: list[Any] = [
    {"dtype": "int8"},
    {"dtype": "int8", "axis": "column"},
    {"dtype": "fp16"},
    {"dtype": "bf16"},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_are_within_the_bound(form: Any) -> None:
    x = torch.randn(50, 7, 2) * torch.logspace(-3, 3, 50)[:, None, None]
    store = Quantized(**form)
    store["paper", "x", None] = x
    bound = store.error_bound("x", "paper")
    assert bound.dtype == torch.float64
    far = (store["paper", "x", None] - x).abs()
    assert bool((far <= bound).all()) and float(far.max()) > 0
    index = torch.tensor([49, 3, 3])
    some = store["paper", "x", index]
    assert torch.equal(some, store["paper", "x", None][index])
    assert bool(((some - x[index]).abs() <= store.error_bound("x", "paper", index)).all())
    if form["dtype"] == "int8":  # the bound is half a step, and hardly more
        packed = store.store.get_all_tensor_attrs()[0]
        assert float(bound.max()) < 1.01 * float(x.abs().max()) * 2 / 254 / 2 + 1e-3, packed


def test_it_takes_a_quarter_of_the_bytes() -> None:
    x = torch.randn(1000, 128)
    for form, bytes_per_row in zip(FORMS, (136, 128, 256, 256)):
        store = Quantized(**form)
        store[None, "x", None] = x
        (attr,) = store.store.get_all_tensor_attrs()
        inner = store.store.get_tensor(attr.group_name, attr.attr_name, None)
        head = 8 if form.get("axis") else 0
        assert inner.numel() * inner.element_size() == (1000 + head) * bytes_per_row


@pytest.mark.parametrize("value", [torch.arange(4), torch.ones(4) > 0, torch.ones(4).cfloat()])
def test_what_is_no_floating_point_number_is_refused(value: torch.Tensor) -> None:
    store = Quantized()
    assert not store.accepts(value) and store.accepts(torch.ones(1))
    with pytest.raises(TypeError, match="'y' of 'paper' has .* only floating point"):
        store["paper", "y", None] = value


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_nan_names_the_row_and_leaves_the_old(form: Any) -> None:
    store = Quantized(**form)
    store["paper", "x", None] = torch.ones(9, 2)
    x = torch.ones(9, 2)
    x[6, 1] = float("nan")
    with pytest.raises(ValueError, match="'x' of 'paper': row 6 has nan"):
        store["paper", "x", None] = x
    assert store["paper", "x", None].eq(1).all()


@pytest.mark.parametrize(
    ("args", "options", "error", "match"),
    [
        (("int8",), {}, LookupError, "int8"),
        ((3,), {}, TypeError, "FeatureStore"),
        (("memory", "int4"), {}, ValueError, "int8, fp16, bf16"),
        (("memory", "fp16"), {"axis": "column"}, ValueError, "no scale"),
        (("memory",), {"axis": "both"}, ValueError, "'row' or 'column'"),
    ],
)
def test_wrong_arguments(args: Any, options: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Quantized(*args, **options)


def test_rows_of_another_shape_or_dtype() -> None:
    store = Quantized()
    store["paper", "x", None] = torch.ones(5, 2)
    for value, match in ((torch.ones(1, 3), r"\[2\]"), (torch.ones(1, 2).double(), "float32")):
        with pytest.raises(ValueError, match=match):
            store.put_tensor(value, "paper", "x", torch.tensor([1]))
    columns = Quantized(axis="column")
    columns["paper", "x", None] = torch.ones(5, 2)
    with pytest.raises(NotImplementedError, match="columns share scales"):
        columns.put_tensor(torch.ones(1, 2), "paper", "x", torch.tensor([1]))


def test_a_store_that_holds_plain_numbers_is_refused_and_labels_pass() -> None:
    inner = MemoryFeatureStore()
    inner["paper", "y", None] = torch.arange(5)
    store = Quantized(inner)
    store["paper", "x", None] = torch.randn(5, 3)
    assert store["paper", "y", torch.tensor([3])].tolist() == [3]
    assert store.error_bound("y", "paper") == 0
    inner["paper", "z", None] = torch.randn(5)
    with pytest.raises(ValueError, match="'z' of 'paper' is already in the store"):
        Quantized(inner)


def test_another_shape_replaces_the_old(tmp_path: Path) -> None:
    store, other = Quantized(Mmap(tmp_path)), Quantized(Mmap(tmp_path))
    store["paper", "x", None] = torch.ones(5, 2)
    assert other["paper", "x", None].shape == (5, 2)
    store["paper", "x", None] = torch.ones(4, 3).double()
    assert other["paper", "x", None].dtype == torch.float64  # although it knew another form
    assert [a.attr_name for a in other.get_all_tensor_attrs()] == ["x"]
    assert torch.equal(pickle.loads(pickle.dumps(store))["paper", "x", 2], torch.ones(3).double())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("by_name", [False, True])
def test_in_a_loader(tmp_path: Path, by_name: bool, num_workers: int) -> None:
    data = Data(x=torch.randn(N, 8), y=torch.arange(N), edge_index=edge_index(), num_nodes=N)
    store: Any = "quantized"
    if not by_name:
        store = Quantized(Mmap(tmp_path / "q"), "bf16")
        store[None, "x", None] = data.x
    loader = NeighborLoader(
        data, [2], batch_size=16, feature_store=store, num_workers=num_workers, seed=1
    )
    for batch in loader:
        exact = data.x[batch.n_id]
        assert torch.equal(batch.y, batch.n_id) and batch.x.dtype == torch.float32
        assert not torch.equal(batch.x, exact) and torch.allclose(batch.x, exact, atol=0.03)
