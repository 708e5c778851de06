"""What is served is what a loader gives, byte for byte, whatever else is in a batch."""

import pytest
import torch
from torch_geometric.data import Data, HeteroData

import pyg_scale
from pyg_scale.loader import NeighborLoader
from pyg_scale.ops import colptr
from pyg_scale.sampler.parts import parts_topology
from pyg_scale.serving import Neighborhoods, NewRows
from pyg_scale.store import Disk
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.testing import graphs

SEEDS = torch.tensor([5, 0, 17, 8, 33])
HOPS = [3, 2]


def tensors(batch):
    """Every tensor of a batch by place and name."""
    return {
        (str(store._key), name): store[name]
        for store in batch.stores
        for name in store.keys()  # noqa: SIM118
        if isinstance(store[name], torch.Tensor) and name != "input_id"
    }


def assert_same_bytes(found, expected):
    found, expected = tensors(found), tensors(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert found[name].numpy().tobytes() == value.numpy().tobytes(), name


def batch_of_loader(data, seeds, **options):
    loader = NeighborLoader(
        data, HOPS, seeds, disjoint=True, redraw=False, seed=3, batch_size=100, **options
    )
    (batch,) = loader
    return batch


def test_a_batch_is_that_of_the_loader():
    data = graphs.hostile()
    found = Neighborhoods(data, HOPS, seed=3).batch(SEEDS)
    assert_same_bytes(found, batch_of_loader(data, SEEDS))
    assert found.batch_size == 5


def test_with_types():
    data, ids = graphs.hetero(), torch.tensor([3, 0, 11])
    found = Neighborhoods(data, HOPS, input_type="item", seed=3).batch(ids)
    assert_same_bytes(found, batch_of_loader(data, ("item", ids)))


@pytest.mark.parametrize("strategy", ["uniform", "last"])
@pytest.mark.parametrize("time_attr", ["time", "when"])
def test_at_times(time_attr, strategy):
    data, time = graphs.hostile(), torch.tensor([4, 0, 7, 3, 9])
    options = {"time_attr": time_attr, "temporal_strategy": strategy}
    found = Neighborhoods(data, HOPS, seed=3, **options).batch(SEEDS, time)
    assert_same_bytes(found, batch_of_loader(data, SEEDS, input_time=time, **options))


def test_from_disk(tmp_path):
    data = graphs.hostile()
    pyg_scale.save(data, tmp_path / "graph")
    expected = batch_of_loader(data, SEEDS)
    assert_same_bytes(Neighborhoods(tmp_path / "graph", HOPS, seed=3).batch(SEEDS), expected)
    store = Disk(tmp_path / "graph", cache="1MB")
    cached = Neighborhoods(tmp_path / "graph", HOPS, seed=3, feature_store=store)
    assert_same_bytes(cached.batch(SEEDS), expected)


def assert_same_block(block, batch):
    assert block is not None
    for found, expected in ((block.x, batch.x), (block.edge_index, batch.edge_index)):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.numpy().tobytes() == expected.numpy().tobytes()
    assert block.num_seeds == batch.batch_size
    assert block.nodes_per_hop == batch.num_sampled_nodes
    assert block.edges_per_hop == batch.num_sampled_edges
    assert torch.equal(colptr.recall(block.edge_index), colptr.recall(batch.edge_index))


@pytest.mark.parametrize("time_attr", [None, "time"])
@pytest.mark.parametrize("place", ["memory", "mapped", "disk"])
def test_a_block_is_of_the_batch_of_the_loader(place, time_attr, tmp_path):
    data, time = graphs.hostile(), torch.tensor([4, 0, 7, 3, 9])
    options = {} if time_attr is None else {"time_attr": time_attr}
    when = None if time_attr is None else time
    expected = batch_of_loader(data, SEEDS, input_time=when, **options)
    graph, store = data, None
    if place != "memory":
        pyg_scale.save(data, tmp_path / "graph", time_attr=time_attr)
        graph = pyg_scale.open(tmp_path / "graph")
        store = Disk(tmp_path / "graph", cache="1MB") if place == "disk" else None
    found = Neighborhoods(graph, HOPS, seed=3, feature_store=store, **options)
    assert_same_block(found.block(SEEDS, when), expected)


def test_what_has_no_block():
    assert Neighborhoods(graphs.hetero(), HOPS, input_type="item").block(SEEDS) is None
    data = graphs.hostile()
    assert Neighborhoods((data, data), HOPS).block(SEEDS) is None
    assert Neighborhoods(data, HOPS, subgraph_type="induced").block(SEEDS) is None
    assert Neighborhoods(data, HOPS, attributes=["y"]).block(SEEDS) is None


def test_only_the_named_attributes_are_read():
    found = Neighborhoods(graphs.hostile(), HOPS, attributes=["x"]).batch(SEEDS)
    assert "x" in found
    assert {"y", "time", "when", "weight"}.isdisjoint(found.keys())
    with pytest.raises(ValueError, match="no nothing"):
        Neighborhoods(graphs.hostile(), HOPS, attributes=["x", "nothing"])


@pytest.mark.parametrize("store", ["memory", "mmap", "disk", "pair"])
def test_a_feature_store_reads_the_named_attributes_only(store, tmp_path):
    data = graphs.hostile()
    pyg_scale.save(data, tmp_path / "graph")
    graph, options = pyg_scale.open(tmp_path / "graph"), {"feature_store": store}
    names = ["x"] if store == "pair" else ["x", "edge_attr"]
    if store == "pair":
        graph = (data, data)  # a Data is both of PyG's stores
        options = {}
    found = Neighborhoods(graph, HOPS, seed=3, attributes=names, **options)
    batch = found.batch(SEEDS)
    assert {"y", "time", "when", "weight"}.isdisjoint(batch.keys())
    expected = batch_of_loader(data, SEEDS)
    for name in (*names, "n_id"):
        assert batch[name].numpy().tobytes() == expected[name].numpy().tobytes()
    with pytest.raises(ValueError, match="no nothing"):
        Neighborhoods(graph, HOPS, attributes=["x", "nothing"], **options)


def with_rows(data, rows):
    """The same graph, rebuilt with new nodes at its end."""
    first, (_, num_edges) = data.num_nodes, rows.edge_index.shape
    whole = Data(num_nodes=first + rows.num_rows)
    new = torch.stack([rows.edge_index[0], rows.edge_index[1] + first])
    whole.edge_index = torch.cat([data.edge_index, new], dim=1)
    for name in data.node_attrs():
        if name in rows.attributes:
            whole[name] = torch.cat([data[name], rows.attributes[name]])
    for name in data.edge_attrs():
        if name in rows.edge_attributes:
            whole[name] = torch.cat([data[name], rows.edge_attributes[name]])
    assert whole.num_edges == data.num_edges + num_edges
    return whole


def new_rows(data, num_edges=9, num_rows=2):
    generator = torch.Generator().manual_seed(1)

    def like(value, rows):
        if value.is_floating_point():
            return torch.randn(rows, *value.shape[1:], generator=generator).to(value.dtype).abs()
        return torch.randint(9, (rows, *value.shape[1:]), generator=generator).to(value.dtype)

    source = torch.randint(data.num_nodes, (num_edges,), generator=generator)
    target = torch.randint(num_rows, (num_edges,), generator=generator)
    return NewRows(
        {name: like(data[name], num_rows) for name in data.node_attrs()},
        torch.stack([source, target]),
        {n: like(data[n], num_edges) for n in data.edge_attrs() if n != "edge_index"},
    )


@pytest.mark.parametrize("kernels", ["require", "never"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"replace": True},
        {"weight_attr": "weight"},
        {"time_attr": "when"},
        {"time_attr": "when", "temporal_strategy": "last"},
        {"time_attr": "time"},
    ],
    ids=str,
)
def test_new_rows_are_as_those_of_a_graph_that_has_them(options, kernels, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", kernels)
    data = graphs.hostile()
    rows = new_rows(data)
    whole = with_rows(data, rows)
    time = torch.tensor([4, 0, 7, 3, 9, 5, 6]) if "time_attr" in options else None
    found = Neighborhoods(data, HOPS, seed=3, **options).batch(SEEDS, time, rows)
    ids = torch.cat([SEEDS, data.num_nodes + torch.arange(2)])
    expected = Neighborhoods(whole, HOPS, seed=3, **options).batch(ids, time)
    assert_same_bytes(found, expected)
    assert bool((found.e_id >= data.num_edges).any())


def shop():
    generator = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["user"].x = torch.randn(30, 3, generator=generator)
    data["item"].x = torch.randn(20, 2, generator=generator)
    for edge_type, sources, targets in (
        (("item", "bought", "user"), 20, 30),
        (("user", "buys", "item"), 30, 20),
    ):
        ends = [torch.randint(n, (150,), generator=generator) for n in (sources, targets)]
        data[edge_type].edge_index = torch.stack(ends)
    return data


def test_new_rows_with_types():
    data, bought = shop(), ("item", "bought", "user")
    x, edges = torch.randn(1, 3), torch.tensor([[4, 9, 2, 19], [0, 0, 0, 0]])
    served = Neighborhoods(data, HOPS, input_type="user", seed=3)
    found = served.batch(torch.tensor([7]), None, NewRows({"x": x}, {bought: edges}))
    whole = shop()
    whole["user"].x = torch.cat([data["user"].x, x])
    new = torch.stack([edges[0], edges[1] + 30])
    whole[bought].edge_index = torch.cat([data[bought].edge_index, new], dim=1)
    expected = Neighborhoods(whole, HOPS, input_type="user", seed=3).batch(torch.tensor([7, 30]))
    assert_same_bytes(found, expected)
    assert_same_bytes(served.batch(torch.tensor([7])), batch_of_loader(data, ("user", [7])))


def test_a_new_row_without_edges():
    data = graphs.hostile()
    rows = NewRows({name: data[name][:1] for name in data.node_attrs()})
    found = Neighborhoods(data, HOPS).batch(torch.empty(0, dtype=torch.int64), None, rows)
    assert found.num_nodes == 1
    assert found.edge_index.shape == (2, 0)


@pytest.mark.parametrize(
    ("rows", "error", "what"),
    [
        (lambda d: NewRows({"x": d.x[:1]}), ValueError, "lack"),
        (lambda d: NewRows({}), TypeError, "attributes"),
        (lambda d: NewRows({"x": d.x[:1], "y": d.y[:2]}), ValueError, "differ"),
        (lambda d: NewRows({"x": d.x[:1, :1]}), ValueError, "rows of shape"),
        (lambda d: NewRows({"x": d.x[:1].double()}), ValueError, "float"),
        (lambda d: NewRows({"x": d.x[:1]}, torch.tensor([[999], [0]])), IndexError, "999"),
        (lambda d: NewRows({"x": d.x[:1]}, torch.tensor([[0], [1]])), IndexError, "1"),
        (lambda d: NewRows({"x": d.x[:1]}, torch.tensor([[0.0], [0.0]])), TypeError, "int64"),
        (lambda d: NewRows({"x": d.x[:1]}, {("a", "b", "c"): d.edge_index}), TypeError, "no types"),
    ],
)
def test_new_rows_that_do_not_fit_are_refused(rows, error, what):
    data = graphs.hostile()
    attributes = None if what == "lack" else ["x"]
    served = Neighborhoods(data, HOPS, attributes=attributes)
    with pytest.raises(error, match=what):
        served.with_new_rows(rows(data))


def test_new_rows_lack_the_time_of_an_edge():
    data = graphs.hostile()
    served = Neighborhoods(data, HOPS, attributes=["x"], time_attr="when")
    with pytest.raises(ValueError, match="lack 'when'"):
        served.with_new_rows(NewRows({"x": data.x[:1]}, torch.tensor([[3], [0]])))


def test_a_graph_in_parts(tmp_path):
    data = graphs.hostile()
    pyg_scale.save(data, tmp_path / "whole")
    pyg_scale.partition(tmp_path / "whole", 2, method="random", path=tmp_path / "parts")
    rows = new_rows(data)
    expected = Neighborhoods(data, HOPS, seed=3).batch(SEEDS, None, rows)
    joined = Neighborhoods(tmp_path / "parts", HOPS, seed=3)
    assert_same_bytes(joined.batch(SEEDS, None, rows), expected)
    directory = GraphDirectory.shared(tmp_path / "parts")

    class InParts(Data):
        def supply_topology(self, options):
            return parts_topology(directory)

    asked = Neighborhoods(InParts(**data.to_dict()), HOPS, seed=3)
    assert_same_bytes(asked.batch(SEEDS), batch_of_loader(data, SEEDS))
    with pytest.raises(NotImplementedError, match="one part"):
        asked.with_new_rows(rows)
