"""Runs of a test class of the kit from Python, for example to see a broken implementation fail."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from pyg_scale.testing.ask import unbound


def failures(
    kit: type, only: str | None = None, **fixtures: Any
) -> Iterator[tuple[str, BaseException]]:
    """Run a test class, and yield its failures as they happen.

    Args:
        kit: A class such as :class:`~pyg_scale.testing.SamplerTests`.
        only: The name of one test; by default all.
        **fixtures: The values of fixtures, such as ``sampler=MySampler()``; a class is called for
            every test, except for ``conv``, which is a class itself.

    Yields:
        The name of the test with its parameters, and the exception.
    """
    for name, function in inspect.getmembers(kit, inspect.isfunction):
        if name.startswith("test_") and name == (only or name):
            for parameters in _parameters(function):
                wanted = set(inspect.signature(function).parameters) - {"self", *parameters}
                made = {
                    n: v() if isinstance(v, type) and n != "conv" else v
                    for n, v in fixtures.items()
                }
                if "sampler" in made:
                    made["unbound"] = unbound(made["sampler"])
                arguments = {n: made[n] for n in wanted} | parameters
                try:
                    function(kit(), **arguments)
                except pytest.skip.Exception:
                    continue
                except (Exception, pytest.fail.Exception) as error:
                    yield f"{name}{list(parameters.values()) if parameters else ''}", error


def _parameters(function: Any) -> Iterator[dict[str, Any]]:
    """Every combination of the parameters of a test."""
    several = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args
            names = [n.strip() for n in names.split(",")] if isinstance(names, str) else names
            rows = [value if len(names) > 1 else (value,) for value in values]
            several.append([dict(zip(names, row)) for row in rows])
    for chosen in itertools.product(*several):
        yield {name: value for part in chosen for name, value in part.items()}
