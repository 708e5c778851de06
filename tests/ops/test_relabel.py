"""The table of nodes in a batch, whose kind changes with the graph and the batch before."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale.ops.expand import number_nodes

pytestmark = pytest.mark.skipif(
    not library.status()["loaded"], reason="the kernels are not compiled"
)
SIZES = [1, 7, 300, 5_000, 60_000, 700_000, 4_000_000, 5_000_000, 1 << 40, (1 << 62) - 1]
COUNTS = [0, 1, 40, 700, 9_000, 60_000]


def rows_of(known: list[int], wanted: list[int]) -> tuple[list[int], list[int]]:
    """All nodes, each once, in order of arrival, and the rows of those that were wanted."""
    row: dict[int, int] = {}
    nodes = list(known)
    for i, v in enumerate(known):
        row.setdefault(v, i)
    for v in wanted:
        if v not in row:
            row[v] = len(nodes)
            nodes.append(v)
    return nodes, [row[v] for v in wanted]


@pytest.mark.parametrize("number", range(8))
def test_batches_of_changing_size_from_graphs_of_changing_size(number: int) -> None:
    draw = random.Random(number)
    for _ in range(20):
        # Again and again, as a table changes its kind after a batch that is like the next one.
        size, count = draw.choice(SIZES), draw.choice(COUNTS)
        for _ in range(draw.choice([1, 2, 4])):
            known = draw.sample(range(size), min(size, count // 5))
            wanted = [draw.randrange(size) for _ in range(count)]
            nodes, _, row = number_nodes(
                torch.tensor(known, dtype=torch.int64),
                None,
                torch.tensor(wanted, dtype=torch.int64),
                None,
                size,
                1,
                append=True,
            )
            expected = rows_of(known, wanted)
            assert (nodes.tolist(), row.tolist()) == expected, (size, count)


def test_a_table_by_node_outlives_its_epochs_and_grows() -> None:
    for size in (2_000, 3_500, 2_000):
        for number in range(400):
            wanted = [(number * 977 + 31 * i) % size for i in range(300)]
            found = torch.ops.pyg_scale.first_places(torch.tensor(wanted), len(set(wanted)))
            assert found.tolist() == [wanted.index(v) for v in wanted]


def test_a_probed_table_outlives_its_epochs() -> None:
    size, empty = 1 << 46, torch.empty(0, dtype=torch.int64)

    def check() -> int:
        for number in range(600):
            wanted = [number % 7, 5, size - 1 - number % 7, 5, 11]
            found = number_nodes(empty, None, torch.tensor(wanted), None, size, 1, append=True)
            assert (found[0].tolist(), found[2].tolist()) == rows_of([], wanted)
        return 600

    with ThreadPoolExecutor(1) as pool:  # a thread of its own has a table of its own
        assert pool.submit(check).result(60) == 600


def test_disjoint_batches_between_others() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1_000, 1 << 30) * 3:
        for disjoint in (False, True, False):
            node = torch.randint(size, (5_000,), generator=generator)
            seed = torch.randint(50, (5_000,), generator=generator)
            empty = torch.empty(0, dtype=torch.int64)
            nodes, seeds, row = number_nodes(
                empty,
                empty if disjoint else None,
                node,
                seed if disjoint else None,
                size,
                50 if disjoint else 1,
                append=True,
            )
            keys = (node + seed * size if disjoint else node).tolist()
            expected = rows_of([], keys)
            found = nodes if seeds is None or not disjoint else nodes + seeds * size
            assert (found.tolist(), row.tolist()) == expected
