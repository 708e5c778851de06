"""PyG's neighbour sampler, restricted to one of the two libraries that it can use."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch_geometric.sampler as pyg
from torch import Tensor
from torch_geometric.sampler.base import SubgraphType

from pyg_scale.sampler.capabilities import CAPABILITIES


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
                raise NotImplementedError(
                    f"{self.library} does not support {CAPABILITIES[name]}; "
                    f"neighbor_sampler='native' does"
                )
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
    supports = frozenset(CAPABILITIES) - {"induced", "fixed"}


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
