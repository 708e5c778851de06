"""Measure the speed on this machine, compared with PyG where possible."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyg_scale_bench.benchmark import Benchmark

BENCHMARKS = (
    "conv",
    "dist",
    "events",
    "gpu",
    "inference",
    "loader",
    "parallel",
    "recording",
    "sampler",
    "scale",
    "serving",
    "store",
    "streaming",
    "tables",
    "transport",
)
"""The names of all benchmarks: modules of this package with a ``BENCHMARK``."""


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale bench NAME``."""
    args = list(argv)
    if args and args[0] in (*BENCHMARKS, "report"):
        from pyg_scale_bench.benchmark import report_again, run  # imports torch

        if args[0] == "report":
            return report_again(_benchmark, args[1:])
        return run(_benchmark(args[0]), args[1:])
    lines = ["usage: pyg-scale bench NAME ...", "       pyg-scale bench report FILE.json ...", ""]
    lines += ["benchmarks:", f"  {', '.join(BENCHMARKS)}", ""]
    lines.append("`pyg-scale bench NAME --help` says more.")
    asked = bool(args) and args[0] in ("-h", "--help")
    if args and not asked:
        lines.insert(0, f"pyg-scale bench: there is no benchmark {args[0]!r}")
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _benchmark(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise ValueError(f"there is no benchmark {name!r}")
    benchmark: Benchmark = importlib.import_module(f"pyg_scale_bench.{name}").BENCHMARK
    return benchmark
