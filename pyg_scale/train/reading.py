"""The newest checkpoint that is whole, and what is in it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from pyg_scale.comm import Communicator
from pyg_scale.errors import CheckpointError
from pyg_scale.ops.raw_bytes import raw_bytes
from pyg_scale.train import folders
from pyg_scale.train.folders import Folder
from pyg_scale.train.storage import Reader, StoredRows
from pyg_scale.train.tree import names_of, unflatten
from pyg_scale.train.writing import tell

VALUES, RANDOM = "values", "random"
"""Parts of every checkpoint: what the user gave to ``save``, and the random generators."""


def newest(path: Path, ranks: Communicator) -> tuple[Folder | None, list[str]]:
    """The newest checkpoint whose files are as they were written; ranks share the reading.

    Returns:
        It, or ``None`` if there is no checkpoint, and the names of newer ones, which are damaged:
        the same on all ranks.

    Raises:
        CheckpointError: If there are some, but none is whole.
    """
    mine = [(each.number, each.step, each.path.name) for each in folders.written(path)]
    found = tell(mine if ranks.rank == 0 else None, ranks)[0]
    damaged: dict[str, str] = {}
    for number, step, name in found:
        wrong = None
        try:
            folders.verify(path / name, ranks.rank, ranks.world_size)
        except CheckpointError as error:
            wrong = str(error)
        told = [each for each in tell(wrong, ranks) if each is not None]
        if not told:
            return Folder(number, step, path / name), list(damaged)
        damaged[name] = told[0]
        if ranks.rank == 0:
            warnings.warn(
                f"checkpoint {name} is damaged, the one before is tried: {told[0]}",
                RuntimeWarning,
                stacklevel=3,
            )
    if damaged:
        first = next(iter(damaged.values()))
        raise CheckpointError(
            f"none of the {len(damaged)} checkpoints in {path} is whole; the newest: {first}"
        )
    return None, []


def read_states(
    path: Path,
    parts: Mapping[str, bool],
    ranks: Communicator,
    *,
    exactly: bool,
    layouts: Mapping[str, DTensor] | None = None,
) -> dict[str, Any]:
    """The states that a checkpoint holds for this rank.

    Args:
        path: The checkpoint.
        parts: What is wanted, and whether all ranks share it.
        ranks: All of them.
        exactly: Whether it must hold nothing else, but for the random generators.
        layouts: How tensors are sharded here, see :func:`layouts_of`: only what this rank has of
            them is read.

    Returns:
        The state of each part, and the user's values. A rank that was not there when it was saved
        has no random generators.

    Raises:
        CheckpointError: If a part is missing, or there is another, or a part differs between the
            ranks that saved it and they were not as many.
    """
    reader = Reader(path)
    metadata = reader.read_metadata()
    saved_by = folders.manifest(path)["world_size"]
    there = reader.states[0].keys() - {VALUES}
    if missing := sorted(parts.keys() - there):
        raise CheckpointError(
            f"{path} has no {', '.join(map(repr, missing))}; it has {', '.join(sorted(there))}"
            + ("; it was saved with random_state=False" if RANDOM in missing else "")
        )
    if exactly and (more := sorted(there - parts.keys() - {RANDOM})):
        raise CheckpointError(
            f"{path} also has {', '.join(map(repr, more))}: add it to the state, or say what to "
            f"load with only="
        )
    found: dict[str, Any] = {}
    for name, shared in parts.items():
        if shared:
            source = 0
        elif saved_by == ranks.world_size:
            source = ranks.rank
        elif name == RANDOM:
            if ranks.rank >= saved_by:
                continue
            source = ranks.rank
        else:
            _refuse_unequal(reader, metadata, name, saved_by, ranks.world_size)
            source = 0
        found[name] = _read(reader, metadata, reader.states[source][name], layouts or {})
    return {**found, VALUES: _read(reader, metadata, reader.states[0][VALUES])}


def _refuse_unequal(
    reader: Reader, metadata: Metadata, name: str, saved_by: int, world_size: int
) -> None:
    """A part of each rank can be loaded by more or fewer ranks if it is the same on all."""
    first = reader.states[0][name]
    for rank in range(1, saved_by):
        other = reader.states[rank][name]
        text = json.dumps(other).replace(f'"rank-{rank}/', '"rank-0/')
        equal = text == json.dumps(first)
        if equal:
            ours = _tensors(reader, metadata, names_of(first)).values()
            theirs = _tensors(reader, metadata, names_of(other)).values()
            equal = all(
                torch.equal(raw_bytes(a.contiguous()), raw_bytes(b.contiguous()))
                for a, b in zip(ours, theirs)
            )
        if not equal:
            raise CheckpointError(
                f"{reader.folder} was saved by {saved_by} ranks, whose {name!r} differ, so it "
                f"cannot be loaded by {world_size}: a loader with split_seeds='global' is the same "
                f"on all ranks"
            )


def layouts_of(name: str, part: Any) -> dict[str, DTensor]:
    """The sharded tensors of a part of a run, by the beginning of their names in a checkpoint.

    An optimizer may not have its state yet: that of a parameter is sharded as the parameter is.

    Args:
        name: Of the part.
        part: A module, an optimizer, or anything else, which has none.
    """
    named: list[tuple[str, Any]] = []
    if isinstance(part, nn.Module):
        named = [(f"{name}.{key}", value) for key, value in part.state_dict().items()]
    elif isinstance(part, torch.optim.Optimizer):
        parameters = [each for group in part.param_groups for each in group["params"]]
        named = [(f"{name}.state.{i}", each) for i, each in enumerate(parameters)]
    return {key: value for key, value in named if isinstance(value, DTensor)}


def _read(
    reader: Reader, metadata: Metadata, state: Any, layouts: Mapping[str, DTensor] | None = None
) -> Any:
    tensors = _tensors(reader, metadata, names_of(state), layouts)

    def rows(values: str, ids: str | None) -> SavedRows:
        found = reader.rows_of(values, metadata)
        if ids is None:
            return SavedRows(found, None)
        order = reader.rows_of(ids, metadata)
        if order.dtype != torch.int64 or order.size != found.size[:1]:
            raise CheckpointError(f"{reader.folder}: {ids!r} are not the ids of {values!r}")
        return SavedRows(found, order)

    return unflatten(state, tensors.__getitem__, rows)


@dataclass(frozen=True)
class SavedRows:
    """Rows of a table that ranks saved; see :class:`~pyg_scale.train.tree.Rows`.

    Only what is asked for is kept, whatever rank saved it.

    Attributes:
        values: The rows.
        ids: The original id of each, ``int64``; ``None`` if that is its number.
    """

    values: StoredRows
    ids: StoredRows | None

    @property
    def num_rows(self) -> int:
        """Number of rows of the whole table."""
        return self.values.size[0]

    def take(self, ids: Tensor) -> Tensor:
        """See :meth:`pyg_scale.train.tree.Rows.take`."""
        if self.ids is None:
            lacking = (ids < 0) | (ids >= self.num_rows)
            number = ids
        else:
            ordered, order = ids.sort()
            number = torch.full_like(ids, -1)
            for begin, block in self.ids.blocks() if ids.numel() else ():
                at = torch.searchsorted(ordered, block).clamp_(max=ids.numel() - 1)
                found = ordered[at] == block
                number[order[at[found]]] = begin + found.nonzero().view(-1)
            lacking = number < 0
        if bool(lacking.any()):
            raise CheckpointError(
                f"{self.values.folder}: row {int(ids[lacking][0])} is not in {self.values.name!r}, "
                f"which has {self.num_rows} rows"
            )
        return self.values.at(number)


def _tensors(
    reader: Reader,
    metadata: Metadata,
    names: list[str],
    layouts: Mapping[str, DTensor] | None = None,
) -> dict[str, Tensor]:
    layouts = layouts or {}
    into: dict[str, Any] = {}
    for name in names:
        about = metadata.state_dict_metadata.get(name)
        if not isinstance(about, TensorStorageMetadata):
            raise CheckpointError(f"{reader.folder} has no tensor {name!r}")
        like = layouts.get(name, layouts.get(name.rpartition(".")[0]))
        if like is not None and like.shape == about.size:
            into[name] = torch.empty_like(like, dtype=about.properties.dtype)
        else:
            into[name] = torch.empty(about.size, dtype=about.properties.dtype)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(into, metadata, is_coordinator=True)
    plans = planner.create_global_plan([planner.create_local_plan()])
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.finish_plan(plans[0]), planner).wait()
    return into
