"""Products of matrices: of the compiled op beside float64, torch, and those of integers."""

import itertools

import pytest
import torch
from torch import Tensor

from pyg_scale.ops import dense_product, library
from pyg_scale.ops.dense_product import covers, mm

needs_kernels = pytest.mark.skipif(not library.compiled(), reason="the kernels are not compiled")

SIZES = [
    (1, 1, 1),
    (7, 3, 5),
    (8, 16, 48),
    (9, 17, 49),
    (65, 257, 33),
    (200, 256, 100),
    (130, 600, 16),
    (3, 5000, 20),  # a long sum
    (47, 3001, 100),
    (600, 9, 700),
    (300, 2500, 1200),  # too large a second matrix to be copied
]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op, whatever the processor and the sizes."""
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    monkeypatch.setattr(dense_product, "pays", lambda: True)
    monkeypatch.setattr(dense_product, "_MIN_MACS", 1)


def matrix(rows: int, columns: int, dtype: torch.dtype, layout: str) -> Tensor:
    """Whole numbers, whose products ``float32`` has without rounding."""
    draw = torch.Generator().manual_seed(rows + 7 * columns)
    x = torch.randint(-4, 5, (rows, columns), generator=draw).to(dtype)
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "wider":
        return torch.cat([x, x.new_full((rows, 3), float("nan"))], dim=1)[:, :columns]
    if layout == "one row":
        return x[:1].expand(rows, columns)
    if layout == "one column":
        return x[:, :1].expand(rows, columns)
    return x


LAYOUTS = ["plain", "transposed", "wider", "one row", "one column"]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_layout(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, depth, columns = size
    few = LAYOUTS if rows * depth * columns < 10**7 else LAYOUTS[:2]
    for left, right in itertools.product(few, few):
        a, b = matrix(rows, depth, dtype, left), matrix(depth, columns, dtype, right)
        expected = (a.long() @ b.long()).to(dtype)
        with torch.no_grad():
            assert torch.equal(mm(a, b), expected)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES, ids=str)
@torch.no_grad()
def test_bias_and_sums(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, depth, columns = size
    a, b = matrix(rows, depth, dtype, "plain"), matrix(depth, columns, dtype, "transposed")
    expected = (a.long() @ b.long()).to(dtype)
    bias = torch.arange(columns).to(dtype)
    assert torch.equal(mm(a, b, bias=bias), expected + bias)
    around = torch.full((rows, columns + 2), 7.0, dtype=dtype)
    out = around[:, 1 : columns + 1]
    assert mm(a, b, out=out) is out
    assert torch.equal(out, expected)
    assert mm(a, b, out=out, add=True) is out
    assert torch.equal(out, 2 * expected)
    mm(a, b, out=out, bias=bias)
    assert torch.equal(out, expected + bias)
    assert (around[:, 0] == 7).all() and (around[:, -1] == 7).all()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_rounding_is_that_of_a_sum(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    for rows, depth, columns in [(500, 300, 70), (40, 9000, 30)]:
        a = torch.randn(rows, depth, generator=draw, dtype=torch.float64).to(dtype)
        b = torch.randn(depth, columns, generator=draw, dtype=torch.float64).to(dtype)
        right = a.to(torch.float64) @ b.to(torch.float64)
        most = a.abs().to(torch.float64) @ b.abs().to(torch.float64)
        error = (mm(a, b).to(torch.float64) - right).abs() / most
        assert error.max() < 16 * torch.finfo(dtype).eps


@pytest.mark.usefixtures("compiled")
@torch.no_grad()
def test_numbers_that_are_not_finite_go_where_they_belong() -> None:
    a, b = torch.ones(20, 30), torch.ones(30, 50)
    a[11, 4], a[3, 2], b[7, 20] = float("nan"), float("inf"), float("-inf")
    found = mm(a, b)
    assert torch.equal(found.isnan(), (a @ b).isnan())
    assert torch.equal(found.nan_to_num(), (a @ b).nan_to_num())


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("size", [(3000, 100, 60), (100, 9000, 40), (300, 2500, 1200)], ids=str)
@torch.no_grad()
def test_bits_are_those_of_any_number_of_threads(size: tuple[int, int, int]) -> None:
    draw = torch.Generator().manual_seed(2)
    a, b = torch.randn(*size[:2], generator=draw), torch.randn(*size[1:], generator=draw)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5, 16):
            torch.set_num_threads(threads)
            found.append(mm(a, b))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.usefixtures("compiled")
@torch.no_grad()
def test_a_row_does_not_depend_on_others() -> None:
    draw = torch.Generator().manual_seed(3)
    a, b = torch.randn(777, 120, generator=draw), torch.randn(120, 90, generator=draw)
    whole = mm(a, b)
    for begin, end in ((0, 1), (5, 70), (64, 777)):
        assert torch.equal(mm(a[begin:end], b), whole[begin:end])


def test_torch_has_all_else(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.ones(4, 5), torch.ones(5, 6)
    assert covers(a, b)
    assert not covers(a.half(), b.half())
    assert not covers(a, b.double())
    assert not covers(a.to("meta"), b.to("meta"))
    assert not covers(a.to_sparse(), b)
    assert not covers(a[:0], b) and not covers(a[:, :0], b[:0]) and not covers(a, b[:, :0])
    torch.testing.assert_close(torch.vmap(mm)(a.expand(3, 4, 5), b.expand(3, 5, 6))[1], a @ b)
    assert torch.equal(torch.compile(mm, backend="eager", fullgraph=True)(a, b), a @ b)
    with torch.no_grad():
        column = torch.zeros(6, 4).t()  # rows that do not lie one after the other
        assert torch.equal(mm(a, b, out=column), a @ b)
    monkeypatch.setattr(dense_product, "pays", lambda: False)
    with torch.no_grad():
        out = torch.ones(4, 6)
        assert torch.equal(mm(a, b, out=out, add=True), a @ b + 1)
        assert torch.equal(mm(a, b, bias=torch.arange(6.0)), a @ b + torch.arange(6.0))


@torch.no_grad()
def test_without_kernels_torch_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.ones(300, 200), torch.ones(200, 100)
    assert covers(a, b) == dense_product.pays()  # and what that was is not kept
    monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    assert not dense_product.pays() and not covers(a, b)
    assert torch.equal(mm(a, b, bias=b[0]), a @ b + 1)


def test_gradients_are_torchs(compiled: None) -> None:
    a, b = torch.ones(4, 5, requires_grad=True), torch.ones(5, 6)
    mm(a, b).sum().backward()
    assert torch.equal(a.grad, torch.full((4, 5), 6.0))  # type: ignore[arg-type]


def test_a_sum_needs_something_to_add_to() -> None:
    a = torch.ones(2, 2)
    with pytest.raises(ValueError, match="add=True takes out and no bias"):
        mm(a, a, add=True)
    with pytest.raises(ValueError, match="add=True takes out and no bias"):
        mm(a, a, add=True, out=a.clone(), bias=a[0])


@needs_kernels
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"a": torch.ones(2, 3).double()}, "of one type on the CPU"),
        ({"a": torch.ones(6)}, "must be matrices"),
        ({"a": torch.ones(2, 4)}, "those of a product"),
        ({"b": torch.ones(3, 5)}, "those of a product"),
        ({"a": torch.ones(2, 0), "b": torch.ones(0, 4)}, "must not be empty"),
        ({"out": torch.ones(4, 2).t()}, "one after the other"),
        ({"out": torch.ones(1, 4).expand(2, 4)}, "one after the other"),
        ({"out": torch.ones(2, 4).half()}, "float32 or float64"),
        ({"bias": torch.ones(3)}, "bias must be"),
        ({"bias": torch.ones(4).double()}, "bias must be"),
        ({"bias": torch.ones(8)[::2]}, "bias must be"),
        ({"bias": torch.ones(4), "add": True}, "bias must be absent"),
    ],
)
def test_what_the_op_refuses(changed: dict[str, Tensor], message: str) -> None:
    given = {"a": torch.ones(2, 3), "b": torch.ones(3, 4), "bias": None, "add": False}
    given |= {"out": torch.zeros(2, 4)} | changed
    with pytest.raises(ValueError, match=message):
        torch.ops.pyg_scale.dense_product(**given)
