"""Shapes of products of tensors along edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Slice(NamedTuple):
    """A part of rows: one place in a dimension, or some side by side."""

    at: int
    """The dimension."""
    first: int
    size: int | None = None
    """The number of places; ``None`` for one place, without the dimension."""

    def of(self, tensor: Tensor, dims: int) -> Tensor:
        """The part of a factor of rows, which may have size 1 there, or fewer dimensions.

        Args:
            tensor: The factor.
            dims: Number of dimensions of the rows.
        """
        at = self.at - dims + tensor.dim()
        if at < 0:
            return tensor
        is_one = tensor.size(at) == 1
        if self.size is None:
            return tensor.select(at, 0 if is_one else self.first)
        return tensor if is_one else tensor.narrow(at, self.first, self.size)

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a part of rows of a shape."""
        middle = () if self.size is None else (self.size,)
        return (*shape[: self.at], *middle, *shape[self.at + 1 :])


def product_shape(
    num_edges: int, dim: int, ends: Sequence[Tensor | None], weight: Tensor | None
) -> list[int]:
    """The shape of rows of edges that are a product.

    Args:
        num_edges: Their number.
        dim: The dimension of edges.
        ends: See :class:`~pyg_scale.nn.lifted.Lifted`.
        weight: The same.
    """
    factors = [each.shape for each in (*ends, weight) if each is not None]
    shape = [*factors[0]] if len(factors) == 1 else broadcast(factors, dim)
    shape[dim] = num_edges
    return shape


def broadcast(shapes: Sequence[Sequence[int]], but: int = -1) -> list[int]:
    """The shape of a product of tensors of as many dimensions; it takes torch longer.

    Args:
        shapes: Their shapes.
        but: A dimension in which they need not fit.

    Raises:
        RuntimeError: If they do not fit, as in torch.
    """
    made = []
    for at, sizes in enumerate(zip(*shapes, strict=True)):
        size = next((each for each in sizes if each != 1), 1)
        if at != but and any(each not in (1, size) for each in sizes):
            raise RuntimeError(f"tensors of shapes {[*map(list, shapes)]} cannot be multiplied")
        made.append(size)
    return made


def leading(shape: Sequence[int], row: Sequence[int]) -> int | None:
    """Number of elements of a tensor that has the first dimensions of a row, and 1 in the others.

    It is then one number for as many places side by side in the row. ``None`` if it has not.
    """
    count, k = 1, 0
    while k < len(row) and shape[k] == row[k]:
        count *= row[k]
        k += 1
    return count if all(size == 1 for size in shape[k:]) else None


def aligned_with(b: Tensor, shape: Sequence[int]) -> Tensor | None:
    """A view with as many dimensions as a shape, if a product with it has that shape."""
    missing = len(shape) - b.dim()
    if missing < 0:
        return None
    mine = [1] * missing + [*b.shape]
    if any(size not in (1, other) for size, other in zip(mine, shape, strict=True)):
        return None
    return b.view(mine) if missing else b
