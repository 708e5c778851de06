"""Seed tables of a graph made of tables: entities, times and targets of a task, by split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch_geometric.data import HeteroData

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.graph.topology import NodeType
from pyg_scale.store.directory.frame import FRAME, without_columns
from pyg_scale.store.directory.reader import GraphDirectory
from pyg_scale.store.directory.values import decode

SEED_TABLES = "seed_tables"
"""The entry of ``graph_attributes`` that holds them."""


@dataclass(frozen=True)
class SeedTable:
    """The rows of one split: which entity, at which time, and what is to be predicted.

    Example::

        train = graph.tasks["churn"].train
        loader = NeighborLoader(
            graph, [16, 16], input_nodes=train.nodes, input_time=train.time, time_attr="time",
            transform=train.transform, batch_size=512,
        )

    Attributes:
        nodes: The node type and the entities, ``int64`` ``[n]``: what ``input_nodes`` takes.
        time: UTC nanoseconds ``int64`` ``[n]``; ``None`` for a task without times.
        target: Targets ``[n]`` or ``[n, labels]``; ``None`` where they are not known, and in tasks
            of pairs.
        destinations: In tasks that recommend, the node type and the nodes ``int64`` ``[pairs]``
            that belong to the entities.
        pairs: For each destination its row of the table, ``int64`` ``[pairs]``, ascending.
        hidden: Columns that a model must not see, as (table, column).
    """

    nodes: tuple[NodeType, Tensor]
    time: Tensor | None
    target: Tensor | None
    destinations: tuple[NodeType, Tensor] | None = None
    pairs: Tensor | None = None
    hidden: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return self.nodes[1].numel()

    def __repr__(self) -> str:
        return f"SeedTable({self.nodes[0]!r}, {len(self)} rows)"

    def transform(self, batch: HeteroData) -> HeteroData:
        """Put ``y`` on the seeds of a batch, and take away what the task must not see.

        Args:
            batch: A batch whose seeds are rows of this table; changed.

        Raises:
            ModuleNotFoundError: If columns are to be hidden, and torch_frame is not installed.
        """
        entity = self.nodes[0]
        if self.target is not None:
            batch[entity].y = self.target[batch[entity].input_id.to(self.target.device)]
        for table in {table for table, _ in self.hidden}:
            if table in batch.node_types and FRAME in batch[table]:
                names = [column for of, column in self.hidden if of == table]
                batch[table][FRAME] = without_columns(batch[table][FRAME], names)
        return batch


class Task:
    """A task: its seed tables by split, ``task.train``, ``task["val"]``.

    Attributes:
        name: Its name.
        task_type: ``"binary_classification"``, ``"regression"``, ... as in RelBench.
        node_type: The table of the entities.
        splits: The seed table of each split.
    """

    def __init__(
        self, name: str, task_type: str, node_type: NodeType, splits: Mapping[str, SeedTable]
    ) -> None:
        self.name, self.task_type, self.node_type = name, task_type, node_type
        self.splits = dict(splits)

    def __getitem__(self, split: str) -> SeedTable:
        if split not in self.splits:
            raise KeyError(f"task {self.name!r} has no {split!r}, only {', '.join(self.splits)}")
        return self.splits[split]

    @property
    def train(self) -> SeedTable:
        """The rows to train on."""
        return self["train"]

    @property
    def val(self) -> SeedTable:
        """The rows to choose a model by."""
        return self["val"]

    @property
    def test(self) -> SeedTable:
        """The rows to judge a model by."""
        return self["test"]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={len(table)}" for name, table in self.splits.items())
        return f"Task({self.name!r}, {self.task_type}, {self.node_type!r}, {sizes})"


class Tasks(Mapping[str, Task]):
    """The tasks of a graph directory, by name; their tables are mapped when somebody asks.

    Args:
        directory: The directory.
    """

    def __init__(self, directory: GraphDirectory) -> None:
        self._directory = directory
        self._found: dict[str, Any] = seed_tables(directory.meta.graph_attributes) or {}

    def __getitem__(self, name: str) -> Task:
        if name not in self._found:
            known = ", ".join(self._found) or "none"
            raise KeyError(f"{self._directory.path} has no task {name!r} (found: {known})")
        try:
            found = decode(self._found[name], self._directory)
            return _task(name, found)
        except (KeyError, TypeError, AttributeError) as error:
            raise GraphDirectoryError(
                f"task {name!r} of {self._directory.path} is incomplete or wrong "
                f"({type(error).__name__}: {error})"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"Tasks({', '.join(self._found)})"


def _task(name: str, found: Mapping[str, Any]) -> Task:
    node_type, hidden = found["node_type"], tuple((t, c) for t, c in found["hidden"])
    splits = {}
    for split, table in found["splits"].items():
        destination = found["destination_type"]
        splits[split] = SeedTable(
            (node_type, table["ids"]),
            table["time"],
            table["target"],
            None if destination is None else (destination, table["destinations"]),
            None if destination is None else table["pairs"],
            hidden,
        )
    return Task(name, found["task_type"], node_type, splits)


def seed_tables(attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """The tasks among the attributes of a graph; ``None`` if they are something else."""
    found = attributes.get(SEED_TABLES)
    if isinstance(found, dict) and found.keys() == {"$dict"}:
        found = found["$dict"]
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        return None
    known = all("splits" in each and "node_type" in each for each in found.values())
    return found if known else None
