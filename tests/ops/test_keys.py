"""The keyed draws: the vectors of docs/draws.md, plain torch and C++ against each other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pyg_scale.graph.topology import Topology
from pyg_scale.loader.seeds import epoch
from pyg_scale.ops import keys, library
from pyg_scale.sampler.native import NativeSampler
from pyg_scale.sampler.reference import ReferenceSampler
from pyg_scale.testing.statistics import chi_square_tail
from tests.sampler.graphs import bound, csc

PAGE = (Path(__file__).parents[2] / "docs" / "draws.md").read_text()
VECTORS = [
    re.fullmatch(r"(\w+)\((.*)\) = (.*)", line).groups()
    for block in re.findall(r"```vectors\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
WORD = (1 << 64) - 1


@pytest.fixture
def compiled():
    if not library.compiled():
        pytest.skip(f"needs the compiled kernels: {library.status()['command']}")
    return torch.ops.pyg_scale.keyed_draws


def word(number: int) -> Tensor:
    return torch.tensor([keys.to_signed(number)])


def bounded(key: int, index: int, size: int) -> int:
    return int(keys.bounded(word(key), index, torch.tensor([size])))


def star(degree: int, prefix: list[int] | None = None) -> Topology:
    """Node 0 has ``degree`` in-edges; edge ``i`` comes from node ``i + 1``."""
    edges = csc(degree + 1, [(i + 1, 0) for i in range(degree)])
    if prefix is not None:
        weights = torch.tensor(prefix)
        edges = type(edges)(edges.indptr, edges.indices, None, None, weights)
    return Topology((None,), (None,), {None: degree + 1}, {None: edges})


def picked(sampler, topology: Topology, node_key: int, k: int, replace: bool) -> list[int]:
    """What a sampler picks for node 0 when the key of that node is ``node_key``."""
    # A key of the batch that leads to the key of the node: every step of fold can be undone.
    key = node_key
    for value in (0, 0, 0, keys.NEIGHBOR):  # the node, the edge type, the hop, the purpose
        key = unmix(key) ^ (value * keys.GOLDEN & WORD)
    assert keys.fold(key, keys.NEIGHBOR, 0, 0, 0) == node_key
    out = bound(sampler, topology, num_neighbors=[k], replace=replace)
    return out.sample({None: torch.tensor([0])}, None, key).edge[None].tolist()


def unmix(word: int) -> int:
    """The inverse of ``mix``."""
    word ^= word >> 31 ^ word >> 62
    word = word * pow(0x94D049BB133111EB, -1, 1 << 64) & WORD
    word ^= word >> 27 ^ word >> 54
    word = word * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & WORD
    return word ^ word >> 30 ^ word >> 60


def fixed_point(weights: list[float]) -> list[int]:
    return csc(1, [(0, 0)] * len(weights), weight=weights).weight_prefix.tolist()


MEANING = {
    "source_number": lambda key, t: int(keys.source_number(key, torch.tensor([t]))),
    "mix": keys.mix,
    "fold": keys.fold,
    "batch_key": keys.batch_key,
    "draw": lambda key, i: int(keys.draw(word(key), i)) & WORD,
    "bounded": bounded,
    "edge_type_hash": lambda *names: keys.edge_type_hash(names),
    "permutation": lambda key, size: keys.permutation(key, size).tolist(),
    "permuted": lambda key, size, *at: keys.permuted(key, size, torch.tensor(at)).tolist(),
    "weight_prefix": fixed_point,
}


@pytest.mark.parametrize(("name", "arguments", "result"), VECTORS)
@pytest.mark.parametrize("sampler", [ReferenceSampler, NativeSampler])
def test_vectors_of_the_specification(name, arguments, result, sampler, request):
    arguments, result = ast.literal_eval(f"({arguments},)"), ast.literal_eval(result)
    if sampler is NativeSampler:
        draws = request.getfixturevalue("compiled")
        if name in ("draw", "bounded"):
            key, index, size = (*arguments, 0)[:3]
            out = draws(keys.to_signed(key), torch.tensor([index]), torch.tensor([size]))
            assert int(out) & WORD == result
    if name in MEANING:
        assert MEANING[name](*arguments) == result
        return
    key, population, k = arguments
    if name in ("floyd", "uniform"):
        found = picked(sampler, star(population), key, k, name == "uniform")
    else:
        found = picked(sampler, star(len(population), population), key, k, name == "weighted")
    assert found == result


def test_there_are_vectors_of_everything():
    assert {name for name, _, _ in VECTORS} == {
        *MEANING, "floyd", "uniform", "weighted", "successive",
    }  # fmt: skip
    assert [rejections(a) for name, a, _ in VECTORS if name == "bounded"][-3:] == [1, 3, 0]


def rejections(arguments: str) -> int:
    key, index, size = ast.literal_eval(arguments)
    drawn, count = int(keys.draw(word(key), index)) & WORD, 0
    while drawn * size & WORD < (1 << 64) % size:
        drawn, count = keys.mix(drawn + keys.GOLDEN), count + 1
    return count


@pytest.mark.parametrize("sampler", [ReferenceSampler, NativeSampler])
def test_the_batch_of_the_specification(sampler, request):
    if sampler is NativeSampler:
        request.getfixturevalue("compiled")
    (block,) = re.findall(r"```batch\n(.*?)```", PAGE, re.DOTALL)
    text = dict(line.split(" = ") for line in block.splitlines())
    given = {name: ast.literal_eval(value) for name, value in text.items()}
    edges = list(zip(given["source"], given["destination"], strict=True))
    graph = csc(given["num_nodes"], edges)
    topology = Topology((None,), (None,), {None: given["num_nodes"]}, {None: graph})
    seeds, key = {None: torch.tensor(given["seeds"])}, given["key"]
    assert key == keys.batch_key(12, 3, 45)
    out = bound(sampler, topology, num_neighbors=given["num_neighbors"]).sample(seeds, None, key)
    for name in ("node", "row", "col", "edge"):
        assert getattr(out, name)[None].tolist() == given[name]
    for name in ("num_sampled_nodes", "num_sampled_edges"):
        assert getattr(out, name)[None] == given[name]
    out = bound(sampler, topology, num_neighbors=given["num_neighbors"], disjoint=True).sample(
        seeds, None, key
    )
    for name in ("node", "batch", "edge"):
        assert getattr(out, name)[None].tolist() == given[f"disjoint_{name}"]


def test_compiled_draws_are_those_of_plain_torch(compiled):
    generator = torch.Generator().manual_seed(5)
    for key in (0, 1, -1, 2**63 - 1, -(2**63), 0x1234567):
        index = torch.randint(0, 2**62, (4000,), generator=generator) >> torch.arange(4000) % 62
        # Every magnitude of sizes, and those just above a fraction of 2**64: many rejections.
        size = torch.randint(1, 2**62, (4000,), generator=generator) >> torch.arange(4000) % 62
        size = torch.where(torch.arange(4000) % 7 == 0, (2**63 - 1) // 3 * 2 + 2, size.clamp(min=1))
        mine = compiled(key, index, size)
        assert torch.equal(mine, keys.bounded(torch.full_like(index, key), index, size))
        words = compiled(key, index, torch.zeros_like(size))
        assert torch.equal(words, keys.draw(torch.full_like(index, key), index))


def test_compiled_draws_of_each_key_are_those_of_plain_torch(compiled, monkeypatch):
    for key in (0, 1, 2**64 - 1, 0x1234567):
        for size in (1, 7, 2**31, (2**63 - 1) // 3 * 2 + 2):  # of the last, many are rejected
            mine = keys.draws_each(key, 500, size)
            each = [keys.fold(key, i) for i in range(500)]
            plain = torch.tensor([keys.to_signed(one) for one in each])
            assert torch.equal(mine, keys.bounded(plain, 0, torch.tensor(size)))
            with monkeypatch.context() as patch:
                patch.setenv("PYG_SCALE_KERNELS", "never")
                assert torch.equal(mine, keys.draws_each(key, 500, size))


def test_mix_is_a_permutation_that_can_be_undone():
    for x in (0, 1, 2**63, WORD, 0x0123456789ABCDEF):
        assert unmix(keys.mix(x)) == x


def test_draws_in_a_range_are_uniform():
    key = torch.full((200_000,), keys.to_signed(keys.fold(0, 9)))
    # Of the words, 8 lead to 3 values without rejection: these would come as 3 : 3 : 2.
    size = 2**62 + 2**61
    drawn = keys.bounded(key, torch.arange(200_000), torch.tensor(size))
    for bins in (drawn % 3, drawn // (size // 12)):
        count = torch.bincount(bins).double()
        expected = 200_000 / count.numel()
        assert float(((count - expected) ** 2 / expected).sum()) < 40  # p < 1e-4 up to 12 bins


def test_numbers_of_sources_are_uniform():
    """Chi-square of the upper and of the lower bits of successive sources, for a few keys."""
    for key in range(4):
        number = keys.source_number(keys.fold(key, keys.SOURCE), torch.arange(1 << 16))
        assert int(number.min()) >= 0 and int(number.max()) < 1 << 32
        for bins in (number >> 26, number & 63):
            count = torch.bincount(bins, minlength=64).double()
            statistic = float(((count - 1024) ** 2 / 1024).sum())
            assert chi_square_tail(statistic, 63) > 0.001 / 8


def test_numbers_of_sources_are_independent_in_pairs():
    """Two sources, or one at two batches, are below a share as often as its square says.

    Sources differ in one bit, or two; ``|z| < 4.7`` has the probability 0.999 for 400 pairs.
    """
    number_of_keys = 20_000
    apart = [step << bit for bit in range(24) for step in (1, 3)]
    sources = torch.tensor([12_345, *(12_345 + step for step in apart)])
    number = torch.stack(
        [keys.source_number(keys.batch_key(0, 0, n), sources) for n in range(number_of_keys)]
    )
    for share in (0.5, 0.125, 0.03125):
        below = (number < share * 2**32).double()
        deviation = (share**2 * (1 - share**2) / number_of_keys) ** 0.5
        with_first = (below[:, :1] * below[:, 1:]).mean(0)
        with_next = (below[:-1] * below[1:]).mean(0)
        with_next_of_first = (below[:-1, :1] * below[1:, 1:]).mean(0)
        for joint in (with_first, with_next, with_next_of_first):
            assert float((joint - share**2).abs().max()) < 4.7 * deviation


def test_an_epoch_has_the_keys_of_its_batches_from_any_of_them_on():
    cut = epoch.EqualNumbers(150, 1, drop_last=False, shuffle=True)
    expected = [keys.batch_key(7, 2, number) for number in range(150)]
    for start in (0, 1, 63, 64, 149, 150):
        found = [batch.key for batch in epoch.batches(cut, seed=7, epoch=2, start=start)]
        assert found == expected[start:]
    drawn = epoch.batches(cut, seed=7, epoch=2)
    rest = drawn.rest(epoch.Passed(130, frozenset({131})))
    assert [batch.key for batch in rest] == [expected[130], *expected[132:]]
    assert [batch.key for batch in drawn] == expected
