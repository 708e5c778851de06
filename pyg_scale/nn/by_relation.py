"""Products of rows of edges with the matrix of each edge's relation, without a matrix per edge.

A message such as ``torch.bmm(x_j.unsqueeze(1), weight[edge_type])`` reads a matrix for every edge.
Edges of one relation and one node have the same product, so it is computed once for each such pair,
by one product for each relation, and is a row of features of the pair from there on: a
:class:`~pyg_scale.nn.lifted.Lifted` along edges whose sources are the pairs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyg_scale.nn.edges import SOURCE, Edges
from pyg_scale.nn.graph import derived
from pyg_scale.nn.lifted import INDEX_SELECT, Lifted, by_rule, features_of
from pyg_scale.nn.linear import apply_weight
from pyg_scale.nn.relations import Pairs, group_pairs
from pyg_scale.ops.adjacency import recording
from pyg_scale.ops.aggregate import aggregate_exactly
from pyg_scale.ops.lazy_rows import METADATA

_PLAIN = (Tensor, torch.nn.Parameter)


class EdgeTypes(Tensor):
    """An argument of a message with one whole number for every edge, such as its relation."""

    edges: Edges
    plain: Tensor

    @classmethod
    def of(cls, value: Any, edges: Edges) -> Any:
        """The argument, if it is one whole number for every edge; else what it is."""
        if type(value) is not Tensor or value.dtype not in (torch.int64, torch.int32):
            return value
        if value.shape != (edges.num_edges,) or not edges.num_edges:
            return value
        made = value.as_subclass(cls)
        made.edges, made.plain = edges, value
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Take the matrix of each edge without a copy for each; else run on the plain tensor."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in METADATA:
                return func(*args, **kwargs)
            rule = _RULES.get(func)
            found = None if rule is None else by_rule(rule, args, kwargs)
            if found is not None:
                return found
            args, kwargs = tree_map(_plain, (args, kwargs))
        return func(*args, **kwargs)


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, EdgeTypes) else value


class Matrices(Lifted):
    """A matrix per edge, not gathered: that of its relation.

    Edges are in the first dimension.
    """

    table: Tensor
    types: EdgeTypes

    @classmethod
    def of(cls, table: Tensor, types: EdgeTypes) -> Matrices:
        """Rows of a table ``[num_relations, ...]``."""
        edges = types.edges
        made: Matrices = Tensor._make_wrapper_subclass(
            cls, [edges.num_edges, *table.shape[1:]], dtype=table.dtype, device=table.device
        )
        made.edges, made.dim_of_edges, made.ends, made.weight = edges, 0, [None, None], None
        made.row, made.viewed, made.summed, made._value = None, None, None, None
        made.table, made.types = table, types
        return made

    @property
    def is_product(self) -> bool:
        """False."""
        return False

    def computed(self) -> Tensor:
        """The matrices, in memory of their own."""
        return self.table[self.types.plain]

    def reads(self) -> list[Tensor]:
        """The tensors that the matrices are computed from."""
        return [self.table, self.types.plain]

    def pairs(self, end: int) -> Pairs | None:
        """The pairs of relations and nodes at an end; ``None`` if relations do not exist."""
        graph, plain, size = self.edges.graph, self.types.plain, self.table.size(0)
        return derived(
            graph,
            ("pairs", end, size),
            lambda: group_pairs(graph, plain, size, end == SOURCE),
            of=plain,
        )


# Rules ####################################################################################


def by_relation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a product with :class:`Matrices`; ``None`` for any other function."""
    rule = _PRODUCTS.get(func)
    return None if rule is None else by_rule(rule, args, kwargs)


def _select(table: Any, dim: Any, types: Any) -> Any:
    return _choose(table, types) if dim == 0 else None


def _choose(table: Any, types: Any) -> Any:
    if type(table) not in _PLAIN or not isinstance(types, EdgeTypes) or table.dim() < 3:
        return None
    if not table.is_floating_point() or table.device != types.device or not table.size(0):
        return None
    if recording():  # the number of pairs depends on the edges
        return None
    made = Matrices.of(table, types)
    return None if made.pairs(SOURCE) is None else made  # torch says what is wrong


def _product(x: Any, matrices: Any) -> Any:
    """The product of every row's matrix with that of its relation."""
    if not isinstance(matrices, Matrices) or matrices.dim() != 3 or not isinstance(x, Lifted):
        return None
    if x.dim() != 3 or x.size(2) != matrices.size(1):
        return None

    def function(part: Tensor, matrix: Tensor) -> Tensor:
        out = apply_weight(part.reshape(-1, part.size(2)), matrix.t())
        return out.view(*part.shape[:2], matrix.size(1))

    return _mapped(x, matrices, function)


def _einsum(equation: Any, x: Any, matrices: Any) -> Any:
    """A sum of products in which edges are the first dimension of both operands and the result."""
    if not isinstance(equation, str) or not isinstance(matrices, Matrices):
        return None
    found = re.fullmatch(r"(\w)(\w+),\1(\w+)->\1(\w+)", equation.replace(" ", ""))
    if found is None or not isinstance(x, Lifted):
        return None
    edge, of_x, of_matrix, of_out = found.groups()
    if edge in of_x + of_matrix + of_out:
        return None
    if len(of_x) != x.dim() - 1 or len(of_matrix) != matrices.dim() - 1:
        return None
    without = f"{edge}{of_x},{of_matrix}->{edge}{of_out}"
    return _mapped(x, matrices, lambda part, matrix: torch.einsum(without, part, matrix))


def _mapped(
    x: Lifted, matrices: Matrices, function: Callable[[Tensor, Tensor], Tensor]
) -> Lifted | None:
    """A function of a row and the matrix of its relation, computed once for each pair.

    Args:
        x: Features of one end, with edges in the first dimension.
        matrices: Those of the edges.
        function: A function of rows ``[num_rows, ...]`` and the matrix that all of them share.
    """
    features = features_of(x)
    if features is None or x.dim_of_edges != 0 or x.edges is not matrices.edges:
        return None
    if matrices.is_changed or x.dtype != matrices.dtype:
        return None
    if torch.is_autocast_enabled(x.device.type):
        return None
    pairs = matrices.pairs(SOURCE if x.ends[SOURCE] is not None else 1 - SOURCE)
    if pairs is None:
        return None
    row = features.shape[1:]
    rows = aggregate_exactly(pairs.nodes, features.reshape(-1, row.numel()), None, "sum")
    parts = rows.view(-1, *row).split(pairs.counts)
    maps = zip(parts, matrices.table.unbind(0), strict=True)
    made = torch.cat([function(part, matrix) for part, matrix in maps if part.size(0)])
    edges = Edges.with_sources(pairs.edges, pairs.edge_index, x.edges.call)
    return Lifted(edges, 0, [made, None], None)


_RULES: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _choose,
    **dict.fromkeys(INDEX_SELECT, _select),
}
_PRODUCTS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.bmm, Tensor.bmm), _product),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _product),
    torch.einsum: _einsum,
}
