"""HGT sampling of graphs with types: distribution, arguments, and torch-sparse where it is."""

from collections import Counter

import pytest
import torch
import torch_geometric.typing
from scipy.stats import chisquare
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput
from torch_geometric.sampler import HGTSampler as PyGHGTSampler

from pyg_scale.sampler.hgt import HGTSampler


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    data = HeteroData()
    for node_type, size in (("paper", 50), ("author", 30), ("venue", 5)):
        data[node_type].num_nodes = size
    for a, name, b, count in (
        ("paper", "cites", "paper", 150),
        ("author", "writes", "paper", 120),
        ("paper", "rev_writes", "author", 120),
        ("paper", "in", "venue", 50),
    ):
        sizes = data[a].num_nodes, data[b].num_nodes
        data[a, name, b].edge_index = torch.stack(
            [torch.randint(size, (count,), generator=generator) for size in sizes]
        )
    return data


def sample(sampler, nodes, node_type="paper", key=1):
    node = torch.as_tensor(nodes)
    inputs = NodeSamplerInput(torch.arange(node.numel()), node, None, node_type)
    return sampler.sample_from_nodes(inputs, key=key)


def test_output(data):
    out = sample(HGTSampler(data, [4, 3]), [3, 3, 7])
    assert out.node["paper"].tolist()[:3] == [3, 3, 7]
    assert out.node.keys() == set(data.node_types)
    assert out.row.keys() == out.col.keys() == out.edge.keys() == set(data.edge_types)
    assert out.batch is None
    assert out.num_sampled_nodes is None
    assert out.metadata[0].tolist() == [0, 1, 2]
    assert out.metadata[1] is None
    for edge_type in data.edge_types:
        edge_index = data[edge_type].edge_index[:, out.edge[edge_type]]
        found = torch.stack(
            [out.node[edge_type[0]][out.row[edge_type]], out.node[edge_type[2]][out.col[edge_type]]]
        )
        assert torch.equal(found, edge_index)


def test_no_more_than_asked_for_and_none_twice(data):
    out = sample(HGTSampler(data, {"paper": [4, 2], "author": [3, 0], "venue": [1, 1]}), [3])
    assert out.node["paper"].numel() <= 1 + 6
    assert out.node["author"].numel() <= 3
    for node in out.node.values():
        assert node.unique().numel() == node.numel()


def test_all_reaches_what_can_be_reached(data):
    """-1 takes every node from which a path of that many edges leads to a seed."""
    out = sample(HGTSampler(data, [-1, -1]), [3], "venue")
    reached = {t: set() for t in data.node_types} | {"venue": {3}}
    for _ in range(2):
        before = {t: set(nodes) for t, nodes in reached.items()}
        for a, name, b in data.edge_types:
            src, dst = data[a, name, b].edge_index
            reached[a] |= {int(s) for s, d in zip(src, dst, strict=True) if int(d) in before[b]}
    assert {t: set(node.tolist()) for t, node in out.node.items()} == reached


def test_probability_is_the_squared_sum_of_inverse_degrees():
    """Scores 1/4 + 1/2, 1/4 and 1/2 of which one node is taken: 9 to 1 to 4, by hand."""
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 4, 2
    # b0 has the in-neighbours 0, 1, 1, 1; b1 has 0 and 2: 3/4, 3/4 and 1/2.
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1, 1, 1, 0, 2], [0, 0, 0, 0, 1, 1]])
    sampler = HGTSampler(data, [1])
    found = Counter(int(sample(sampler, [0, 1], "b", key=key).node["a"]) for key in range(2000))
    scores = torch.tensor([3 / 4, 3 / 4, 1 / 2], dtype=torch.float64) ** 2
    expected = (scores / scores.sum() * 2000).tolist()
    assert chisquare([found[n] for n in range(3)], expected).pvalue > 1e-3


def test_a_hub_gives_all_its_edges():
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 500, 1
    data["a", "to", "b"].edge_index = torch.stack([torch.arange(500), torch.zeros(500).long()])
    out = sample(HGTSampler(data, [200]), [0], "b")
    assert out.node["a"].numel() == 200
    assert out.edge["a", "to", "b"].sort().values.equal(out.node["a"].sort().values)


def test_same_key_same_batch(data):
    sampler = HGTSampler(data, [3, 3])
    first, same, other = (sample(sampler, [1, 2], key=key) for key in (1, 1, 2))
    assert all(torch.equal(first.node[t], same.node[t]) for t in data.node_types)
    assert any(first.node[t].tolist() != other.node[t].tolist() for t in data.node_types)


def test_int32_stays_int32(data):
    wide = sample(HGTSampler(data, [4, 3]), [3, 7])
    for edge_type in data.edge_types:
        data[edge_type].edge_index = data[edge_type].edge_index.int()
    out = sample(HGTSampler(data, [4, 3]), [3, 7])
    for node_type in data.node_types:
        assert out.node[node_type].dtype == torch.int32
        assert out.node[node_type].tolist() == wide.node[node_type].tolist()


def test_links(data):
    edge_type = ("author", "writes", "paper")
    row, col = data[edge_type].edge_index[:, :6]
    inputs = EdgeSamplerInput(None, row, col, input_type=edge_type)
    out = HGTSampler(data, [3]).sample_from_edges(inputs, "binary", key=3)
    index = out.metadata[1]
    assert torch.equal(out.node["author"][index[0, :6]], row)
    assert torch.equal(out.node["paper"][index[1, :6]], col)


@pytest.mark.parametrize(
    ("num_samples", "match"),
    [
        ({"paper": [1], "author": [1, 2], "venue": [1]}, "same number of hops"),
        ({"paper": [1]}, "no entry for node type 'author'"),
        ({"paper": [1], "author": [1], "shop": [1]}, "num_samples has 'shop'"),
    ],
)
def test_bad_num_samples(data, num_samples, match):
    with pytest.raises(ValueError, match=match):
        HGTSampler(data, num_samples)


def test_a_type_that_is_never_reached_may_be_left_out(data):
    out = sample(HGTSampler(data, {"paper": [2], "author": [2]}), [0])  # no edge leaves a venue
    assert out.node["venue"].numel() == 0


def test_a_homogeneous_graph_raises():
    with pytest.raises(NotImplementedError, match="needs a graph with node types"):
        HGTSampler(Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2), [1])


def test_seed_times_raise(data):
    inputs = NodeSamplerInput(None, torch.tensor([0]), torch.tensor([5]), "paper")
    with pytest.raises(ValueError, match="seeds have times"):
        HGTSampler(data, [1]).sample_from_nodes(inputs, key=0)


def test_same_as_torch_sparse_where_nothing_is_drawn(data):
    if not torch_geometric.typing.WITH_TORCH_SPARSE:
        pytest.skip("torch-sparse is not installed")
    for seeds, node_type in (([3, 7], "paper"), ([0, 4], "venue"), ([9], "author")):
        inputs = NodeSamplerInput(None, torch.tensor(seeds), None, node_type)
        theirs = PyGHGTSampler(data, [1000, 1000]).sample_from_nodes(inputs)
        ours = HGTSampler(data, [1000, 1000]).sample_from_nodes(inputs, key=0)
        none = torch.empty(0, dtype=torch.int64)  # it leaves out types that it did not reach
        for t in data.node_types:
            assert set(ours.node[t].tolist()) == set(theirs.node.get(t, none).tolist())
        for e in data.edge_types:
            perm = PyGHGTSampler(data, [1]).edge_permutation[e]
            assert ours.edge[e].sort().values.equal(perm[theirs.edge.get(e, none)].sort().values)
