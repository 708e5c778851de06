"""Measure how fast this is here, next to PyG where PyG can do the same."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

BENCHMARKS = {
    "conv": "pyg_scale.cli.bench.conv",
    "dist": "pyg_scale.cli.bench.dist",
    "gpu": "pyg_scale.cli.bench.gpu",
    "loader": "pyg_scale.cli.bench.loader",
    "scale": "pyg_scale.cli.bench.scale",
    "store": "pyg_scale.cli.bench.store",
}
"""Every benchmark: a module with ``main(argv) -> int`` and a docstring."""


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale bench NAME``."""
    args = list(argv)
    if args and args[0] in BENCHMARKS:
        return int(importlib.import_module(BENCHMARKS[args[0]]).main(args[1:]))
    lines = ["usage: pyg-scale bench NAME ...", "", "benchmarks:", f"  {', '.join(BENCHMARKS)}", ""]
    lines.append("`pyg-scale bench NAME --help` says more.")
    asked = bool(args) and args[0] in ("-h", "--help")
    if args and not asked:
        lines.insert(0, f"pyg-scale bench: there is no benchmark {args[0]!r}")
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2
