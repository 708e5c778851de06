"""Models and graphs for wrappers that divide a graph, and their training with and without."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data, HeteroData

import pyg_scale
from pyg_scale import parallel
from pyg_scale.nn import accelerate
from pyg_scale.parallel.mesh import DIMENSIONS
from pyg_scale.testing.graph_parallel import cut, opened
from pyg_scale.testing.parallel import CHANNELS, CLASSES, TOLERANCE

HIDDEN = 6
STEPS = 3
LOOPLESS = {"add_self_loops": False}


class Found(NamedTuple):
    """The results of a model on a rank."""

    out: Tensor
    gradients: dict[str, Tensor | None]
    final: dict[str, Tensor]


class Stack(nn.Module):
    """Two layers, with an optional module between them."""

    def __init__(self, first: nn.Module, last: nn.Module, between: nn.Module | None = None):
        super().__init__()
        self.first, self.last = first, last
        self.between = nn.Tanh() if between is None else between

    def forward(self, x: Tensor, edge_index: Tensor, *of_edges: Tensor) -> Tensor:
        x = self.between(self.first(x, edge_index, *of_edges))
        return self.last(x, edge_index, *of_edges)


class Shared(nn.Module):
    """One layer, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.conv = nn.Linear(CHANNELS, CLASSES), pyg.SAGEConv(CLASSES, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.into(x)
        for _ in range(3):
            x = self.conv(x, edge_index).tanh()
        return x


class Checkpointed(nn.Module):
    """Its layers compute again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = pyg.GATv2Conv(CHANNELS, HIDDEN), pyg.GCNConv(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in (self.first, self.last):
            x = checkpoint(layer, x, edge_index, use_reentrant=False)
        return x


def pair(conv: Callable[..., nn.Module], between: nn.Module | None = None, **options: Any) -> Stack:
    """Two layers of a kind."""
    heads = options.get("heads", 1)
    return Stack(
        conv(CHANNELS, HIDDEN, **options), conv(HIDDEN * heads, CLASSES, **options), between
    )


def gin(inside: int, outside: int) -> nn.Module:
    """A GIN layer whose network normalises over all nodes."""
    return pyg.GINConv(
        nn.Sequential(
            nn.Linear(inside, outside), nn.BatchNorm1d(outside), nn.Linear(outside, outside)
        ),
        train_eps=True,
    )


def last(conv: nn.Module, channels: int = HIDDEN) -> Stack:
    """A layer between linear ones, for layers that keep the number of channels."""

    class Around(Stack):
        def forward(self, x: Tensor, edge_index: Tensor, *of_edges: Tensor) -> Tensor:
            return self.last(self.between(self.conv(self.first(x), edge_index, *of_edges)))

    model = Around(nn.Linear(CHANNELS, channels), nn.Linear(channels, CLASSES))
    model.conv = conv
    return model


class Beside(nn.Module):
    """Its first layer sends the graph's own features beside rows that need a gradient."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.into, self.conv = nn.Linear(CHANNELS, CHANNELS), conv
        self.last = pyg.SAGEConv(CHANNELS, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first = x if isinstance(self.conv, pyg.FAConv) else self.into(x)
        return self.last(self.conv(first, x, edge_index).tanh(), edge_index)


BOTH_WAYS: dict[str, Callable[[], nn.Module]] = {
    "both ways": lambda: last(pyg.DirGNNConv(pyg.SAGEConv(HIDDEN, HIDDEN))),
    "both ways gcn": lambda: last(pyg.DirGNNConv(pyg.GCNConv(HIDDEN, HIDDEN))),
}
"""Models that also follow edges the other way."""

BESIDE: dict[str, Callable[[], nn.Module]] = {
    "point": lambda: Beside(pyg.PointNetConv(nn.Linear(2 * CHANNELS, CHANNELS))),
    "fa": lambda: Beside(pyg.FAConv(CHANNELS)),
}
"""Models that send what never changes in one call with what does."""

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: pair(pyg.GCNConv),
    "gcn improved": lambda: pair(pyg.GCNConv, improved=True, between=pyg.BatchNorm(HIDDEN)),
    "sage mean": lambda: pair(pyg.SAGEConv),
    "sage max": lambda: pair(pyg.SAGEConv, aggr="max", project=True),
    "gin": lambda: pair(gin),
    "gat": lambda: Stack(pyg.GATConv(CHANNELS, 3, heads=2), pyg.GATConv(6, CLASSES, residual=True)),
    "gatv2": lambda: Stack(pyg.GATv2Conv(CHANNELS, 3, heads=2), pyg.GATv2Conv(6, CLASSES)),
    "transformer": lambda: Stack(
        pyg.TransformerConv(CHANNELS, 3, heads=2), pyg.TransformerConv(6, CLASSES, beta=True)
    ),
    "appnp": lambda: last(pyg.APPNP(4, 0.1)),
    "tag": lambda: pair(pyg.TAGConv),
    "sg": lambda: pair(pyg.SGConv, K=3),
    "ssg": lambda: pair(pyg.SSGConv, alpha=0.2, K=3),
    "arma": lambda: pair(pyg.ARMAConv, num_stacks=2, num_layers=3),
    "gated": lambda: last(pyg.GatedGraphConv(HIDDEN, 3)),
    "shared": Shared,
    "checkpointed": Checkpointed,
}
"""Models of ``x`` and ``edge_index``."""

BY_HEAD: dict[str, Callable[[], nn.Module]] = {
    "gat heads": lambda: Stack(
        pyg.GATConv(CHANNELS, 2, heads=12), pyg.GATConv(24, CLASSES, heads=12, concat=False)
    ),
    "gatv2 heads": lambda: Stack(
        pyg.GATv2Conv(CHANNELS, 2, heads=12, share_weights=True),
        pyg.GATv2Conv(24, CLASSES, heads=12, concat=False),
    ),
    "transformer heads": lambda: Stack(
        pyg.TransformerConv(CHANNELS, 2, heads=12),
        pyg.TransformerConv(24, CLASSES, heads=12, concat=False),
    ),
}
"""Models whose heads can be divided among 2, 3 or 4 ranks."""

MORE: dict[str, Callable[[], nn.Module]] = {
    "lg": lambda: last(pyg.LGConv()),
    "mixhop": lambda: Stack(pyg.MixHopConv(CHANNELS, 2), pyg.MixHopConv(6, 4)),
    "graph": lambda: pair(pyg.GraphConv, aggr="mean"),
    "general": lambda: pair(pyg.GeneralConv),
    "resgated": lambda: pair(pyg.ResGatedGraphConv),
    "edge": lambda: last(pyg.EdgeConv(nn.Linear(2 * HIDDEN, HIDDEN))),
    "leconv": lambda: pair(pyg.LEConv),
    "film": lambda: pair(pyg.FiLMConv),
    "feast": lambda: pair(pyg.FeaStConv),
    "gen": lambda: pair(pyg.GENConv, norm="layer"),
    "agnn": lambda: last(pyg.AGNNConv()),
    "antisymmetric": lambda: last(pyg.AntiSymmetricConv(HIDDEN)),
    "pna": lambda: pair(
        pyg.PNAConv, aggregators=["mean", "std"], scalers=["identity"], deg=torch.ones(9).long()
    ),
    "eg": lambda: pair(pyg.EGConv, num_heads=1, num_bases=2),
    "batch norm without weights": lambda: pair(
        pyg.SAGEConv, between=nn.BatchNorm1d(HIDDEN, affine=False, momentum=None)
    ),
    "basic gnn": lambda: pyg.GraphSAGE(CHANNELS, HIDDEN, 3, CLASSES, norm="BatchNorm", jk="cat"),
    "median": lambda: pair(pyg.SAGEConv, aggr="median"),
    "several": lambda: pair(pyg.SAGEConv, aggr=["mean", "max", "softmax"]),
}
"""Further models of ``x`` and ``edge_index``."""

OF_EDGES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "rgcn": (lambda: pair(pyg.RGCNConv, num_relations=3), "edge_type"),
    "gcn weights": (lambda: pair(pyg.GCNConv), "edge_weight"),
    "gat edges": (lambda: pair(pyg.GATConv, edge_dim=2), "edge_attr"),
    "gine": (
        lambda: last(pyg.GINEConv(nn.Linear(HIDDEN, HIDDEN), edge_dim=2)),
        "edge_attr",
    ),
}
"""Models of ``x``, ``edge_index`` and an attribute of edges."""


BY_CHANNEL = [
    "gcn",
    "gcn improved",
    "sage mean",
    "sage max",
    "gin",
    "appnp",
    "tag",
    "sg",
    "ssg",
    "arma",
    "gated",
    "shared",
    "rgcn",
    "gcn weights",
]
"""Models whose layers aggregate each channel for itself."""

SEQUENTIAL = [
    "gcn",
    "sage mean",
    "gin",
    "gat",
    "appnp",
    "tag",
    "sg",
    "ssg",
    "arma",
    "gated",
    "shared",
    "lg",
    "mixhop",
    "graph",
    "gcn weights",
    "gat edges",
    "sage max",
    "gatv2",
    "transformer",
    "rgcn",
]
"""Models whose layers can be computed piece by piece."""


def strip() -> tuple[Data, Tensor, int]:
    """A graph along a line, of which three parts have many inner nodes, and its cut."""
    data, _, _ = cut("random")
    data = data.clone()
    nodes = torch.arange(data.num_nodes)
    pairs = [torch.stack([nodes[:-step], nodes[step:]]) for step in (1, 2)]
    half = torch.cat(pairs, dim=1)
    data.edge_index = torch.cat([half, half.flip(0)], dim=1)
    return data, nodes * 3 // data.num_nodes, 3


def graph(name: str) -> tuple[Data, Tensor, int]:
    """The graph of the kit, or that of :func:`strip`, with attributes of edges, and a cut."""
    data, assignment, parts = strip() if name == "strip" else cut(name)
    generator = torch.Generator().manual_seed(2)
    edges = data.edge_index.size(1)
    data.edge_type = torch.randint(3, (edges,), generator=generator)
    data.edge_weight = torch.rand(edges, dtype=torch.float64, generator=generator)
    data.edge_attr = torch.rand(edges, 2, dtype=torch.float64, generator=generator)
    return data, assignment, parts


def write(folder: Path, name: str) -> str:
    """Write the parts of a graph by name; returns their path."""
    data, assignment, parts = graph(name)
    path = folder / f"{name}-parts"
    pyg_scale.partition(data, parts, path=path, assignment=assignment)
    return str(path)


def inputs_of(name: str) -> tuple[str, ...]:
    """The inputs of a model."""
    return ("x", "edge_index", *([OF_EDGES[name][1]] if name in OF_EDGES else []))


def build(name: str, seed: int) -> nn.Module:
    """A model by name."""
    torch.manual_seed(seed)
    make = (
        OF_EDGES[name][0]
        if name in OF_EDGES
        else {**MODELS, **BY_HEAD, **MORE, **BESIDE, **BOTH_WAYS}[name]
    )
    return make().double()


def train(
    model: Any,
    forward: Callable[[], Any],
    y: Tensor,
    mask: Tensor,
    part: Callable[[Any], Tensor] = lambda out: out,
) -> Found:
    """Three steps of SGD on a part of the output, with a wrapped model or a plain one."""
    plain = not parallel.is_parallel_module(model)
    module = model if plain else model.module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        out = part(forward())
        loss = F.cross_entropy(out[mask], y[mask])
        if plain:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            model.backward(loss, int(mask.sum()))
        if step == 0:
            first = out.detach().clone()
            gradients = {
                name: None if p.grad is None else p.grad.clone()
                for name, p in module.named_parameters()
            }
        optimizer.step()
    final = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return Found(first, gradients, final)


def compare(
    path: str,
    cut_name: str,
    names: list[str],
    method: Any,
    accelerated: bool = False,
    shape: tuple[int, ...] = (),
) -> dict[str, str]:
    """What differs on a rank from the whole graph, by model."""
    found = {}
    data, _, _ = graph(cut_name)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=DIMENSIONS) if shape else None
    with opened(path) as cut_graph:
        for name in names:
            model = build(name, dist.get_rank())
            if accelerated:
                accelerate(model)
            inputs = inputs_of(name)
            model = parallel.wrap(model, method, graph=cut_graph, inputs=inputs, mesh=mesh)
            own = model.own_nodes
            ours = train(model, model, data.y[own], data.train_mask[own])
            plain = build(name, 0)
            forward = partial(plain, *[data[each] for each in inputs])
            found[name] = difference(ours, train(plain, forward, data.y, data.train_mask), own)
    return {name: said for name, said in found.items() if said}


def difference(found: Found, alone: Found, own: Tensor) -> str:
    """What differs by more than the tolerance; empty if nothing does."""
    pairs = {"out": (found.out, alone.out[own])}
    for kind, ours, theirs in (
        ("gradient of", found.gradients, alone.gradients),
        ("final", found.final, alone.final),
    ):
        assert ours.keys() == theirs.keys()
        pairs |= {f"{kind} {name}": (ours[name], theirs[name]) for name in theirs}  # type: ignore[dict-item]
    # One scale for all: some gradients are 0 up to rounding.
    scale = max(1.0, *(float(v.abs().max()) for v in alone.gradients.values() if v is not None))
    said = []
    for name, (ours, theirs) in pairs.items():
        if (ours is None) != (theirs is None):
            said.append(f"{name}: one is missing")
        elif ours is not None and ours.numel():
            by = float((ours.double() - theirs.double()).abs().max())
            if not by <= TOLERANCE * scale:
                said.append(f"{name} by {by:g}")
    return ", ".join(said)


def typed_graph() -> tuple[HeteroData, dict[str, Tensor]]:
    """Papers and authors, and a cut into four parts."""
    generator = torch.Generator().manual_seed(0)
    data = HeteroData()
    sizes = {"paper": 30, "author": 14}
    for kind, size in sizes.items():
        data[kind].x = torch.randn(size, CHANNELS, dtype=torch.float64, generator=generator)
    data["paper"].y = torch.randint(CLASSES, (30,), generator=generator)
    data["paper"].train_mask = torch.rand(30, generator=generator) < 0.6
    for src, name, dst in (
        ("author", "writes", "paper"),
        ("paper", "written_by", "author"),
        ("paper", "cites", "paper"),
    ):
        ends = [torch.randint(sizes[end], (70,), generator=generator) for end in (src, dst)]
        data[src, name, dst].edge_index = torch.stack(ends)
    cuts = {kind: torch.randint(4, (size,), generator=generator) for kind, size in sizes.items()}
    return data, cuts


class Typed(nn.Module):
    """Two layers of convolutions by edge type."""

    def __init__(self, conv: Callable[..., nn.Module], edge_types: list[Any]) -> None:
        super().__init__()
        sizes = [(CHANNELS, HIDDEN), (HIDDEN, CLASSES)]
        self.layers = nn.ModuleList(
            pyg.HeteroConv({kind: conv((a, a), b) for kind in edge_types}) for a, b in sizes
        )

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        for layer in self.layers:
            x_dict = {k: v.tanh() for k, v in layer(x_dict, edge_index_dict).items()}
        return x_dict


def build_typed(name: str, data: HeteroData, seed: int) -> nn.Module:
    """A model of typed nodes by name."""
    torch.manual_seed(seed)
    if name == "to_hetero":
        return pyg.to_hetero(
            pyg.GraphSAGE((-1, -1), HIDDEN, 2, CLASSES, act="tanh"), data.metadata()
        ).double()
    convs: dict[str, Callable[..., nn.Module]] = {
        "sage": pyg.SAGEConv,
        "gat": lambda size, out: pyg.GATConv(size, out, add_self_loops=False),
        "transformer": pyg.TransformerConv,
        "graph": pyg.GraphConv,
        "gatv2": lambda size, out: pyg.GATv2Conv(size, out, heads=6, concat=False, **LOOPLESS),
        "gat heads": lambda size, out: pyg.GATConv(size, out, heads=6, concat=False, **LOOPLESS),
        "transformer heads": lambda size, out: pyg.TransformerConv(size, out, 6, concat=False),
        "max": lambda size, out: pyg.SAGEConv(size, out, aggr="max"),
    }
    return Typed(convs[name], data.edge_types).double()


def compare_typed(
    path: str, names: list[str], method: Any, shape: tuple[int, ...] = ()
) -> dict[str, str]:
    """What differs on a rank from the whole graph of typed nodes, by model."""
    found = {}
    data, _ = typed_graph()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=DIMENSIONS) if shape else None
    papers = data["paper"]
    with opened(path) as graph:
        for name in names:
            model, plain = (build_typed(name, data, seed) for seed in (dist.get_rank(), 0))
            if name == "to_hetero":  # its parameters have no shape before the first call
                for each, seed in ((model, dist.get_rank()), (plain, 0)):
                    torch.manual_seed(seed)
                    each(data.x_dict, data.edge_index_dict)
            model = parallel.wrap(model, method, graph=graph, mesh=mesh)
            own = model.own_nodes["paper"]
            values = data.x_dict, data.edge_index_dict
            of_papers = operator.itemgetter("paper")
            ours = train(model, model, papers.y[own], papers.train_mask[own], of_papers)
            forward = partial(plain, *values)
            theirs = train(plain, forward, papers.y, papers.train_mask, of_papers)
            found[name] = difference(ours, theirs, own)
    return {name: said for name, said in found.items() if said}
