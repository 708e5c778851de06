"""Optimizers of rows: those of torch that take sparse gradients, and row-wise Adagrad."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from pyg_scale.train.embedding.table import Table
from pyg_scale.train.tree import Rows


class RowAdagrad(torch.optim.Optimizer):
    """Adagrad with one number per row instead of one per value.

    The sum of a row grows by the mean of the squares of its gradient, and the row changes by
    ``lr / (sqrt(sum) + eps)`` times the gradient (Duchi et al., "Adaptive Subgradient Methods",
    JMLR 2011, with one step size for each row, as embeddings of recommender systems have it). A
    table of 128 channels then needs 1 % more memory than without an optimizer, and not twice as
    much.

    Args:
        params: Parameters ``[num_rows, channels]``, whose gradients are sparse.
        lr: Learning rate.
        eps: Added to the root of the sum.

    Raises:
        ValueError: If ``lr`` or ``eps`` is negative.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 0.01, eps: float = 1e-10) -> None:
        for name, value in (("lr", lr), ("eps", eps)):
            if not value >= 0:
                raise ValueError(f"{name} must not be negative (got {value})")
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step.

        Args:
            closure: Computes the loss and gradients again, and returns the loss.

        Raises:
            TypeError: If a gradient is dense.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if not weight.grad.is_sparse:
                    raise TypeError("RowAdagrad takes sparse gradients: of NodeEmbedding, or of "
                                    "torch.nn.Embedding(..., sparse=True)")  # fmt: skip
                state = self.state[weight]
                if not state:
                    state["sum"] = weight.new_zeros(weight.size(0))
                gradient = weight.grad.coalesce()
                rows, values = gradient.indices()[0], gradient.values()
                state["sum"].index_add_(0, rows, values.square().mean(dim=1))
                scale = state["sum"][rows].sqrt_().add_(group["eps"])
                weight.index_add_(0, rows, values / scale[:, None], alpha=-group["lr"])
        return loss


SPARSE = (torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD, RowAdagrad)
"""Classes of optimizers that take sparse gradients."""

_DENSE = {
    "weight_decay": "it changes all rows in every step",
    "momentum": "it changes all rows in every step",
    "foreach": "it is for dense gradients",
    "fused": "it is for dense gradients",
}


def check_sparse(kind: Any, options: dict[str, Any]) -> None:
    """Check that an optimizer touches only rows that have a gradient.

    Raises:
        TypeError: If it does not.
        ValueError: If an option makes it touch others.
    """
    if not (isinstance(kind, type) and issubclass(kind, SPARSE)):
        named = kind.__name__ if isinstance(kind, type) else type(kind).__name__
        raise TypeError(
            f"{named} is not an optimizer of sparse gradients, which touch few rows of a table: "
            f"pass the class of one of {', '.join(each.__name__ for each in SPARSE)}"
        )
    for name, why in _DENSE.items():
        if options.get(name):
            raise ValueError(f"{name}={options[name]!r} is not for tables: {why}")


class Owner(Protocol):
    """The tables that an optimizer is bound to."""

    def exchange(self) -> None:
        """Set ``grad`` of the weights of this rank."""

    def forget(self) -> None:
        """Drop gradients that were not exchanged."""

    def finish(self) -> None:
        """Wait until all ranks have made their step."""


class OfTables(torch.optim.Optimizer):
    """The part of a bound optimizer that gives gradients to owners before a step.

    A class for each optimizer is made of this and of the optimizer's own.
    """

    owner: Owner
    tables: list[Table]

    def bind(self, owner: Owner, tables: list[Table]) -> None:
        """Bind it to its tables."""
        self.owner, self.tables = owner, tables
        self.register_step_pre_hook(_before)
        self.register_step_post_hook(_after)
        self.register_state_dict_post_hook(_sharded)
        self.register_load_state_dict_pre_hook(_taken)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of rows."""
        self.owner.forget()
        super().zero_grad(set_to_none)


def bound(
    kind: type[torch.optim.Optimizer], owner: Owner, tables: list[Table], **options: Any
) -> OfTables:
    """An optimizer of tables.

    Args:
        kind: Its class.
        owner: What it is bound to.
        tables: The tables.
        **options: Of the optimizer.

    Raises:
        TypeError: If it is no optimizer of sparse gradients.
        ValueError: If an option is not for such.
    """
    check_sparse(kind, options)
    made: OfTables = type(kind.__name__, (OfTables, kind), {})(
        [table.weight for table in tables], **options
    )
    made.bind(owner, tables)
    return made


def _before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = [*args[1:], *kwargs.values()]  # the first argument is the optimizer
    if any(value is not None for value in given):
        raise ValueError(
            "step() of an embedding takes no closure: gradients are exchanged before it"
        )
    optimizer.owner.exchange()


def _after(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for table in optimizer.tables:
        table.weight.grad = None
    optimizer.owner.finish()


def _sharded(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The state with a shard of rows for each tensor that has a row per row."""
    found = {}
    for number, each in state["state"].items():
        table = optimizer.tables[number]
        found[number] = {
            name: table.shard(value) if isinstance(value, Tensor) and value.dim() else value
            for name, value in each.items()
        }
    return {**state, "state": found}


def _taken(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The state with the rows of this rank."""
    found = {}
    for number, each in state["state"].items():
        table = optimizer.tables[number]
        found[number] = {
            name: table.rows_of(value, f"{name} of {table.column}")
            if isinstance(value, Rows)
            else value
            for name, value in each.items()
        }
    return {**state, "state": found}
