"""Padded batches: few sizes, and the loss and gradients of the batches that they were."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GATConv, SAGEConv, to_hetero
from torch_geometric.nn.models import GAT, GCN, GraphSAGE
from torch_geometric.utils import trim_to_layer

from pyg_scale.loader import Buckets, Budget, LinkNeighborLoader, NeighborLoader, ShaDowKHopSampler
from pyg_scale.loader.batch.source import filled
from pyg_scale.nn import accelerate
from pyg_scale.ops import colptr
from pyg_scale.store import MemoryFeatureStore
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same_batches


def power_law(num_nodes: int = 600) -> Data:
    draw = torch.Generator().manual_seed(0)
    degree = (3 / torch.rand(num_nodes, generator=draw) ** 0.7).long().clamp(max=60)
    target = torch.arange(num_nodes).repeat_interleave(degree)
    source = torch.randint(num_nodes, target.shape, generator=draw)
    return Data(
        x=torch.randn(num_nodes, 5, generator=draw),
        edge_index=torch.stack([source, target]),
        edge_attr=torch.randn(target.numel(), 2, generator=draw),
        y=torch.randint(3, (num_nodes,), generator=draw),
    )


DATA = power_law()


def loader(data: Any = DATA, **kwargs: Any) -> NeighborLoader:
    kwargs = {"num_neighbors": [4, 3], "batch_size": 50, "shuffle": True, "seed": 2} | kwargs
    return NeighborLoader(data, **kwargs)


def both(data: Any = DATA, **kwargs: Any) -> list[tuple[Any, Any]]:
    """Batches, and the same padded."""
    plain, padded = loader(data, **kwargs), loader(data, **kwargs, pad_to="buckets")
    return list(zip(plain, padded, strict=True))


def loss_of(out: Tensor, batch: Any) -> Tensor:
    """The masked loss, of padded and other batches: a mean over the seeds."""
    seeds = batch.get("seed_mask")
    if seeds is None:
        return F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])
    each = F.cross_entropy(out, batch.y, reduction="none")
    return (each * seeds).sum() / seeds.sum()


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


class Trimmed(nn.Module):
    """Two layers, of which the second computes what the seeds need."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(5, 8), SAGEConv(8, 3)])

    def forward(self, batch: Any) -> Tensor:
        x, edges = batch.x, batch.edge_index
        numbers = batch.num_sampled_nodes, batch.num_sampled_edges
        for layer, conv in enumerate(self.convs):
            x, edges, _ = trim_to_layer(layer, *numbers, x, edges)
            x = conv(x, edges)
        return x


class WithEdges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GATConv(5, 8, edge_dim=2), GATConv(8, 3, edge_dim=2)])

    def forward(self, batch: Any) -> Tensor:
        x = batch.x
        for conv in self.convs:
            x = conv(x, batch.edge_index, batch.edge_attr)
        return x


class Stock(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Tensor:
        out: Tensor = self.model(batch.x, batch.edge_index)
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "SAGE": lambda: Stock(GraphSAGE(5, 8, 2, 3)),
    "SAGE max": lambda: Stock(GraphSAGE(5, 8, 2, 3, aggr="max")),
    "GCN": lambda: Stock(GCN(5, 8, 2, 3)),
    "GAT": lambda: Stock(GAT(5, 8, 2, 3, heads=2)),
    "GAT with edge attributes": WithEdges,
    "accelerated": lambda: accelerated(Stock(GraphSAGE(5, 8, 2, 3))),
}


def accelerated(model: nn.Module) -> nn.Module:
    accelerate(model, min_work=0)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_without_padding(name: str) -> None:
    torch.manual_seed(1)
    model = MODELS[name]()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        model.to(dtype)
        for plain, padded in both()[:4]:
            assert padded.num_nodes > plain.num_nodes and padded.num_edges > plain.num_edges
            found, expected = [], []
            for batch, into in ((plain, expected), (padded, found)):
                batch.x, batch.edge_attr = batch.x.to(dtype), batch.edge_attr.to(dtype)
                loss = loss_of(model(batch), batch)
                into += [loss.detach().view(1), gradients(model, loss)]
            for ours, theirs in zip(found, expected):
                assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def test_trim_to_layer_takes_the_padding_away_first() -> None:
    torch.manual_seed(1)
    model = Trimmed().double()
    for plain, padded in both()[:3]:
        results = []
        for batch in (plain, padded):
            batch.x = batch.x.double()
            out = model(batch)[: batch.batch_size]
            results.append(gradients(model, out.square().sum()))
            assert sum(batch.num_sampled_nodes) == batch.num_nodes
            assert sum(batch.num_sampled_edges) == batch.num_edges
        assert torch.allclose(*results, rtol=1e-12, atol=1e-12)


def test_padding_touches_no_real_node() -> None:
    for plain, padded in both():
        nodes, edges = plain.num_nodes, plain.num_edges
        assert torch.equal(padded.edge_index[:, :edges], plain.edge_index)
        added = padded.edge_index[:, edges:]
        assert added.min() >= nodes and added.max() < padded.num_nodes
        assert bool((added[0] != added[1]).all()), "loops are what layers add themselves"
        assert padded.node_mask.sum() == nodes and bool(padded.node_mask[:nodes].all())
        assert padded.edge_mask.sum() == edges and bool(padded.edge_mask[:edges].all())
        assert padded.seed_mask.nonzero().view(-1).tolist() == list(range(plain.batch_size))
        for name in ("x", "y", "n_id", "e_id", "edge_attr"):
            rows = padded[name]
            count = edges if name in ("e_id", "edge_attr") else nodes
            assert torch.equal(rows[:count], plain[name]) and not rows[count:].any()
        known = colptr.recall(padded.edge_index)
        assert known is not None
        counts = torch.bincount(padded.edge_index[1], minlength=padded.num_nodes)
        assert torch.equal(known.diff(), counts)


def test_an_epoch_is_compiled_at_most_four_times() -> None:
    plain, padded = loader(batch_size=75), loader(batch_size=75, pad_to="buckets")
    assert compilations(padded) <= 4
    assert compilations(plain) == len(plain) == 8


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 20},
        {"batch_size": 47, "num_neighbors": [-1, -1]},
        {"batch_cost": Budget("edges", 600)},
    ],
    ids=str,
)
def test_an_epoch_has_at_most_four_sizes(options: dict[str, Any]) -> None:
    own = NeighborLoader(DATA, **{"num_neighbors": [4, 3], "seed": 2, "shuffle": True} | options)
    padded = NeighborLoader(
        DATA, **{"num_neighbors": [4, 3], "seed": 2, "shuffle": True} | options, pad_to="buckets"
    )
    for _ in range(3):
        assert len({(batch.num_nodes, batch.num_edges) for batch in padded}) <= 4
        assert len({(batch.num_nodes, batch.num_edges) for batch in own}) > 6


def compilations(batches: Any) -> int:
    """How often a training step is compiled in an epoch."""
    model = GraphSAGE(5, 8, 2, 3)
    shapes: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        shapes.append([tuple(each.shape) for each in inputs if isinstance(each, Tensor)])
        return graph.forward

    def step(x: Tensor, edges: Tensor, y: Tensor, seeds: Tensor) -> Tensor:
        each = F.cross_entropy(model(x, edges), y, reduction="none")
        return (each * seeds).sum() / seeds.sum()

    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        compiled = torch.compile(step, backend=backend, dynamic=False)
        for batch in batches:
            seeds = batch.get("seed_mask", torch.arange(batch.num_nodes) < batch.batch_size)
            compiled(batch.x, batch.edge_index, batch.y, seeds).backward()
    torch.compiler.reset()
    return len(shapes)


@pytest.mark.parametrize(
    "workers",
    [
        {"num_workers": 2},
        {"num_workers": 1, "worker_type": "process"},
        {"num_workers": 1, "worker_type": "ring"},
    ],
    ids=str,
)
def test_workers_do_not_change_sizes(workers: dict[str, Any]) -> None:
    assert_same_batches(loader(pad_to="buckets"), loader(pad_to="buckets", **workers))


def test_no_row_is_read_for_padding() -> None:
    rows = []
    for pad_to in (None, "buckets"):
        own = loader(feature_store=filled(MemoryFeatureStore(), DATA), pad_to=pad_to)
        list(own)
        rows.append(own.stats()["epoch"]["fetch"]["rows"])
    assert rows[0] == rows[1] > 0


def test_types_have_sizes_of_their_own() -> None:
    data = graphs.hetero()
    kind = data.node_types[0]
    kwargs: dict[str, Any] = {"shuffle": True, "seed": 3, "batch_size": 8}
    plain = NeighborLoader(data, [3, 2], kind, **kwargs)
    padded = NeighborLoader(data, [3, 2], kind, **kwargs, pad_to="buckets")
    sizes = set()
    for left, right in zip(plain, padded, strict=True):
        sizes.add(tuple(right[t].num_nodes for t in right.node_types))
        for t in left.node_types:
            assert right[t].node_mask.sum() == left[t].num_nodes < right[t].num_nodes
        for t in left.edge_types:
            edges, count = right[t].edge_index, left[t].edge_index.size(1)
            assert torch.equal(edges[:, :count], left[t].edge_index)
            for end in (0, 1):
                node_type = t[2 * end]
                assert bool((edges[end, count:] >= left[node_type].num_nodes).all())
                assert bool((edges[end] < right[node_type].num_nodes).all())
        assert right[kind].seed_mask.sum() == left[kind].batch_size
    assert len(sizes) <= 4


def test_heterogeneous_models_compute_the_same() -> None:
    draw = torch.Generator().manual_seed(3)
    data = HeteroData()
    data["user"].x = torch.randn(80, 4, generator=draw).double()
    data["item"].x = torch.randn(120, 4, generator=draw).double()
    data["user", "buys", "item"].edge_index = torch.stack(
        [torch.randint(80, (500,), generator=draw), torch.randint(120, (500,), generator=draw)]
    )
    data["item", "of", "user"].edge_index = data["user", "buys", "item"].edge_index.flip(0)
    data["user", "knows", "user"].edge_index = torch.randint(80, (2, 300), generator=draw)
    torch.manual_seed(0)
    model = to_hetero(GraphSAGE((-1, -1), 8, 2, 3), data.metadata()).double()
    kwargs: dict[str, Any] = {"shuffle": True, "seed": 3, "batch_size": 20}
    plain = NeighborLoader(data, [3, 3], "user", **kwargs)
    padded = NeighborLoader(data, [3, 3], "user", **kwargs, pad_to="buckets")
    for pair in zip(plain, padded, strict=True):
        found = []
        for batch in pair:
            out = model(batch.x_dict, batch.edge_index_dict)["user"]
            found.append(gradients(model, out[: batch["user"].batch_size].square().sum()))
        assert torch.allclose(*found, rtol=1e-12, atol=1e-12)


def test_links_and_disjoint_batches() -> None:
    links = DATA.edge_index[:, ::7]
    kwargs: dict[str, Any] = {"batch_size": 30, "seed": 1, "neg_sampling": "binary"}
    plain = LinkNeighborLoader(DATA, [3, 2], links, **kwargs)
    padded = LinkNeighborLoader(DATA, [3, 2], links, **kwargs, pad_to="buckets")
    for left, right in zip(plain, padded, strict=True):
        assert torch.equal(left.edge_label_index, right.edge_label_index)
        assert right.node_mask.sum() == left.num_nodes and "seed_mask" not in right
    for left, right in both(disjoint=True):
        assert right.batch[left.num_nodes :].unique().tolist() == [left.batch_size]


@pytest.mark.parametrize("sizes", [[(300.0, 400)], [("300", "400")], [3], [(1, 2, 3)]])
def test_sizes_that_are_no_integers_are_refused(sizes: Any) -> None:
    with pytest.raises(TypeError, match="sizes must be pairs of integers"):
        Buckets(sizes=sizes)


def test_given_sizes() -> None:
    sizes = Buckets(sizes=[(300, 400), (600, 900)])
    found = {(b.num_nodes, b.num_edges) for b in loader(pad_to=sizes)}
    assert found <= {(300, 400), (600, 900)}
    with pytest.raises(ValueError, match=r"largest of pad_to=Buckets\(sizes=...\) is 20 nodes"):
        list(loader(pad_to=Buckets(sizes=[(20, 30)])))


def test_a_batch_beyond_the_largest_gets_a_larger_one() -> None:
    few = loader(input_nodes=torch.arange(600), pad_to=Buckets(headroom=1.0))
    seen = {b.num_nodes for b in itertools.chain(few, few)}
    assert few([*range(400)]).num_nodes > max(seen)


Refused = tuple[dict[str, Any], type[Exception], str]
REFUSED: list[Refused] = [
    ({"pad_to": "few"}, TypeError, "pad_to must be 'buckets'"),
    ({"pad_to": "buckets", "sampler": range(5), "shuffle": False}, ValueError, "find sizes"),
]


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refused(case: Refused) -> None:
    kwargs, error, match = case
    with pytest.raises(error, match=match):
        loader(**kwargs)


def test_refused_options() -> None:
    with pytest.raises(ValueError, match="headroom must be 1 to 16"):
        Buckets(headroom=0.5)
    with pytest.raises(TypeError, match="pairs of integers, nodes and edges"):
        Buckets(sizes=[5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="sizes must ascend"):
        Buckets(sizes=[(50, 60), (40, 70)])
    hetero = graphs.hetero()
    with pytest.raises(NotImplementedError, match="graphs without types"):
        NeighborLoader(hetero, [3], hetero.node_types[0], pad_to=Buckets(sizes=[(50, 60)]))
    with pytest.raises(NotImplementedError, match="pad_to= is not for ShaDowKHopSampler"):
        ShaDowKHopSampler(DATA, 1, 2, pad_to="buckets")
    sparse = DATA.edge_index.flip(0)
    data = Data(x=DATA.x, num_nodes=600)
    matrix = torch.sparse_coo_tensor(sparse, torch.ones(sparse.size(1)), (600, 600))
    data.adj_t = matrix.to_sparse_csr()
    with pytest.raises(NotImplementedError, match="set data.edge_index instead of adj_t"):
        list(loader(data, pad_to="buckets"))
