"""Compile the kernels, so that loaders take the native path."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

from pyg_scale.ops import build as kernels
from pyg_scale.ops import library


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale build``.

    Raises:
        KernelsError: If the kernels cannot be compiled, or cannot be loaded afterwards.
    """
    parser = argparse.ArgumentParser(prog="pyg-scale build", description=__doc__)
    parser.add_argument("--force", action="store_true", help="compile everything again")
    parser.add_argument(
        "--clean", action="store_true", help="remove compiled files, and compile nothing"
    )
    parser.add_argument("--jobs", type=int, help="compilers at once (default: one per core)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(argv)
    if args.jobs is not None and args.jobs < 1:
        parser.error(f"--jobs must be 1 or more (got {args.jobs})")

    if args.clean:
        removed = [str(path) for path in kernels.clean()]
        print(json.dumps({"removed": removed}) if args.json else "\n".join(removed) or "was clean")
        return 0

    start = time.perf_counter()
    with tqdm(desc="compiling", unit="file", disable=None, leave=False) as bar:

        def progress(done: int, total: int, name: str) -> None:
            bar.total = total
            bar.set_postfix_str(name, refresh=False)
            bar.update(done - bar.n)

        path = kernels.build(force=args.force, jobs=args.jobs, progress=progress)
    seconds = time.perf_counter() - start
    state = library.status()
    if args.json:
        print(json.dumps({"path": str(path), "seconds": round(seconds, 2), **state}))
    elif state["loaded"]:
        print(f"compiled kernels: {path} ({seconds:.1f} s)")
    else:
        print(f"compiled to {path}, but {state['reason']}", file=sys.stderr)
    return 0 if state["loaded"] or state["mode"] == "never" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
