"""The capabilities of samplers and of what they return: names, and protocols to ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from pyg_scale.graph.topology import Topology

CAPABILITIES = {
    "hetero": "graphs with several node or edge types",
    "replace": "replace=True",
    "disjoint": "disjoint=True",
    "weighted": "weight_attr=",
    "node_time": "time_attr= of a node attribute",
    "edge_time": "time_attr= of an edge attribute",
    "last": "temporal_strategy='last'",
    "window": "time_window=",
    "strict": "strictly_earlier=True",
    "bidirectional": "subgraph_type='bidirectional'",
    "induced": "subgraph_type='induced'",
    "backward": "sample_direction='backward'",
    "fixed": "redraw=False",
    "links": "link loaders (sample_from_edges)",
}
"""The names that a sampler can declare in ``supports``; others raise when asked for."""


@runtime_checkable
class DrawsByNode(Protocol):
    """A sampler that says whether what it draws for a node depends on that node alone.

    Attributes:
        draws_by_node: Whether draws are a function of the batch's key, the hop, the edge type and
            the node, and of nothing else of the batch. The pieces of a step that several ranks
            share are then sampled with one key, and a node has the same neighbours in all of them.
    """

    draws_by_node: bool


@runtime_checkable
class MayKeepDraws(Protocol):
    """A sampler that says whether it draws anew in every batch.

    Attributes:
        redraw: If False, what a node gets in a hop follows from the loader's seed and the node
            alone: it is the same in all batches of all epochs, for all seeds.
    """

    redraw: bool


@runtime_checkable
class WeighsEdges(Protocol):
    """A sampler whose samples have weights of edges, ``edge_attrs["edge_weight"]``.

    Attributes:
        weights: The sum over all in-edges of which the weighted sum over sampled in-edges is an
            unbiased estimate: ``"sum"``, ``"mean"``, or ``"gcn"`` for
            ``1 / sqrt(d(source) * d(destination))``; ``None`` if there are no weights.
    """

    weights: str | None


@runtime_checkable
class FollowsSteps(Protocol):
    """A sampler whose draws may depend on where a batch stands among those of all epochs.

    Attributes:
        batch_dependency: The number of batches within which its random numbers change; with 1,
            those of a batch follow from its key, and nothing else is needed.
    """

    batch_dependency: int

    def at_step(self, seed: int, step: int) -> Any:
        """The sampler of a batch.

        Args:
            seed: The seed of the loader.
            step: Counts the batches of all ranks, over all epochs, from 0.
        """
        ...


@runtime_checkable
class HasTopology(Protocol):
    """A sampler that has the graph as a topology.

    Attributes:
        topology: The graph; ``None`` if the sampler is unbound, or the graph is elsewhere.
    """

    topology: Topology | None


@runtime_checkable
class ExcludesPositives(Protocol):
    """A sampler that draws negatives itself, and says whether it can leave out positives.

    Attributes:
        knows_exclude_positives: True if it follows
            :attr:`pyg_scale.sampler.NegativeSampling.exclude_positives`.
    """

    knows_exclude_positives: bool


@runtime_checkable
class HasNodeAttrs(Protocol):
    """A sampled subgraph with extra tensors of nodes, which batches get.

    Attributes:
        node_attrs: Tensors with a row for each node, by name; in a graph with types, of each type.
    """

    node_attrs: Mapping[str, Any]


@runtime_checkable
class HasEdgeAttrs(Protocol):
    """A sampled subgraph with extra tensors of edges, which batches get.

    Attributes:
        edge_attrs: As :attr:`HasNodeAttrs.node_attrs`, for edges.
    """

    edge_attrs: Mapping[str, Any]


@runtime_checkable
class HasPointers(Protocol):
    """A sampled subgraph that knows where the edges of each destination begin.

    Attributes:
        colptr: ``int64``, see :class:`pyg_scale.sampler.Sample`; in a graph with types, of each.
    """

    colptr: Any
