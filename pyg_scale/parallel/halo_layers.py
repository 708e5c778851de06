"""Stock layers on a share of a graph whose halo other ranks have.

Where a layer looks at sources of edges, it gets the rows of the halo. While these are under way, it
computes inner nodes, all of whose neighbours are own ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils import add_remaining_self_loops, scatter

from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.parallel.exchange import Extension, HaloExchange
from pyg_scale.parallel.layers import GraphLayers, ends_of
from pyg_scale.parallel.peers import Peers
from pyg_scale.parallel.split import LEFT_BEHIND, Split, edge_rows, split_edges


class HaloLayers(GraphLayers):
    """Layers that get the halo's rows wherever they look at sources of edges.

    Args:
        module: See :class:`GraphLayers`.
        edges: The edges of own nodes by type, see :class:`~pyg_scale.parallel.shard.Shard`.
        exchange: The exchange of halo rows.
        peers: The ranks.
        constant: See :class:`GraphLayers`.
    """

    def __init__(
        self,
        module: nn.Module,
        edges: dict[EdgeType, Tensor],
        exchange: HaloExchange,
        peers: Peers,
        constant: Sequence[Tensor],
    ) -> None:
        super().__init__(module, peers, constant)
        self._exchange, self._is_hetero = exchange, None not in exchange.halos
        self._kept: dict[int, Tensor] = {}
        self._edge_types = {id(each): edge_type for edge_type, each in edges.items()}
        self._within: list[tuple[str, EdgeType]] = []
        self._last: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._norms: dict[Any, tuple[Tensor, Tensor]] = {}
        self._splits: dict[int, tuple[Tensor, Split | None]] = {}
        self._checked: dict[tuple[int, int], Tensor] = {}

    # The layer #############################################################################

    def hooked(self, conv: MessagePassing) -> list[Any]:
        return [
            conv.register_forward_pre_hook(self._enter, with_kwargs=True),
            conv.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, layer: Any, args: Any, kwargs: Any) -> None:
        given = [id(each) for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        known = [self._edge_types[each] for each in given if each in self._edge_types]
        if self._is_hetero and not known:
            raise ValueError(
                f"{type(layer).__name__} is given other edges than those of the graph, so that the "
                "types of its nodes are not known"
            )
        self._within.append((type(layer).__name__, known[0] if known else None))

    def _leave(self, layer: Any, args: Any, out: Any) -> None:
        if self._within:
            self._within.pop()
        if not self._within:
            self._last = {}
            self._forget_splits()

    @property
    def _types(self) -> tuple[NodeType, NodeType]:
        edge_type = self._within[-1][1] if self._within else None
        return (None, None) if edge_type is None else (edge_type[0], edge_type[2])

    # Where edges are followed ##############################################################

    def propagate(self, layer: Any, edge_index: Tensor, kwargs: dict[str, Any]) -> Any:
        sources = self._sources(layer, kwargs, layer._user_args)
        halos, (src, dst) = self._exchange.halos, self._types

        def on(edges: Tensor, is_whole: bool, changed: dict[str, Any]) -> Any:
            rows = halos[src].num_own + is_whole * halos[src].num_halo
            size = (rows, halos[dst].num_own)
            return type(layer).propagate(layer, edges, size=size, **{**kwargs, **changed})

        return self._on_parts(layer, edge_index, kwargs, sources, on, of_nodes=True)

    def update_edges(self, layer: Any, edge_index: Tensor, kwargs: dict[str, Any]) -> Any:
        sources = self._sources(layer, kwargs, layer._edge_user_args)

        def on(edges: Tensor, is_whole: bool, changed: dict[str, Any]) -> Any:
            return type(layer).edge_updater(layer, edges, size=None, **{**kwargs, **changed})

        return self._on_parts(layer, edge_index, kwargs, sources, on, of_nodes=False)

    def _on_parts(
        self,
        layer: Any,
        edge_index: Tensor,
        kwargs: dict[str, Any],
        sources: dict[str, tuple[Tensor, Any]],
        on: Callable[[Tensor, bool, dict[str, Any]], Any],
        of_nodes: bool,
    ) -> Any:
        """The result of a layer for all edges: of inner ones while the halo's rows are under way.

        Args:
            layer: The layer.
            edge_index: All edges.
            kwargs: The arguments of the layer.
            sources: See :meth:`_sources`.
            on: Calls it with edges, from own rows of sources or all, and changed arguments.
            of_nodes: Whether the result has a row for each own node, or for each edge.
        """
        self._check_ends(edge_index)
        rows = [value for value, _ in sources.values()]
        coming = self._halo_of(self._types[0], rows, layer.node_dim)

        def changed(found: list[Tensor]) -> dict[str, Any]:
            pairs = zip(sources.items(), found, strict=True)
            return {name: (each, other) for (name, (_, other)), each in pairs}

        split, of_edges = None, None
        if coming.is_under_way:
            split = self._split(edge_index)
            of_edges = edge_rows(layer, edge_index, kwargs, sources, of_nodes)
        if split is None or of_edges is None:
            return on(edge_index, True, changed(coming.whole()))
        found, left = [], []
        for edges, position, is_whole in split.parts:
            given = coming.whole() if is_whole else coming.own
            some = {name: each[position] for name, each in of_edges.items()}
            found.append(on(edges, is_whole, {**changed(given), **some}))
            left.append(vars(layer).get(LEFT_BEHIND))
        if all(isinstance(each, Tensor) for each in left):
            setattr(layer, LEFT_BEHIND, split.of_edges(*left))
        inner, outer = found
        if of_nodes:
            return split.of_nodes(inner, outer, layer.node_dim)
        return split.of_edges(inner, outer)

    def _check_ends(self, edge_index: Tensor) -> None:
        """Refuse edges that end at nodes of other ranks; those of the graph and degrees do not."""
        of_degrees = any(edges is edge_index for edges, _ in self._norms.values())
        if id(edge_index) in self._edge_types or of_degrees:
            return
        key = id(edge_index), edge_index._version
        if key in self._checked:
            return
        own = self._exchange.halos[self._types[1]].num_own
        if edge_index.size(1) and int(edge_index[1].max()) >= own:
            layer = self._within[-1][0] if self._within else "a layer"
            raise ValueError(
                f"{layer} is given edges that end at nodes of other ranks, as "
                "edge_index.flip(0) does, and a rank has the in-edges of its own nodes: add the "
                "edges the other way to the graph before it is partitioned, or use 'feature'"
            )
        self._checked[key] = edge_index

    def _split(self, edge_index: Tensor) -> Split | None:
        """Inner edges and others; ``None`` if there are no inner ones."""
        if id(edge_index) not in self._splits:
            src, dst = (self._exchange.halos[each].num_own for each in self._types)
            self._splits[id(edge_index)] = edge_index, split_edges(edge_index, src, dst)
        return self._splits[id(edge_index)][1]

    def _forget_splits(self) -> None:
        """Keep those of edges that never change."""
        kept = {*self._edge_types, *(id(edges) for edges, _ in self._norms.values())}
        self._splits = {key: each for key, each in self._splits.items() if key in kept}
        self._checked = {}

    def _sources(
        self, layer: Any, kwargs: dict[str, Any], names: list[str]
    ) -> dict[str, tuple[Tensor, Any]]:
        """The arguments that a layer looks at by the source of an edge: own rows of both ends."""
        src, dst = self._types
        pairs: dict[str, tuple[Tensor, Any]] = {}
        for name in ends_of(names, "_j"):
            value = kwargs.get(name)
            if isinstance(value, tuple | list) and isinstance(value[0], Tensor):
                pairs[name] = (value[0], value[1])
            elif isinstance(value, Tensor):
                pairs[name] = (value, value if src == dst else None)
        own = self._exchange.halos[src].num_own
        for name, (value, _) in pairs.items():
            if value.size(layer.node_dim) != own:
                raise ValueError(
                    f"{type(layer).__name__}: {name} has {value.size(layer.node_dim)} rows for "
                    f"{own} own nodes"
                )
        return pairs

    def _halo_of(self, node_type: NodeType, tensors: list[Tensor], dim: int) -> Extension:
        """Tensors with the halo's rows, of which those that are known are not sent again."""
        found = {id(tensor): self._known(tensor) for tensor in tensors}
        missing = {id(each): each for each in tensors if found[id(each)] is None}
        if not missing:
            return Extension([found[id(each)] for each in tensors])  # type: ignore[misc]
        constant = [each for each in missing.values() if self.is_constant(each)]
        if 0 < len(constant) < len(missing):  # kept for good, so exact and without a gradient
            self._halo_of(node_type, constant, dim).whole()
            return self._halo_of(node_type, tensors, dim)
        rows = [each.movedim(dim, 0) for each in missing.values()]
        send = self._exchange.exactly if constant else self._exchange.extend
        coming = send(node_type, rows)
        if not constant:
            self._last = {}

        def whole() -> list[Tensor]:
            for tensor, each in zip(missing.values(), coming.whole(), strict=True):
                found[id(tensor)] = each = each.movedim(0, dim)
                if self.is_constant(tensor):
                    self._kept[id(tensor)] = each
                else:
                    self._last[id(tensor), tensor._version] = (tensor, each)
            return [found[id(tensor)] for tensor in tensors]  # type: ignore[misc]

        if not coming.is_under_way:
            return Extension(whole())
        own = dict(zip(missing, coming.own, strict=True))
        near = [own[id(t)].movedim(0, dim) if id(t) in own else t for t in tensors]
        return Extension(near, whole)

    def _known(self, tensor: Tensor) -> Tensor | None:
        """The rows sent before: in this layer (of other relations), or of the graph itself."""
        if self.is_constant(tensor) and id(tensor) in self._kept:
            return self._kept[id(tensor)]
        entry = self._last.get((id(tensor), tensor._version))
        return None if entry is None else entry[1]

    # Degrees ###############################################################################

    def replacements(self) -> dict[str, Callable[..., Any]]:
        return {"gcn_norm": self._gcn_norm}

    def _gcn_norm(
        self,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        num_nodes: int | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        flow: str = "source_to_target",
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``gcn_norm`` of PyG for own nodes: their degrees are here, those of the halo are sent."""
        key = (id(edge_index), id(edge_weight), improved, add_self_loops, dtype)
        keeps = id(edge_index) in self._edge_types and edge_weight is None
        if keeps and key in self._norms:
            return self._norms[key]
        self._check_ends(edge_index)
        halo = self._exchange.halos[self._types[1]]
        if add_self_loops:
            fill = 2.0 if improved else 1.0
            edge_index, edge_weight = add_remaining_self_loops(
                edge_index, edge_weight, fill, halo.num_own
            )
        if edge_weight is None:
            edge_weight = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
        src, dst = edge_index
        degree = scatter(edge_weight, dst, 0, dim_size=halo.num_own, reduce="sum")
        scale = degree.pow(-0.5)
        scale = scale.masked_fill(scale == float("inf"), 0.0)
        (whole,) = self._exchange.exactly(self._types[1], [scale]).whole()
        found = (edge_index, whole[src] * edge_weight * scale[dst])
        if keeps:
            self._norms[key] = found
        self._checked[id(edge_index), edge_index._version] = edge_index
        return found
