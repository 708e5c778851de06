"""States as JSON and named tensors: nothing that is read back can run code.

Dictionaries, lists, tuples, tensors, arrays, numbers, strings, bytes, ``None``: everything that
``state_dict()`` of torch's modules, optimizers and schedulers consists of comes back as it was.
What JSON has not is an object with one key that says what it is.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from pyg_scale.errors import CheckpointError


@dataclass(frozen=True)
class Piece:
    """A tensor, or what a rank has of one that is sharded.

    Attributes:
        values: On the CPU, contiguous, and nobody else's.
        offsets: Where it begins in the whole tensor, in each dimension.
        size: The shape of the whole tensor.
    """

    values: Tensor
    offsets: torch.Size
    size: torch.Size


@runtime_checkable
class Rows(Protocol):
    """Rows of a table, which may be sharded among ranks, found by their original ids."""

    def take(self, ids: Tensor) -> Tensor:
        """Some rows, on the CPU.

        Args:
            ids: Original ids, ``int64`` ``[n]``.

        Returns:
            ``[n, ...]``.

        Raises:
            CheckpointError: If one is not there.
        """

    @property
    def num_rows(self) -> int:
        """Number of rows of the whole table."""


@dataclass(frozen=True)
class RowShard:
    """The rows of a table that this rank has; every row is one rank's.

    In a checkpoint the rows of all ranks are one tensor, in the order of the ranks.

    Attributes:
        values: ``[n, ...]``.
        ids: Their original ids, ``int64`` ``[n]``.
        begin: Number of rows of lower ranks.
        num_rows: Number of rows of all ranks.
        in_order: True if the rows of all ranks, one after the other, are in the order of their ids.
            The same on all ranks.
    """

    values: Tensor
    ids: Tensor
    begin: int
    num_rows: int
    in_order: bool

    def take(self, ids: Tensor) -> Tensor:
        """See :class:`Rows`: those that this rank has."""
        ordered, order = self.ids.sort()
        at = torch.searchsorted(ordered, ids)
        found = at < ordered.numel()
        found[found.clone()] = ordered[at[found]] == ids[found]
        if not bool(found.all()):
            raise CheckpointError(f"row {int(ids[~found][0])} is not among those of this rank")
        return self.values[order[at]]


class Pieces(dict[str, Piece]):
    """The tensors of a state by name, as it is taken apart.

    Args:
        shards_only: Whether to leave out tensors that are not sharded: another rank has them.
    """

    def __init__(self, *, shards_only: bool = False) -> None:
        super().__init__()
        self._shards_only = shards_only
        self._names: set[str] = set()

    def keep(self, tensor: Tensor, where: str) -> str:
        """Copy a tensor; the name that it got."""
        if tensor.layout != torch.strided or tensor.is_meta:
            raise NotImplementedError(f"{where} is not dense: a checkpoint holds dense tensors")
        name, count = where, 2
        while name in self._names:  # such as the keys 1 and "1"
            name, count = f"{where}#{count}", count + 1
        self._names.add(name)
        if isinstance(tensor, DTensor):
            if (offsets := _begin(tensor, where)) is not None:
                self[name] = Piece(_copied(tensor.to_local()), offsets, tensor.shape)
        elif not self._shards_only:
            self[name] = Piece(_copied(tensor), torch.Size([0] * tensor.dim()), tensor.shape)
        return name

    def keep_rows(self, shard: RowShard, where: str) -> list[str | None]:
        """Copy the rows of this rank; the names of the values, and of their ids if need be."""
        names: list[str | None] = []
        for values, kind in ((shard.values, "rows"), (shard.ids, "ids")):
            if kind == "ids" and shard.in_order:
                names.append(None)
                continue
            name = f"{where}.{kind}"
            self._names.add(name)
            if values.size(0) or not shard.num_rows:
                rest = values.shape[1:]
                begin = torch.Size([shard.begin, *[0] * len(rest)])
                size = torch.Size([shard.num_rows, *rest])
                self[name] = Piece(_copied(values), begin, size)
            names.append(name)
        return names


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _begin(tensor: DTensor, where: str) -> torch.Size | None:
    """The offsets of what this rank has of a sharded tensor; ``None`` if others save that."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if other := [each for each in placements if type(each) not in (Shard, Replicate)]:
        raise NotImplementedError(
            f"{where} is a DTensor of placement {other[0]}: a checkpoint holds those that are "
            "sharded by Shard(dim) or replicated"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # not one of the ranks that have it
        return None
    if any(isinstance(p, Replicate) and at for p, at in zip(placements, coordinate, strict=True)):
        return None
    chunks = tensor.__create_chunk_list__()
    return chunks[0].offsets if chunks and tensor.to_local().numel() else None


def flatten(tree: Any, name: str, *, shards_only: bool = False) -> tuple[Any, Pieces]:
    """Take a state apart.

    Args:
        tree: The state.
        name: With which the names of its tensors begin.
        shards_only: Whether to leave out tensors that are not sharded.

    Returns:
        What is to be JSON, and copies of the tensors.

    Raises:
        NotImplementedError: If a tensor is sparse, or a partial sum.
        TypeError: If something else is in it; says where.
    """
    tensors = Pieces(shards_only=shards_only)
    return _flatten(tree, name, tensors), tensors


def _flatten(value: Any, where: str, tensors: Pieces) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Tensor):
        return {"tensor": tensors.keep(value, where)}
    if isinstance(value, RowShard):
        return {"rows": tensors.keep_rows(value, where)}
    if isinstance(value, np.ndarray):
        return {"array": tensors.keep(_from_numpy(value, where), where)}
    if isinstance(value, np.generic):
        return {"number": tensors.keep(_from_numpy(np.asarray(value), where), where)}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        pairs = []
        for key, item in value.items():
            if not isinstance(key, (str, int, float, bool, tuple, type(None))):
                raise TypeError(f"{where} has the key {key!r}: it must be a number or a string")
            name = _flatten(key, where, Pieces())
            pairs.append([name, _flatten(item, f"{where}.{key}", tensors)])
        return {kind: pairs}
    if isinstance(value, (list, tuple)):
        items = [_flatten(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: it holds tensors, "
        f"arrays, numbers, strings, bytes, lists, tuples and dictionaries"
    )


def _from_numpy(array: Any, where: str) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    except TypeError:
        raise TypeError(f"{where} is an array of {array.dtype}, which torch has not") from None


def unflatten(
    found: Any,
    tensors: Callable[[str], Tensor],
    rows: Callable[[str, str | None], Rows] | None = None,
) -> Any:
    """Put a state together again.

    Args:
        found: What :func:`flatten` made JSON of.
        tensors: Gives the tensor of a name.
        rows: Gives the rows of a :class:`RowShard`, by the names of the values and of their ids.

    Raises:
        ValueError: If it is not what :func:`flatten` makes.
    """
    if isinstance(found, list):
        return [unflatten(item, tensors, rows) for item in found]
    if not isinstance(found, dict):
        return found
    if len(found) != 1:
        raise ValueError("not the state of a checkpoint")
    ((kind, value),) = found.items()
    if kind == "float":
        return float(value)
    if kind == "tensor":
        return tensors(value)
    if kind == "rows" and rows is not None:
        if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)):
            raise ValueError("not the state of a checkpoint: rows without a name")
        return rows(value[0], None if value[1] is None else str(value[1]))
    if kind == "array":
        return tensors(value).numpy()
    if kind == "number":
        return tensors(value).numpy()[()]
    if kind in ("dict", "counter"):
        pairs = {unflatten(key, tensors): unflatten(item, tensors, rows) for key, item in value}
        return Counter(pairs) if kind == "counter" else pairs
    if kind == "tuple":
        return tuple(unflatten(item, tensors, rows) for item in value)
    if kind == "bytes":
        return base64.b64decode(value)
    raise ValueError(f"not the state of a checkpoint: {kind!r}")


def names_of(found: Any) -> list[str]:
    """The names of all tensors of a state that was taken apart, but for those of rows."""
    if isinstance(found, list):
        return [name for item in found for name in names_of(item)]
    if not isinstance(found, dict):
        return []
    ((kind, value),) = found.items()
    if kind in ("tensor", "array", "number"):
        return [value]
    return names_of(value) if kind in ("dict", "counter", "tuple") else []
