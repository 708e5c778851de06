import pytest
import torch

from pyg_scale.ops.edge_buckets import Ranges, edge_buckets, edge_group


@pytest.fixture(params=["compiled", "plain"])
def kernels(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setenv("PYG_SCALE_KERNELS", "never")


def chunk(size=500, num_nodes=90, dtype=torch.int64):
    generator = torch.Generator().manual_seed(0)
    dst = torch.randint(num_nodes, (size,), generator=generator)
    return dst.to(dtype), torch.arange(size).to(dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shift", [0, 3, 7])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("wide", [True, False])
def test_every_edge_is_in_its_range_in_order(shift, dtype, wide):
    bounds = torch.tensor([0, 1, 13, 13, 40, 90])
    dst, src = chunk(dtype=dtype)
    out = edge_buckets(dst, src, Ranges.of(bounds, shift), 64, wide=wide)
    assert out.src.dtype == (torch.int64 if wide else torch.int32)
    assert out.dst.dtype == out.order.dtype == torch.int32
    begin = 0
    for bucket, count in enumerate(out.counts.sum(0).tolist()):
        low, high = int(bounds[bucket]), int(bounds[bucket + 1])
        wanted = ((dst >= low) & (dst < high)).nonzero().view(-1)
        part = slice(begin, begin + count)
        assert out.order[part].tolist() == wanted.tolist()
        assert out.src[part].tolist() == src[wanted].tolist()
        assert out.dst[part].tolist() == (dst[wanted] - low).tolist()
        blocks = torch.bincount(wanted // 64, minlength=out.counts.size(0))
        assert out.counts[:, bucket].tolist() == blocks.tolist()
        begin += count
    assert begin == dst.numel()


@pytest.mark.usefixtures("kernels")
def test_no_edges():
    none = torch.empty(0, dtype=torch.int64)
    out = edge_buckets(none, none, Ranges.of(torch.tensor([0, 5]), 0), 64, wide=False)
    assert out.dst.numel() == 0 and out.counts.shape == (0, 1)


def test_a_table_says_where_a_range_begins_inside_a_bin():
    ranges = Ranges.of(torch.tensor([0, 4, 6, 20]), 2)
    assert ranges.table.tolist() == [0, -1, 2, 2, 2]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("base", [0, 2**31])
def test_edges_of_a_range_by_destination(wide, base):
    dst, src = chunk(400, 30, torch.int32)
    src = src.to(torch.int64 if wide else torch.int32)
    first, count = torch.tensor([base, base + 70_000]), torch.tensor([150, 250])
    offset = torch.cat([torch.arange(150), 65_000 + torch.arange(250)])
    edge_id = first.repeat_interleave(count) + offset
    indptr, pair = edge_group(dst, src, offset.to(torch.int16), first, count, 32)
    assert pair.dtype == (torch.int64 if wide or base else torch.int32)
    order = torch.argsort(dst, stable=True)
    assert pair[:, 0].tolist() == src[order].tolist()
    assert pair[:, 1].tolist() == edge_id[order].tolist()
    assert indptr.diff().tolist() == torch.bincount(dst, minlength=32).tolist()
    assert indptr.dtype == torch.int64 and indptr[0] == 0


@pytest.mark.usefixtures("kernels")
def test_a_range_without_edges():
    none = torch.empty(0, dtype=torch.int32)
    long = none.to(torch.int64)
    indptr, pair = edge_group(none, none, none.to(torch.int16), long, long, 3)
    assert indptr.tolist() == [0, 0, 0, 0] and pair.shape == (0, 2)
