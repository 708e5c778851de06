"""Generated streams of events: users come back to what they like, and change what they like."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import TemporalData


def event_stream(
    num_events: int = 157_474,
    num_users: int = 8_227,
    num_items: int = 1_000,
    *,
    num_features: int = 16,
    loyalty: float = 0.8,
    num_phases: int = 8,
    num_favorites: int = 3,
    seed: int = 0,
) -> TemporalData:
    """A bipartite stream of events between users and items, in the order of time.

    The default has the numbers of events, users and items of the Wikipedia stream of JODIE (Kumar
    et al.: "Predicting Dynamic Embedding Trajectory in Temporal Interaction Networks", KDD 2019).
    Few users and items have most of the events. A user has some favourites, which are others in
    every phase of the stream; an event is about one of them with the probability ``loyalty``, else
    about any item. So the past of a user says what comes next, and its recent past says it best.

    Args:
        num_events: Number of events.
        num_users: Nodes ``0`` to ``num_users - 1``, the sources.
        num_items: The nodes after them, the destinations.
        num_features: Numbers of ``msg``: those of the item's kind, with noise.
        loyalty: From 0 to 1.
        num_phases: How often users change what they like.
        num_favorites: How many items a user likes at a time.
        seed: Of all random numbers.

    Returns:
        ``src``, ``dst``, ``t`` (seconds, with ties) and ``msg`` ``[num_events, num_features]``.

    Raises:
        ValueError: If a number is out of range.
    """
    counts = {
        "num_events": num_events,
        "num_users": num_users,
        "num_items": num_items,
        "num_features": num_features,
        "num_phases": num_phases,
        "num_favorites": num_favorites,
    }
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1 (got {value})")
    if not 0 <= loyalty <= 1:
        raise ValueError(f"loyalty must be from 0 to 1 (got {loyalty})")
    generator = torch.Generator().manual_seed(seed)
    user = _popular(num_events, num_users, generator)
    favorites = _popular(num_users * num_phases * num_favorites, num_items, generator)
    favorites = favorites.view(num_users, num_phases, num_favorites)
    phase = torch.arange(num_events) * num_phases // num_events
    which = torch.randint(num_favorites, (num_events,), generator=generator)
    loyal = torch.rand(num_events, generator=generator) < loyalty
    anything = _popular(num_events, num_items, generator)
    item = torch.where(loyal, favorites[user, phase, which], anything)
    kinds = torch.randn(num_items, num_features, generator=generator)
    noise = torch.randn(num_events, num_features, generator=generator)
    step = torch.randint(0, 34, (num_events,), generator=generator)  # 17 seconds on average
    return TemporalData(
        src=user, dst=item + num_users, t=step.cumsum(0), msg=kinds[item] + 0.5 * noise
    )


def _popular(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Numbers below ``size``, few of them often: the density falls as ``x ** (-2/3)``."""
    return (torch.rand(count, generator=generator, dtype=torch.float64) ** 3 * size).to(torch.int64)
