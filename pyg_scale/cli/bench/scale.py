"""Convert, partition and train on a graph that is larger than the memory it may use.

A graph in the shape of papers100M is computed while it is converted, cut by a streaming
partitioner, and trained on with features from disk: each step in a process whose memory, page
cache included, is limited by a control group to a share of the files. Where that cannot be done,
the report says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyg_scale.cli.bench import environment, files, memory, scale_report, scale_steps
from pyg_scale.cli.bench.memory_limit import MemoryLimit, evict

_TEMPORARY = 12  # bytes an edge that a conversion needs for a while
_STEP_SECONDS = 6 * 3600


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale bench scale``."""
    args = _arguments(argv)
    root = Path(args.dir).absolute()
    graph = root / "graph"
    root.mkdir(parents=True, exist_ok=True)
    _check_disk(root, args)
    found: dict[str, Any] = {
        "benchmark": "scale",
        "command": environment.command("scale", argv),
        "environment": environment.describe(),
        "settings": {k: v for k, v in vars(args).items() if k not in ("dir", "json", "png")},
        "steps": [],
    }
    source = (
        f"generated:nodes={args.nodes},edges={args.edges},features={args.features},"
        f"communities={args.communities},seed=0"
    )
    expected = args.nodes * (args.features * 2 + 8) + args.edges * 8
    limit = args.limit or expected // 3
    found["limit_bytes"], found["limited"] = limit, True
    convert = [sys.executable, "-m", "pyg_scale.cli", "convert", source, str(graph)]
    convert += ["--memory", str(args.memory or limit // 2), "--overwrite"]
    try:
        if not graph.exists() or not args.reuse:
            _step(found, "convert", convert, limit, as_json=False)
        found["file_bytes"] = sum(f.stat().st_size for f in graph.rglob("*") if f.is_file())
        if args.parts > 1:
            evict(root)
            step = scale_steps.command(
                "partition",
                path=graph,
                num_parts=args.parts,
                method=args.method,
                out=root / "assignment.npy",
            )
            _step(found, "partition", step, limit)
        cache = int(args.cache * args.nodes * args.features * 2)
        step = scale_steps.command(
            "train",
            path=graph,
            cache=f"{cache}B",
            batches=args.batches,
            warmup=args.warmup,
            num_neighbors=args.num_neighbors,
            hidden=args.hidden,
        )
        found["cache_bytes"] = cache
        evict(root)
        _step(found, "train", step, limit)
    finally:
        if not args.keep:
            shutil.rmtree(root, ignore_errors=True)
    found["environment"]["load_average_after"] = memory.load_average()
    print(scale_report.terminal(found))
    files.write(
        found,
        args.json,
        args.png,
        args.report,
        draw=scale_report.draw,
        markdown=scale_report.markdown,
    )
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pyg-scale bench scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    graph = parser.add_argument_group("graph")
    graph.add_argument("--nodes", type=files.count, default=40_000_000)
    graph.add_argument("--edges", type=files.count, default=600_000_000, help="directed")
    graph.add_argument("--features", type=int, default=128, help="columns of fp16")
    graph.add_argument("--communities", type=int, default=172)
    how = parser.add_argument_group("how")
    how.add_argument("--dir", required=True, help="a folder with room for the files")
    how.add_argument("--keep", action="store_true", help="do not delete that folder afterwards")
    how.add_argument("--reuse", action="store_true", help="use the graph that is there already")
    how.add_argument("--limit", type=files.count, help="bytes of memory; a third of the files")
    how.add_argument("--memory", type=files.count, help="of the conversion; half the limit")
    how.add_argument("--parts", type=int, default=4, help="1 for no partition")
    how.add_argument("--method", default="fennel")
    how.add_argument("--cache", type=float, default=0.15, help="share of the features in memory")
    how.add_argument("--batches", type=int, default=100)
    how.add_argument("--warmup", type=int, default=20)
    how.add_argument("--num-neighbors", type=files.numbers, default=[15, 10, 5], metavar="K,K,...")
    how.add_argument("--hidden", type=int, default=128)
    files.add_output(parser)
    return parser.parse_args(argv)


def _check_disk(root: Path, args: argparse.Namespace) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        SystemExit: Says how much is needed and how much there is.
    """
    needed = args.nodes * (args.features * 2 + 16) + args.edges * (8 + _TEMPORARY)
    if args.reuse and (root / "graph").exists():
        needed = args.nodes * 16
    free = shutil.disk_usage(root).free
    if free < needed:
        raise SystemExit(
            f"pyg-scale bench scale: about {needed / 1e9:.0f} GB are needed in --dir, "
            f"{free / 1e9:.0f} GB are free: choose another folder or a smaller graph"
        )


def _step(
    found: dict[str, Any], name: str, command: list[str], limit: int, as_json: bool = True
) -> None:
    """Run a step under the limit and append what it said and took.

    Raises:
        SystemExit: If it fails; shows the end of what it printed.
    """
    print(f"{name} ...", file=sys.stderr)
    step: dict[str, Any] = {"name": name}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "timeout": _STEP_SECONDS}
    environ = {**os.environ, "PYG_SCALE_KERNELS": os.environ.get("PYG_SCALE_KERNELS", "require")}
    start = time.perf_counter()
    try:
        group = MemoryLimit(limit)
    except OSError as error:
        found["limited"], found["why_not"] = False, str(error)
        done = subprocess.run(command, text=True, check=False, env=environ, **options)
    else:
        with group:
            done = group.run(command, env=environ, **options)
            step["peak_with_page_cache"] = group.peak()
    step["wall_seconds"] = time.perf_counter() - start
    if done.returncode != 0:
        reason = "it was killed: more memory than the limit" if done.returncode == -9 else ""
        raise SystemExit(f"{name} failed ({done.returncode}) {reason}\n{done.stdout[-2000:]}")
    if as_json:
        step["result"] = json.loads(done.stdout.strip().splitlines()[-1])
    found["steps"].append(step)
