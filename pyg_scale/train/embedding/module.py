"""Learnable embeddings of nodes, for types without features."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch_geometric.data import Data, HeteroData

from pyg_scale.comm import Communicator, connect
from pyg_scale.comm.local import Local
from pyg_scale.distributed.features.requests import RemoteRead
from pyg_scale.distributed.features.serve import FEATURES
from pyg_scale.distributed.features.store import read_here
from pyg_scale.distributed.graph import RankData, RankHeteroData
from pyg_scale.distributed.owners import Owners
from pyg_scale.distributed.ranks import Ranks
from pyg_scale.distributed.records import from_record, to_record
from pyg_scale.errors import CheckpointError
from pyg_scale.graph.topology import NodeType
from pyg_scale.ops.raw_bytes import raw_bytes
from pyg_scale.parallel.base import differentiate
from pyg_scale.store.directory.book import PartitionBook
from pyg_scale.store.rows import Key
from pyg_scale.train.embedding.gradients import Gradients
from pyg_scale.train.embedding.optimizers import OfTables, bound
from pyg_scale.train.embedding.table import (
    RowLayout,
    ShardAnswers,
    ShardRows,
    Table,
    checked_ids,
    ranges,
    uniform,
)
from pyg_scale.train.tree import Rows

Init = Callable[[Tensor], Tensor]

_DTYPES = (torch.float32, torch.float64)


class NodeEmbedding(nn.Module):
    """A learnable row for every node, sharded among the ranks.

    ```python
    embedding = NodeEmbedding(data, 64)
    optimizer = embedding.optimizer(torch.optim.SparseAdam, lr=0.01)
    for batch in loader:
        loss = ...(model(embedding(batch.n_id), batch.edge_index))
        model.backward(loss, batch.batch_size)      # of parallel.wrap; one process: loss.backward()
        optimizer.step()
    ```

    Every row is one rank's: that of the rank that owns its part, if the graph was opened on several
    ranks, else that of a range of ids. A batch asks the others for the rows that it needs, each
    once; a step sends back their gradients, each once, and the owner updates its rows. Nothing is
    as large as the table but the table. Rows and moments stay in the memory of the CPU, and a batch
    gets them on the device of its ids.

    All ranks make the embedding, and each calls :meth:`optimizer`'s ``step()`` equally often; reads
    need nobody else's consent. The rows are no parameters of the module, so that a wrapper such as
    DDP leaves them alone, and an optimizer of ``model.parameters()`` does not see them. They are in
    ``state_dict()``, one shard per rank, for :class:`pyg_scale.train.Checkpoint`; all ranks call
    ``load_state_dict``, which also takes dense tables ``[num_nodes, channels]``.

    First values are uniform in ``±1 / sqrt(channels)``, a function of ``seed`` and the node's id
    alone: the same for any number of ranks and parts.

    Args:
        graph: A ``Data`` or ``HeteroData``, opened or in memory, or the number of nodes. All ranks
            must give the same.
        channels: Length of a row.
        node_types: Of a ``HeteroData``: the types that get a table, by default those without ``x``.
        dtype: ``torch.float32`` or ``torch.float64``.
        seed: For the first values.
        init: Makes the first values of rows ``[n, channels]`` from ids ``int64`` ``[n]``: a
            function, or for each node type one (``None`` is the type of a ``Data``); types
            without one have those of ``seed``.
        comm: The ranks: a name of the kind ``comm``, or a communicator, which is not closed. By
            default all ranks of the job. ``"local"``: this process alone, even if there are others.
        timeout: Seconds that ranks wait for each other.
        num_threads: Number of requests of other ranks that this one answers at a time.

    Raises:
        TypeError: If the graph, a number, the dtype, ``init`` or a type of node cannot be.
        ValueError: If there is nothing to embed, the graph does not say how many nodes it has, or
            ranks disagree; says about what.
        CommTimeoutError: If not all ranks make one in time; names them.
    """

    _ranks: Ranks | None
    _optimizer: OfTables | None

    def __init__(
        self,
        graph: Data | HeteroData | int,
        channels: int,
        *,
        node_types: Sequence[str] | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        init: Init | Mapping[NodeType, Init] | None = None,
        comm: str | Communicator | None = None,
        timeout: float = 300.0,
        num_threads: int = 2,
    ) -> None:
        super().__init__()
        sizes = _sizes(graph, node_types)
        channels, seed = _integer("channels", channels), _integer("seed", seed)
        if channels < 1:
            raise ValueError(f"channels must be 1 or more (got {channels})")
        if dtype not in _DTYPES:
            raise TypeError(f"dtype must be torch.float32 or torch.float64 (got {dtype})")
        self.channels, self.dtype = channels, dtype
        begin = _inits(init, sizes)
        ranks = Local() if comm == "local" else connect(comm, timeout=timeout)
        try:
            books, owner = _books(graph, sizes, ranks)
            made = dict[NodeType, Table]()
            for kind, book in books.items():
                layout = RowLayout(book, owner, ranks.rank, ranks.world_size)
                first = begin[kind]
                if first is None:
                    first = uniform(kind, channels, dtype, seed)
                made[kind] = Table(kind, layout, channels, dtype, first)
            _agree(ranks, {"sizes": list(sizes.items()), "channels": channels, "dtype": str(dtype),
                           "parts": _checksum(books), "owners": list(owner)})  # fmt: skip
        except BaseException:
            if ranks is not comm:
                ranks.close()
            raise
        self._tables = made
        self._begin(ranks)
        if ranks.world_size > 1:
            service = ranks.serve({FEATURES: ShardAnswers(made)}, num_threads=num_threads)
            mine = _owners(owner, ranks.rank, ranks.world_size)
            name = Path("a NodeEmbedding")
            self._ranks = Ranks(ranks, service, mine, name, owns_comm=ranks is not comm)
            ranks.barrier()  # from now on all ranks serve

    def _begin(self, comm: Communicator) -> None:
        """Set all that is not to be copied with the rows."""
        self._comm, self._rows = comm, ShardRows(self._tables)
        self._gradients = Gradients(self._tables, comm)
        self._optimizer, self._ranks = None, None
        self._anchor = torch.empty(0, requires_grad=True)  # so that rows get a gradient

    # Reading ###############################################################################

    def forward(self, ids: Any) -> Any:
        """The rows of nodes, whose gradients the optimizer of this embedding takes.

        Args:
            ids: Original ids ``int64`` or ``int32`` ``[n]``, such as ``batch.n_id``; some may be
                there more than once. Of a ``HeteroData`` by node type, ``batch.n_id_dict``: types
                without a table are left out.

        Returns:
            ``[n, channels]`` on the device of the ids; of a ``HeteroData`` by node type.

        Raises:
            IndexError: If a node does not exist; names it.
            TypeError: If ids are not integers, or are by type and the graph has none.
            CommError: If a rank that has rows is gone; names it.
            CommTimeoutError: If it does not answer in time; names it.
        """
        by_type = isinstance(ids, Mapping)
        if by_type == (None in self._tables):
            asked = "batch.n_id_dict" if not by_type else "batch.n_id"
            raise TypeError(f"the tables are those of other node types: pass {asked}")
        given: dict[NodeType, Any] = {None: ids}
        if by_type:
            given = {kind: ids[kind] for kind in self._tables if kind in ids}
        checked = {kind: checked_ids(each, self._tables[kind]) for kind, each in given.items()}
        rows = self._read(checked)
        found = {}
        for kind, each in checked.items():
            device = given[kind].device
            found[kind] = _Rows.apply(self._anchor, self, kind, each, rows[kind].to(device))
        return found if by_type else found[None]

    @torch.no_grad()
    def _read(self, ids: Mapping[NodeType, Tensor]) -> dict[NodeType, Tensor]:
        wanted = [
            (self._tables[kind].layout.by_part(kind, each), (self._tables[kind].column,))
            for kind, each in ids.items()
        ]
        read = None
        if self._ranks is not None and any(rows.remote for rows, _ in wanted):
            read = RemoteRead(self._ranks.service, wanted, self._ranks.search())
        found = {}
        for number, (rows, (column,)) in enumerate(wanted):
            out: dict[Key, Tensor] = {}
            if read is not None and (number, column.key) in read.out:
                out[column.key] = read.out[number, column.key]
            if rows.local or column.key not in out:
                read_here(self._rows, None, rows, [column], out)
            if rows.remote:
                assert read is not None
                read.write(number, column, _as_bytes(out[column.key]))
            found[column.type] = out[column.key]
        return found

    # Training ##############################################################################

    def optimizer(self, kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
        """The optimizer of the rows, an object of torch's class ``kind`` in every respect.

        Its ``step()`` is made by all ranks: gradients go to the owners of rows, who add them up in
        the order of the ranks and change their rows, and when it returns all have. Schedulers of
        learning rates take it, and :class:`pyg_scale.train.Checkpoint` saves its moments shard by
        shard. In ``model.join(...)`` it is one of the steps.

        Args:
            kind: ``torch.optim.SparseAdam``, ``Adagrad`` or ``SGD``, or
                :class:`~pyg_scale.train.RowAdagrad`.
            **options: Of the optimizer, such as ``lr``.

        Raises:
            TypeError: If it is no optimizer of sparse gradients.
            ValueError: If an option changes rows without gradients, or the embedding has an
                optimizer already.
        """
        if self._optimizer is not None:
            raise ValueError(
                "this embedding has an optimizer already, and two would both change its rows"
            )
        self._optimizer = bound(kind, self, list(self._tables.values()), **options)
        return self._optimizer

    def backward(self, loss: Tensor, num_seeds: int) -> None:
        """Compute gradients where there is no other model to wrap, as that of a factorization.

        It is :meth:`pyg_scale.parallel.ParallelModule.backward` for the rows: a step's gradient is
        that of the mean over the seeds of all ranks.

        Args:
            loss: The mean over the seeds of this rank's batch, ``[]``.
            num_seeds: How many those are, 0 or more.

        Raises:
            ValueError: If ``num_seeds`` is negative.
        """
        if num_seeds < 0:
            raise ValueError(f"num_seeds must not be negative (got {num_seeds})")
        with self._gradients.counting(num_seeds):
            differentiate(loss, num_seeds)

    def exchange(self) -> None:
        """Give gradients to the owners of rows; the optimizer calls it before its step."""
        self._gradients.exchange()

    def forget(self) -> None:
        """Drop gradients since the last step; ``zero_grad()`` of the optimizer calls it."""
        self._gradients.clear()

    def finish(self) -> None:
        """Wait until all ranks have changed their rows; the optimizer calls it after its step."""
        self._comm.barrier()

    def add_gradient(self, kind: NodeType, ids: Tensor, gradient: Tensor) -> None:
        """Keep a gradient of rows until the next step; autograd calls it."""
        self._gradients.add(kind, ids, gradient)

    # State #################################################################################

    @property
    def num_nodes(self) -> dict[NodeType, int]:
        """The number of nodes of each type that has a table; the type of a ``Data`` is ``None``."""
        return {kind: table.layout.num_rows for kind, table in self._tables.items()}

    def own_ids(self, node_type: NodeType = None) -> Tensor:
        """The original ids ``int64`` ``[n]`` of the nodes whose rows this rank has.

        Raises:
            ValueError: If there is no table of this type, or of several none is named.
        """
        return self._table(node_type).layout.own_ids()

    def own_rows(self, node_type: NodeType = None) -> Tensor:
        """The rows ``[n, channels]`` of these, the same memory.

        Raises:
            ValueError: See :meth:`own_ids`.
        """
        return self._table(node_type).weight.detach()

    def _table(self, node_type: NodeType) -> Table:
        if node_type not in self._tables:
            known = ", ".join(repr(kind) for kind in self._tables)
            raise ValueError(f"node_type {node_type!r} has no table; there are those of {known}")
        return self._tables[node_type]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for kind, table in self._tables.items():
            destination[prefix + _name(kind)] = table.shard(table.weight.detach())

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known = {prefix + _name(kind): table for kind, table in self._tables.items()}
        unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in known]
        for name, table in known.items():
            if name not in state_dict:
                missing_keys.append(name)
                continue
            saved = state_dict[name]
            if isinstance(saved, Rows):
                values = table.rows_of(saved, str(table.column))
            else:  # a dense table
                if list(saved.shape) != [table.layout.num_rows, self.channels]:
                    raise CheckpointError(
                        f"{table.column}: a table of shape {list(saved.shape)} was given, expected "
                        f"{[table.layout.num_rows, self.channels]}"
                    )
                values = saved[table.layout.own_ids()]
            row = list(values.shape[1:])
            if row != [self.channels] or values.dtype != self.dtype:
                raise CheckpointError(
                    f"{table.column}: rows of {values.dtype} and shape {row} were saved, expected "
                    f"{self.dtype} and {[self.channels]}"
                )
            with torch.no_grad():
                table.weight.copy_(values)
        self._comm.barrier()  # from now on all ranks have what was loaded

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        found = fn(torch.empty(0, dtype=self.dtype)).dtype
        if found != self.dtype:
            advice = f"make it with dtype={found}"
            if found not in _DTYPES:
                advice = f"convert what it returns, embedding(ids).to({found})"
            raise TypeError(f"the rows of a NodeEmbedding stay {self.dtype}: {advice}")
        return self  # rows stay on the CPU

    # As of other modules, a copy has no gradients and no optimizer.

    def __getstate__(self) -> dict[str, Any]:
        if self._comm.world_size > 1:
            raise TypeError(
                f"a NodeEmbedding of {self._comm.world_size} ranks can be neither copied nor "
                "pickled, as each has some of the rows: save its state_dict() with Checkpoint, or "
                "make another one and load_state_dict() of it"
            )
        left_out = ("_comm", "_rows", "_gradients", "_optimizer", "_anchor", "_ranks")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin(Local())

    def __copy__(self) -> Self:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def extra_repr(self) -> str:
        """The sizes of the tables."""
        sizes = ", ".join(f"{_name(kind)}={size}" for kind, size in self.num_nodes.items())
        return f"{sizes}, channels={self.channels}, world_size={self._comm.world_size}"

    # Ending ################################################################################

    def close(self, timeout: float | None = None) -> None:
        """Answer other ranks until all have closed it, then stop. May be called again.

        Args:
            timeout: Seconds to wait for the others, by default those of the communicator.

        Raises:
            CommTimeoutError: If not all ranks closed it in time; names those that did not.
            CommError: If ranks ended without closing it; names them.
        """
        if self._ranks is not None:
            self._ranks.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self.close(0.0 if kind is not None else None)


class _Rows(torch.autograd.Function):
    """Rows that were read, and whose gradient goes to their owners."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, to: NodeEmbedding, kind: NodeType, ids: Tensor, rows: Tensor
    ) -> Tensor:
        ctx.to, ctx.kind, ctx.ids = to, kind, ids
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.to.add_gradient(ctx.kind, ctx.ids, gradient)
        return None, None, None, None, None


def _as_bytes(rows: Tensor) -> Tensor:
    return raw_bytes(rows).view(rows.size(0), -1)


def _name(kind: NodeType) -> str:
    return "weight" if kind is None else f"weight.{kind}"


def _sizes(graph: Any, node_types: Sequence[str] | None) -> dict[NodeType, int]:
    """The number of nodes of each type that gets a table."""
    if isinstance(graph, HeteroData):
        types = graph.node_types
        if isinstance(node_types, str):
            raise TypeError(f"node_types must be a list: pass [{node_types!r}]")
        if node_types is None:
            node_types = [kind for kind in types if "x" not in graph[kind]]
        if unknown := [kind for kind in node_types if kind not in types]:
            raise ValueError(f"node_types: the graph has no {unknown[0]!r}, only {types}")
        if not node_types:
            raise ValueError("all node types have features x: say which get rows by node_types=")
        return {kind: _count(graph[kind].num_nodes, f"graph[{kind!r}]") for kind in node_types}
    if node_types is not None:
        raise ValueError("node_types is for a HeteroData")
    if isinstance(graph, Data):
        graph = _count(graph.num_nodes, "graph")
    if not isinstance(graph, int) or isinstance(graph, bool):
        raise TypeError(
            f"graph must be a Data, a HeteroData or a number of nodes (got {type(graph).__name__})"
        )
    if graph < 0:
        raise ValueError(f"there cannot be {graph} nodes")
    return {None: graph}


def _count(num_nodes: int | None, what: str) -> int:
    if num_nodes is None:
        raise ValueError(f"{what} does not say how many nodes there are: set its num_nodes")
    return int(num_nodes)


def _integer(name: str, value: Any) -> int:
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None:
        raise TypeError(f"{name} must be an integer (got {value!r})")
    return found


def _inits(init: Any, kinds: Iterable[NodeType]) -> dict[NodeType, Init | None]:
    """The maker of first values of each type; ``None`` where none is given."""
    known = list(kinds)
    given = list(init.values()) if isinstance(init, Mapping) else [init]
    for each in given:
        if each is not None and not callable(each):
            raise TypeError(
                "init must be a function of ids, or a dictionary of functions by node type (got "
                f"{type(each).__name__}): rows of a table are given by lambda ids: table[ids]"
            )
    if not isinstance(init, Mapping):
        return dict.fromkeys(known, init)
    if unknown := [kind for kind in init if kind not in known]:
        raise ValueError(f"init: no table of {unknown[0]!r} is made, only of {known}")
    return {kind: init.get(kind) for kind in known}


def _books(
    graph: Any, sizes: Mapping[NodeType, int], comm: Communicator
) -> tuple[dict[NodeType, PartitionBook], tuple[int, ...]]:
    """The part of every node, and the rank that has the rows of each part."""
    if comm.world_size == 1 or not isinstance(graph, RankData | RankHeteroData):
        size = comm.world_size
        return {kind: ranges(count, size) for kind, count in sizes.items()}, tuple(range(size))
    owners = graph.owners
    if (owners.rank, owners.world_size) != (comm.rank, comm.world_size):
        raise ValueError(
            f"the graph was opened by {owners.world_size} ranks, and comm= has {comm.world_size}"
        )
    first = tuple(ranks[0] for ranks in owners.ranks_of)
    return {kind: graph.partition_books[kind] for kind in sizes}, first


def _owners(owner: Sequence[int], rank: int, world_size: int) -> Owners:
    readable = tuple(
        tuple(part for part, each in enumerate(owner) if each == other)
        for other in range(world_size)
    )
    return Owners(
        rank, world_size, readable, tuple((each,) for each in owner), frozenset(readable[rank])
    )


def _checksum(books: Mapping[NodeType, PartitionBook]) -> int:
    """A checksum of the places of rows; of large books, of some entries."""
    crc = 0
    for book in books.values():
        crc = zlib.crc32(raw_bytes(book.offsets).numpy().data, crc)
        if book.part is not None:
            some = book.part[:: max(1, book.num_nodes >> 16)].contiguous()
            crc = zlib.crc32(raw_bytes(some).numpy().data, crc)
    return crc


def _agree(ranks: Communicator, mine: dict[str, Any]) -> None:
    """Check that all ranks make the same tables.

    Raises:
        ValueError: If they do not; says about what and which rank.
    """
    found = [
        from_record(record, f"the tables of rank {rank}")
        for rank, record in enumerate(ranks.all_gather(to_record(mine)))
    ]
    for rank, other in enumerate(found):
        for name, value in other.items():
            if value != found[0][name]:
                raise ValueError(
                    f"rank {rank} makes an embedding with {name} {value}, rank 0 with "
                    f"{found[0][name]}: all ranks must make the same"
                )
