"""Make a page about a recorded training run: timeline, balance, bytes, memory, and what is slow.

Exit status: 0 if the page was written, 1 if the folder is not one of a recorded run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pyg_scale.errors import RecordingError
from pyg_scale.files.place import replace_file
from pyg_scale.train.recording.findings import findings, load
from pyg_scale.train.recording.page import page
from pyg_scale.train.recording.run import read_run
from pyg_scale.train.recording.trace import write_trace


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale report``."""
    parser = argparse.ArgumentParser(
        prog="pyg-scale report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="the folder that a Recorder was given")
    parser.add_argument("--session", type=int, help="which start of the run; default: the last one")
    parser.add_argument("--out", metavar="FILE", help="default: report.html in RUN")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="also write a Chrome trace of all ranks, for ui.perfetto.dev",
    )
    args = parser.parse_args(argv)
    out = Path(args.out or Path(args.run) / "report.html")
    try:
        run = read_run(args.run, args.session)
        replace_file(out, page(run), durable=False)
        if args.trace:
            write_trace(run, args.trace)
    except (RecordingError, OSError) as error:
        print(f"pyg-scale report: {error}", file=sys.stderr)
        return 1
    for each in findings(run):
        print(f"{each.text} Remedy: {each.remedy}.")
    print(f"imbalance of {len(run.ranks)} ranks: {load(run).imbalance:.2f}")
    print(f"wrote {out}" + (f" and {args.trace}" if args.trace else ""))
    return 0
