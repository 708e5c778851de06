"""OGB's own evaluators."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from pyg_scale_ogb.catalog import facts_of


def Evaluator(name: str) -> Any:
    """The evaluator of a data set, from the package ``ogb``: the numbers are OGB's.

    Args:
        name: Name of the data set, such as ``"ogbn-arxiv"``.

    Returns:
        ``ogb.nodeproppred.Evaluator(name)`` or that of ``ogb.linkproppred``, with ``eval``,
        ``expected_input_format`` and ``expected_output_format``.

    Raises:
        ValueError: If the data set is unknown.
        ImportError: If ``ogb`` is not installed, or cannot be imported.

    Example::

        evaluator = Evaluator("ogbn-arxiv")
        evaluator.eval({"y_true": y, "y_pred": logits.argmax(-1, keepdim=True)})["acc"]
    """
    task = "linkproppred" if facts_of(name).of_links else "nodeproppred"
    try:
        module = _imported(f"ogb.{task}")
    except ImportError as error:
        raise ImportError(
            f"Evaluator({name!r}) is OGB's own, and needs its package, which cannot be imported "
            f"({error}): pip install ogb"
        ) from error
    return module.Evaluator(name)


def _imported(name: str) -> Any:
    if "ogb" in sys.modules:
        return importlib.import_module(name)
    # On import, ogb looks for a newer version on the network in a thread, by the package outdated
    # if it is installed, and leaves a variable in the environment.
    modules: Any = sys.modules
    before, variable = modules.get("outdated"), os.environ.get("OUTDATED_IGNORE")
    modules["outdated"] = None
    try:
        return importlib.import_module(name)
    finally:
        del modules["outdated"]
        if before is not None:
            modules["outdated"] = before
        if variable is None:
            os.environ.pop("OUTDATED_IGNORE", None)
