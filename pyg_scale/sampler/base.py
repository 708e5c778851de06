"""The contract of kind ``sampler``: seeds and a key go in, one sampled subgraph comes out."""

from __future__ import annotations

import copy
import inspect
import operator
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch_geometric.sampler as pyg
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput, NumNeighbors
from torch_geometric.sampler.base import SubgraphType

from pyg_scale.graph.topology import EdgeType, NodeType, Topology
from pyg_scale.sampler.capabilities import CAPABILITIES, HasTopology
from pyg_scale.sampler.subgraph import swap_directions, to_bidirectional
from pyg_scale.sampler.times import TimeLimits, limits_of, windows_of
from pyg_scale.store.topology import topology_of

_FEW = 64
"""So many seeds at most are checked in Python: torch takes longer, and lets other threads in."""


@dataclass
class Sample:
    """One sampled subgraph, per node type and edge type (``None`` in a homogeneous graph).

    Attributes:
        node: Original node ids, the seeds first and in order (repeats kept), then nodes in
            the order in which they were first reached.
        row: Position in ``node`` of the neighbour of each edge.
        col: Position in ``node`` of the expanded node of each edge; never decreases in a
            directional sample.
        edge: Original edge id of each edge, ``int64``; ``None`` where an edge stands for
            two of different types.
        batch: Position of the seed to which each node belongs, if disjoint.
        num_sampled_nodes: New nodes of each hop, the seeds first (``num_hops + 1`` numbers).
        num_sampled_edges: Edges of each hop (``num_hops`` numbers).
        colptr: ``int64``; the edges into node ``i`` are ``colptr[i]`` to ``colptr[i+1] - 1``.
            Covers the nodes that were expanded; nodes beyond it have no edges.
        node_attrs: Extra tensors per node, by name, put on the batch.
        edge_attrs: Extra tensors per edge, by name (such as importance weights as
            ``edge_weight``), put on the batch.
    """

    node: dict[NodeType, Tensor]
    row: dict[EdgeType, Tensor]
    col: dict[EdgeType, Tensor]
    edge: dict[EdgeType, Tensor | None]
    batch: dict[NodeType, Tensor] | None = None
    num_sampled_nodes: dict[NodeType, list[int]] | None = None
    num_sampled_edges: dict[EdgeType, list[int]] | None = None
    colptr: dict[EdgeType, Tensor] | None = None
    node_attrs: dict[str, dict[NodeType, Tensor]] = field(default_factory=dict)
    edge_attrs: dict[str, dict[EdgeType, Tensor]] = field(default_factory=dict)

    def to_output(self) -> SamplerOutput | HeteroSamplerOutput:
        """The same as PyG's ``SamplerOutput`` or ``HeteroSamplerOutput``."""
        if None not in self.node:
            return HeteroSamplerOutput(**vars(self))
        return SamplerOutput(**{k: _single(v) for k, v in vars(self).items()})


def _single(value: Any) -> Any:
    """The entry of the one type of a homogeneous graph, also inside named extras."""
    if not isinstance(value, dict):
        return value
    if None in value:
        return value[None]
    return {name: entry[None] for name, entry in value.items()}


Rows = Mapping[tuple[bool, NodeType | EdgeType | None, str], Tensor | None]


@dataclass
class SamplerOutput(pyg.SamplerOutput):
    """PyG's ``SamplerOutput`` with destination pointers, extra tensors and rows that came along.

    ``collected`` has rows ``[n, ...]`` of attributes, such as from a server, by (true if of edges,
    node or edge type, name); ``None`` where there are none.
    """

    colptr: Tensor | None = field(default=None, repr=False)
    node_attrs: dict[str, Tensor] = field(default_factory=dict, repr=False)
    edge_attrs: dict[str, Tensor] = field(default_factory=dict, repr=False)
    collected: Rows | None = field(default=None, repr=False)


@dataclass
class HeteroSamplerOutput(pyg.HeteroSamplerOutput):
    """PyG's ``HeteroSamplerOutput`` with what :class:`SamplerOutput` has besides."""

    colptr: dict[EdgeType, Tensor] | None = field(default=None, repr=False)
    node_attrs: dict[str, dict[NodeType, Tensor]] = field(default_factory=dict, repr=False)
    edge_attrs: dict[str, dict[EdgeType, Tensor]] = field(default_factory=dict, repr=False)
    collected: Rows | None = field(default=None, repr=False)


def graph_of(sampler: Any) -> Topology | None:
    """The graph of a sampler, if it has one as a topology."""
    return sampler.topology if isinstance(sampler, HasTopology) else None


class NeighborSampler(pyg.BaseSampler):
    """Samples neighbours hop by hop. The contract; a subclass implements :meth:`sample`.

    Takes the arguments of :class:`torch_geometric.sampler.NeighborSampler`. Without ``data``
    the sampler is *unbound*: it carries only its own options, and the loader to which it is
    given binds it (:meth:`bind`) to the loader's data and arguments.

    ``redraw=False`` asks for the same neighbours of a node in all batches: see
    :class:`MayKeepDraws`. The key is then the same for all batches.

    ``time_window=w`` limits what a seed of time ``t`` sees to ``(t - w, t]``, and
    ``strictly_earlier=True`` to what is before ``t``: see
    :class:`~pyg_scale.loader.NeighborLoader`.

    Every random choice of a subclass must be drawn from the key of the batch, see
    :mod:`pyg_scale.ops.keys`, so that batches do not depend on workers, ranks or parts.
    """

    supports: ClassVar[frozenset[str]] = frozenset()
    """The :data:`CAPABILITIES` that this sampler has."""

    exact_count: ClassVar[bool] = True
    """True if a node gets as many in-edges as were asked for, or all if it has no more."""

    uniform: ClassVar[bool] = True
    """True if all sets of in-edges of that size are equally likely (in proportion to weights,
    if there are), and independent for every node, hop and edge type."""

    across_parts: ClassVar[bool] = False
    """True if it reaches in-edges through :attr:`Topology.router
    <pyg_scale.graph.topology.Topology.router>`, so that other processes may
    have parts of the graph."""

    topology: Topology | None = None

    edge_permutation: Any = None
    """``None``: ``edge`` already holds original edge ids."""

    def __init__(
        self,
        data: Any = None,
        num_neighbors: Any = None,
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
        redraw: bool = True,
        time_window: Any = None,
        strictly_earlier: bool = False,
    ):
        if not directed:
            subgraph_type = "induced"
        self.subgraph_type = SubgraphType(subgraph_type)
        self.replace = flag("replace", replace)
        self._disjoint = flag("disjoint", disjoint)
        self.temporal_strategy = one_of("temporal_strategy", temporal_strategy, ("uniform", "last"))
        self.sample_direction = one_of(
            "sample_direction", sample_direction, ("forward", "backward")
        )
        self.time_attr = time_attr
        self.weight_attr = weight_attr
        self.is_sorted = is_sorted
        self.share_memory = share_memory
        self.redraw = flag("redraw", redraw)
        self.time_window = time_window
        self.strictly_earlier = flag("strictly_earlier", strictly_earlier)
        self.num_neighbors = num_neighbors
        if data is not None:
            self._attach(data)

    # Binding ###############################################################################

    @property
    def is_bound(self) -> bool:
        """True if the sampler knows its graph."""
        return self.topology is not None

    def bind(self, data: Any, **options: Any) -> Self:
        """A copy of this sampler bound to ``data`` with its own and a loader's ``options``.

        An option that only one of the two sets (to something else than its default) counts.

        Args:
            data: ``Data``, ``HeteroData`` or ``(FeatureStore, GraphStore)``.
            options: Arguments of the constructor, by name.

        Raises:
            ValueError: If the sampler is already bound and an option that the caller set is not
                what the sampler was built with, or if both set one and differ.
            NotImplementedError: If an option asks for what is not in ``supports``.
            TypeError: If the constructor of a subclass does not call that of this class.
        """
        if "share_memory" not in vars(self):
            raise TypeError(
                f"{type(self).__name__}.__init__ must call super().__init__(): the sampler has "
                "none of its arguments"
            )
        together = self._together(options)
        if self.is_bound:
            return self
        bound = copy.copy(self)
        NeighborSampler.__init__(bound, data, **together)
        return bound

    def _together(self, options: Mapping[str, Any]) -> dict[str, Any]:
        parameters = inspect.signature(NeighborSampler.__init__).parameters
        theirs = {name: p.default for name, p in parameters.items()} | dict(options)
        if not theirs["directed"]:
            theirs["subgraph_type"] = "induced"
        theirs["subgraph_type"] = SubgraphType(theirs["subgraph_type"])
        theirs["num_neighbors"] = number_of_neighbors(theirs["num_neighbors"])
        together = {"share_memory": self.share_memory or theirs["share_memory"]}
        for name in theirs.keys() - {"self", "data", "directed", "share_memory"}:
            mine = getattr(self, "_disjoint" if name == "disjoint" else name)
            default = parameters[name].default
            if name == "subgraph_type":
                default = SubgraphType(default)
            together[name] = mine if theirs[name] in (None, default) else theirs[name]
            if together[name] != mine and (self.is_bound or mine != default):
                raise ValueError(
                    f"the sampler was built with {name}={mine!r}, the loader was given "
                    f"{name}={theirs[name]!r}: leave it out of one of them"
                )
        return together

    def _attach(self, data: Any) -> None:
        self.topology = topology_of(
            data,
            direction=self.sample_direction,
            time_attr=self.time_attr,
            weight_attr=self.weight_attr,
            is_sorted=self.is_sorted,
        )
        if self.share_memory:
            self.topology.share_memory_()
        self._check_reach(self.topology)
        if self._num_neighbors is None:
            raise ValueError("num_neighbors is missing: give one number per hop, such as [15, 10]")
        self.hops()  # refuses wrong edge types and unequal numbers of hops
        self._check_supported()
        if self.time_window is not None:
            windows_of(self.time_window, self.topology)  # refuses what is no window
        timed = {"strictly_earlier=True": self.strictly_earlier}
        timed["temporal_strategy='last'"] = self.temporal_strategy == "last"
        for option, is_asked in timed.items():
            if is_asked and not self.topology.is_temporal:
                raise ValueError(
                    f"{option} needs times: say in time_attr= which attribute has them"
                )

    def needs(self) -> dict[str, bool]:
        """Those of the :data:`CAPABILITIES` that the arguments ask for."""
        graph = self.topology
        assert graph is not None
        return {
            "hetero": graph.is_hetero,
            "replace": self.replace,
            "disjoint": self._disjoint,
            "weighted": self.weight_attr is not None,
            "window": self.time_window is not None,
            "strict": self.strictly_earlier,
            "last": self.temporal_strategy == "last",
            "node_time": graph.has_node_time,
            "edge_time": graph.has_edge_time,
            "bidirectional": self.subgraph_type == SubgraphType.bidirectional,
            "induced": self.subgraph_type == SubgraphType.induced,
            "backward": self.sample_direction == "backward",
            "fixed": not self.redraw,
        }

    def _check_reach(self, graph: Topology) -> None:
        if graph.router is not None and not self.across_parts:
            raise NotImplementedError(
                f"{type(self).__name__} does not sample across the parts of a graph, of which some "
                "are read by other ranks; neighbor_sampler='native' does (this one needs a graph "
                "of one part, or one that is opened with comm='local' where all parts are)"
            )

    def _check_supported(self) -> None:
        for name, wanted in self.needs().items():
            if wanted:
                self._require(name)

    def _require(self, capability: str) -> None:
        if capability not in self.supports:
            raise NotImplementedError(
                f"{type(self).__name__} does not support {CAPABILITIES[capability]} "
                f"({capability!r}); neighbor_sampler='native' does"
            )

    # Arguments #############################################################################

    @property
    def num_neighbors(self) -> NumNeighbors | None:
        """Neighbours per hop, and per edge type in a heterogeneous graph."""
        return self._num_neighbors

    @num_neighbors.setter
    def num_neighbors(self, value: Any) -> None:
        self._num_neighbors = number_of_neighbors(value)
        if self.is_bound:
            self.hops()

    def hops(self) -> dict[EdgeType, list[int]]:
        """Neighbours per hop of every edge type."""
        graph = self.topology
        assert graph is not None and self._num_neighbors is not None
        if not graph.is_hetero:
            values = self._num_neighbors.get_values()
            if isinstance(values, dict):
                raise ValueError(
                    "num_neighbors maps edge types to numbers, but the graph has no edge "
                    "types: give one number per hop, such as [15, 10]"
                )
            return {None: integers(values)}
        by_type = self._num_neighbors.get_values(list(graph.edge_types))
        return {edge_type: integers(values) for edge_type, values in by_type.items()}

    @property
    def disjoint(self) -> bool:
        """True if every seed gets a subgraph of its own; always so with times, as in PyG."""
        return self._disjoint or (self.topology is not None and self.topology.is_temporal)

    @disjoint.setter
    def disjoint(self, value: bool) -> None:
        self._disjoint = value

    def time_limits(self, seed_time: Tensor) -> TimeLimits:
        """The times between which the seeds of a batch see edges.

        Args:
            seed_time: (Sortable) times, ``int64`` ``[num_seeds]``, of the seeds of all types, in
                the order of the types.
        """
        graph = self.topology
        assert graph is not None
        windows = windows_of(self.time_window, graph)
        return limits_of(graph, seed_time, windows, strict=self.strictly_earlier)

    # Sampling ##############################################################################

    def _finish(self, sample: Sample) -> Sample:
        """Apply the direction and the type of the subgraph to the sampled edges."""
        if self.subgraph_type == SubgraphType.induced:
            sample.num_sampled_nodes = sample.num_sampled_edges = None
        if self.sample_direction == "backward":
            sample = swap_directions(sample)
        if self.subgraph_type == SubgraphType.bidirectional:
            sample = to_bidirectional(sample)
        return sample

    @abstractmethod
    def sample(
        self,
        seed: Mapping[NodeType, Tensor],
        seed_time: Mapping[NodeType, Tensor] | None,
        key: int,
    ) -> Sample:
        """Sample the neighbourhood of seeds.

        Args:
            seed: Node ids ``[num_seeds]`` of one or several types; in range, repeats allowed.
            seed_time: ``int64`` (sortable) time of every seed; given exactly if the graph is
                temporal.
            key: The key of the batch, an unsigned 64-bit integer.
        """

    def sample_from_nodes(
        self, index: NodeSamplerInput, key: int | None = None, **kwargs: Any
    ) -> SamplerOutput | HeteroSamplerOutput:
        """PyG's entry point for node loaders, with the key of the batch.

        Args:
            index: The seeds, their times and their position in the loader's input.
            key: The key of the batch; drawn from torch's default generator if ``None``.
        """
        inputs = NodeSamplerInput.cast(index)
        seed = {inputs.input_type: inputs.node}
        time = None if inputs.time is None else {inputs.input_type: inputs.time}
        out = self.sample_checked(seed, time, key).to_output()
        out.metadata = (inputs.input_id, inputs.time)
        return out

    def sample_from_edges(
        self,
        index: EdgeSamplerInput,
        neg_sampling: Any = None,
        key: int | None = None,
        **kwargs: Any,
    ) -> SamplerOutput | HeteroSamplerOutput:
        """PyG's entry point for link loaders, with the key of the batch.

        Args:
            index: The seed links, their labels and times.
            neg_sampling: PyG's or our :class:`~pyg_scale.sampler.NegativeSampling`.
            key: The key of the batch; drawn from torch's default generator if ``None``.

        Raises:
            NotImplementedError: If the sampler does not declare ``"links"``.
        """
        from pyg_scale.sampler.link import sample_links

        self._require("links")
        return sample_links(self, EdgeSamplerInput.cast(index), neg_sampling, _key(key))

    def sample_checked(
        self,
        seed: Mapping[NodeType, Tensor],
        time: Mapping[NodeType, Tensor] | None,
        key: int | None,
    ) -> Sample:
        """:meth:`sample` after checking the seeds and filling in their times.

        Raises:
            IndexError: If a seed is not a node.
            ValueError: If a time is missing or not wanted, or a seed is of no known type.
        """
        graph = self.topology
        if graph is None:
            raise ValueError(
                f"{type(self).__name__} has no graph: pass data=, or give it to a loader"
            )
        for node_type, node in seed.items():
            check_nodes(node, graph, node_type)
        return self.sample(seed, self._seed_time(seed, time), _key(key))

    def _seed_time(
        self,
        seed: Mapping[NodeType, Tensor],
        time: Mapping[NodeType, Tensor] | None,
    ) -> dict[NodeType, Tensor] | None:
        graph = self.topology
        assert graph is not None
        if not graph.is_temporal:
            if time is not None:
                raise ValueError("seeds have times but the graph has none: set time_attr=")
            return None
        if time is not None:
            return {k: graph.to_time(v) for k, v in time.items()}
        out = {}
        for node_type, node in seed.items():
            when = graph.time_of(node_type, node)
            if when is None:
                raise ValueError(
                    f"seeds of type {node_type!r} have no time: pass input_time= "
                    f"(edge_label_time= for links)"
                )
            out[node_type] = when
        return out


def check_nodes(node: Tensor, graph: Topology, node_type: NodeType, name: str = "seed") -> None:
    """Refuse what is not a list of nodes of ``node_type``."""
    if node_type not in graph.num_nodes:
        raise ValueError(
            f"unknown node type {node_type!r}; the graph has "
            f"{', '.join(repr(t) for t in graph.node_types)}"
        )
    if node.dtype not in (torch.int64, torch.int32) or node.dim() != 1:
        raise TypeError(
            f"{name} must be a one-dimensional int64 or int32 tensor "
            f"(got {node.dtype} of shape {list(node.shape)})"
        )
    if node.numel():
        if node.numel() <= _FEW:
            values = node.tolist()
            low, high = min(values), max(values)
        else:
            low, high = int(node.min()), int(node.max())
        if low < 0 or high >= graph.num_nodes[node_type]:
            of_type = "" if node_type is None else f" of type {node_type!r}"
            raise IndexError(
                f"{name} {low if low < 0 else high} is out of range: the graph has "
                f"{graph.num_nodes[node_type]} nodes{of_type}"
            )


def _key(key: int | None) -> int:
    if key is not None:
        return key
    return int(torch.empty((), dtype=torch.int64).random_())


def number_of_neighbors(value: Any) -> NumNeighbors | None:
    """``num_neighbors`` in PyG's form; ``None`` stays ``None``."""
    if value is None or isinstance(value, NumNeighbors):
        return value
    if isinstance(value, str | int | float):
        raise TypeError(
            f"num_neighbors must be one integer per hop, such as [15, 10] (got {value!r})"
        )
    return NumNeighbors(value.tolist() if isinstance(value, Tensor | np.ndarray) else value)


def integers(num_neighbors: Any) -> list[int]:
    """The numbers of neighbours of an edge type, one per hop."""
    try:
        numbers = [operator.index(k) for k in num_neighbors]
    except TypeError:
        raise TypeError(
            f"num_neighbors must be integers, one per hop (got {num_neighbors!r})"
        ) from None
    if min(numbers, default=0) < -1:
        raise ValueError(
            f"num_neighbors must be -1 (all), 0 (none) or more (got {num_neighbors!r})"
        )
    if max(numbers, default=0) >= 2**31:
        raise ValueError(
            f"num_neighbors must be less than 2**31 (got {num_neighbors!r}); -1 takes all"
        )
    return numbers


def flag(name: str, value: Any) -> bool:
    """An argument that must be a bool."""
    if value not in (True, False):
        raise TypeError(f"{name} must be True or False (got {value!r})")
    return bool(value)


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """An argument that must be one of some words."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))} (got {value!r})")
    return value
