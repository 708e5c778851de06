"""Rows that ``trim_to_layer`` would cut off after a layer, left out before it.

In a sampled batch the nodes of the last hop have no in-edges. A layer has a row of its result for
each of them all the same, and the next call of PyG's ``trim_to_layer`` cuts exactly these rows off.
Most nodes of a batch are of the last hop. A layer that gets ``(x, x[:n])`` instead of ``x`` makes
rows for the first ``n`` nodes only, so that linear maps, activations and gradients of the others
are not computed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn import aggr
from torch_geometric.nn.aggr.fused import FusedAggregation
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import trim_to_layer as _pyg_trim_to_layer
from torch_geometric.utils._trim_to_layer import TrimToLayer

from pyg_scale.nn.conv.base import FusedConv, Made, observed, untouched
from pyg_scale.nn.fallback import record
from pyg_scale.nn.linear import LINEAR_MAPS
from pyg_scale.ops.colptr import recall, remember
from pyg_scale.ops.lazy_rows import LazyRows

OF_PAIRS = {
    *(pyg.SAGEConv, pyg.GraphConv, pyg.GINConv, pyg.GINEConv, pyg.EdgeConv),
    *(pyg.GATConv, pyg.GATv2Conv, pyg.TransformerConv, pyg.ResGatedGraphConv),
}
"""Layers of PyG whose result for some nodes is the same if only these are destinations."""

_LEAST_CUT = 24_000  # rows times channels; fewer cost less than a layer of pairs, as measured
_PLAIN = (Tensor, nn.Parameter, LazyRows)
_BY_ROW = {
    *(nn.Identity, nn.Linear, pyg.Linear, pyg.MLP, nn.Sequential, nn.ModuleList),
    *LINEAR_MAPS.values(),
    *(nn.Dropout, nn.LayerNorm, nn.RMSNorm),
    *(aggr.SumAggregation, aggr.MeanAggregation, aggr.MaxAggregation, aggr.MinAggregation),
    *(aggr.MulAggregation, aggr.VarAggregation, aggr.StdAggregation, aggr.SoftmaxAggregation),
    *(aggr.PowerMeanAggregation, aggr.MultiAggregation, FusedAggregation),
}
"""Modules that compute each row from its own, or each destination from its own messages."""
_BY_NUMBER = {F.relu, F.elu, F.gelu, F.silu, F.leaky_relu, F.selu, torch.relu, torch.tanh}
_BY_NUMBER |= {torch.sigmoid, F.softplus, F.mish}


def trim_to_layer(
    layer: int,
    num_sampled_nodes_per_hop: Any,
    num_sampled_edges_per_hop: Any,
    x: Any,
    edge_index: Any,
    edge_attr: Any = None,
) -> tuple[Any, Any, Any]:
    """Trim a batch for a layer as :func:`torch_geometric.utils.trim_to_layer`, and its result too.

    Instead of ``x`` it returns a pair: the features of all nodes that are left, and of those of
    which the next call would keep the rows. A layer that takes pairs, such as ``SAGEConv``,
    computes these rows alone, and the next call has no row to cut off::

        for i, conv in enumerate(convs):
            x, edge_index, _ = trim_to_layer(i, nodes_per_hop, edges_per_hop, x, edge_index)
            x = conv(x, edge_index).relu()  # with PyG's: of nodes that nobody reads, too

    The last layer, if there is one for each hop, has a row for each seed. A residual connection
    adds ``x[1]``. What lies between two layers sees fewer rows, which matters for statistics over
    nodes, such as those of a batch norm.

    Args:
        layer: The number of the layer, from 0.
        num_sampled_nodes_per_hop: Number of nodes of each hop, the seeds first; by node type in a
            heterogeneous batch.
        num_sampled_edges_per_hop: Number of edges of each hop; by edge type in a heterogeneous
            batch.
        x: The result of the layer before, or the features of the batch.
        edge_index: The edges, as the call before returned them. Nodes that edges of other forms
            than a tensor, or edges to nodes of the last hop, go to are all destinations.
        edge_attr: Values of the edges, or ``None``.

    Returns:
        The pair, the edges, and their values, of the layer. Of a heterogeneous batch, what PyG's
        function returns.
    """
    if not isinstance(x, Tensor):
        rest = num_sampled_nodes_per_hop, num_sampled_edges_per_hop
        return _pyg_trim_to_layer(layer, *rest, x, edge_index, edge_attr)
    nodes, edges = num_sampled_nodes_per_hop, num_sampled_edges_per_hop
    x, edge_index, edge_attr = _of_layer(layer, nodes, edges, x, edge_index, edge_attr)
    count = num_read(layer, nodes, edges, x, edge_index)
    return (x, x if count == x.size(0) else x[:count]), edge_index, edge_attr


def _of_layer(
    layer: int, nodes: list[int], edges: list[int], x: Tensor, edge_index: Any, edge_attr: Any
) -> tuple[Tensor, Any, Any]:
    """PyG's ``trim_to_layer``; features that have only the rows of this layer stay as they are."""
    whole = edge_index
    x_is_cut = 0 < layer < len(nodes) and x.size(0) == sum(nodes[: len(nodes) - layer])
    given = x.new_empty(x.size(0) + nodes[-layer], 0) if x_is_cut else x  # PyG cuts this instead
    out, edge_index, edge_attr = _pyg_trim_to_layer(
        layer, nodes, edges, given, edge_index, edge_attr
    )
    known = recall(whole) if edge_index is not whole and type(whole) is Tensor else None
    if known is not None:
        count = sum(nodes[: len(edges) - layer])  # destinations of the edges that are left
        if count < known.numel() and _ends_at(known, count, edge_index.size(1)):
            remember(edge_index, known[: count + 1])
    return x if x_is_cut else out, edge_index, edge_attr


def _ends_at(colptr: Tensor, count: int, num_edges: int) -> bool:
    """Return True if the edges are those into the first ``count`` nodes."""
    return colptr.is_cpu and int(colptr[count]) == num_edges


def num_read(layer: int, nodes: list[int], edges: list[int], x: Tensor, edge_index: Any) -> int:
    """The number of rows of a layer's result that the layers after it read, or the model returns.

    Args:
        layer: The number of the layer, from 0.
        nodes: Number of nodes of each hop, the seeds first.
        edges: Number of edges of each hop.
        x: Features of the nodes that are left, ``[n, channels]``.
        edge_index: The edges that are left.

    Returns:
        ``n`` if nothing would be cut off, if edges go to what would be, or if the numbers of hops
        are not those of ``x``.
    """
    whole = x.size(0)
    if not 0 <= layer < min(len(nodes), len(edges)):
        return whole
    count = whole - nodes[-(layer + 1)]
    if count < 0 or type(edge_index) is not Tensor or edge_index.dim() != 2:
        return whole
    known = recall(edge_index)
    if known is not None and known.numel() - 1 <= count:
        return count
    if known is not None and known.is_cpu:
        inside = int(known[count]) == edge_index.size(1)
    else:
        inside = edge_index.size(1) == 0 or int(edge_index[1].max()) < count
    return count if inside else whole


# Models of PyG ############################################################################


class TrimmedGNN(Made):
    """A ``BasicGNN`` of PyG whose layers compute only the rows that are read after them.

    It does so in calls with ``num_sampled_nodes_per_hop`` and ``num_sampled_edges_per_hop``, for
    each layer of which the rows that are left are the same, and where they are enough to pay for
    it. Made by :func:`trimmed`; its module ``_trim`` is a :class:`TrimAhead`.
    """

    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_weight: Any = None,
        edge_attr: Any = None,
        batch: Any = None,
        batch_size: Any = None,
        num_sampled_nodes_per_hop: Any = None,
        num_sampled_edges_per_hop: Any = None,
    ) -> Any:
        """See PyG. With numbers of each hop, as many rows as the layers after the last one read."""
        forward: Any = self.replaces.forward  # type: ignore[attr-defined]
        given = self, x, edge_index, edge_weight, edge_attr, batch, batch_size
        hops = num_sampled_nodes_per_hop
        if type(hops) is not list or torch.compiler.is_compiling():
            return forward(*given, hops, num_sampled_edges_per_hop)
        hops = _Hops(hops)
        hops.model = self
        out = forward(*given, hops, num_sampled_edges_per_hop)
        return out if hops.rows in (None, out.size(0)) else out[: hops.rows]


class _Hops(list[int]):
    """Numbers of nodes of each hop on their way through a model."""

    model: Any
    is_ahead = False
    """True once a layer computed only the rows that are read."""
    rows: int | None = None
    """The number of rows of the result, once the last layer has begun."""


class TrimAhead(TrimToLayer):
    """PyG's module of :class:`TrimmedGNN`, which hands its layers pairs.

    Attributes:
        min_work: Rows that would be cut off times channels from which on they are left out; 0:
            always. ``None``: where it was measured to pay.
    """

    min_work: int | None = None

    def forward(
        self,
        layer: int,
        num_sampled_nodes_per_hop: Any,
        num_sampled_edges_per_hop: Any,
        x: Any,
        edge_index: Any,
        edge_attr: Any = None,
    ) -> Any:
        """See PyG; ``x`` may become a pair."""
        nodes, edges = num_sampled_nodes_per_hop, num_sampled_edges_per_hop
        if type(nodes) is not _Hops or type(edges) is not list or type(x) not in _PLAIN:
            return super().forward(layer, nodes, edges, x, edge_index, edge_attr)
        least = _LEAST_CUT if self.min_work is None else self.min_work
        cut = nodes[-(layer + 1)] if layer < len(nodes) else 0
        is_last, is_small = layer == len(nodes.model.convs) - 1, cut * x.size(-1) < least
        if nodes.is_ahead or not is_small:
            x, edge_index, edge_attr = _of_layer(layer, nodes, edges, x, edge_index, edge_attr)
        else:
            x, edge_index, edge_attr = super().forward(
                layer, nodes, edges, x, edge_index, edge_attr
            )
        if is_small and not is_last:
            return x, edge_index, edge_attr
        count = num_read(layer, nodes, edges, x, edge_index)
        if is_last:
            nodes.rows = count
        if is_small or count == x.size(0):
            return x, edge_index, edge_attr
        reason = why_not_ahead(nodes.model, layer)
        if reason:
            record(nodes.model, f"rows that are cut off are computed: {reason}")
            return x, edge_index, edge_attr
        nodes.is_ahead = True
        return (x, x[:count]), edge_index, edge_attr


@functools.cache
def trimmed(cls: type[BasicGNN]) -> type[TrimmedGNN]:
    """The subclass of a model whose layers compute only the rows that are read after them.

    Args:
        cls: The class of a model for which :func:`is_trimmable` holds.

    Returns:
        A class of the same name, parameters and ``state_dict``; made once.
    """
    body = {
        "replaces": cls,
        "made_by": staticmethod(trimmed),
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    return type(cls.__name__, (TrimmedGNN, cls), body)


def class_of(module: nn.Module) -> Any:
    """The class of a model or layer or, of an accelerated one, PyG's class."""
    return module.replaces if isinstance(module, TrimmedGNN | FusedConv) else type(module)


def is_trimmable(model: Any) -> bool:
    """Return True for a ``BasicGNN`` that goes through its layers as PyG's do, trimmed or not."""
    return (
        isinstance(model, BasicGNN)
        and class_of(model).forward is BasicGNN.forward
        and "forward" not in model.__dict__
        and isinstance(model._modules.get("_trim"), TrimToLayer)
    )


def why_not_ahead(model: Any, layer: int) -> str:
    """The reason why a layer of a ``BasicGNN`` must compute all rows; empty if there is none."""
    if hasattr(model, "jk"):
        return f"jk={model.jk_mode!r} reads the rows of every layer"
    conv = model.convs[layer]
    if class_of(conv) not in OF_PAIRS:
        return f"convs.{layer} is a {type(conv).__name__}"
    if conv.flow != "source_to_target":
        return f"flow={conv.flow!r}"
    reason = observed(conv)
    if reason is not None:
        return reason
    for name, module in conv.named_modules():
        if module is not conv and not is_by_row(module):
            return f"convs.{layer}.{name} is a {type(module).__name__}"
    if not untouched(conv, type(conv)):
        return f"convs.{layer} has hooks"
    norm = model.norms[layer]
    for module in norm.modules():
        if not is_by_row(module):
            return f"norms.{layer} is a {type(norm).__name__}"
    if not is_act_by_row(model.act):
        return "act is not known to keep rows apart"
    return "" if is_by_row(model.dropout) else "dropout has hooks"


def is_act_by_row(act: Any) -> bool:
    """Return True for the ``act`` of a ``BasicGNN`` that keeps rows apart."""
    return act is None or act in _BY_NUMBER or is_by_row(act)


def is_by_row(module: Any) -> bool:
    """Return True for a module without hooks that keeps rows apart; its children not looked at."""
    kind: Any = type(module)
    if not isinstance(module, nn.Module) or not untouched(module, kind):
        return False
    if kind in _BY_ROW:
        return True
    if kind is pyg.LayerNorm:
        return module.mode == "node"
    if kind is nn.BatchNorm1d or kind is pyg.BatchNorm:
        inner: Any = module if kind is nn.BatchNorm1d else module.module
        return not module.training and not inner.training and inner.track_running_stats
    return kind.__module__ == nn.ReLU.__module__ and not hasattr(module, "dim")
