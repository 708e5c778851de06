"""Steps of a benchmark on a GPU that fail in several ways, for processes that begin quickly."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any


def steps(deadly: str, skip: int) -> Iterator[Any]:
    """Four steps: one is right, one wrong, one ends the process or waits, the last is right."""
    yield ["right", "wrong", "deadly", "last"]
    process: dict[str, Any] = {"process": os.getpid(), "ok": True, "detail": ""}
    rows: list[Any] = [process, {**process, "ok": False, "detail": "it differs"}, None, process]
    for row in rows[skip:]:
        if row is None and deadly == "ends":
            os.abort()
        if row is None:
            time.sleep(100)
        yield row


def broken(skip: int) -> Iterator[Any]:
    """Steps whose process cannot begin."""
    raise RuntimeError("no kernels")
    yield
