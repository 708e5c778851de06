"""What ``pyg-scale bench gpu`` measures, and what each number is held against."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing

from pyg_scale.cli.bench.gpu_check import run
from pyg_scale.ops.adjacency import Adjacency

OURS, PYG, SPARSE = "pyg_scale", "PyG", "torch.sparse.mm"
CONTROL = "even degrees"


class Sizes(NamedTuple):
    """Nodes and edges of the graphs; the defaults have the shape of real ones."""

    large: tuple[int, int] = (2_449_029, 123_718_280)  # ogbn-products
    middle: tuple[int, int] = (500_000, 20_000_000)
    small: tuple[int, int] = (169_343, 2_332_486)  # ogbn-arxiv
    block: tuple[int, int, int] = (400_000, 110_000, 550_000)  # sources, destinations, edges
    channels: int = 128
    heads: int = 4


_ROOMY_BYTES = 100 << 30
QUICK = Sizes((3000, 30_000), (2000, 20_000), (1000, 12_000), (900, 300, 1500), 16, 2)


class Case(NamedTuple):
    """One side of a comparison.

    Attributes:
        name: What is computed and on what.
        side: Who does it.
        step: Does it once.
        bytes: What has to be moved if no row of features is found in a cache; 0 if not counted.
        inputs: Bytes of all tensors of nodes that a step reads or makes, for a limit of memory.
    """

    name: str
    side: str
    step: Callable[[], Any]
    bytes: int = 0
    inputs: int = 0


class Gate(NamedTuple):
    """A limit that a measurement is held against; see docs/kernels.md.

    Attributes:
        name: What is wanted.
        left: Case and side whose time, memory or rate is looked at.
        right: Case and side that it is compared with; empty: the device's copy bandwidth.
        limit: The ratio to reach. For ``"slower"`` and ``"memory"`` not to be exceeded.
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
    Gate("sum on a block 2 times PyG", ("sum on a block", OURS), ("sum on a block", PYG), 2),
)


def sizes_for(device: torch.device) -> Sizes:
    """Sizes of graphs that PyG's layers have the memory for, too, on a device."""
    if device.type != "cuda":
        return Sizes()
    roomy = torch.cuda.get_device_properties(device).total_memory >= _ROOMY_BYTES
    # PyG's GATv2 makes about ten tensors of edges by channels.
    return Sizes() if roomy else Sizes(middle=(500_000, 12_000_000))


def groups(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, list[Case]]]:
    """What is measured side by side, one graph in memory at a time."""
    torch.manual_seed(0)
    graph = power_law(*sizes.large, device)
    yield "large", _sums(graph, sizes, device)
    graph = power_law(*sizes.middle, device)
    for op in ("max", "min", "gat", "gatv2"):
        yield "middle", _with_gradients(op, graph, sizes, device)
    for op in ("sum", "gat"):
        yield "small", _with_hubs(op, sizes, device)
    yield "block", _block(sizes, device)


# Graphs ###################################################################################


def power_law(nodes: int, edges: int, device: torch.device, exponent: float = 0.4) -> Adjacency:
    """Degrees that fall with a power of the rank; sources are drawn unevenly, too."""
    weight = torch.arange(1, nodes + 1, device=device, dtype=torch.float64).pow(-exponent)
    weight = weight[torch.randperm(nodes, device=device)]
    degree = (weight / weight.sum() * edges).long()
    return _drawn(degree, nodes, device)


def with_hubs(nodes: int, edges: int, device: torch.device, hubs: int = 20) -> Adjacency:
    """A few rows have a third of all edges, the others have even degrees."""
    degree = torch.full((nodes,), edges * 2 // 3 // nodes, device=device)
    degree[torch.randperm(nodes, device=device)[:hubs]] = edges // 3 // hubs
    return _drawn(degree, nodes, device)


def _drawn(degree: Tensor, sources: int, device: torch.device) -> Adjacency:
    indptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    count = int(indptr[-1])
    place = (torch.rand(count, device=device, dtype=torch.float64).pow(1.5) * sources).long()
    indices = torch.randperm(sources, device=device)[place]
    graph = Adjacency(indptr, indices, sources)
    graph.transpose()
    return graph


# Cases ####################################################################################


class _Message(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor, size: tuple[int, int]) -> Tensor:
        return self.propagate(edge_index, x=(x, None), size=size)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


def _edge_index(graph: Adjacency) -> Tensor:
    rows = torch.arange(graph.num_dst, device=graph.device)
    rows = rows.repeat_interleave(graph.indptr.diff(), output_size=graph.num_edges)
    return torch.stack([graph.indices.long(), rows])


def _sums(graph: Adjacency, sizes: Sizes, device: torch.device) -> list[Case]:
    cases = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(graph.num_src, sizes.channels, device=device).to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sparse CSR is in beta state
            ones = torch.ones(graph.num_edges, device=device, dtype=dtype)
            shape = (graph.num_dst, graph.num_src)
            matrix = torch.sparse_csr_tensor(graph.indptr, graph.indices, ones, shape)
        row = sizes.channels * x.element_size()
        moved = (graph.num_edges + graph.num_dst) * row
        moved += graph.num_edges * graph.indices.element_size() + graph.num_dst * 8
        name = f"sum {str(dtype).removeprefix('torch.')}"
        cases.append(Case(name, OURS, _plain("sum", graph, [x]), moved))
        cases.append(Case(name, SPARSE, partial(torch.sparse.mm, matrix, x), moved))
    return cases


def _with_gradients(op: str, graph: Adjacency, sizes: Sizes, device: torch.device) -> list[Case]:
    heads, channels = sizes.heads, sizes.channels // sizes.heads
    edges, size = _edge_index(graph), (graph.num_src, graph.num_dst)
    x = torch.randn(graph.num_src, heads, channels, device=device)
    given = [x]
    theirs: Callable[..., Tensor]
    if op == "gat":
        given += [torch.randn(count, heads, device=device) for count in size]
        conv = GATConv(8, channels, heads, add_self_loops=False, bias=False).to(device)

        def theirs(x: Tensor, a_src: Tensor, a_dst: Tensor) -> Tensor:
            alpha = conv.edge_updater(edges, alpha=(a_src, a_dst), edge_attr=None, size=size)
            return conv.propagate(edges, x=(x, None), alpha=alpha, size=size)

    elif op == "gatv2":
        given += [torch.randn(graph.num_dst, heads, channels, device=device)]
        given += [torch.randn(heads, channels, device=device)]
        layer = GATv2Conv(8, channels, heads, add_self_loops=False, bias=False).to(device)
        del layer._parameters["att"]  # an input here

        def theirs(x_src: Tensor, x_dst: Tensor, att: Tensor) -> Tensor:
            layer.att = att.unsqueeze(0)
            alpha = layer.edge_updater(edges, x=(x_src, x_dst), edge_attr=None)
            return layer.propagate(edges, x=(x_src, x_dst), alpha=alpha)

    else:
        message = _Message(aggr=op)
        given = [x.view(graph.num_src, sizes.channels)]

        def theirs(x: Tensor) -> Tensor:
            return message(x, edges, size)

    leaves = [tensor.requires_grad_() for tensor in given]
    # Features, the result, and the gradients of both, all in float32.
    nodes = 4 * sizes.channels * (2 * graph.num_src + 2 * graph.num_dst)
    limit = nodes + 8 * graph.num_edges * heads + (64 << 20)
    name = f"{op}, both"
    return [
        Case(name, OURS, _both(lambda *f: run(op, graph, list(f)), leaves), inputs=limit),
        Case(name, PYG, _both(theirs, leaves)),
    ]


def _with_hubs(op: str, sizes: Sizes, device: torch.device) -> list[Case]:
    nodes, edges = sizes.small
    cases = []
    hubs = with_hubs(nodes, edges, device)
    even = torch.full((nodes,), hubs.num_edges // nodes, device=device)
    even[: hubs.num_edges - int(even.sum())] += 1  # as many edges
    row = sizes.heads, sizes.channels // sizes.heads
    for side, graph in ((OURS, hubs), (CONTROL, _drawn(even, nodes, device))):
        given = [torch.randn(nodes, *row, device=device)]
        if op == "gat":
            given += [torch.randn(nodes, sizes.heads, device=device) for _ in range(2)]
        cases.append(Case(f"{op} with hubs", side, _plain(op, graph, given)))
    return cases


def _block(sizes: Sizes, device: torch.device) -> list[Case]:
    sources, destinations, edges = sizes.block
    graph = _drawn(
        torch.full((destinations,), edges // destinations, device=device), sources, device
    )
    index, message = _edge_index(graph), _Message(aggr="sum")
    x = torch.randn(sources, sizes.channels, device=device).requires_grad_()
    size = sources, destinations
    return [
        Case("sum on a block", OURS, _both(lambda x: run("sum", graph, [x]), [x])),
        Case("sum on a block", PYG, _both(lambda x: message(x, index, size), [x])),
    ]


def _plain(op: str, graph: Adjacency, given: list[Tensor]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        with torch.no_grad():
            return run(op, graph, given)

    return step


def _both(forward: Callable[..., Tensor], leaves: list[Tensor]) -> Callable[[], Any]:
    gradient: list[Tensor] = []

    def step() -> Any:
        out = forward(*leaves)
        if not gradient:
            gradient.append(torch.randn_like(out))
        return torch.autograd.grad(out, leaves, gradient[0])

    return step
