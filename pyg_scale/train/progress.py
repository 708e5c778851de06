"""A bar for a loop, where somebody looks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm

from pyg_scale.comm.connect import rank_here


def progress(batches: Iterable[Any], description: str = "", **options: Any) -> tqdm:
    """A progress bar around a loader: on rank 0, and only where the output is a terminal.

    ```python
    for batch in (bar := progress(loader, f"epoch {epoch}")):
        ...
        bar.set_postfix(loss=float(loss), refresh=False)
    ```

    Args:
        batches: A loader, or anything else that can be iterated over. An
            :class:`~pyg_scale.train.Accumulation` and a recorder go inside.
        description: The text before the bar.
        **options: Arguments of ``tqdm``, such as ``total`` where a length is not known.

    Returns:
        A ``tqdm``, through which the batches come; on other ranks one that prints nothing.
    """
    quiet = True if rank_here() != 0 else None  # None: unless it is a terminal
    usual = {"desc": description, "unit": " batches", "leave": False, "disable": quiet}
    return tqdm(batches, **{**usual, **options})
