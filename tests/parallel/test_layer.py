"""What ``layer`` computes, against one process, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch_geometric.data import Batch, Data, HeteroData

from pyg_scale import parallel
from pyg_scale.datasets import planted_communities
from pyg_scale.errors import CommError
from pyg_scale.loader import NeighborLoader
from pyg_scale.parallel.layer import LayerParallel
from pyg_scale.testing.parallel import TOLERANCE
from pyg_scale.testing.processes import WaitingProcesses
from tests.parallel import models
from tests.parallel.models import CHANNELS, Found, difference

FEATURES, CLASSES = 6, 4


class Residual(nn.Module):
    """Its first layer is added to the last, over all that is between; features of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(FEATURES, 8)
        self.convs = nn.ModuleList(pyg.GATConv(8, 4, heads=2, edge_dim=2) for _ in range(3))
        self.score = nn.Linear(2, 1)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        first = hidden = self.into(x).relu()
        weight = self.score(edge_attr).sigmoid()
        for conv in self.convs:
            hidden = conv(hidden, edge_index, edge_attr * weight).tanh()
        return self.out(hidden + first)


class Twice(nn.Module):
    """A layer that two ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.conv = pyg.SAGEConv(FEATURES, 8), pyg.SAGEConv(8, 8)
        self.last = pyg.GCNConv(8, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv(self.into(x, edge_index).tanh(), edge_index).tanh()
        return self.last(self.conv(x, edge_index), edge_index)


class Relations(nn.Module):
    """Layers by the types of edges."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(FEATURES, 8), (8, 8), (8, CLASSES)]
        self.convs = nn.ModuleList(pyg.RGCNConv(a, b, num_relations=3) for a, b in sizes)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index, edge_type).tanh()
        return x


class Variadic(nn.Module):
    """Takes any number of arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between = pyg.GATConv(FEATURES, 8, edge_dim=2), pyg.GCNConv(8, 8)
        self.last = pyg.GCNConv(8, CLASSES)

    def forward(self, x: Tensor, *of_edges: Any, scale: float = 1.0, **more: Any) -> Tensor:
        x = self.first(x, *of_edges).tanh() * more.get("factor", scale)
        return self.last(self.between(x, of_edges[0]).tanh(), of_edges[0])


def sequential() -> nn.Module:
    """A module with a forward of its own, where its class has that of another one."""
    made = [
        pyg.Sequential(
            "x, edge_index",
            [
                (pyg.SAGEConv(FEATURES, 8), "x, edge_index -> hidden"),
                nn.Tanh(),
                (pyg.SAGEConv(8, 8), "hidden, edge_index -> hidden"),
                (last, "hidden, edge_index -> out"),
            ],
        )
        for last in (pyg.GCNConv(8, CLASSES), nn.Bilinear(8, 1, CLASSES))
    ]
    return made[0]


OF_EDGES = {"variadic": "edge_attr", "residual": "edge_attr", "relations": "edge_type"}
"""The attribute of edges that a model takes."""

MODELS: dict[str, Callable[[], nn.Module]] = {
    "sage": lambda: pyg.GraphSAGE(FEATURES, 8, 4, CLASSES, norm="BatchNorm", jk="cat"),
    "gat": lambda: pyg.GAT(FEATURES, 8, 3, CLASSES, heads=2),
    "gin": lambda: pyg.GIN(FEATURES, 8, 3, CLASSES),
    "residual": Residual,
    "twice": Twice,
    "relations": Relations,
    "sequential": sequential,
    "variadic": Variadic,
}


def graph() -> Data:
    data = planted_communities(120, 700, CLASSES, FEATURES, progress=False)
    data.x = data.x.double()
    generator = torch.Generator().manual_seed(3)
    shape = (data.num_edges, 2)
    data.edge_attr = torch.rand(shape, dtype=torch.float64, generator=generator)
    data.edge_type = torch.randint(3, (data.num_edges,), generator=generator)
    return data


def batches(data: Data, rank: int, number: int) -> list[Data]:
    """Sampled blocks of a rank, of different sizes."""
    seeds = torch.arange(rank * 30, rank * 30 + 5 * number + rank)
    loader = NeighborLoader(data, [4, 3], input_nodes=seeds, batch_size=5 + rank, seed=rank)
    return list(loader)[:number]


def build(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().double()


def arguments(name: str, batch: Data) -> tuple[Tensor, ...]:
    return (batch.x, batch.edge_index, *([batch[OF_EDGES[name]]] if name in OF_EDGES else []))


def loss_of(out: Tensor, batch: Data) -> Tensor:
    return F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])


def train(name: str, device_map: dict[str, int] | None, steps: int = 3) -> str:
    """What differs from one process that computes the batches of all ranks one by one."""
    data, rank, size = graph(), dist.get_rank(), dist.get_world_size()
    model = parallel.wrap(build(name, rank), "layer", device_map=device_map)
    own, all_ = batches(data, rank, steps), [batches(data, r, steps) for r in range(size)]
    plain = build(name, 0)
    results = []
    for module in (model, plain):
        inner = plain if module is plain else model.module
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            mine = own[step]
            if module is plain:
                total = sum(each[step].batch_size for each in all_)
                outs = []
                for each in all_:
                    outs.append(plain(*arguments(name, each[step])))
                    (loss_of(outs[-1], each[step]) * each[step].batch_size / total).backward()
                out = outs[rank]
            else:
                out = model(*arguments(name, mine))
                model.backward(loss_of(out, mine), mine.batch_size)
            if step == 0:
                first = out.detach().clone()
                grads = {
                    n: None if p.grad is None else p.grad.clone()
                    for n, p in inner.named_parameters()
                }
            optimizer.step()
        final = {n: v.detach().clone() for n, v in inner.state_dict().items()}
        results.append(Found(first, grads, final))
    return difference(results[0], results[1], torch.arange(len(results[1].out)))


def train_all(names: list[str], device_map: dict[str, int] | None) -> dict[str, str]:
    found = {name: train(name, device_map) for name in names}
    return {name: said for name, said in found.items() if said}


@pytest.mark.parametrize(
    ("size", "names", "device_map"),
    [
        (2, ["sage", "residual", "relations"], None),
        (3, ["residual"], {"into": 0, "convs.1": 1, "out": 2}),
        *(
            pytest.param(size, list(MODELS), None, marks=pytest.mark.slow)
            for size in (1, 2, 3)
        ),
        pytest.param(4, ["sage"], None, marks=pytest.mark.slow),
        pytest.param(
            2, ["sage"], {"convs.0": 0, "convs.1": 0, "convs.2": 0, "convs.3": 1},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_gradients_are_those_of_one_process(
    ranks: WaitingProcesses, size: int, names: list[str], device_map: dict[str, int] | None
) -> None:
    """Also parameters and running statistics after three steps."""
    assert ranks.run(train_all, names, device_map, world_size=size) == [{}] * size


# Nodes of several types #########################################################################


class ByHGT(nn.Module):
    """Layers that look at all types at once, and give back some."""

    def __init__(self, data: HeteroData) -> None:
        super().__init__()
        self.into = pyg.HeteroDictLinear(CHANNELS, 8, data.node_types)
        sizes = [(8, 8), (8, 8)]
        self.convs = nn.ModuleList(pyg.HGTConv(a, b, data.metadata(), heads=2) for a, b in sizes)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Tensor:
        x_dict = {kind: each.tanh() for kind, each in self.into(x_dict).items()}
        for conv in self.convs:
            x_dict = {kind: each.tanh() for kind, each in conv(x_dict, edge_index_dict).items()}
        return self.out(x_dict["paper"])


def typed_model(name: str, data: HeteroData, seed: int) -> nn.Module:
    if name == "hgt":
        torch.manual_seed(seed)
        return ByHGT(data).double()
    return models.build_typed(name, data, seed)


def typed_batches(data: HeteroData, rank: int, steps: int) -> list[HeteroData]:
    """Sampled batches of a rank; in the first, papers are as many as authors."""
    seeds = torch.arange(rank * 10, rank * 10 + 4 * steps) % 30
    nodes = ("paper", seeds)
    found = list(NeighborLoader(data, [3, 2], input_nodes=nodes, batch_size=4 - rank, seed=rank))
    same = data.clone()
    same["paper"].x, same["paper"].y = data["paper"].x[:14], data["paper"].y[:14]
    same["paper"].batch_size = 3
    for kind in same.edge_types:
        edges = same[kind].edge_index
        same[kind].edge_index = edges[:, (edges < 14).all(dim=0)]
    return [same, *found[: steps - 1]]


def train_typed(names: list[str]) -> dict[str, str]:
    """What differs from one process that has the batches of all ranks."""
    data, _ = models.typed_graph()
    rank, size, steps, found = dist.get_rank(), dist.get_world_size(), 3, {}
    every = [typed_batches(data, r, steps) for r in range(size)]
    for name in names:
        model, plain = (typed_model(name, data, seed) for seed in (rank, 0))
        for each, seed in ((model, rank), (plain, 0)):
            torch.manual_seed(seed)
            if name == "to_hetero":  # its parameters have no shape before
                each(data.x_dict, data.edge_index_dict)
        model = parallel.wrap(model, "layer")

        def loss(net: Any, batch: HeteroData) -> Tensor:
            out = net(batch.x_dict, batch.edge_index_dict)
            out = out["paper"] if isinstance(out, dict) else out
            n = batch["paper"].batch_size
            return F.cross_entropy(out[:n], batch["paper"].y[:n])

        said = []
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        for step in range(steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            mine = every[rank][step]
            model.backward(loss(model, mine), mine["paper"].batch_size)
            total = sum(each[step]["paper"].batch_size for each in every)
            for each in every:
                (loss(plain, each[step]) * each[step]["paper"].batch_size / total).backward()
            pairs = zip(model.module.named_parameters(), plain.parameters(), strict=True)
            for (each, p), q in pairs:
                if (p.grad is None) != (q.grad is None):
                    assert (p.grad if q.grad is None else q.grad).abs().max() == 0, each
                elif p.grad is not None and not (p.grad - q.grad).abs().max() <= TOLERANCE:
                    said.append(f"{each} in step {step}")
            for optimizer in optimizers:
                optimizer.step()
        outs = [m(mine.x_dict, mine.edge_index_dict) for m in (model, plain)]
        for kind in outs[1] if isinstance(outs[1], dict) else []:
            if not torch.allclose(outs[0][kind], outs[1][kind], rtol=0, atol=TOLERANCE):
                said.append(f"out {kind}")
        found[name] = ", ".join(said)
    return {name: said for name, said in found.items() if said}


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, ["to_hetero", "gat", "hgt"]),
        pytest.param(3, ["sage", "transformer", "to_hetero"], marks=pytest.mark.slow),
        pytest.param(1, ["sage", "hgt"], marks=pytest.mark.slow),
    ],
)
def test_gradients_of_typed_nodes_are_those_of_one_process(
    ranks: WaitingProcesses, size: int, names: list[str]
) -> None:
    assert ranks.run(train_typed, names, world_size=size) == [{}] * size


class Weighted(nn.Module):
    """Weights of edges, made on the first rank, go to the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(2, 1)
        self.first, self.last = pyg.GraphConv(FEATURES, 8), pyg.GraphConv(8, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        weight = self.score(edge_attr).flatten().sigmoid()
        return self.last(self.first(x, edge_index, weight), edge_index, weight)


class WeightedTypes(nn.Module):
    """The same with two types of edges."""

    def __init__(self, edge_types: Any) -> None:
        super().__init__()
        self.edge_types, self.score = edge_types, nn.Linear(2, 1)
        sizes = [(FEATURES, 8), (8, CLASSES)]
        self.first, self.last = (
            pyg.HeteroConv({kind: pyg.GraphConv(a, b) for kind in edge_types}) for a, b in sizes
        )

    def forward(self, x_dict: Any, edge_index_dict: Any, attrs: Any) -> Any:
        weights = {kind: self.score(attrs[kind]).flatten().sigmoid() for kind in self.edge_types}
        x_dict = self.first(x_dict, edge_index_dict, edge_weight_dict=weights)
        return self.last(x_dict, edge_index_dict, edge_weight_dict=weights)["a"]


def as_many_of_each(typed: bool) -> None:
    """Batches with as many edges as nodes, or edges of one type as of another, and then others."""
    torch.manual_seed(0)
    edge_types = [("a", "to", "a"), ("a", "of", "a")]
    plain = (WeightedTypes(edge_types) if typed else Weighted()).double()
    model, rank = parallel.wrap(plain, "layer"), dist.get_rank()

    def arguments_of(sizes: tuple[int, int, int]) -> tuple[Any, ...]:
        n, *edges = sizes
        x = torch.randn(n, FEATURES, dtype=torch.float64)
        made = [(torch.randint(n, (2, e)), torch.randn(e, 2, dtype=torch.float64)) for e in edges]
        if not typed:
            return x, *made[0]
        index, attr = (dict(zip(edge_types, each)) for each in zip(*made))
        return {"a": x}, index, attr

    same, more, fewer = (12, 12, 12), (10, 40, 30), (40, 10, 9)
    for step in ((same, same), (same, more), (fewer, same), (more, fewer)):
        every = [arguments_of(sizes) for sizes in step]
        plain.zero_grad()
        expected = [plain(*each) for each in every]
        sum(each.sum() / len(every) for each in expected).backward()
        grads = [p.grad.clone() for p in plain.parameters()]
        plain.zero_grad()
        out = model(*every[rank])
        assert (out - expected[rank]).abs().max() <= TOLERANCE, step
        model.backward(out.sum(), 1)
        for p, grad in zip(plain.parameters(), grads, strict=True):
            assert (p.grad - grad).abs().max() <= TOLERANCE, step


@pytest.mark.parametrize("typed", [False, True])
def test_rows_that_the_first_batch_does_not_tell_apart(
    ranks: WaitingProcesses, typed: bool
) -> None:
    ranks.run(as_many_of_each, typed, world_size=2)


# Micro-batches #################################################################################


def call_with_any() -> None:
    """Arguments by position and by name, which are tensors, numbers and ``None``."""
    data = graph()
    module = Variadic().double()
    model = parallel.wrap(module, "layer")
    for given, more in (
        ((data.edge_index, data.edge_attr), {"scale": 2.0}),
        ((data.edge_index, data.edge_attr, None), {"factor": data.x.new_full((1, 8), 3.0)}),
    ):
        with torch.no_grad():
            out, expected = (each(data.x, *given, **more) for each in (model, module))
        assert float((out - expected).abs().max()) < 1e-12


def test_any_number_of_arguments(ranks: WaitingProcesses) -> None:
    ranks.run(call_with_any, world_size=2)


def several(number: int) -> None:
    """Micro-batches of one rank and of all are one batch, padded or not."""
    data, rank = graph(), dist.get_rank()
    model = parallel.wrap(build("gat", rank), "layer")
    own = batches(data, rank, number + rank)
    outs = model.forward_all([arguments("gat", each) for each in own])
    seeds = sum(each.batch_size for each in own)
    losses = [loss_of(out, each) * each.batch_size for out, each in zip(outs, own)]
    model.backward(sum(losses) / seeds, seeds)
    plain, size = build("gat", 0), dist.get_world_size()
    every = [each for r in range(size) for each in batches(data, r, number + r)]
    union = Batch.from_data_list([Data(x=e.x, edge_index=e.edge_index) for e in every])
    found = plain(union.x, union.edge_index)
    sizes = [each.batch_size for each in every]
    parts = [found[union.ptr[n] :][:size] for n, size in enumerate(sizes)]
    labels = torch.cat([each.y[: each.batch_size] for each in every])
    F.cross_entropy(torch.cat(parts), labels).backward()
    for (name, p), q in zip(model.module.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() <= TOLERANCE, name


@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_micro_batches_are_one_batch(ranks: WaitingProcesses, number: int) -> None:
    ranks.run(several, number, world_size=2)


def drop(size: int) -> None:
    """Dropout draws in the backward pass what it drew in the forward."""
    torch.manual_seed(dist.get_rank())
    model = parallel.wrap(pyg.GCN(FEATURES, 16, 3, CLASSES, dropout=0.5).double(), "layer")
    data = graph()
    found = []
    for _ in range(2):
        torch.manual_seed(7)
        model.zero_grad()
        out = model(data.x, data.edge_index)
        # The gradient of the sum by the last bias is the number of nodes, whatever was drawn; by
        # the last weight it is what the last layer added up, which the output is made of, too.
        model.backward(out.sum(), 1)
        weight = model.module.convs[-1].lin.weight
        bias = model.module.convs[-1].bias
        total = (weight * weight.grad).sum() + (bias * bias.grad).sum()
        sums = out.detach().sum().reshape(1)
        dist.all_reduce(sums)
        assert torch.allclose(total * size, sums, rtol=1e-10)
        found.append(out.detach())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(model(data.x, data.edge_index), found[0])


def test_dropout_draws_once(ranks: WaitingProcesses) -> None:
    ranks.run(drop, 2, world_size=2)


def keep() -> tuple[int, bool]:
    """Bytes that a forward keeps for the backward, and whether an evaluation works in between."""
    data = graph()
    model = parallel.wrap(build("gin", 0), "layer")
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(data.x, data.edge_index)
    total = sum(each.nbytes for each in kept)
    model.backward(out.mean(), 1)
    model.eval()
    with torch.no_grad():
        return total, torch.equal(
            model(data.x, data.edge_index), model.module(data.x, data.edge_index)
        )


def test_a_forward_keeps_no_activations(ranks: WaitingProcesses) -> None:
    assert ranks.run(keep, world_size=2) == [(0, True)] * 2


# What is refused ###############################################################################


class Decides(nn.Module):
    """Its forward depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = pyg.GCNConv(FEATURES, 8), pyg.GCNConv(8, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.a(x, edge_index)
        return self.b(x if x.sum() > 0 else -x, edge_index)


def refuse() -> None:
    data, rank = graph(), dist.get_rank()
    x, edge_index = data.x, data.edge_index

    def fails(model: Any, kind: type[Exception], reason: str, *args: Any) -> None:
        with pytest.raises(kind, match=reason):
            parallel.wrap(model.double(), "layer")(*(args or (x, edge_index)))

    fails(pyg.GCN(FEATURES, 8, 1, 4), ValueError, r"has 1 layers that follow edges for 2 ranks")
    fails(Decides(), ValueError, r"Decides cannot be cut into stages .*decide by values")
    model = build("gin", 0)
    wrapped = parallel.wrap(model, "layer")
    with pytest.raises(ValueError, match="x needs a gradient"):
        wrapped(x.clone().requires_grad_(), edge_index)
    with pytest.raises(TypeError, match=r"x must be a tensor, a dictionary of .*\(got list\)"):
        wrapped([x], edge_index)
    with pytest.raises(TypeError, match=r"x must be a tensor, a dictionary of .*\(got dict\)"):
        wrapped({1: x}, edge_index)
    for device_map, reason in (
        ({"convs.0": 0, "elsewhere": 1}, r"no module 'elsewhere'; it has dropout, act, convs"),
        ({"convs.0": 0, "convs.1": 2}, r"'convs.1' is on rank 2, and there are 2 ranks"),
        ({"convs": 0}, r"rank 1 has no module"),
    ):
        with pytest.raises(ValueError, match=reason):
            parallel.wrap(model, "layer", device_map=device_map)
    with pytest.raises(ValueError, match=r"'convs.1' is on rank 0 and is used after"):
        parallel.wrap(model, "layer", device_map={"convs.0": 1, "convs.1": 0})(x, edge_index)
    with pytest.raises(TypeError, match="device_map must be a dictionary"):
        LayerParallel(device_map=["convs"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ranks have different device_map="):
        parallel.wrap(model, "layer", device_map={"convs.0": rank, "convs.1": 1 - rank})
    if rank:
        with pytest.raises(RuntimeError, match=r"rank 0: forward, rank 1: backward"):
            wrapped.backward(next(model.parameters()).sum(), 1)
    else:
        with pytest.raises(RuntimeError, match=r"rank 0: forward, rank 1: backward"):
            wrapped(x, edge_index)
    wrong = edge_index + 1_000 * rank  # the batch of rank 1 fails in the first layer, on rank 0
    kind, reason = (CommError, "^rank 0 failed: .*ndex") if rank else (IndexError, "ndex")
    with pytest.raises(kind, match=reason):
        wrapped(x, wrong)


def test_what_is_refused(ranks: WaitingProcesses) -> None:
    ranks.run(refuse, world_size=2)
