"""Links as seeds: PyG's own function with our draws gives the same; and what PyG gets wrong."""

import pytest
import torch
import torch_geometric.sampler.neighbor_sampler as pyg_sampler
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import EdgeSamplerInput

from pyg_scale.sampler.base import NeighborSampler
from pyg_scale.sampler.negative import NegativeSampling, sample_negatives
from pyg_scale.sampler.reference import ReferenceSampler

KEY = 77
P = 7
MODES = [None, ("binary", 1), ("binary", 3), ("triplet", 1)]


def homogeneous():
    generator = torch.Generator().manual_seed(3)
    edge_index = torch.randint(40, (2, 300), generator=generator)
    time = torch.randint(50, (40,), generator=generator)
    time[0] = 0
    return Data(edge_index=edge_index, num_nodes=40, time=time)


def heterogeneous():
    generator = torch.Generator().manual_seed(4)
    data = HeteroData()
    for node_type, size in (("user", 30), ("item", 20)):
        data[node_type].num_nodes = size
        data[node_type].time = torch.randint(50, (size,), generator=generator)
        data[node_type].time[0] = 0
    for a, name, b in (
        ("user", "rates", "item"),
        ("item", "rev_rates", "user"),
        ("user", "knows", "user"),
    ):
        sizes = data[a].num_nodes, data[b].num_nodes
        data[a, name, b].edge_index = torch.stack(
            [torch.randint(size, (120,), generator=generator) for size in sizes]
        )
    return data


EDGE_TYPES = [None, ("user", "rates", "item"), ("user", "knows", "user")]


def links(data, edge_type, size=P, **kwargs):
    """Repeated endpoints and a repeated link among the seeds."""
    row, col = (data if edge_type is None else data[edge_type]).edge_index[:, :size]
    row[-1:], col[-1:] = row[:1], col[:1]
    return EdgeSamplerInput(torch.arange(size) + 100, row, col, input_type=edge_type, **kwargs)


def sampler_for(edge_type, **kwargs):
    data = homogeneous() if edge_type is None else heterogeneous()
    return data, ReferenceSampler(data, [4, 3], **kwargs)


def pyg_edge_sample(sampler, inputs, spec, monkeypatch):
    """PyG's own function, with our sampler and our negatives in place of its."""
    graph = sampler.topology
    time = None if inputs.time is None else graph.to_time(inputs.time)
    if spec is not None:
        spec = NegativeSampling.cast(spec)
        src, dst = sample_negatives(
            spec, graph, inputs.input_type, inputs.row, inputs.col, time, KEY
        )
        drawn = {"src": src, "dst": dst}
        monkeypatch.setattr(
            pyg_sampler, "neg_sample", lambda *args, endpoint, **kwargs: drawn[endpoint]
        )

    def sample(seed, seed_time):
        if not isinstance(seed, dict):
            seed, seed_time = {None: seed}, None if seed_time is None else {None: seed_time}
        return sampler.sample_checked(seed, seed_time, KEY).to_output()

    num_nodes = dict(graph.num_nodes) if graph.is_hetero else graph.num_nodes[None]
    # Negatives are already drawn, so that PyG needs no times of nodes.
    return pyg_sampler.edge_sample(inputs, sample, num_nodes, sampler.disjoint, neg_sampling=spec)


def assert_equal(ours, theirs):
    """Tensors, dictionaries and tuples of them."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        ours, theirs = ours.values(), [theirs[key] for key in ours]
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    elif ours is None or isinstance(ours, int):
        assert ours == theirs
    else:
        for a, b in zip(ours, theirs, strict=True):
            assert_equal(a, b)


@pytest.mark.parametrize("edge_type", EDGE_TYPES)
@pytest.mark.parametrize("spec", MODES)
@pytest.mark.parametrize("kind", ["plain", "disjoint", "temporal"])
def test_same_as_pygs_function(edge_type, spec, kind, monkeypatch):
    options = {"disjoint": kind == "disjoint", "time_attr": "time" if kind == "temporal" else None}
    data, sampler = sampler_for(edge_type, **options)
    time = torch.arange(20, 20 + P) if kind == "temporal" else None
    label = None if spec is None or spec[0] == "triplet" else torch.arange(1, P + 1)
    inputs = links(data, edge_type, label=label, time=time)
    ours = sampler.sample_from_edges(inputs, spec, key=KEY)
    theirs = pyg_edge_sample(sampler, inputs, spec, monkeypatch)
    for name in ("node", "row", "col", "edge", "batch", "metadata", "num_sampled_nodes"):
        assert_equal(getattr(ours, name), getattr(theirs, name))


def ends(data, edge_type, out):
    """Node ids of both endpoints, from rows of the batch."""
    if edge_type is None:
        return out.node, out.node
    return out.node[edge_type[0]], out.node[edge_type[2]]


@pytest.mark.parametrize("edge_type", EDGE_TYPES)
@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("amount", [0.5, 1, 1.3, 2])
def test_binary_means_what_it_says(edge_type, disjoint, amount):
    data, sampler = sampler_for(edge_type, disjoint=disjoint)
    inputs = links(data, edge_type)
    out = sampler.sample_from_edges(inputs, ("binary", amount), key=KEY)
    input_id, index, label, time = out.metadata
    src_node, dst_node = ends(data, edge_type, out)
    num_negatives = -int(-P * amount // 1)
    assert input_id.tolist() == list(range(100, 100 + P))
    assert index.shape == (2, P + num_negatives)
    assert torch.equal(src_node[index[0, :P]], inputs.row)
    assert torch.equal(dst_node[index[1, :P]], inputs.col)
    assert label.tolist() == [1.0] * P + [0.0] * num_negatives
    assert label.dtype == torch.float
    assert time is None
    spec = NegativeSampling("binary", amount)
    src, dst = sample_negatives(
        spec, sampler.topology, edge_type, inputs.row, inputs.col, None, KEY
    )
    assert torch.equal(src_node[index[0, P:]], src)
    assert torch.equal(dst_node[index[1, P:]], dst)
    if disjoint:
        batch = out.batch if edge_type is None else out.batch[edge_type[0]]
        owner = torch.arange(P + num_negatives) % P
        owner[P:] = torch.arange(num_negatives) % P
        assert torch.equal(batch[index[0]], owner)
        batch = out.batch if edge_type is None else out.batch[edge_type[2]]
        assert torch.equal(batch[index[1]], owner)


@pytest.mark.parametrize("edge_type", EDGE_TYPES)
@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("amount", [1, 2, 3])
def test_triplet_means_what_it_says(edge_type, disjoint, amount):
    data, sampler = sampler_for(edge_type, disjoint=disjoint)
    inputs = links(data, edge_type)
    spec = NegativeSampling("triplet", amount, exclude_positives=True)
    out = sampler.sample_from_edges(inputs, spec, key=KEY)
    _, src, positive, negative, time = out.metadata
    src_node, dst_node = ends(data, edge_type, out)
    assert torch.equal(src_node[src], inputs.row)
    assert torch.equal(dst_node[positive], inputs.col)
    assert negative.shape == ((P,) if amount == 1 else (P, amount))
    assert time is None
    edge_index = (data if edge_type is None else data[edge_type]).edge_index
    present = set(map(tuple, edge_index.t().tolist()))
    for i, nodes in enumerate(dst_node[negative].view(P, amount).tolist()):
        assert not {(int(inputs.row[i]), node) for node in nodes} & present
    if disjoint:
        batch = out.batch if edge_type is None else out.batch[edge_type[2]]
        assert torch.equal(
            batch[negative.view(P, amount)], torch.arange(P).view(P, 1).expand(P, amount)
        )


def test_seeds_are_sorted_once_each_unless_disjoint():
    data, sampler = sampler_for(None)
    out = sampler.sample_from_edges(links(data, None), key=KEY)
    expected = torch.cat([*data.edge_index[:, : P - 1]]).unique()
    assert torch.equal(out.node[: expected.numel()], expected)


@pytest.mark.parametrize("edge_type", EDGE_TYPES)
@pytest.mark.parametrize("spec", [None, ("binary", 2), ("triplet", 1), ("triplet", 3)])
@pytest.mark.parametrize("kind", ["plain", "disjoint", "temporal"])
def test_no_links(edge_type, spec, kind):
    options = {"disjoint": kind == "disjoint", "time_attr": "time" if kind == "temporal" else None}
    data, sampler = sampler_for(edge_type, **options)
    time = torch.empty(0, dtype=torch.int64) if kind == "temporal" else None
    out = sampler.sample_from_edges(links(data, edge_type, size=0, time=time), spec, key=KEY)
    if spec is None or spec[0] == "binary":
        assert out.metadata[1].shape == (2, 0)
    else:
        assert out.metadata[3].shape == ((0,) if spec[1] == 1 else (0, 3))
    assert ends(data, edge_type, out)[0].numel() == 0


def test_labels_of_several_columns():
    data, sampler = sampler_for(None)
    label = torch.arange(3 * P).view(P, 3)
    out = sampler.sample_from_edges(links(data, None, label=label), ("binary", 1), key=KEY)
    assert torch.equal(out.metadata[2], torch.cat([label, torch.zeros_like(label)]))
    assert torch.equal(
        sampler.sample_from_edges(links(data, None, label=label), key=KEY).metadata[2], label
    )


def test_times_of_negatives_are_those_of_their_links():
    data, sampler = sampler_for(None, time_attr="time")
    time = torch.arange(30, 30 + P)
    out = sampler.sample_from_edges(links(data, None, time=time), ("binary", 1.5), key=KEY)
    expected = torch.cat([time, time, time])[: P + 11]
    assert torch.equal(out.metadata[3], expected)
    index = out.metadata[1]
    assert bool((data.time[out.node[index[:, P:]]] <= expected[P:]).all())
    assert torch.equal(out.batch[index[0]], out.batch[index[1]])
    # Whatever was sampled around an endpoint is not later than its link.
    grown = torch.ones(out.node.numel(), dtype=torch.bool)
    grown[index.flatten()] = False
    assert bool((data.time[out.node] <= time[out.batch])[grown].all())


def test_the_same_key_gives_the_same_batch_and_another_key_another():
    data, sampler = sampler_for(None)
    first, same, other = (
        sampler.sample_from_edges(links(data, None), "binary", key=key) for key in (1, 1, 2)
    )
    assert_equal(first.metadata, same.metadata)
    assert torch.equal(first.node, same.node)
    assert first.node.tolist() != other.node.tolist()


def test_backward_direction_takes_the_same_negatives():
    data = homogeneous()
    spec = NegativeSampling("binary", 2, exclude_positives=True)
    pairs = []
    for direction in ("forward", "backward"):
        sampler = ReferenceSampler(data, [2], sample_direction=direction)
        out = sampler.sample_from_edges(links(data, None), spec, key=KEY)
        pairs.append(out.node[out.metadata[1]])
    assert torch.equal(*pairs)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"row": torch.tensor([0, 40])}, IndexError, r"edge_label_index\[0\] 40 is out of range"),
        ({"col": torch.tensor([-1, 0])}, IndexError, r"edge_label_index\[1\] -1 is out of range"),
        ({"col": torch.tensor([0.5, 1])}, TypeError, r"edge_label_index\[1\] must be"),
        ({"col": torch.tensor([1])}, ValueError, r"edge_label_index\[1\] must have one entry"),
        ({"label": torch.ones(3)}, ValueError, "edge_label must have one entry per link, 2"),
        ({"time": torch.ones(2)}, ValueError, "set time_attr="),
        ({"input_type": ("a", "b", "c")}, ValueError, "do not go with a homogeneous graph"),
    ],
)
def test_bad_links(change, error, match):
    _, sampler = sampler_for(None)
    arguments = {"row": torch.tensor([0, 1]), "col": torch.tensor([2, 3])} | change
    with pytest.raises(error, match=match):
        sampler.sample_from_edges(EdgeSamplerInput(None, **arguments), key=KEY)


def test_triplets_have_no_labels():
    data, sampler = sampler_for(None)
    with pytest.raises(ValueError, match="edge_label must be None in mode 'triplet'"):
        sampler.sample_from_edges(links(data, None, label=torch.ones(P)), "triplet", key=KEY)


def test_a_sampler_that_cannot_says_so():
    class NodesOnly(ReferenceSampler):
        supports = NeighborSampler.supports

    data = homogeneous()
    with pytest.raises(NotImplementedError, match="NodesOnly does not support link loaders"):
        NodesOnly(data, [2]).sample_from_edges(links(data, None), key=KEY)
