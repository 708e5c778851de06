"""Fold the rows that were appended to a graph directory into its base.

Others may read and append meanwhile. Exit status: 0 if all is well, 1 if it cannot be done,
2 for wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.store.directory.appending import TIMEOUT
from pyg_scale.store.directory.compacting import compact


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale compact``."""
    parser = argparse.ArgumentParser(
        prog="pyg-scale compact",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", help="a graph directory of one part")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="SECONDS",
        help="how long to wait, at the end, while another process appends (default: %(default)g)",
    )
    args = parser.parse_args(argv)
    if not args.timeout >= 0:
        parser.error(f"--timeout must be 0 or more seconds (got {args.timeout:g})")
    try:
        snapshot = compact(args.directory, timeout=args.timeout)
    except GraphDirectoryError as error:
        print(f"pyg-scale compact: {error}", file=sys.stderr)
        return 1
    print(f"{args.directory}: snapshot {snapshot} is the base")
    return 0
