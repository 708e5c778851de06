"""HGT sampling: the compiled op and plain torch agree to the bit; both with a naive rewriting."""

import ast
import random
import re
from pathlib import Path

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale.ops.hgt import hgt_sample, hgt_sample_reference, hgt_take
from pyg_scale.ops.keys import GOLDEN, HGT, fold, mix
from pyg_scale.sampler.hgt import _node_type_hash


def csc(num_src, num_dst, num_edges, generator):
    dst = torch.randint(num_dst, (num_edges,), generator=generator).sort().values
    count = torch.bincount(dst, minlength=num_dst)
    indptr = torch.cat([count.new_zeros(1), count.cumsum(0)])
    return indptr, torch.randint(num_src, (num_edges,), generator=generator), dst


def random_case(number):
    """A graph of one to three node types, seeds with repeats, and numbers of samples."""
    generator, choose = torch.Generator().manual_seed(number), random.Random(number)
    num_nodes = [choose.randint(1, 60) for _ in range(choose.randint(1, 3))]
    types = range(len(num_nodes))
    ends = [(choose.choice(types), choose.choice(types)) for _ in range(choose.randint(1, 4))]
    graphs = [
        csc(num_nodes[s], num_nodes[d], choose.choice([0, 5, 100, 400]), generator) for s, d in ends
    ]
    num_hops = choose.randint(1, 4)
    return {
        "indptr": [indptr for indptr, _, _ in graphs],
        "indices": [src.int() if number % 2 else src for _, src, _ in graphs],
        "edge_id": [
            2 * torch.arange(len(src))
            if choose.random() < 0.5
            else torch.empty(0, dtype=torch.int64)
            for _, src, _ in graphs
        ],
        "num_nodes": num_nodes,
        "dst_type": [d for _, d in ends],
        "src_type": [s for s, _ in ends],
        "node_type_hash": [choose.getrandbits(64) for _ in types],
        "seed": [
            torch.randint(size, (choose.choice([0, 1, 3, 8]),), generator=generator)
            for size in num_nodes
        ],
        "num_samples": [[choose.choice([-1, 0, 1, 3, 10]) for _ in range(num_hops)] for _ in types],
        "key": choose.getrandbits(64),
        "int32_output": bool(number % 3),
    }


def bounded(key, index, size):
    word = mix(key + (index + 1) * GOLDEN)
    while (word * size) % 2**64 < 2**64 % size:
        word = mix(word + GOLDEN)
    return word * size >> 64


def naive_nodes(case):
    """The nodes of each type as lists, with dictionaries and Python's integers."""
    node = [ids.tolist() for ids in case["seed"]]
    new = [set(ids) for ids in node]
    budget = [{} for _ in node]
    edges = list(
        zip(case["indptr"], case["indices"], case["src_type"], case["dst_type"], strict=True)
    )
    for hop in range(len(case["num_samples"][0])):
        for indptr, indices, s, d in edges:
            for w in new[d]:
                sources = indices[indptr[w] : indptr[w + 1]].tolist()
                for source in sources:
                    budget[s][source] = budget[s].get(source, 0) + 2**32 // len(sources)
        for t, word in enumerate(case["node_type_hash"]):
            left = {n: budget[t][n] for n in sorted(budget[t]) if n not in node[t]}
            k = case["num_samples"][t][hop]
            key = fold(case["key"], HGT, hop, word)
            if k < 0 or k >= len(left):
                new[t] = list(left)
            else:
                new[t] = naive_picks(left, k, key)
            node[t] += new[t]
    return node


def naive_picks(scores, k, key):
    shift = max(scores.values()).bit_length() - 31
    weight = {}
    for n, score in scores.items():
        score = score >> shift if shift > 0 else score << -shift
        weight[n] = max(1, score * score >> 30)
    picks = []
    for i in range(k):
        t = bounded(key, i, sum(weight.values()))
        for n in weight:
            if t < weight[n]:
                break
            t -= weight[n]
        picks.append(n)
        del weight[n]
    return picks


@pytest.mark.parametrize("number", range(60))
def test_nodes_to_the_bit(number):
    case = random_case(number)
    out = hgt_sample_reference(**case)
    assert [ids.tolist() for ids in out.node] == naive_nodes(case)


@pytest.mark.parametrize("number", range(60))
def test_edges_are_all_edges_among_the_nodes(number):
    case = random_case(number)
    out = hgt_sample_reference(**case)
    for r, (indptr, indices) in enumerate(zip(case["indptr"], case["indices"], strict=True)):
        src = out.node[case["src_type"][r]].tolist()
        expected = []
        for col, w in enumerate(out.node[case["dst_type"][r]].tolist()):
            for position in range(int(indptr[w]), int(indptr[w + 1])):
                if int(indices[position]) in src:
                    edge = 2 * position if case["edge_id"][r].numel() else position
                    expected.append((src.index(int(indices[position])), col, edge))
        found = zip(out.row[r].tolist(), out.col[r].tolist(), out.edge[r].tolist(), strict=True)
        assert list(found) == expected
        degree = torch.bincount(out.col[r], minlength=len(out.node[case["dst_type"][r]]))
        assert torch.equal(out.colptr[r].diff(), degree)


def grouped(edges, num_dst):
    """Pointers, sources and edge ids by destination."""
    src, dst = map(torch.tensor, edges)
    order, count = dst.argsort(stable=True), torch.bincount(dst, minlength=num_dst)
    return torch.cat([count.new_zeros(1), count.cumsum(0)]), src[order], order


@pytest.mark.parametrize("function", [hgt_sample_reference, hgt_sample])
def test_vector_of_the_specification(function):
    page = (Path(__file__).parents[2] / "docs" / "draws.md").read_text()
    (block,) = re.findall(r"```hgt\n(.*?)```", page, re.DOTALL)
    lines = [line.split(" = ") for line in block.splitlines()]
    vector = {name: ast.literal_eval(value) for name, value in lines}
    assert [_node_type_hash(t) for t in vector["node_types"]] == vector["node_type_hash"]
    graphs = [grouped(vector[name], vector["num_nodes"][0]) for name in ("writes", "cites")]
    out = function(
        indptr=[graph[0] for graph in graphs],
        indices=[graph[1] for graph in graphs],
        edge_id=[graph[2] for graph in graphs],
        num_nodes=vector["num_nodes"],
        dst_type=[0, 0],
        src_type=[1, 0],
        node_type_hash=vector["node_type_hash"],
        seed=[torch.tensor(vector["seeds"]), torch.empty(0, dtype=torch.int64)],
        num_samples=vector["num_samples"],
        key=0x028E4B9782EAAAF1,
    )
    for name in ("node", "row", "col", "edge"):
        assert [part.tolist() for part in getattr(out, name)] == vector[name]


@pytest.mark.parametrize("number", range(120))
def test_compiled_gives_the_same_bits(number):
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    case = random_case(number)
    for ours, reference in zip(hgt_sample(**case), hgt_sample_reference(**case), strict=True):
        for a, b in zip(ours, reference, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


def test_compiled_on_a_hub_and_many_samples():
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    generator = torch.Generator().manual_seed(0)
    indptr, indices, _ = csc(20_000, 50, 60_000, generator)
    none = torch.empty(0, dtype=torch.int64)
    case = {
        "indptr": [indptr],
        "indices": [indices],
        "edge_id": [none],
        "num_nodes": [20_000, 50],
        "dst_type": [1],
        "src_type": [0],
        "node_type_hash": [5, 6],
        "seed": [none, torch.arange(50)],
        "num_samples": [[700], [1]],
        "key": 9,
    }
    for ours, reference in zip(hgt_sample(**case), hgt_sample_reference(**case), strict=True):
        for a, b in zip(ours, reference, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": [torch.tensor([7])]}, "seed 7 is out of range"),
        ({"indices": [torch.tensor([7])]}, "neighbour 7 is not a node"),
        ({"num_nodes": [4]}, "indptr has 4 entries, expected 5"),
        ({"dst_type": [1]}, "must be numbers of node types"),
    ],
)
def test_compiled_refuses_what_would_read_out_of_bounds(change, match):
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    case = {
        "indptr": [torch.tensor([0, 1, 1, 1])],
        "indices": [torch.tensor([2])],
        "edge_id": [torch.empty(0, dtype=torch.int64)],
        "num_nodes": [3],
        "dst_type": [0],
        "src_type": [0],
        "node_type_hash": [0],
        "seed": [torch.tensor([0])],
        "num_samples": [[1]],
        "key": 0,
    }
    with pytest.raises(ValueError, match=match):
        hgt_sample(**case | change)


def random_take(number):
    """In-edges of some nodes in three lists, of which some nodes count nothing."""
    generator, choose = torch.Generator().manual_seed(number), random.Random(number)
    num_nodes = choose.choice([1, 7, 60, 3000])
    counts = [
        torch.randint(choose.choice([1, 3, 200]), (n,), generator=generator) for n in (0, 4, 30)
    ]
    return {
        "neighbor": [
            torch.randint(num_nodes, (int(c.sum()),), generator=generator) for c in counts
        ],
        "counts": counts,
        "score": [torch.randint(3, (c.numel(),), generator=generator) * 2**30 for c in counts],
        "taken": torch.randint(num_nodes, (choose.choice([0, 5]),), generator=generator),
        "num_nodes": num_nodes,
        "k": choose.choice([-1, 0, 1, 5, 100]),
        "key": choose.getrandbits(64),
    }


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("number", range(60))
def test_one_draw_to_the_bit(number, plain, monkeypatch):
    if plain:
        monkeypatch.setattr(library, "compiled", lambda: False)
    case = random_take(number)
    budget = {}
    for source, counts, score in zip(case["neighbor"], case["counts"], case["score"], strict=True):
        adds = [s for c, s in zip(counts.tolist(), score.tolist(), strict=True) for _ in range(c)]
        for node, each in zip(source.tolist(), adds, strict=True):
            if each:
                budget[node] = budget.get(node, 0) + each
    left = {n: budget[n] for n in sorted(budget) if n not in case["taken"].tolist()}
    k = case["k"]
    expected = list(left) if k < 0 or k >= len(left) else naive_picks(left, k, case["key"])
    lists = [case.pop(name) for name in ("neighbor", "counts", "score")]
    assert hgt_take(*lists, **case).tolist() == expected


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"neighbor": [torch.tensor([0, 3])]}, "neighbour 3 is not a node"),
        ({"neighbor": [torch.tensor([-1, 0])]}, "neighbour -1 is not a node"),
        ({"counts": [torch.tensor([3])]}, "counts must add up to neighbor"),
        ({"counts": [torch.tensor([1])]}, "counts must add up to neighbor"),
        ({"counts": [torch.tensor([-1])]}, "counts must add up to neighbor"),
        ({"score": [torch.tensor([1, 1])]}, "score has 2 entries, expected 1"),
        ({"score": []}, "must have as many entries"),
        ({"taken": torch.tensor([3])}, "3 is out of range"),
    ],
)
def test_a_compiled_draw_refuses_what_would_read_out_of_bounds(change, match):
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    case = {
        "neighbor": [torch.tensor([0, 1])],
        "counts": [torch.tensor([2])],
        "score": [torch.tensor([1])],
        "taken": torch.tensor([0]),
        "num_nodes": 3,
        "k": 1,
        "key": 0,
    }
    case |= change
    lists = [case.pop(name) for name in ("neighbor", "counts", "score")]
    with pytest.raises(ValueError, match=match):
        hgt_take(*lists, **case)
