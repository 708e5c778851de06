import pytest
import torch

from pyg_scale.ops.edge_buckets import Ranges, edge_buckets


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
