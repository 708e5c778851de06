"""Mini-batches of induced subgraphs, with the normalisation of GraphSAINT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_geometric.loader
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from tqdm.auto import tqdm

from pyg_scale.loader.archive import ADVICE, edges_hash, load_archive, save_archive
from pyg_scale.loader.base import SubgraphLoader
from pyg_scale.loader.batch.source import rows_in_huge_pages
from pyg_scale.loader.induced import Grouped, batch_of, has_edge_attrs, refuse_overrides
from pyg_scale.loader.seeds.epoch import BatchIndex, draw_seed
from pyg_scale.loader.stats import Stats
from pyg_scale.ops import keys
from pyg_scale.ops.induced_edges import Induced

_FORMAT = "pyg_scale GraphSAINT 2"


class _Saint(SubgraphLoader, torch_geometric.loader.GraphSAINTSampler):
    """The base of the GraphSAINT samplers: a subclass draws nodes."""

    def __init__(
        self,
        data: Data,
        batch_size: int,
        num_steps: int = 1,
        sample_coverage: int | str = 0,
        save_dir: str | None = None,
        log: bool = True,
        *,
        seed: int | None = None,
        worker_type: str | None = None,
        **kwargs: Any,
    ):
        refuse_overrides(self, "_sample_nodes", "_collate", "_filename", "__getitem__")
        _check(type(self).__name__, data, kwargs)
        self._batch_size = _number("batch_size", batch_size, 1)
        self.num_steps = _number("num_steps", num_steps, 1)
        self.sample_coverage = self._coverage(sample_coverage)
        self.save_dir, self.log, self.data = save_dir, log, data
        self.N, self.E = int(data.num_nodes or 0), int(data.num_edges)
        self._graph = Grouped.of(data.edge_index, self.N)
        rows_in_huge_pages(data)
        self._start(self.num_steps, seed=seed, worker_type=worker_type, **kwargs)
        if self.sample_coverage:
            self.node_norm, self.edge_norm = self._norms()
        self._publish()

    def _draw(self, key: int) -> Tensor:
        """Node ids ``int64``, repeats allowed, drawn with a key."""
        raise NotImplementedError

    def _chances(self) -> tuple[Tensor, Tensor]:
        """The chances that one draw has a node, and both ends of an edge; ``float64``, [N], [E]."""
        raise NotImplementedError(
            f"sample_coverage='exact' is not for {type(self).__name__}, whose chances have no "
            "closed form: pass a number of samples per node"
        )

    def _coverage(self, value: Any) -> int | str:
        return value if value == "exact" else _number("sample_coverage", value, 0)

    def _options(self) -> dict[str, int]:
        """The options on which the probabilities of nodes depend."""
        return {"batch_size": self._batch_size}

    # Normalisation #########################################################################

    def _norms(self) -> tuple[Tensor, Tensor]:
        """``float32`` ``[num_nodes]`` and ``[num_edges]``, read if they were saved."""
        if self.sample_coverage == "exact":
            return self._exact_norm()
        file = None
        if self.save_dir is not None:
            name = f"{type(self).__name__.lower()}_{self.sample_coverage}.npz"
            file = Path(self.save_dir) / name
        edges = 0 if file is None else edges_hash(self.data.edge_index, ordered=True)
        if file is not None and file.exists():
            names = ("node_norm", "edge_norm", "options")
            node, edge, options = load_archive(file, _FORMAT, edges, *names)
            if str(options) != str(self._options()) or node.size != self.N:
                raise ValueError(
                    f"{file} is for {options} and {node.size} nodes, not {self._options()} and "
                    f"{self.N}: {ADVICE}"
                )
            return torch.from_numpy(node), torch.from_numpy(edge)
        node_norm, edge_norm = self._compute_norm()
        if file is not None:
            arrays = {"node_norm": node_norm.numpy(), "edge_norm": edge_norm.numpy()}
            save_archive(file, _FORMAT, edges, **arrays, options=np.array(str(self._options())))
        return node_norm, edge_norm

    def _compute_norm(self) -> tuple[Tensor, Tensor]:
        seed = draw_seed(self.generator) if self.seed is None else self.seed
        key = keys.fold(0, seed, keys.SAINT, 1)
        node_count = torch.zeros(self.N, dtype=torch.int64)
        edge_count = torch.zeros(self.E, dtype=torch.int64)
        number = total = 0
        wanted = self.N * int(self.sample_coverage)
        with tqdm(total=wanted, desc="GraphSAINT norms", disable=not self.log, delay=1) as bar:
            while total < wanted:
                for _ in range(self.num_steps):
                    found = self._induced(keys.fold(key, number))
                    node_count[found.node] += 1
                    edge_count[found.edge] += 1
                    number, total = number + 1, total + found.node.numel()
                    bar.update(found.node.numel())
        source = node_count[self.data.edge_index[0].long()].float()
        edge_norm = (source / edge_count).clamp(0, 1e4)
        edge_norm[edge_norm.isnan()] = 0.1
        seen = node_count.float()
        seen[seen == 0] = 0.1
        return number / seen / self.N, edge_norm

    def _exact_norm(self) -> tuple[Tensor, Tensor]:
        """The norms that :meth:`_compute_norm` tends to; 0 for what no batch has."""
        one, both = self._chances()
        source, target = self.data.edge_index.long()
        node = _in_any(one, self._batch_size)
        either = _in_any(one[source] + one[target] - both, self._batch_size)
        edge = torch.where(source == target, node[source], node[source] + node[target] - either)
        node_norm = torch.where(node > 0, 1 / (node * self.N), 0)
        edge_norm = torch.where(edge > 0, (node[source] / edge).clamp(max=1e4), 0)
        return node_norm.float(), edge_norm.float()

    # Batches ###############################################################################

    def _seed_tensors(self) -> list[Tensor]:
        return [torch.arange(self.num_steps)]

    def _parts_of_seeds(self) -> Tensor | None:
        return None

    def _draws(self) -> dict[str, str]:
        return {name: str(value) for name, value in self._options().items()}

    def _identity(self) -> dict[str, Any]:
        drawn_by = next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        return super()._identity() | {"subgraphs": f"{drawn_by.__name__} {self._options()}"}

    def _sample(self, batch: BatchIndex) -> Induced:
        return self._induced(batch.key, bool(self.sample_coverage) or has_edge_attrs(self.data))

    def _induced(self, key: int, ids: bool = True) -> Induced:
        """Nodes drawn with a key, and all edges among them, with or without their ids."""
        return self._graph.among(self._draw(keys.fold(key, keys.SAINT)), ids=ids)

    def _fetch(self, out: Induced, stats: Stats) -> Data:
        batch = batch_of(self.data, out, stats)
        if self.sample_coverage:
            assert out.edge is not None
            batch.node_norm, batch.edge_norm = self.node_norm[out.node], self.edge_norm[out.edge]
        return batch


class GraphSAINTNodeSampler(_Saint, torch_geometric.loader.GraphSAINTNodeSampler):
    """Loads subgraphs among nodes, each drawn in proportion to its out-degree.

    As :class:`torch_geometric.loader.GraphSAINTNodeSampler`, and a subclass of it, but needs
    nothing besides this package. The method is that of Zeng et al.: "GraphSAINT: Graph Sampling
    Based Inductive Learning Method", ICLR 2020.

    Args:
        data: ``Data`` with ``edge_index`` ``[2, num_edges]``, on the CPU.
        batch_size: Number of sources of edges to draw, repeats counted.
        num_steps: Number of batches of an epoch.
        sample_coverage: Number of samples per node from which the normalisation is computed; 0:
            none. Batches then have ``node_norm`` ``[num_nodes]`` and ``edge_norm`` ``[num_edges]``.
            ``"exact"``: those that ever more samples tend to; not for walks.
        save_dir: The folder of a file without pickle, in which sampled ones are kept.
        log: If True, show the progress of the normalisation.
        seed: See :class:`NodeLoader`; it decides the normalisation, too.
        worker_type: See :class:`NodeLoader`.
        kwargs: Arguments of :class:`torch.utils.data.DataLoader`.

    Raises:
        NotImplementedError: If the graph has types, or walks are to have exact norms.
        TypeError: If an argument has a wrong type.
        ValueError: If a number is out of range, ``data`` has no edges, or the file does not fit.
    """

    def _draw(self, key: int) -> Tensor:
        return self._graph.row[keys.draws_each(key, self._batch_size, self.E)].long()

    def _chances(self) -> tuple[Tensor, Tensor]:
        one = self._graph.indptr.diff() / torch.tensor(self.E, dtype=torch.float64)
        return one, one.new_zeros(self.E)


class GraphSAINTEdgeSampler(_Saint, torch_geometric.loader.GraphSAINTEdgeSampler):
    """Loads subgraphs among the ends of edges.

    As :class:`torch_geometric.loader.GraphSAINTEdgeSampler`, and a subclass of it, with its
    probabilities: an edge is drawn in proportion to the in-degree of its source plus the
    out-degree of its destination. (Section 3.2 of the paper has the inverses of degrees.) The
    method is that of Zeng et al., ICLR 2020.

    Args:
        data: See :class:`GraphSAINTNodeSampler`, as for all other arguments.
        batch_size: Number of edges to draw, repeats counted.
    """

    def _draw(self, key: int) -> Tensor:
        place = keys.draws_each(key, self._batch_size, int(self._prefix[-1]))
        edge = torch.searchsorted(self._prefix, place, right=True)
        return torch.cat([self._graph.row[edge], self._graph.col[edge]]).long()

    def _chances(self) -> tuple[Tensor, Tensor]:
        _, row, col, edge = (each.long() for each in self._graph)
        weight = self._prefix.diff(prepend=self._prefix.new_zeros(1)).double()
        chance = weight / weight.sum()
        one = torch.bincount(row, chance, self.N)
        one += torch.bincount(col, torch.where(row == col, 0, chance), self.N)
        pair = torch.minimum(row, col) * self.N + torch.maximum(row, col)
        _, place = pair.unique(return_inverse=True)
        both = torch.empty_like(chance)
        both[edge] = torch.bincount(place, chance)[place]
        return one, both

    @property
    def _prefix(self) -> Tensor:
        """The sums of the weights ``int64`` ``[num_edges]`` of edges up to each of them."""
        found: Tensor | None = self.__dict__.get("_sums")
        if found is None:
            out = self._graph.indptr.diff()
            weight = torch.bincount(self._graph.col, minlength=self.N)[self._graph.row]
            weight += out[self._graph.col]
            found = self._sums = (weight if bool(weight.any()) else weight + 1).cumsum(0)
        return found


class GraphSAINTRandomWalkSampler(_Saint, torch_geometric.loader.GraphSAINTRandomWalkSampler):
    """Loads subgraphs among the nodes of random walks from nodes that are equally likely.

    As :class:`torch_geometric.loader.GraphSAINTRandomWalkSampler`, and a subclass of it, but needs
    nothing besides this package. Walks are those of :func:`pyg_scale.sampler.random_walk`. The
    method is that of Zeng et al., ICLR 2020.

    Args:
        data: See :class:`GraphSAINTNodeSampler`, as for all other arguments.
        batch_size: Number of walks.
        walk_length: Number of steps of each walk.
    """

    def __init__(
        self,
        data: Data,
        batch_size: int,
        walk_length: int,
        num_steps: int = 1,
        sample_coverage: int | str = 0,
        save_dir: str | None = None,
        log: bool = True,
        **kwargs: Any,
    ):
        self.walk_length = _number("walk_length", walk_length, 0)
        super().__init__(data, batch_size, num_steps, sample_coverage, save_dir, log, **kwargs)

    def _options(self) -> dict[str, int]:
        return {"batch_size": self._batch_size, "walk_length": self.walk_length}

    def _induced(self, key: int, ids: bool = True) -> Induced:
        of_batch = keys.fold(key, keys.SAINT)
        return self._graph.among_walks(self._batch_size, self.walk_length, of_batch, ids=ids)


def _in_any(chance: Tensor, draws: int) -> Tensor:
    """The chance of what has a chance in every draw to be in any of them."""
    return -torch.expm1(torch.log1p(-chance.clamp(max=1)) * draws)


def _check(name: str, data: Any, kwargs: dict[str, Any]) -> None:
    if isinstance(data, HeteroData):
        raise NotImplementedError(
            f"{name} does not take HeteroData: pass data.to_homogeneous(), or use NeighborLoader"
        )
    if not isinstance(data, Data):
        raise TypeError(f"data must be a Data (got {type(data).__name__})")
    edge_index = data.get("edge_index")
    if not isinstance(edge_index, Tensor) or not edge_index.numel() or edge_index.is_cuda:
        raise ValueError(f"{name} needs data.edge_index [2, num_edges] with edges, on the CPU")
    for norm in ("node_norm", "edge_norm"):
        if norm in data:
            raise ValueError(f"data has a {norm}, which {name} sets on batches: rename it")
    for other in ("sampling", "feature_store", "transform"):
        if kwargs.get(other) is not None:
            raise NotImplementedError(f"{other}= is not for {name}: leave it out")
    if kwargs.get("split_seeds") == "part":
        raise ValueError("split_seeds='part' is for seeds of a graph in parts: use 'global'")
    if kwargs.get("split_batches"):
        raise ValueError(
            f"split_batches=True cuts the seeds of a step, and {name} has none: use "
            "split_seeds='global', with which ranks take turns"
        )


def _number(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer (got {value!r})")
    if value < least:
        raise ValueError(f"{name} must be {least} or more (got {value})")
    return value
