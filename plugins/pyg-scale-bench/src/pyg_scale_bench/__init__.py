"""Benchmarks as a command. Imports nothing heavy, as it is imported to list names."""

from __future__ import annotations

from pyg_scale import hookimpl


@hookimpl
def pyg_scale_commands() -> dict[str, str]:
    return {"bench": "pyg_scale_bench.command:main"}
