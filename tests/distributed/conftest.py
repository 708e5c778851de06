"""Servers of a graph in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pyg_scale
from tests.distributed.served import Served


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """``serve(data, num_servers, **options of save)``: servers of a graph."""
    made: list[Served] = []

    def start(
        data: Any, num_servers: int = 1, server: dict[str, Any] | None = None, **saving: Any
    ) -> Served:
        path = tmp_path / f"graph{len(made)}"
        pyg_scale.save(data, path, **saving)
        made.append(Served(path, num_servers, **(server or {})))
        return made[-1]

    yield start
    for each in made:
        each.close()
