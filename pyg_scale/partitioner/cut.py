"""Cut a graph into parts, by any method, and write them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_scale import plugins
from pyg_scale.graph.topology import NodeType
from pyg_scale.partitioner.assignment import read_assignment
from pyg_scale.partitioner.base import (
    Partition,
    Partitioner,
    PartitionGraph,
    check_count,
    check_num_parts,
    equal_shares,
)
from pyg_scale.partitioner.graph import Train, partition_graph
from pyg_scale.partitioner.write import write_partition

Assignment = Tensor | dict[str, Tensor]


def partition(
    data: Any,
    num_parts: int,
    method: str | Partitioner = "fennel",
    path: str | PathLike[str] | None = None,
    seed: int = 0,
    *,
    shares: Sequence[float] | Tensor | None = None,
    balance: str | Sequence[str] = ("nodes",),
    train: Train | None = None,
    assignment: Any = None,
    **options: Any,
) -> Assignment:
    """Cut a graph into parts of equal size with few edges between them.

    Args:
        data: ``Data``, ``HeteroData``, ``(FeatureStore, GraphStore)``, or a graph directory, opened
            or by its path (also one of several parts, which is partitioned anew).
        num_parts: Number of parts, at most as many as there are nodes.
        method: The name of a partitioner, or an instance with its options.
        path: The graph directory to write, part by part. ``None``: nothing is written.
        seed: Seed of all random choices: the same seed gives the same parts.
        shares: The share ``[num_parts]`` of every quantity that each part should have, in any unit,
            for unequal machines. Equal if ``None``.
        balance: Quantities to balance: any of ``"nodes"`` (of each type), ``"edges"`` (in-edges)
            and ``"train"`` (training nodes of each type).
        train: The training nodes: a mask or ids (by node type if there are types), or the name of
            an attribute or index set. By default ``train_mask``, or the index set ``"train"``.
        assignment: A given assignment, instead of a method: a tensor ``[num_nodes]`` or a file (see
            :func:`~pyg_scale.partitioner.assignment.read_assignment`), by node type if there are
            types.
        **options: Options of the method, and with ``path`` those of
            :func:`~pyg_scale.partitioner.write.write_partition`.

    Returns:
        The part ``int32`` ``[num_nodes]`` of every node; by node type if there are types.

    Raises:
        ValueError: If there are more parts than nodes, or something is out of range.
        TypeError: If neither the method nor the writer has such an option.
        UnknownPluginError: If there is no such method.
        FileExistsError: If something is at ``path`` and ``overwrite=True`` is not given.
    """
    if path is not None and Path(path).exists() and not options.get("overwrite"):
        raise FileExistsError(f"{path} exists: choose another path, or set overwrite=True")
    found, _ = assign(
        data,
        num_parts,
        method,
        seed,
        shares=shares,
        balance=balance,
        train=train,
        assignment=assignment,
        writes=path is not None,
        options=options,
    )
    if path is not None:
        write_partition(data, found, Path(path), **_split(method, assignment, options, True)[1])
    if tuple(found.assignment) == (None,):
        return found.assignment[None]
    return {str(node_type): part for node_type, part in found.assignment.items()}


def assign(
    data: Any,
    num_parts: int,
    method: str | Partitioner = "fennel",
    seed: int = 0,
    *,
    shares: Sequence[float] | Tensor | None = None,
    balance: str | Sequence[str] = ("nodes",),
    train: Train | None = None,
    assignment: Any = None,
    writes: bool = False,
    options: Mapping[str, Any] | None = None,
    graph: PartitionGraph | None = None,
) -> tuple[Partition, PartitionGraph]:
    """The assignment that :func:`partition` writes, and the graph that the method got.

    Args:
        data: As in :func:`partition`.
        num_parts: As there.
        method: As there.
        seed: As there.
        shares: As there.
        balance: As there.
        train: As there.
        assignment: As there.
        writes: True if ``options`` may have options of the writer.
        options: As there.
        graph: An earlier result of :func:`~pyg_scale.partitioner.graph.partition_graph` for
            ``data``, with ascending neighbours if the method needs that. ``None``: it is made.
    """
    check_count("num_parts", num_parts)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be a number (got {seed!r})")
    target = _shares(shares, num_parts)
    mine, _ = _split(method, assignment, options or {}, writes)
    partitioner = None if assignment is not None else _partitioner(method, mine)
    if graph is None:
        graph = partition_graph(
            data,
            balance=balance,
            train=train,
            is_sorted=partitioner is not None and partitioner.needs_sorted,
            is_simple=partitioner is not None and partitioner.needs_simple,
        )
    check_num_parts(num_parts, graph.num_nodes)
    cache: dict[NodeType, list[Tensor]] = {}
    if partitioner is None:
        part = read_assignment(assignment, graph.offsets, num_parts)
        name, kept, extra = "imported", {}, {}
    else:
        name = method if isinstance(method, str) else type(partitioner).__name__
        part, cache = _assigned(partitioner, name, graph, num_parts, seed, target)
        kept, extra = partitioner.options(), partitioner.extra()
    by_type = {t: part[begin:end] for t, (begin, end) in graph.offsets.items()}
    return Partition(by_type, num_parts, name, dict(kept), seed, dict(extra), cache), graph


def _assigned(
    partitioner: Partitioner,
    name: str,
    graph: PartitionGraph,
    num_parts: int,
    seed: int,
    shares: Tensor,
) -> tuple[Tensor, dict[NodeType, list[Tensor]]]:
    asked = {column.partition(" ")[0] for column in graph.names}
    if partitioner.balances and asked - set(partitioner.balances):
        raise ValueError(
            f"method {name!r} balances {', '.join(partitioner.balances)}, not "
            f"{', '.join(sorted(asked - set(partitioner.balances)))}: give balance= one of those, "
            "or use method='fennel'"
        )
    if not partitioner.balances and asked != {"nodes"}:
        raise ValueError(f"method {name!r} balances nothing: leave balance= out, or use another")
    if num_parts == 1:
        return torch.zeros(graph.num_nodes, dtype=torch.int32), {}
    part, cache = partitioner.assign_and_cache(graph, num_parts, seed=seed, shares=shares)
    if not isinstance(part, Tensor) or part.is_floating_point() or part.dtype == torch.bool:
        raise TypeError(f"method {name!r} returned {part!r:.100}, expected an integer tensor")
    if part.shape != (graph.num_nodes,):
        raise ValueError(
            f"method {name!r} returned a tensor of shape {list(part.shape)} for "
            f"{graph.num_nodes} nodes"
        )
    low, high = (int(v) for v in torch.aminmax(part))
    if low < 0 or high >= num_parts:
        raise ValueError(
            f"method {name!r} returned parts {low} to {high}, expected 0 to {num_parts - 1}"
        )
    _say_if_unbalanced(partitioner, name, graph, part, shares)
    return part.to(torch.int32), cache


def _say_if_unbalanced(
    partitioner: Partitioner, name: str, graph: PartitionGraph, part: Tensor, shares: Tensor
) -> None:
    """Warn of parts that exceed the method's limit, as several quantities may not fit at once."""
    if not partitioner.balances:
        return
    held = torch.zeros(shares.numel(), graph.weights.size(1), dtype=torch.int64)
    held.index_add_(0, part.to(torch.int64), graph.weights)
    most = partitioner.capacity(graph, shares)
    over = (held > most).nonzero().tolist()
    if over:
        p, column = max(over, key=lambda at: int(held[at[0], at[1]]) / max(1, int(most[*at])))
        warnings.warn(
            f"method {name!r} did not balance everything: part {p} holds "
            f"{int(held[p, column])} {graph.names[column]}, at most {int(most[p, column])} were "
            "expected; balance fewer quantities, or raise max_imbalance",
            RuntimeWarning,
            stacklevel=5,
        )


def _partitioner(method: str | Partitioner, options: Mapping[str, Any]) -> Partitioner:
    if isinstance(method, str):
        made: Partitioner = _named(method)(**options)
        return made
    if isinstance(method, Partitioner):
        return method
    raise TypeError(f"method must be a name or a Partitioner (got {method!r})")


def _named(method: str) -> Any:
    found = plugins.get("partitioner", method)
    if not (isinstance(found, type) and issubclass(found, Partitioner)):
        raise TypeError(
            f"method={method!r} must name a subclass of pyg_scale.partitioner.Partitioner "
            f"(it names {found!r}, a fault of the plugin)"
        )
    return found


def _split(
    method: str | Partitioner, assignment: Any, options: Mapping[str, Any], writes: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the method, and those of the writer."""
    known: list[str] = []
    if assignment is None and isinstance(method, str):
        known = list(inspect.signature(_named(method)).parameters)
    mine = {name: value for name, value in options.items() if name in known}
    rest = {name: value for name, value in options.items() if name not in known}
    if not rest:
        return mine, rest
    # after data, partition and path
    writer = list(inspect.signature(write_partition).parameters)[3:] if writes else []
    unknown = [name for name in rest if name not in writer]
    if unknown:
        what = f"method {method!r} has"
        if assignment is not None:
            what = "imported parts have"
        elif not isinstance(method, str):
            what = f"{type(method).__name__}: an instance already has its options, there is"
        also = f"of writing: {', '.join(writer)}" if writes else "with path= also those of writing"
        raise TypeError(
            f"{what} no option {', '.join(map(repr, unknown))}; there are: "
            f"{', '.join(known) or 'none'}; {also}"
        )
    return mine, rest


def _shares(shares: Any, num_parts: int) -> Tensor:
    if shares is None:
        return equal_shares(num_parts)
    found = torch.as_tensor(shares, dtype=torch.float64).detach().cpu()
    if found.shape != (num_parts,):
        raise ValueError(
            f"shares must have one number for each of the {num_parts} parts (got {shares!r})"
        )
    if not bool((found.isfinite() & (found > 0)).all()):
        raise ValueError(f"shares must be above 0 and finite (got {shares!r})")
    return found / found.sum()
