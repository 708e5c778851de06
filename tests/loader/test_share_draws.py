"""Ranks that share seeds are told if their loaders would draw something else for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_geometric.sampler import NumNeighbors

from pyg_scale.comm.base import Communicator
from pyg_scale.errors import CommError
from pyg_scale.loader import HGTLoader, LinkNeighborLoader, ZipLoader
from pyg_scale.sampler.negative import NegativeSampling
from pyg_scale.sampler.reference import ReferenceSampler
from tests.loader.ranks import DATA, loader, on_ranks
from tests.loader.test_share_ranks import HETERO, errors_of

EDGE_TYPES = HETERO.edge_types


class Own(ReferenceSampler):
    """Draws as the built-in ones do, but who knows that of a class of somebody else."""


def links(comm: Communicator, **kwargs: Any) -> LinkNeighborLoader:
    seeds = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(0))
    more = {"batch_size": 9, "seed": 1, "split_seeds": "global", "comm": comm} | kwargs
    return LinkNeighborLoader(DATA, [3], edge_label_index=seeds, **more)


def hgt(comm: Communicator, num_samples: int) -> HGTLoader:
    more: dict[str, Any] = {"seed": 1, "split_seeds": "global", "comm": comm}
    return HGTLoader(HETERO, [5, num_samples], HETERO.node_types[0], batch_size=4, **more)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda c: loader(c, num_neighbors=[4, 3 + c.rank]), r"rank 1 has num_neighbors=\[4, 4\]"),
        (lambda c: loader(c, replace=c.rank == 1), "rank 1 has replace=True, that of rank 0 rep"),
        (lambda c: loader(c, disjoint=c.rank == 1), "rank 1 has disjoint=True, that of"),
        (
            lambda c: loader(c, subgraph_type=("directional", "induced")[c.rank]),
            "rank 1 has subgraph_type=induced, that of rank 0 subgraph_type=directional",
        ),
        (lambda c: loader(c, neighbor_sampler=Own if c.rank else None), "neighbor_sampler=Own, th"),
        (lambda c: links(c, neg_sampling="binary" if c.rank else None), "mode=binary, that of"),
        (
            lambda c: links(
                c, neg_sampling=NegativeSampling("triplet", 1, None, torch.ones(100) + c.rank)
            ),
            r"has neg_sampling.dst_weight=a tensor \[100\] ",
        ),
        (lambda c: hgt(c, 5 + c.rank), "rank 1 has num_samples="),
        (
            lambda c: ZipLoader([loader(c), loader(c, replace=c.rank == 1)], seed=1, comm=c),
            r"the ZipLoader of rank 1 has loaders\[1\].replace=True",
        ),
    ],
)
def test_other_draws(make: Callable[[Communicator], Any], said: str) -> None:
    errors = errors_of(2, lambda comm: list(make(comm)))
    assert len(errors) == 2
    for error in errors:
        with pytest.raises(CommError, match=said):
            raise error


def test_the_same_said_in_other_ways() -> None:
    numbers = [
        [4, 3],
        NumNeighbors([4, 3]),
        {edge_type: [4, 3] for edge_type in reversed(EDGE_TYPES)},
    ]

    def work(comm: Communicator) -> int:
        options: dict[str, Any] = {"num_neighbors": numbers[comm.rank]}
        options["neighbor_sampler"] = ("native", "reference", None)[comm.rank]
        return len(list(loader(comm, HETERO, input_nodes=HETERO.node_types[0], **options)))

    assert sum(on_ranks(3, work)) == -(-HETERO[HETERO.node_types[0]].num_nodes // 9)


def test_who_splits_seeds_by_hand_may_choose_for_each_rank() -> None:
    def work(comm: Communicator) -> int:
        mine = torch.arange(comm.rank, 100, 2)
        return len(list(loader(comm, input_nodes=mine, num_neighbors=[4, 3 + comm.rank])))

    with pytest.warns(UserWarning, match="different seeds"):
        assert on_ranks(2, work) == [6, 6]
