"""Rows before nothing but zeros: compiled, plain, and by a count."""

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale.ops.nonzero_rows import nonzero_rows


@pytest.fixture(params=["never", "require"], autouse=True)
def kernels(request, monkeypatch):
    if request.param == "require" and not library.status()["loaded"]:
        pytest.skip("the kernels are not compiled")
    monkeypatch.setenv("PYG_SCALE_KERNELS", request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 3, 47, 256])
def test_the_last_row_that_is_not_zero(dtype, columns):
    x = torch.zeros(9000, columns, dtype=dtype)
    assert nonzero_rows(x) == 0
    x[:, -1] = -0.0  # is a zero
    assert nonzero_rows(x) == 0
    for row in (0, 1, 1023, 5000, 8998, 8999):
        for value in (1.0, -torch.finfo(dtype).smallest_normal, float("nan"), float("inf")):
            for column in (0, columns - 1):
                x[row, column] = value
                assert nonzero_rows(x) == row + 1
                x[row, column] = 0
        x[row, columns // 2] = 2.0  # the ones before stay


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing(shape):
    assert nonzero_rows(torch.ones(shape)) == 0


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_matter(threads):
    x = torch.zeros(70_000, 40)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for row in (3, 20_000, 20_001, 65_000):
            x[row, 7] = 1
            assert nonzero_rows(x) == row + 1
    finally:
        torch.set_num_threads(before)


def test_what_it_does_not_take_is_refused(kernels):
    if kernels == "never":
        pytest.skip("plain torch takes more")
    for wrong in (torch.ones(3), torch.ones(3, 4).t(), torch.ones(3, 4).long()):
        with pytest.raises(ValueError, match="x must be"):
            nonzero_rows(wrong)
