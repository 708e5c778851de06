"""Rows reduced where a store holds them: the bits of gathered rows, near float64, bad input."""

import pytest
import torch

from pyg_scale.ops import quantize
from pyg_scale.ops.adjacency import Adjacency
from pyg_scale.ops.aggregate import aggregate
from pyg_scale.ops.stored_rows import StoredRows, aggregate_stored, aggregate_stored_plain

ROWS, BATCH, DESTINATIONS, EDGES = 90, 60, 50, 5_000


def by_row(x):
    return StoredRows(quantize.quantize_rows(x), x.dtype)


def by_column(x):
    packed, head = quantize.quantize_columns(x), quantize.head_of(x.dtype)
    scale, zero = quantize.columns_of(packed[-head:], x.dtype)
    return StoredRows(packed[:-head], x.dtype, scale=scale, zero=zero)


FORMS = {
    "int8 by row": (by_row, (torch.float32, torch.float64)),
    "int8 by column": (by_column, (torch.float32, torch.float64)),
    "fp16": (lambda x: StoredRows(x.half(), x.dtype), (torch.float32, torch.float16)),
    "bf16": (lambda x: StoredRows(x.bfloat16(), x.dtype), (torch.float32, torch.bfloat16)),
    "as they are": (lambda x: StoredRows(x, x.dtype), (torch.float32, torch.float64)),
}
CASES = [(name, dtype) for name, (_, dtypes) in FORMS.items() for dtype in dtypes]


def in_two(stored, index):
    """The same rows in two matrices, and their places."""
    half = ROWS // 3
    places = torch.where(index < half, index, half - 1 - index)
    rows, rest = stored.rows[:half].clone(), stored.rows[half:].clone()
    return stored._replace(rows=rows, rest=rest), places


@pytest.fixture(scope="module")
def edges():
    """Edges of which one destination has most, and several none; and their ids."""
    generator = torch.Generator().manual_seed(1)
    dst = torch.randint(DESTINATIONS - 4, (EDGES,), generator=generator)
    dst[: EDGES // 2] = 3
    count = torch.bincount(dst, minlength=DESTINATIONS)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), count.cumsum(0)])
    src = torch.randint(BATCH, (EDGES,), generator=generator)
    return indptr, src, torch.randperm(EDGES, generator=generator)


@pytest.mark.parametrize("channels", [1, 5, 8, 12, 33, 100])
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_bits_are_those_of_gathered_rows(name, dtype, channels, edges):
    generator = torch.Generator().manual_seed(channels)
    x = (torch.randn(ROWS, channels, generator=generator) * 3).to(dtype)
    index = torch.randint(ROWS, (BATCH,), generator=generator)
    indptr, src, edge_id = edges
    weight = torch.rand(EDGES, generator=generator)
    stored = FORMS[name][0](x)
    assert stored.readable and stored.columns == channels
    gathered = stored.gather(index)
    assert gathered.dtype == dtype and torch.allclose(gathered, x[index], atol=0.2)
    for held, places in ((stored, index), in_two(stored, index)):
        assert torch.equal(held.gather(places), gathered)
        for how in ("sum", "mean", "max", "min"):
            for weights, ids in ((None, None), (weight, edge_id)):
                usual = Adjacency(indptr, src, BATCH, ids)
                lazy = Adjacency.of_checked(indptr, places[src], ROWS, ids)
                found = aggregate_stored(lazy, held, weights, how)
                assert torch.equal(found, aggregate(usual, gathered, weights, how))
                plain = aggregate_stored_plain(lazy, held, weights, how)
                assert found.dtype == plain.dtype == dtype
                torch.testing.assert_close(found, plain, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("form", [by_row, by_column])
def test_sums_are_those_of_float64(form, edges):
    x = torch.randn(ROWS, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    indptr, src, _ = edges
    found = aggregate_stored(Adjacency(indptr, src, ROWS), form(x))
    dense = torch.zeros(DESTINATIONS, ROWS, dtype=torch.float64)
    row = torch.arange(DESTINATIONS).repeat_interleave(indptr.diff())
    dense.index_put_((row, src), torch.ones(EDGES, dtype=torch.float64), accumulate=True)
    torch.testing.assert_close(
        found, dense @ form(x).gather(torch.arange(ROWS)), atol=1e-11, rtol=0
    )


def test_places_without_a_row_are_refused():
    indptr, stored = torch.tensor([0, 2]), StoredRows(torch.ones(3, 4), torch.float32)
    both = stored._replace(rest=torch.ones(2, 4))
    for wrong, held in ((3, stored), (-1, stored), (3, both), (-3, both)):
        graph = Adjacency.of_checked(indptr, torch.tensor([0, wrong]), 3)
        for how in ("sum", "max"):
            with pytest.raises(ValueError, match=rf"indices\[1\] is .*{wrong}, but there are only"):
                aggregate_stored(graph, held, None, how)
        with pytest.raises(IndexError):
            held.gather(graph.indices)


def test_forms_that_are_not_read():
    rows = torch.zeros(3, 20, dtype=torch.uint8)
    graph = Adjacency(torch.tensor([0, 1]), torch.tensor([0]), 3)
    for held in (
        StoredRows(rows, torch.float16),
        StoredRows(rows[:, :4].contiguous(), torch.float32),
        StoredRows(rows.half(), torch.float64),
        StoredRows(rows, torch.uint8),
        StoredRows(rows.float(), torch.float64),
        StoredRows(rows.float().t(), torch.float32),
    ):
        assert not held.readable
        if held.rows.is_contiguous():
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                aggregate_stored(graph, held)
    for rest in (rows[:, :4].contiguous(), rows.float()):
        with pytest.raises(ValueError, match="rest must be a matrix like rows"):
            aggregate_stored(graph, StoredRows(rows, torch.float32, rest))
