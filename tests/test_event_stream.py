"""The generated stream of events is one: bipartite, in order, and users come back."""

import pytest
import torch

from pyg_scale.datasets import event_stream


def test_events_are_in_order_between_users_and_items() -> None:
    data = event_stream(5_000, 200, 50, num_features=7, seed=3)
    assert data.num_events == 5_000
    assert data.msg.shape == (5_000, 7)
    assert bool((data.t.diff() >= 0).all())
    assert int((data.t.diff() == 0).sum()) > 50, "there must be ties"
    assert 0 <= int(data.src.min()) <= int(data.src.max()) < 200
    assert 200 <= int(data.dst.min()) <= int(data.dst.max()) < 250
    again = event_stream(5_000, 200, 50, num_features=7, seed=3)
    assert torch.equal(again.dst, data.dst)
    assert torch.equal(again.msg, data.msg)


def test_loyal_users_have_few_items_in_a_phase() -> None:
    data = event_stream(4_000, 30, 500, loyalty=1.0, num_phases=4, num_favorites=2)
    for phase in range(4):
        pairs = torch.stack([data.src, data.dst])[:, phase * 1000 : (phase + 1) * 1000]
        items = torch.bincount(pairs.unique(dim=1)[0], minlength=30)
        assert int(items.max()) <= 2


@pytest.mark.parametrize(
    "wrong", [{"num_events": 0}, {"num_items": -1}, {"loyalty": 1.5}, {"num_phases": 0}], ids=str
)
def test_wrong_numbers(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        event_stream(**{"num_events": 10, **wrong})
