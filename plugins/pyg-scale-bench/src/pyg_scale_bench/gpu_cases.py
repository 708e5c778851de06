"""The measurements of ``pyg-scale bench gpu``, and the targets of each number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch_geometric.loader
import torch_geometric.nn
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

import pyg_scale.nn
from pyg_scale.loader import NeighborLoader
from pyg_scale.ops.adjacency import Adjacency, rows_of
from pyg_scale.sampler import CudaSampler, NativeSampler
from pyg_scale_bench.rounds import OURS, PYG
from pyg_scale_bench.steps import SPARSE, Case, Graph, compare, once

CONTROL = "even degrees"
ON_CPU = "a thread of the CPU"
ON_HOST = "the graph on the host"
REPLAYED = "replayed"
ODD_WIDTHS = (47, 602)
FRESH: dict[str, dict[str, Any]] = {"SAGEConv": {}, "GCNConv": {}, "GATConv": {"heads": 4}}
"""Layers that are measured on blocks that they see for the first time."""


STEPPED = ("gine, both", "gine with gradients of edges, both", "resgated, both")
"""Layers whose messages are steps on single numbers, forward and backward."""


class Sizes(NamedTuple):
    """Numbers of nodes and edges of the graphs; the defaults are those of real graphs."""

    large: tuple[int, int] = (2_449_029, 123_718_280)  # ogbn-products
    middle: tuple[int, int] = (500_000, 20_000_000)
    small: tuple[int, int] = (169_343, 2_332_486)  # ogbn-arxiv
    block: tuple[int, int, int] = (400_000, 110_000, 550_000)  # sources, destinations, edges
    channels: int = 128
    heads: int = 4


_ROOMY_BYTES = 100 << 30
QUICK = Sizes((3000, 30_000), (2000, 20_000), (1000, 12_000), (900, 300, 1500), 16, 2)


class Gate(NamedTuple):
    """A limit for a measurement; see docs/kernels.md.

    Attributes:
        name: Description of the target.
        left: Case and side whose time, memory or rate is measured.
        right: Case and side to compare with; empty: the copy bandwidth of the device.
        limit: The ratio to reach or, for ``"slower"`` and ``"memory"``, not to exceed.
        kind: ``"faster"``, ``"slower"``, ``"rate"`` or ``"memory"``.
    """

    name: str
    left: tuple[str, str]
    right: tuple[str, str]
    limit: float
    kind: str = "faster"


GATES = (
    Gate(
        "sum of float32 at 70 % of the copy bandwidth", ("sum float32", OURS), ("", ""), 0.7, "rate"
    ),
    Gate("sum not slower than cuSPARSE", ("sum float32", OURS), ("sum float32", SPARSE), 0.95),
    Gate("bfloat16 1.6 times float32", ("sum bfloat16", OURS), ("sum float32", OURS), 1.6),
    Gate("max 3 times PyG", ("max, both", OURS), ("max, both", PYG), 3),
    Gate("min 3 times PyG", ("min, both", OURS), ("min, both", PYG), 3),
    Gate("GAT 5 times PyG", ("gat, both", OURS), ("gat, both", PYG), 5),
    Gate("GATv2 4 times PyG", ("gatv2, both", OURS), ("gatv2, both", PYG), 4),
    Gate("GAT without a tensor of edges by channels", ("gat, both", OURS), ("", ""), 1, "memory"),
    Gate("sum with hubs", ("sum with hubs", OURS), ("sum with hubs", CONTROL), 1.25, "slower"),
    Gate("GAT with hubs", ("gat with hubs", OURS), ("gat with hubs", CONTROL), 1.25, "slower"),
    Gate("GINE 2.5 times PyG", ("gine, both", OURS), ("gine, both", PYG), 2.5),
    Gate("ResGated 2.5 times PyG", ("resgated, both", OURS), ("resgated, both", PYG), 2.5),
    Gate("sum on a block 2 times PyG", ("sum on a block", OURS), ("sum on a block", PYG), 2),
    *(
        Gate(f"{name} not slower", (f"{name}, fresh", OURS), (f"{name}, fresh", PYG), 1)
        for name in FRESH
    ),
)


def sizes_for(device: torch.device) -> Sizes:
    """Sizes of graphs for which PyG's layers also fit into the memory of a device."""
    if device.type != "cuda":
        return Sizes()
    roomy = torch.cuda.get_device_properties(device).total_memory >= _ROOMY_BYTES
    # PyG's GATv2 makes about ten tensors of edges by channels.
    return Sizes() if roomy else Sizes(middle=(500_000, 12_000_000))


def groups(sizes: Sizes, device: torch.device) -> dict[str, Callable[[], list[Case]]]:
    """Functions that make the cases that are measured together, with their graph."""

    @cache
    def middle() -> Graph:
        return power_law("middle", *sizes.middle, device)

    @cache
    def block() -> Graph:
        sources, destinations, edges = sizes.block
        degree = torch.full((destinations,), edges // destinations, device=device)
        return _drawn("block", degree, sources)

    found: dict[str, Callable[[], list[Case]]] = {
        "sum": lambda: _sums(power_law("large", *sizes.large, device), sizes),
        "sum of odd rows": lambda: _odd_rows(middle(), sizes),
    }
    for op in ("max", "min", "gat", "gatv2"):
        found[f"{op}, both"] = partial(_on, middle, f"{op}, both", op, sizes)
    for op in ("sum", "gat"):
        found[f"{op} with hubs"] = partial(_with_hubs, op, sizes, device)
    for name in STEPPED:
        found[name] = partial(_stepped, name, sizes, device)
    found["gat, one narrow head"] = lambda: _narrow_head(middle(), sizes)
    found["sum on a block"] = partial(_on, block, "sum on a block", "sum", sizes)
    for name in FRESH:
        found[f"{name}, fresh"] = partial(_on_fresh_blocks, name, block, sizes)
    found["layer in a CUDA graph"] = lambda: _captured(block(), sizes)
    found["sampling"] = partial(_sampling, sizes, device)
    found["loading"] = partial(_loading, sizes, device)
    return found


# Graphs ###################################################################################


def power_law(
    name: str, nodes: int, edges: int, device: torch.device, exponent: float = 0.4
) -> Graph:
    """A graph whose degrees fall with a power of the rank, with sources drawn unevenly too."""
    weight = torch.arange(1, nodes + 1, device=device, dtype=torch.float64).pow(-exponent)
    weight = weight[torch.randperm(nodes, device=device)]
    return _drawn(name, (weight / weight.sum() * edges).long(), nodes)


def with_hubs(nodes: int, edges: int, device: torch.device, hubs: int = 20) -> Graph:
    """A graph in which a few rows have a third of all edges, and the others have equal degrees."""
    degree = torch.full((nodes,), edges * 2 // 3 // nodes, device=device)
    degree[torch.randperm(nodes, device=device)[:hubs]] = edges // 3 // hubs
    return _drawn("hubs", degree, nodes)


def _drawn(name: str, degree: Tensor, sources: int) -> Graph:
    indptr, device = torch.cat([degree.new_zeros(1), degree.cumsum(0)]), degree.device
    count = int(indptr[-1])
    place = (torch.rand(count, device=device, dtype=torch.float64).pow(1.5) * sources).long()
    indices = torch.randperm(sources, device=device)[place]
    return Graph(name, Adjacency(indptr, indices, sources))


# Cases ####################################################################################


def _sums(graph: Graph, sizes: Sizes) -> list[Case]:
    cases = []
    for dtype in (torch.float32, torch.bfloat16):
        sum_of = compare("sum", graph, sizes.channels, sizes.heads, dtype)
        row = sizes.channels * dtype.itemsize
        moved = (graph.num_edges + graph.num_dst) * row
        moved += graph.num_edges * graph.adjacency.indices.element_size() + graph.num_dst * 8
        about = {"graph": graph.name, "name": f"sum {str(dtype).removeprefix('torch.')}"}
        cases += [
            Case(side=side, about=about, bytes=moved, step=once(sum_of.sides[side], sum_of.inputs))
            for side in (OURS, SPARSE)  # PyG's messages are too large
        ]
    return cases


def _odd_rows(graph: Graph, sizes: Sizes) -> list[Case]:
    """Rows that no wide load fits, and indices of 32 bits."""
    edges = graph.adjacency
    short = Adjacency(edges.indptr, edges.indices.int(), edges.num_src)
    asked = [(width, torch.float32, graph) for width in ODD_WIDTHS]
    asked += [(100, torch.bfloat16, graph)]
    asked += [(sizes.channels, torch.float32, Graph(graph.name, short))]
    cases = []
    for width, dtype, on in asked:
        sum_of = compare("sum", on, width, 1, dtype)
        index = on.adjacency.indices.dtype
        name = f"sum of {width} {str(dtype).removeprefix('torch.')}"
        name += "" if index == torch.int64 else f", {str(index).removeprefix('torch.')}"
        moved = (on.num_edges + on.num_dst) * width * dtype.itemsize
        moved += on.num_edges * index.itemsize + on.num_dst * 8
        step = once(sum_of.sides[OURS], sum_of.inputs)
        cases.append(
            Case(side=OURS, about={"graph": on.name, "name": name}, bytes=moved, step=step)
        )
    return cases


def _narrow_head(graph: Graph, sizes: Sizes) -> list[Case]:
    narrow = sizes._replace(heads=1, channels=8)
    return _with_gradients("gat, one narrow head", "gat", graph, narrow)


def _on(graph: Callable[[], Graph], name: str, op: str, sizes: Sizes) -> list[Case]:
    return _with_gradients(name, op, graph(), sizes)


def _with_gradients(name: str, op: str, graph: Graph, sizes: Sizes) -> list[Case]:
    compared = compare(op, graph, sizes.channels, sizes.heads)
    # Features, the result, and the gradients of both, all in float32.
    nodes = 4 * sizes.channels * (2 * graph.num_src + 2 * graph.num_dst)
    limit = nodes + 8 * graph.num_edges * sizes.heads + (64 << 20)
    about = {"graph": graph.name, "name": name, "memory_limit": limit}
    return [
        Case(side=side, about=about, step=once(compared.sides[side], compared.inputs, []))
        for side in (OURS, PYG)
    ]


def _stepped(name: str, sizes: Sizes, device: torch.device) -> list[Case]:
    """A layer of PyG as accelerated, and as it is; edge features are as wide as those of nodes."""
    graph = power_law("small", *sizes.small, device)
    edges, channels = graph.adjacency, sizes.channels
    ends = torch.stack([edges.indices, rows_of(edges.indptr, edges.num_edges)])
    inputs = [torch.randn(graph.num_src, channels, device=device)]
    data: list[Tensor] = []
    if name.startswith("gine"):
        layer: Any = torch_geometric.nn.GINEConv(torch.nn.Identity())
        attributes = torch.randn(edges.num_edges, channels, device=device)
        (inputs if "gradients" in name else data).append(attributes)
    else:
        layer = torch_geometric.nn.ResGatedGraphConv(channels, channels)
    ours, gradient = copy.deepcopy(layer).to(device), list[Tensor]()
    pyg_scale.nn.accelerate(ours, min_work=0)
    cases = []
    for side, module in ((OURS, ours), (PYG, layer.to(device))):
        run = partial(_call, module, ends, data)
        about = {"graph": "small", "name": name}
        cases.append(Case(side=side, about=about, step=once(run, inputs, gradient)))
    return cases


def _call(layer: torch.nn.Module, ends: Tensor, data: list[Tensor], *inputs: Tensor) -> Any:
    return layer(inputs[0], ends, *inputs[1:], *data)


def _with_hubs(op: str, sizes: Sizes, device: torch.device) -> list[Case]:
    hubs = with_hubs(*sizes.small, device)
    even = torch.full((hubs.num_dst,), hubs.num_edges // hubs.num_dst, device=device)
    even[: hubs.num_edges - int(even.sum())] += 1  # as many edges
    cases = []
    for side, graph in ((OURS, hubs), (CONTROL, _drawn("even", even, hubs.num_src))):
        ours = compare(op, graph, sizes.channels, sizes.heads)
        about = {"graph": "small", "name": f"{op} with hubs"}
        cases.append(Case(side=side, about=about, step=once(ours.sides[OURS], ours.inputs)))
    return cases


def _on_fresh_blocks(name: str, made: Callable[[], Graph], sizes: Sizes) -> list[Case]:
    block = made()
    edges, device = block.adjacency, block.adjacency.device
    ends = torch.stack([edges.indices, rows_of(edges.indptr, edges.num_edges)])
    x = torch.randn(block.num_src, sizes.channels, device=device, requires_grad=True)
    cases = []
    for side, library in ((OURS, pyg_scale.nn), (PYG, torch_geometric.nn)):
        layer = getattr(library, name)(sizes.channels, sizes.channels // 4, **FRESH[name])
        step = partial(_train, layer.to(device), x, ends)
        cases.append(Case(side=side, about={"graph": "block", "name": f"{name}, fresh"}, step=step))
    return cases


def _train(layer: torch.nn.Module, x: Tensor, edge_index: Tensor) -> None:
    out = layer(x, edge_index.clone())  # another tensor: nothing is known about it
    torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out))


def _captured(block: Graph, sizes: Sizes) -> list[Case]:
    """A layer without gradients on one block, called and replayed; on the CPU: called."""
    edges, device = block.adjacency, block.adjacency.device
    ends = torch.stack([edges.indices, rows_of(edges.indptr, edges.num_edges)])
    x = torch.randn(block.num_src, sizes.channels, device=device)
    layer = pyg_scale.nn.SAGEConv(sizes.channels, sizes.channels // 4).to(device)

    def call() -> None:
        with torch.no_grad():
            layer(x, ends)

    about = {"graph": "block", "name": "layer in a CUDA graph"}
    cases = [Case(side=OURS, about=about, step=call)]
    if device.type == "cuda":
        call()  # loads what is loaded once
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        cases.append(Case(side=REPLAYED, about=about, step=graph.replay))
    return cases


def _sampling(sizes: Sizes, device: torch.device) -> list[Case]:
    nodes, count = sizes.small
    graph = power_law("small", nodes, count, torch.device("cpu")).adjacency
    ends = torch.stack([graph.indices, rows_of(graph.indptr, graph.num_edges)])
    data, hops = Data(edge_index=ends, num_nodes=nodes), [15, 10, 5]
    seed: dict[Any, Tensor] = {None: torch.randperm(nodes)[:1024]}
    cases = []
    for side, sampler in (
        (OURS, CudaSampler(data, hops, device=device, host="never")),
        (ON_HOST, CudaSampler(data, hops, device=device, host="mapped")),
        (ON_CPU, NativeSampler(data, hops)),
    ):
        step = partial(sampler.sample, seed, None, 1)
        cases.append(Case(side=side, about={"graph": "small", "name": "sampling"}, step=step))
    return cases


def _loading(sizes: Sizes, device: torch.device) -> list[Case]:
    """A batch of a loader that samples and keeps features on the device, and on the CPU."""
    nodes, count = sizes.small
    graph = power_law("small", nodes, count, torch.device("cpu")).adjacency
    ends = torch.stack([graph.indices, rows_of(graph.indptr, graph.num_edges)])
    data = Data(x=torch.randn(nodes, sizes.channels), edge_index=ends, num_nodes=nodes)
    cases = []
    for side, where in ((OURS, device), (ON_CPU, None)):
        options: dict[str, Any] = {"batch_size": 1024, "shuffle": True, "seed": 1, "device": where}
        loader = NeighborLoader(data, [15, 10, 5], **options)
        step = partial(next, _endless(loader))
        cases.append(Case(side=side, about={"graph": "small", "name": "loading"}, step=step))
    if WITH_PYG_LIB or WITH_TORCH_SPARSE:  # PyG cannot sample without
        theirs = torch_geometric.loader.NeighborLoader(data, [15, 10, 5], batch_size=1024)
        step = partial(next, _endless(theirs))
        cases.append(Case(side=PYG, about={"graph": "small", "name": "loading"}, step=step))
    return cases


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
