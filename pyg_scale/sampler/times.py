"""The times between which a seed sees edges: not later than itself, and within a window."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_scale.graph.topology import EdgeType, Topology

Window = int | float
"""A length of time, in the unit of the graph's times."""

EARLIEST = -(2**63)
"""The least time that there is."""


@dataclass(frozen=True)
class TimeLimits:
    """The (sortable) times of the edges that seeds may see.

    Attributes:
        latest: The last time that each seed sees, ``int64`` ``[num_seeds]``.
        after: For every edge type that has a window, the time after which edges must be,
            ``int64`` ``[num_seeds]``.
        strict: True if a seed does not see what is as late as itself.
    """

    latest: Tensor
    after: Mapping[EdgeType, Tensor] = field(default_factory=dict)
    strict: bool = False

    def limits_rows(self, edge_type: EdgeType) -> bool:
        """Return True if a sampled node may still be outside the limits along an edge type."""
        return self.strict or edge_type in self.after


def windows_of(time_window: Any, graph: Topology) -> dict[EdgeType, Window]:
    """The window of each edge type that has one.

    Args:
        time_window: ``None``, a length of time for all edge types that have times, or one for each
            of some of them.
        graph: The graph.

    Raises:
        TypeError: If a length is not a number, or not an integer where times are integers.
        ValueError: If a length is not positive, or an edge type does not exist or has no times.
    """
    if time_window is None:
        return {}
    timed = [edge_type for edge_type in graph.edge_types if graph.is_timed(edge_type)]
    if not timed:
        raise ValueError(
            f"time_window={time_window!r} needs times: say in time_attr= which attribute has them"
        )
    if not isinstance(time_window, Mapping):
        return dict.fromkeys(timed, _window(time_window, graph, "time_window"))
    if not graph.is_hetero:
        raise ValueError(
            "time_window maps edge types to lengths, but the graph has no edge types: give one "
            "length of time"
        )
    for edge_type in time_window:
        if edge_type not in graph.edge_types:
            raise ValueError(
                f"time_window: {edge_type!r} is no edge type of the graph; there are "
                f"{', '.join(map(repr, graph.edge_types))}"
            )
        if edge_type not in timed:
            raise ValueError(
                f"time_window: neither edges of type {edge_type!r} nor their neighbours have times"
            )
    return {
        edge_type: _window(value, graph, f"time_window[{edge_type!r}]")
        for edge_type, value in time_window.items()
        if value is not None
    }


def _window(value: Any, graph: Topology, name: str) -> Window:
    """A length of time that is right for the graph's times."""
    number: Window
    if graph.float_time and isinstance(value, float):
        number = value
    else:
        try:
            number = operator.index(value)
        except TypeError:
            number = 0
        if isinstance(value, bool) or (number == 0 and value != 0):
            kind = "a number" if graph.float_time else "an integer, as times are integers"
            raise TypeError(f"{name} must be {kind} (got {value!r})")
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be positive and finite (got {value!r})")
    return number


def limits_of(
    graph: Topology, time: Tensor, windows: Mapping[EdgeType, Window], *, strict: bool
) -> TimeLimits:
    """The limits of seeds.

    Args:
        graph: The graph.
        time: The (sortable) times of the seeds, ``int64`` ``[num_seeds]``.
        windows: Lengths of time, see :func:`windows_of`.
        strict: If True, a seed does not see what is as late as itself.

    Raises:
        ValueError: If nothing can be earlier than a seed.
    """
    before = {window: graph.time_before(time, window) for window in set(windows.values())}
    after = {edge_type: before[window] for edge_type, window in windows.items()}
    if not strict:
        return TimeLimits(time, after)
    if time.numel() and int(time.min()) == EARLIEST:
        raise ValueError("strictly_earlier=True: a seed has the time -2**63, the least there is")
    return TimeLimits(time - 1, after, strict=True)


def rows_of(limits: Tensor | None, component: Tensor | None) -> Tensor | None:
    """The limits of seeds, for rows that belong to them."""
    return None if limits is None or component is None else torch.index_select(limits, 0, component)
