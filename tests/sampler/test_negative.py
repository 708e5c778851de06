"""Negatives: the specification to the bit, distributions, times, and no positive among them."""

import ast
import pickle
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_geometric.sampler as pyg
from scipy.stats import chisquare

from pyg_scale.graph.topology import CSC, Topology
from pyg_scale.ops.keys import GOLDEN, NEGATIVE_DST, NEGATIVE_SRC, fold, mix
from pyg_scale.sampler.negative import ATTEMPTS, NegativeSampling, sample_negatives

KEY = 0xFEED_FACE_CAFE_BEEF


def make_csc(edge_index, num_dst):
    src, dst = edge_index
    order = dst.argsort(stable=True)
    count = torch.bincount(dst, minlength=num_dst)
    return CSC(torch.cat([count.new_zeros(1), count.cumsum(0)]), src[order], order)


def homogeneous(num_nodes, edges=(), time=None, direction="forward"):
    edge_index = torch.tensor(list(edges), dtype=torch.int64).view(-1, 2).t()
    if direction == "backward":
        edge_index = edge_index.flip(0)
    node_time = {} if time is None else {None: torch.tensor(time)}
    csc = {None: make_csc(edge_index, num_nodes)}
    return Topology((None,), (None,), {None: num_nodes}, csc, node_time, direction=direction)


def bounded(key, size):
    """One draw with Python's integers: word 0 of a key's stream, Lemire's method."""
    word = mix(key + GOLDEN)
    while (word * size) % 2**64 < 2**64 % size:
        word = mix(word + GOLDEN)
    return word * size >> 64


def negatives(spec, graph, src, dst=None, time=None, key=KEY, edge_type=None):
    src = torch.as_tensor(src)
    dst = src if dst is None else torch.as_tensor(dst)
    time = None if time is None else torch.as_tensor(time)
    return sample_negatives(NegativeSampling.cast(spec), graph, edge_type, src, dst, time, key)


# The specification ##########################################################################


def test_uniform_draws_to_the_bit():
    graph = homogeneous(1000)
    src, dst = negatives("binary", graph, torch.arange(50))
    assert src.tolist() == [bounded(fold(KEY, NEGATIVE_SRC, p, 0), 1000) for p in range(50)]
    assert dst.tolist() == [bounded(fold(KEY, NEGATIVE_DST, p, 0), 1000) for p in range(50)]


def test_weighted_draws_to_the_bit():
    weight = torch.tensor([0.0, 3.0, 1e-30, 7.5, 0.0, 1.0])
    fixed = [0, int(3 / 7.5 * 2**32), 1, 2**32, 0, int(1 / 7.5 * 2**32)]
    expected = []
    for p in range(200):
        t = bounded(fold(KEY, NEGATIVE_DST, p, 0), sum(fixed))
        expected.append(next(n for n in range(6) if sum(fixed[: n + 1]) > t))
    graph = homogeneous(6)
    src, dst = negatives(NegativeSampling("triplet", 4, dst_weight=weight), graph, [0] * 50)
    assert src is None
    assert dst.tolist() == expected


def test_temporal_draws_to_the_bit():
    time = [5, 1, 9, 1, 7]
    order = [1, 3, 0, 4, 2]
    limit = [1, 5, 8, 9]
    sizes = [2, 3, 4, 5]
    _, dst = negatives(("triplet", 10), homogeneous(5, time=time), [0] * 4, time=limit)
    expected = [order[bounded(fold(KEY, NEGATIVE_DST, p, 0), sizes[p % 4])] for p in range(40)]
    assert dst.tolist() == expected


def test_an_attempt_redraws_both_endpoints():
    edges = [(i, j) for i in range(8) for j in range(8) if (i + j) % 3]
    spec = NegativeSampling("binary", 5, exclude_positives=True)
    src, dst = negatives(spec, homogeneous(8, edges), [0] * 20)
    expected = []
    for p in range(100):
        for attempt in range(ATTEMPTS):
            pair = tuple(
                bounded(fold(KEY, purpose, p, attempt), 8)
                for purpose in (NEGATIVE_SRC, NEGATIVE_DST)
            )
            if pair not in edges:
                break
        expected.append(pair)
    assert list(zip(src.tolist(), dst.tolist(), strict=True)) == expected


def test_what_is_left_is_drawn_to_the_bit():
    # Node 0 is joined to all but 3 of 200 nodes: 16 attempts rarely find one.
    left = [17, 90, 170]
    edges = [(0, j) for j in range(200) if j not in left]
    spec = NegativeSampling("triplet", 40, exclude_positives=True)
    _, dst = negatives(spec, homogeneous(200, edges), [0])
    drawn_late = 0
    for p, node in enumerate(dst.tolist()):
        tries = [bounded(fold(KEY, NEGATIVE_DST, p, a), 200) for a in range(ATTEMPTS)]
        found = [n for n in tries if n in left]
        drawn_late += not found
        last = left[bounded(fold(KEY, NEGATIVE_DST, p, ATTEMPTS), 3)]
        assert node == (found[0] if found else last)
    assert drawn_late > 10


def test_vectors_of_the_specification():
    page = (Path(__file__).parents[2] / "docs" / "draws.md").read_text()
    (block,) = re.findall(r"```negatives\n(.*?)```", page, re.DOTALL)
    lines = [line.split(" = ") for line in block.splitlines()]
    vector = {name: ast.literal_eval(value) for name, value in lines}
    key = 0x028E4B9782EAAAF1

    found = negatives(("binary", 2), homogeneous(1000), [0, 0, 0], key=key)
    assert tuple(end.tolist() for end in found) == vector["binary_2"]
    weight = torch.tensor(vector["weight"], dtype=torch.float64)
    spec = NegativeSampling("triplet", 4, dst_weight=weight)
    found = negatives(spec, homogeneous(5), [0, 0], key=key)
    assert found[1].tolist() == vector["weighted_triplet_4"]
    graph = homogeneous(5, time=vector["time"])
    found = negatives(("triplet", 4), graph, [0, 0], time=vector["time_of_links"], key=key)
    assert found[1].tolist() == vector["temporal_triplet_4"]
    spec = NegativeSampling("binary", 3, exclude_positives=True)
    graph = homogeneous(3, zip(*vector["edges"], strict=True))
    found = negatives(spec, graph, [0, 0], key=key)
    assert tuple(end.tolist() for end in found) == vector["excluding_binary_3"]
    spec = NegativeSampling("triplet", 2, exclude_positives=True)
    graph = homogeneous(10, [(0, node) for node in vector["edges_of_0"]])
    assert negatives(spec, graph, [0], key=key)[1].tolist() == vector["excluding_triplet_2"]


# Distributions ##############################################################################


def counts(values, size):
    return torch.bincount(values, minlength=size).tolist()


def test_uniform_distribution():
    src, dst = negatives(("binary", 20), homogeneous(37), torch.zeros(1000, dtype=torch.int64))
    assert chisquare(counts(src, 37)).pvalue > 1e-3
    assert chisquare(counts(dst, 37)).pvalue > 1e-3
    assert chisquare(counts(src * 37 + dst, 37 * 37)).pvalue > 1e-3  # ends are independent


def test_weighted_distribution_among_valid_times():
    weight = torch.arange(10, dtype=torch.float64)
    graph = homogeneous(10, time=[3, 1, 4, 1, 5, 9, 2, 6, 5, 3])
    spec = NegativeSampling("binary", 20, src_weight=weight, dst_weight=weight)
    src, dst = negatives(spec, graph, [0] * 500, time=[4] * 500)
    valid = torch.tensor([0, 1, 2, 3, 6, 9])
    expected = weight[valid] / weight[valid].sum() * 10_000
    for end in (src, dst):
        assert set(end.tolist()) == {1, 2, 3, 6, 9}  # 0 has no weight
        found = torch.bincount(end, minlength=10)[valid]
        assert chisquare(found[1:].numpy(), expected[1:].numpy()).pvalue > 1e-3


def test_excluding_positives_leaves_the_others_equally_likely():
    edges = [(i, j) for i in range(6) for j in range(6) if i != j and (i * j) % 2 == 0]
    spec = NegativeSampling("binary", 50, exclude_positives=True)
    src, dst = negatives(spec, homogeneous(6, edges), [0] * 400)
    found = Counter(zip(src.tolist(), dst.tolist(), strict=True))
    allowed = {(i, j) for i in range(6) for j in range(6)} - set(edges)
    assert set(found) == allowed
    assert chisquare(list(found.values())).pvalue > 1e-3


# Times ######################################################################################


def test_no_negative_is_later_than_its_link():
    generator = torch.Generator().manual_seed(1)
    time = torch.randint(100, (300,), generator=generator)
    limit = torch.randint(int(time.min()), 100, (64,), generator=generator)
    graph = homogeneous(300, time=time.tolist())
    for spec in (("binary", 2.5), ("triplet", 3)):
        src, dst = negatives(spec, graph, [0] * 64, time=limit)
        owner = torch.arange(dst.numel()) % 64
        assert bool((time[dst] <= limit[owner]).all())
        assert src is None or bool((time[src] <= limit[owner]).all())


def test_without_times_of_links_each_endpoint_limits_its_own_negatives():
    time = torch.tensor([1, 2, 3, 4, 5, 6])
    graph = homogeneous(6, time=time.tolist())
    src, dst = negatives(("binary", 200), graph, [1], [3])
    assert set(src.tolist()) == {0, 1}
    assert set(dst.tolist()) == {0, 1, 2, 3}


def test_one_type_with_times_and_one_without():
    rated = ("user", "rated", "item")
    graph = Topology(
        ("user", "item"),
        (rated,),
        {"user": 4, "item": 5},
        {rated: make_csc(torch.empty(2, 0, dtype=torch.int64), 5)},
        {"item": torch.tensor([1, 1, 9, 9, 9])},
    )
    src, dst = negatives(("binary", 300), graph, [0], [0], time=[4], edge_type=rated)
    assert set(src.tolist()) == {0, 1, 2, 3}
    assert set(dst.tolist()) == {0, 1}


def test_none_early_enough_names_the_negative():
    graph = homogeneous(3, time=[5, 6, 7])
    with pytest.raises(ValueError, match=r"negative number 1, .*seed link 1 .*as early"):
        negatives(("triplet", 2), graph, [0, 1, 2], time=[5, 4, 7])


# Positives ##################################################################################


def random_edges(num_nodes, num_edges, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_nodes, (num_edges, 2), generator=generator).tolist()


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("mode", ["binary", "triplet"])
def test_no_positive_comes_as_a_negative(mode, direction):
    edges = random_edges(40, 1100)
    graph = homogeneous(40, edges, direction=direction)
    present = {tuple(edge) for edge in edges}
    link = torch.arange(40)
    without = negatives((mode, 20), graph, link)
    src, dst = negatives(NegativeSampling(mode, 20, exclude_positives=True), graph, link)
    owner = torch.arange(dst.numel()) % 40
    source = link[owner] if src is None else src
    assert not present & set(zip(source.tolist(), dst.tolist(), strict=True))
    plain = link[owner] if src is None else without[0]
    assert present & set(zip(plain.tolist(), without[1].tolist(), strict=True))


def test_links_that_are_no_edges_are_excluded_as_well():
    held_out = torch.tensor([[0, 0, 1], [1, 2, 0]])
    spec = NegativeSampling("binary", 100, exclude_positives=held_out)
    src, dst = negatives(spec, homogeneous(3, [(2, 2)]), [0])
    found = set(zip(src.tolist(), dst.tolist(), strict=True))
    assert found == {(0, 0), (1, 1), (1, 2), (2, 0), (2, 1)}
    spec = NegativeSampling("binary", 100, exclude_positives=True).with_links(held_out)
    src2, dst2 = negatives(spec.with_links(torch.tensor([[1], [1]])), homogeneous(3, [(2, 2)]), [0])
    assert set(zip(src2.tolist(), dst2.tolist(), strict=True)) == found - {(1, 1)}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_one_pair_that_is_left_is_found(direction):
    edges = [(i, j) for i in range(60) for j in range(60) if (i, j) != (41, 7)] + [(0, 7)]
    graph = homogeneous(60, edges, direction=direction)
    spec = NegativeSampling("binary", 3, exclude_positives=True)
    src, dst = negatives(spec, graph, [0, 1])
    assert src.tolist() == [41] * 6
    assert dst.tolist() == [7] * 6
    _, dst = negatives(NegativeSampling("triplet", 3, exclude_positives=True), graph, [41])
    assert dst.tolist() == [7] * 3


def test_the_one_pair_that_is_left_by_time_and_weight():
    # 0 and 1 are early; (1, 0) is no edge, but 1 has no weight as a source, 0 none as a target.
    edges = [(0, 0), (1, 1)]
    graph = homogeneous(4, edges, time=[1, 1, 5, 5])
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0])
    spec = NegativeSampling("binary", 5, src_weight=weight, exclude_positives=True)
    src, dst = negatives(spec, graph, [0], time=[2])
    assert set(zip(src.tolist(), dst.tolist(), strict=True)) == {(0, 1)}
    spec = NegativeSampling(
        "binary", 5, src_weight=weight, dst_weight=weight, exclude_positives=True
    )
    with pytest.raises(ValueError, match="all pairs"):
        negatives(spec, graph, [0], time=[2])


def test_a_source_that_is_joined_to_all_raises():
    graph = homogeneous(5, [(2, j) for j in range(5)])
    spec = NegativeSampling("triplet", exclude_positives=True)
    with pytest.raises(ValueError, match="node 2 is joined to every"):
        negatives(spec, graph, [0, 2])
    assert negatives(spec, graph, [0, 1])[1].numel() == 2


def test_complete_graph_raises():
    graph = homogeneous(4, [(i, j) for i in range(4) for j in range(4)])
    with pytest.raises(ValueError, match="all pairs of nodes that could be negative number 0"):
        negatives(NegativeSampling("binary", exclude_positives=True), graph, [0])


# The configuration ##########################################################################


@pytest.mark.parametrize(
    "given",
    ["binary", ("binary", 2), {"mode": "binary", "amount": 2}, pyg.NegativeSampling("binary", 2)],
)
def test_takes_what_pyg_takes(given):
    spec = NegativeSampling.cast(given)
    assert isinstance(spec, NegativeSampling)
    assert isinstance(spec, pyg.NegativeSampling)
    assert spec.is_binary()
    assert spec.num_negatives(3) == 3 * spec.amount
    assert NegativeSampling.cast(spec) is spec
    assert NegativeSampling.cast(None) is None


def test_keeps_the_weights_of_pygs_object():
    weight = torch.ones(3)
    spec = NegativeSampling.cast(pyg.NegativeSampling("triplet", 2, dst_weight=weight))
    assert spec.is_triplet()
    assert spec.dst_weight is weight
    assert spec.exclude_positives is False


def test_refuses_a_sample_of_its_own():
    class Hard(pyg.NegativeSampling):
        def sample(self, *args, **kwargs):
            raise AssertionError

    with pytest.raises(TypeError, match=r"Hard\.sample would not be called"):
        NegativeSampling.cast(Hard("binary"))


@pytest.mark.parametrize(
    "weight", [torch.ones(4), torch.tensor([1.0, -1, 1]), torch.tensor([1, float("nan"), 1])]
)
def test_refuses_wrong_weights(weight):
    with pytest.raises(ValueError, match="weights of the destination"):
        negatives(NegativeSampling("triplet", dst_weight=weight), homogeneous(3), [0])


def test_weights_that_are_all_zero_raise():
    spec = NegativeSampling("binary", src_weight=torch.zeros(3))
    with pytest.raises(ValueError, match=r"source of negative number 0.*has a weight"):
        negatives(spec, homogeneous(3), [0])


def test_refuses_links_that_are_none():
    with pytest.raises(ValueError, match="exclude_positives must be"):
        NegativeSampling("binary", exclude_positives=torch.ones(2, 3))
    spec = NegativeSampling("binary", exclude_positives=torch.tensor([[0], [3]]))
    with pytest.raises(IndexError, match="exclude_positives: nodes must be from 0 to 2"):
        negatives(spec, homogeneous(3), [0])


@pytest.mark.parametrize("value", [None, 0, 1, "no", torch.tensor(True), torch.ones(2, 3).bool()])
def test_exclude_positives_is_a_bool_or_links(value):
    with pytest.raises(ValueError, match="exclude_positives must be a bool or an integer tensor"):
        NegativeSampling("binary", exclude_positives=value)


def test_numpys_false_is_false():
    assert NegativeSampling("binary", exclude_positives=np.bool_(False)).exclude_positives is False
    assert NegativeSampling("binary", exclude_positives=np.bool_(True)).exclude_positives is True


@pytest.mark.parametrize("amount", [float("inf"), float("nan")])
def test_the_amount_is_finite(amount):
    for mode in ("binary", "triplet"):
        with pytest.raises(ValueError, match=r"amount \(neg_sampling_ratio\) must be finite"):
            NegativeSampling(mode, amount)


def test_no_links_no_negatives():
    none = torch.empty(0, dtype=torch.int64)
    src, dst = negatives(NegativeSampling("binary", exclude_positives=True), homogeneous(3), none)
    assert src.shape == dst.shape == (0,)


def test_is_pickled_without_what_it_remembers_of_a_graph():
    spec = NegativeSampling("binary", 3, exclude_positives=True)
    graph = homogeneous(50, random_edges(50, 100))
    before = negatives(spec, graph, [1, 2])
    again = pickle.loads(pickle.dumps(spec))
    after = negatives(again, graph, [1, 2])
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert len(pickle.dumps(spec)) < 2000
