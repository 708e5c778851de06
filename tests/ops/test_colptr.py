"""Destination pointers are found by the tensor object, and never a wrong one's."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from pyg_scale.ops import colptr as module
from pyg_scale.ops.colptr import colptr, recall, remember


def block(num_nodes: int = 6, num_edges: int = 20, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    col = torch.randint(0, num_nodes, (num_edges,), generator=generator).sort()[0]
    return torch.stack([torch.randint(0, num_nodes, (num_edges,), generator=generator), col])


def expected(edge_index: torch.Tensor, num_nodes: int) -> list[int]:
    return [int((edge_index[1] < i).sum()) for i in range(num_nodes + 1)]


def test_remembered_pointers_are_found_and_padded() -> None:
    edge_index = block()
    pointers = torch.tensor(expected(edge_index, 6))
    remember(edge_index, pointers)
    assert recall(edge_index) is pointers
    assert colptr(edge_index, 6) is not None
    assert colptr(edge_index, 9).tolist() == [*pointers.tolist(), 20, 20, 20]
    with pytest.raises(ValueError, match="num_nodes=2"):
        colptr(edge_index, 2)


def test_pointers_longer_than_the_block_are_cut_where_no_edges_are() -> None:
    edge_index = torch.tensor([[0, 1], [0, 0]])
    remember(edge_index, torch.tensor([0, 2, 2, 2]))
    assert colptr(edge_index, 1).tolist() == [0, 2]


def test_a_copy_and_a_view_are_computed() -> None:
    edge_index = block()
    remember(edge_index, torch.full((7,), 99))  # wrong on purpose: who finds it shows it
    for other in (edge_index.clone(), edge_index[:], edge_index.view(2, -1), edge_index.int()):
        assert recall(other) is None
        found = colptr(other, 6)
        assert found.dtype == torch.int64 and found.tolist() == expected(edge_index, 6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_list_of_pairs_seen_the_other_way_round(dtype: torch.dtype) -> None:
    # torch's conversion to pointers reads strided memory as if it lay in one piece, and writes
    # wherever what it finds there says.
    edge_index = block().to(dtype).t().contiguous().t()
    assert not edge_index[1].is_contiguous()
    assert colptr(edge_index, 6).tolist() == expected(edge_index, 6)


def test_a_change_in_place_is_noticed() -> None:
    edge_index = block()
    remember(edge_index, torch.full((7,), 99))
    edge_index[1, 0] = 0
    assert recall(edge_index) is None
    assert colptr(edge_index, 6).tolist() == expected(edge_index, 6)


def test_unsorted_and_empty_and_foreign_nodes() -> None:
    assert colptr(torch.tensor([[0, 1], [1, 0]]), 2) is None
    assert colptr(torch.empty(2, 0, dtype=torch.int64), 3).tolist() == [0, 0, 0, 0]
    for col in ([0, 3], [-1, 0]):
        with pytest.raises(ValueError, match="num_nodes=3"):
            colptr(torch.tensor([[0, 1], col]), 3)


def test_nothing_is_kept_and_no_later_tensor_gets_an_earlier_ones_pointers() -> None:
    gc.collect()
    before = len(module._known)
    for i in range(200):  # ids repeat here
        edge_index = block(seed=i)
        assert recall(edge_index) is None
        remember(edge_index, torch.tensor(expected(edge_index, 6)))
        assert recall(edge_index).tolist() == expected(edge_index, 6)
    del edge_index
    gc.collect()
    assert len(module._known) == before


def test_a_change_of_an_inference_tensor_is_not_missed() -> None:
    """Such tensors count no versions: nothing is kept of them."""
    with torch.inference_mode():
        edge_index = block()
        remember(edge_index, torch.tensor(expected(edge_index, 6)))
        assert recall(edge_index) is None
        edge_index[1, :3] = 0
        assert colptr(edge_index, 6).tolist() == expected(edge_index, 6)
        edge_index[1, 0] = 5
        assert colptr(edge_index, 6) is None
    ordinary = block()
    remember(ordinary, torch.tensor(expected(ordinary, 6)))
    with torch.inference_mode():  # an ordinary tensor counts there, too
        assert recall(ordinary) is not None
        ordinary[1, :3] = 0
        assert recall(ordinary) is None


def test_many_threads() -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        for i in range(300):
            edge_index = block(seed=seed * 1000 + i)
            pointers = torch.tensor([seed, i])
            remember(edge_index, pointers)
            if recall(edge_index) is not pointers:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
