"""A sampler without data takes a loader's arguments and keeps its own."""

from __future__ import annotations

import pytest
import torch

from pyg_scale.loader import NeighborLoader
from pyg_scale.sampler import NativeSampler
from pyg_scale.testing import graphs


def test_what_only_one_of_the_two_sets_counts() -> None:
    data = graphs.hostile()
    unbound = NativeSampler(replace=True, sample_direction="backward")
    bound = unbound.bind(data, num_neighbors=[2, 1], disjoint=True, replace=False)
    assert bound.replace
    assert bound.disjoint
    assert bound.sample_direction == "backward"
    assert bound.num_neighbors is not None
    assert bound.num_neighbors.values == [2, 1]
    assert not unbound.is_bound


def test_a_loader_samples_in_the_direction_of_its_sampler() -> None:
    data = graphs.hostile()
    loader = NeighborLoader(
        data, [-1], batch_size=1, neighbor_sampler=NativeSampler(sample_direction="backward")
    )
    for node, batch in enumerate(loader):
        expected = (data.edge_index[0] == node).nonzero().view(-1)
        assert torch.equal(batch.e_id.sort().values, expected)


@pytest.mark.parametrize(
    ("own", "loader"),
    [
        ({"num_neighbors": [3]}, {"num_neighbors": [4]}),
        ({"subgraph_type": "induced"}, {"subgraph_type": "bidirectional"}),
        ({"temporal_strategy": "last", "time_attr": "time"}, {"time_attr": "when"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("bound", [True, False])
def test_options_that_contradict_each_other_raise(own: dict, loader: dict, bound: bool) -> None:
    data = graphs.hostile()
    own = {"num_neighbors": [3], **own}
    sampler = NativeSampler(data if bound else None, **own)
    name = next(iter(loader))
    with pytest.raises(ValueError, match=f"the sampler was built with {name}="):
        sampler.bind(data, **loader)
