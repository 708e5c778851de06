"""PyG's neighbour sampler, restricted to one of the two libraries that it can use."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch_geometric.sampler as pyg
from torch import Tensor
from torch_geometric.data import Data, EdgeAttr, GraphStore, HeteroData
from torch_geometric.sampler.base import SubgraphType

from pyg_scale.graph.source import GraphSource, GroupedEdges, of
from pyg_scale.sampler.base import one_of
from pyg_scale.sampler.capabilities import CAPABILITIES
from pyg_scale.store.topology import checked_source

_CHUNK = 1 << 22  # edges whose times are compared at a time


class _PyGSampler(pyg.NeighborSampler):
    """PyG's sampler with its arguments, which refuses options that the library does not support.

    It takes no key: loaders seed torch's generator from the key, and use worker processes.
    """

    library: ClassVar[str]
    """The name of the library."""

    module: ClassVar[str]
    """The module to import."""

    supports: ClassVar[frozenset[str]]
    """The supported options of :data:`pyg_scale.sampler.capabilities.CAPABILITIES`."""

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        subgraph_type: SubgraphType | str = "directional",
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        is_sorted: bool = False,
        share_memory: bool = False,
        directed: bool = True,
        sample_direction: str = "forward",
    ):
        self._require()
        subgraph_type = SubgraphType(subgraph_type if directed else "induced")
        one_of("sample_direction", sample_direction, ("forward", "backward"))
        backward = sample_direction == "backward"
        one_of("temporal_strategy", temporal_strategy, ("uniform", "last"))
        wanted = {
            "disjoint": disjoint,
            "weighted": weight_attr is not None,
            "node_time": time_attr is not None,
            "edge_time": time_attr is not None,
            "last": temporal_strategy == "last",
            "induced": subgraph_type == SubgraphType.induced,
        }
        for name in wanted:
            if wanted[name] and name not in self.supports:
                self._refuse(CAPABILITIES[name])
        timed, weighted = time_attr is not None, weight_attr is not None
        if timed and weighted:
            self._refuse("time_attr= together with weight_attr=")
        if timed and backward:
            self._refuse("time_attr= together with sample_direction='backward'")
        if weighted and not isinstance(data, Data | HeteroData):
            self._refuse("weight_attr= of a (FeatureStore, GraphStore)")
        if temporal_strategy == "last" and not timed:
            raise ValueError(
                "temporal_strategy='last' needs times: say in time_attr= which attribute has them"
            )
        # The list is sorted by destination, which is of no use to samplers of out-edges.
        is_sorted = is_sorted and not backward
        source = checked_source(
            data,
            direction=sample_direction,
            time_attr=time_attr,
            weight_attr=weight_attr,
            is_sorted=is_sorted,
        )
        self._check_dtypes(source, time_attr, weight_attr)
        data = _prepared(data, source, time_attr, weight_attr)
        with warnings.catch_warnings():
            # PyG advises to install pyg-lib, but the library was chosen by name.
            warnings.filterwarnings("ignore", message=".*without a 'pyg-lib' installation")
            super().__init__(
                data,
                num_neighbors,
                subgraph_type=subgraph_type,
                replace=replace,
                disjoint=disjoint,
                temporal_strategy=temporal_strategy,
                time_attr=time_attr,
                weight_attr=weight_attr,
                is_sorted=is_sorted,
                share_memory=share_memory,
                sample_direction=sample_direction,
            )
        if timed:
            if not isinstance(data, Data | HeteroData):
                self._take_times(source)
            self._check_times(source, time_attr)

    def _refuse(self, what: str) -> None:
        raise NotImplementedError(
            f"{self.library} does not support {what}; neighbor_sampler='native' does"
        )

    def _check_dtypes(
        self, source: GraphSource, time_attr: str | None, weight_attr: str | None
    ) -> None:
        """Refuse times and weights of numbers that the library cannot read."""
        for kind, time in [*source.node_time.items(), *source.edge_time.items()]:
            if time.dtype != torch.int64:
                self._refuse(
                    f"time_attr={time_attr!r}{of(kind)} of {time.dtype}, which must be int64 "
                    "(use .long() if no time is a fraction)"
                )
        held = {edges.index_dtype for edges in source.edges.values()}
        if source.node_types != (None,) and time_attr is not None and torch.int32 in held:
            self._refuse(
                f"time_attr={time_attr!r} of a graph with types and int32 edges (use .long())"
            )
        for edge_type, weight in source.weight.items():
            if weight.dtype not in (torch.float32, torch.float64):
                self._refuse(
                    f"weight_attr={weight_attr!r}{of(edge_type)} of {weight.dtype}, which must be "
                    "float32 or float64 (use .float())"
                )

    def _take_times(self, source: GraphSource) -> None:
        """Take the times of stores as they were checked; PyG does not name edge types for ops."""
        if self.node_time is not None and source.node_time:
            self.node_time = source.node_time if self.is_hetero else source.node_time[None]
        if self.edge_time is not None and source.edge_time:
            times = source.edge_time
            self.edge_time = (
                {self.to_rel_type[edge_type]: time for edge_type, time in times.items()}
                if self.is_hetero
                else times[None]
            )

    def _check_times(self, source: GraphSource, time_attr: str | None) -> None:
        """Check that PyG took times for those of the same, and in-edges are in their order."""
        if (self.edge_time is not None) != bool(source.edge_time):
            raise ValueError(
                f"time_attr={time_attr!r} has one time for each "
                f"{'edge' if source.edge_time else 'node'}, but PyG judges by the name: it takes "
                "'time' of stores for one of nodes and all others for one of edges; rename it, or "
                "use neighbor_sampler='native'"
            )
        for edge_type, colptr, row, time in self._kept_order():
            edge = _first_earlier(colptr, row, time, of_edges=self.edge_time is not None)
            if edge is not None:
                raise ValueError(
                    f"is_sorted=True, but the edges of a destination are not sorted by "
                    f"time_attr={time_attr!r}: edge {edge}{of(edge_type)} is earlier than the one "
                    "before it; sort them, or leave is_sorted out"
                )

    def _kept_order(self) -> Iterator[tuple[Any, Tensor, Tensor, Tensor]]:
        """The edges with times that PyG did not sort: type, pointers, neighbours and times."""
        if not self.is_hetero:
            if self.perm is None:
                time = self.node_time if self.edge_time is None else self.edge_time
                yield None, self.colptr, self.row, time
            return
        for edge_type in self.edge_types:
            name = self.to_rel_type[edge_type]
            times = self.node_time if self.edge_time is None else self.edge_time
            time = times.get(edge_type[0] if self.edge_time is None else name)
            if time is not None and self.perm.get(edge_type) is None:
                yield edge_type, self.colptr_dict[name], self.row_dict[name], time

    @property
    def edge_permutation(self) -> Any:
        """The mapping from the library's edge ids to those of the graph."""
        perm = super().edge_permutation
        if isinstance(perm, dict) and self.sample_direction == "backward":
            # PyG has the reversed types here, but the graph's own types in samples.
            return {self.to_restored_edge_type[key]: value for key, value in perm.items()}
        return perm

    def _require(self) -> None:
        try:
            importlib.import_module(self.module)
        except Exception as error:  # a library built for another torch raises OSError
            raise ImportError(
                f"neighbor_sampler={self.library!r} needs {self.library}, which cannot be imported "
                f"({type(error).__name__}: {error}); neighbor_sampler='native' needs nothing"
            ) from error


class PygLibSampler(_PyGSampler):
    """Samples with pyg-lib, through PyG's sampler."""

    library = "pyg-lib"
    module = "pyg_lib"
    supports = frozenset(CAPABILITIES) - {"induced", "fixed", "window", "strict"}

    def _sample(
        self,
        seed: Tensor | Mapping[str, Tensor],
        seed_time: Any = None,
        **kwargs: Any,
    ) -> pyg.SamplerOutput | pyg.HeteroSamplerOutput:
        if self.is_temporal and seed_time is None:
            timed = self.edge_time is None
            if timed and isinstance(seed, Mapping):
                timed = seed.keys() <= self.node_time.keys()
            if not timed:
                raise ValueError(
                    "input_time is missing: the seeds have no time of their own, as time_attr= is "
                    "one of " + ("other nodes" if self.edge_time is None else "edges")
                )
        if isinstance(seed_time, Mapping):
            seed_time = {kind: self._seed_time(time) for kind, time in seed_time.items()}
        elif seed_time is not None:
            seed_time = self._seed_time(seed_time)
        return super()._sample(seed, seed_time, **kwargs)

    def _seed_time(self, time: Tensor) -> Tensor:
        if time.is_floating_point():
            self._refuse(
                f"times of seeds (input_time=, edge_label_time=) of {time.dtype}, which must be "
                "integers"
            )
        return time.long().contiguous()


class TorchSparseSampler(_PyGSampler):
    """Samples with torch-sparse, through PyG's sampler, even if pyg-lib is installed."""

    library = "torch-sparse"
    module = "torch_sparse"
    supports = frozenset({"hetero", "replace", "bidirectional", "induced", "backward", "links"})

    def _sample(
        self,
        seed: Tensor | Mapping[str, Tensor],
        seed_time: Any = None,
        **kwargs: Any,
    ) -> pyg.SamplerOutput | pyg.HeteroSamplerOutput:
        if seed_time is not None:
            raise NotImplementedError(
                "torch-sparse does not support times of seeds; neighbor_sampler='native' does"
            )
        directed = self.subgraph_type != SubgraphType.induced
        if not isinstance(seed, Mapping):
            dtype = self.row.dtype
            node, row, col, edge = torch.ops.torch_sparse.neighbor_sample(
                self.colptr.long(),
                self.row.long(),
                seed.long(),
                self.num_neighbors.get_mapped_values(),
                self.replace,
                directed,
            )
            node, row, col = node.to(dtype), row.to(dtype), col.to(dtype)
            if self.sample_direction == "backward":
                row, col = col, row
            return pyg.SamplerOutput(node=node, row=row, col=col, edge=edge)
        node, row, col, edge = torch.ops.torch_sparse.hetero_neighbor_sample(
            self.node_types,
            self.edge_types,
            {name: value.long() for name, value in self.colptr_dict.items()},
            {name: value.long() for name, value in self.row_dict.items()},
            {name: value.long() for name, value in seed.items()},
            self.num_neighbors.get_mapped_values(self.edge_types),
            self.num_neighbors.num_hops,
            self.replace,
            directed,
        )
        if self.sample_direction == "backward":
            row, col = col, row
        return pyg.HeteroSamplerOutput(
            node=node,
            row=self._by_edge_type(row),
            col=self._by_edge_type(col),
            edge=self._by_edge_type(edge),
        )

    def _by_edge_type(self, values: Mapping[str, Tensor]) -> dict[Any, Tensor]:
        out = {self.to_edge_type[name]: value for name, value in values.items()}
        if self.sample_direction == "backward":
            out = {self.to_restored_edge_type[key]: value for key, value in out.items()}
        return out


class _Contiguous(GraphStore):
    """The edges of another store, with contiguous tensors; only to be read."""

    def __init__(self, store: GraphStore):
        super().__init__()
        self.store = store
        if hasattr(store, "meta"):  # PyG looks there for how to count nodes
            self.meta = store.meta

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        return self.store.get_all_edge_attrs()

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[Tensor, Tensor]:
        row, col = self.store.get_edge_index(edge_attr)
        return row.contiguous(), col.contiguous()

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        raise NotImplementedError

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        raise NotImplementedError


def _prepared(
    data: Any, source: GraphSource, time_attr: str | None, weight_attr: str | None
) -> Any:
    """The data with edges, times and weights as the libraries read them: contiguous, on the CPU.

    Data that need a change are copied without what they hold.
    """
    if not isinstance(data, Data | HeteroData):
        rows = [end for edges in source.edges.values() for end in (edges.row, edges.col)]
        if all(end.is_contiguous() for end in rows):
            return data
        return data[0], _Contiguous(data[1])
    changes: list[tuple[Any, str, Any]] = []

    def store_of(data: Any, kind: Any) -> Any:
        return data if kind is None else data[kind]

    for edge_type, edges in source.edges.items():
        store = store_of(data, edge_type)
        if isinstance(edges, GroupedEdges) or "edge_index" not in store:
            continue  # the list of grouped edges is made when it is asked for
        value = store["edge_index"]
        if value is not None and not (value.is_cpu and value[0].is_contiguous()):
            changes.append((edge_type, "edge_index", value.cpu().contiguous()))
    times = {**source.node_time, **source.edge_time}
    for name, columns in ((time_attr, times), (weight_attr, source.weight)):
        for kind, value in columns.items():
            given = store_of(data, kind)[name]
            if (
                not isinstance(given, Tensor)
                or given.data_ptr() != value.data_ptr()
                or given.dim() != 1
            ):
                changes.append((kind, name, value))
    if changes:
        data = copy.copy(data)
        for kind, name, value in changes:
            store_of(data, kind)[name] = value
    return data


def _first_earlier(colptr: Tensor, row: Tensor, time: Tensor, *, of_edges: bool) -> int | None:
    """The first position whose time is before that of the one before it of the same node."""
    for begin in range(0, row.numel() - 1, _CHUNK):
        piece = slice(begin, begin + _CHUNK + 1)
        when = time[piece] if of_edges else time[row[piece]]
        lower = (when[1:] < when[:-1]).nonzero().view(-1) + (begin + 1)
        # Times may begin anew where the edges of a node do.
        lower = lower.to(colptr.dtype)
        wrong = lower[colptr[torch.searchsorted(colptr, lower)] != lower]
        if wrong.numel():
            return int(wrong[0])
    return None
