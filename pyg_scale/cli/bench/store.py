"""Training with features on disk beside training in memory, epoch by epoch in the same run.

Two processes train the same model on the same batches of a generated graph: one has everything in
memory; the other reads features from the graph directory through a cache of a share of them,
and its memory, page cache included, is limited by a control group to less than the files. They
take turns, so that a slow minute hits both alike. Where memory cannot be limited the report says
so, and it says whether reads passed by the page cache (``O_DIRECT``).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyg_scale.cli.bench import environment, files, memory, store_report
from pyg_scale.cli.bench.memory_limit import MemoryLimit

QUICK = {"nodes": 30_000, "edges": 600_000, "features": 32, "batches": 6, "batch_size": 128}
_CLASSES = 47  # as of ogbn-products
_SECONDS = 3600.0


class Peer:
    """A process that trains an epoch when it is told to.

    Args:
        arguments: Of :class:`pyg_scale.cli.bench.store_steps.Side`.
        group: A limit on its memory, if any.
    """

    def __init__(self, arguments: dict[str, Any], group: MemoryLimit | None) -> None:
        module = "pyg_scale.cli.bench.store_steps"
        command = [sys.executable, "-m", module, json.dumps(arguments)]
        environ = {
            **os.environ,
            "PYG_SCALE_KERNELS": os.environ.get("PYG_SCALE_KERNELS", "require"),
        }
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        if group is None:
            self._process = subprocess.Popen(command, text=True, env=environ, **options)
        else:
            self._process = group.start(command, env=environ, **options)
        try:
            self.ready = self._answer()
        except BaseException:
            self.close()
            raise

    def epoch(self) -> dict[str, Any]:
        """What the process says of one epoch.

        Raises:
            SystemExit: If it died, such as for more memory than its limit.
        """
        assert self._process.stdin is not None
        self._process.stdin.write("epoch\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(_SECONDS, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            code = self._process.wait(10)
            reason = ": it was killed, more memory than the limit" if code == -9 else ""
            raise SystemExit(f"pyg-scale bench store: a side ended with {code}{reason}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale bench store``."""
    args = _arguments(argv)
    root = Path(args.dir).absolute()
    graph = root / "graph"
    hidden = ("dir", "json", "png", "report")  # reports are published
    found: dict[str, Any] = {
        "benchmark": "store",
        "command": environment.command("store", argv),
        "environment": environment.describe(),
        "settings": {k: v for k, v in vars(args).items() if k not in hidden},
    }
    try:
        _make(graph, args)
        found["file_bytes"] = sum(f.stat().st_size for f in graph.rglob("*") if f.is_file())
        features = graph / "part-0/nodes/attributes/x.npy"
        found["feature_bytes"] = features.stat().st_size
        found["cache_bytes"] = int(args.cache * found["feature_bytes"])
        ahead = args.cache if args.read_ahead is None else args.read_ahead
        found["read_ahead_bytes"] = int(ahead * found["feature_bytes"])
        found["limit_bytes"] = args.limit or int(0.9 * found["file_bytes"])
        _measure(found, graph, args)
    finally:
        if not args.keep:
            shutil.rmtree(root, ignore_errors=True)
    found["environment"]["load_average_after"] = memory.load_average()
    print(store_report.terminal(found))
    files.write(
        found,
        args.json,
        args.png,
        args.report,
        draw=store_report.draw,
        markdown=store_report.markdown,
    )
    return 0


def _measure(found: dict[str, Any], graph: Path, args: argparse.Namespace) -> None:
    group, found["limited"] = None, True
    try:
        group = MemoryLimit(found["limit_bytes"])
    except OSError as error:
        found["limited"], found["why_not"] = False, str(error)
    common = {
        "path": str(graph),
        "read_ahead": found["read_ahead_bytes"],
        "policy": args.policy,
        "batches": args.batches,
        "batch_size": args.batch_size,
        "num_neighbors": args.num_neighbors,
        "hidden": args.hidden,
        "workers": args.workers,
        "prefetch": args.prefetch,
        "trim": args.trim,
    }
    found["memory"], found["disk"] = [], []
    sides: dict[str, Peer] = {}
    try:
        for name, cache in (("disk", found["cache_bytes"]), ("memory", 0)):
            sides[name] = Peer({**common, "cache": cache}, group if cache else None)
        for turn in range(args.warmup + args.rounds):
            for name, side in sides.items():
                print(f"epoch {turn + 1}: {name}", file=sys.stderr)
                one = side.epoch() | {"warmup": turn < args.warmup}
                one["load_average"] = memory.load_average()
                found[name].append(one)
        found["peak_with_page_cache"] = None if group is None else group.peak()
    finally:
        for side in sides.values():
            side.close()
        if group is not None:
            group.close()


def _make(graph: Path, args: argparse.Namespace) -> None:
    """Compute the graph while it is converted: it may be larger than memory."""
    if graph.exists() and args.reuse:
        return
    graph.parent.mkdir(parents=True, exist_ok=True)
    source = (
        f"generated:nodes={args.nodes},edges={args.edges},features={args.features},"
        f"dtype={args.dtype},classes={_CLASSES},seed=0"
    )
    convert = [sys.executable, "-m", "pyg_scale.cli", "convert", source, str(graph), "--overwrite"]
    subprocess.run(convert, check=True, timeout=_SECONDS, stdout=subprocess.DEVNULL)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pyg-scale bench store",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    graph = parser.add_argument_group("graph")
    graph.add_argument("--nodes", type=files.count, default=6_000_000)
    graph.add_argument("--edges", type=files.count, default=120_000_000, help="directed")
    graph.add_argument("--features", type=int, default=128, help="columns")
    graph.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    how = parser.add_argument_group("how")
    how.add_argument("--dir", required=True, help="a folder with room for the files")
    how.add_argument("--keep", action="store_true", help="do not delete that folder afterwards")
    how.add_argument("--reuse", action="store_true", help="use the graph that is there already")
    how.add_argument("--cache", type=float, default=0.15, help="share of the features in memory")
    how.add_argument(
        "--read-ahead", type=float, help="share of the features for rows read early; as --cache"
    )
    how.add_argument("--policy", default="belady", help="belady, sieve or placed (by degree)")
    how.add_argument("--limit", type=files.count, help="bytes of memory; 0.9 of the files")
    how.add_argument("--batches", type=int, default=20, help="of an epoch")
    how.add_argument("--batch-size", type=int, default=512)
    how.add_argument("--num-neighbors", type=files.numbers, default=[15, 10, 5], metavar="K,K,...")
    how.add_argument("--hidden", type=int, default=128)
    how.add_argument("--trim", action="store_true", help="layers on the nodes that they need only")
    how.add_argument("--workers", type=int, default=2)
    how.add_argument("--prefetch", type=int, default=1, help="batches per worker")
    how.add_argument("--warmup", type=int, default=1, help="epochs before those that count")
    how.add_argument("--rounds", type=int, default=3, help="epochs that count")
    how.add_argument("--quick", action="store_true", help="a small graph, to see that it runs")
    files.add_output(parser)
    if "--quick" in argv:
        parser.set_defaults(**QUICK, limit=4_000_000_000)
    args = parser.parse_args(argv)
    for name in ("batches", "batch_size", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 < args.cache <= 1:
        parser.error("--cache must be a share, above 0 and at most 1")
    return args
