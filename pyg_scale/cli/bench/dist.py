"""Ranks that share a partitioned graph: what travels between them, how fast, and who waits for it.

Every rank is a process of this machine that reads its own parts only and asks the others over the
network path. In one run: rows of other ranks against what plain sockets carry between the same
processes; bytes of features from other ranks with and without a cache; epochs with every request
answered late, with one and with several batches in flight; where the time of each batch goes; and
ranks that share the mappings of the machine against one process with as many threads. With
``--compare-npz``, what travels when another graph was partitioned by one method or another. With
``--link``, rows against plain sockets once more, on a network of that speed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyg_scale.cli.bench import dist_link, dist_report, environment, files, memory

QUICK = {
    "nodes": 4_000, "edges": 40_000, "features": 16, "batches": 4, "batch_size": 64, "rows": 500,
    "messages": 4, "rounds": 1, "shared_batches": 4, "latency_batches": 8, "num_neighbors": [4, 3],
}  # fmt: skip
_LIMIT = 1800.0


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale bench dist``."""
    args = _arguments(argv)
    root = Path(args.dir).absolute()
    hidden = ("dir", "json", "png", "report", "npz", "compare_npz")  # reports are published
    settings = {k: v for k, v in vars(args).items() if k not in hidden}
    found: dict[str, Any] = {
        "benchmark": "dist",
        "command": environment.command("dist", argv),
        "environment": environment.describe(),
        "settings": settings,
    }
    try:
        made = {"parts": args.parts or args.ranks, "npz": args.npz, "methods": [args.method]}
        found["graph"] = _make(root, args, made)
        settings["classes"] = found["graph"]["classes"]
        settings["features"] = found["graph"]["features"]
        if args.compare_npz:
            made |= {"npz": args.compare_npz, "methods": args.compare_methods}
            found["compared"] = _make(root / "compared", args, made)
        found["ranks"] = _run(root, settings)
    finally:
        if not args.keep:
            shutil.rmtree(root, ignore_errors=True)
    found["environment"]["load_average_after"] = memory.load_average()
    print(dist_report.terminal(found))
    files.write(
        found,
        args.json,
        args.png,
        args.report,
        draw=dist_report.draw,
        markdown=dist_report.markdown,
    )
    return 0


def _make(root: Path, args: argparse.Namespace, made: dict[str, Any]) -> dict[str, Any]:
    """Write the parts in a process of its own, whose memory is gone afterwards."""
    root.mkdir(parents=True, exist_ok=True)
    given = {
        "nodes": args.nodes, "edges": args.edges, "features": args.features, "root": str(root),
        **made,
    }  # fmt: skip
    module = "pyg_scale.cli.bench.dist_graph"
    command = [sys.executable, "-m", module, json.dumps(given)]
    done = subprocess.run(command, check=True, timeout=_LIMIT, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _run(root: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank found.

    Raises:
        SystemExit: If one failed; the others are ended.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    methods = settings["compare_methods"] if (root / "compared").is_dir() else []
    given = {
        **settings,
        "path": str(root / settings["method"]),
        "whole": str(root / "whole"),
        "compared": {method: str(root / "compared" / method) for method in methods},
    }
    command = [sys.executable, "-m", "pyg_scale.cli.bench.dist_steps", json.dumps(given)]
    with contextlib.ExitStack() as stack:
        if settings["link"]:
            command = [*stack.enter_context(dist_link.namespace()), *command]
        out, codes = _ended(command, port, settings)
    failed = [number for number, code in enumerate(codes) if code]
    if failed:
        raise SystemExit(f"pyg-scale bench dist: rank {failed[0]} failed, see above")
    return [json.loads(text.splitlines()[-1]) for text in out]


def _ended(
    command: list[str], port: int, settings: dict[str, Any]
) -> tuple[list[str], list[int | None]]:
    """What the ranks printed, and their exit codes."""
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(settings["ranks"]),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(settings["threads"]),
            },
        )
        for rank in range(settings["ranks"])
    ]
    try:
        out = [rank.communicate(timeout=_LIMIT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return out, [rank.returncode for rank in ranks]


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pyg-scale bench dist",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    graph = parser.add_argument_group("graph (power law, generated)")
    graph.add_argument("--nodes", type=files.count, default=400_000)
    graph.add_argument("--edges", type=files.count, default=8_000_000, help="directed")
    graph.add_argument("--features", type=int, default=128, help="columns of fp32")
    graph.add_argument("--npz", metavar="FILE", help="a graph of nodes with x and y instead")
    graph.add_argument("--method", default="random", help="how it is partitioned")
    graph.add_argument("--parts", type=int, help="as many as ranks")
    graph.add_argument(
        "--compare-npz", metavar="FILE", help="see also what travels of another graph"
    )
    graph.add_argument(
        "--compare-methods",
        type=lambda text: text.split(","),
        default=["random", "metis"],
        metavar="METHOD,METHOD,...",
        help="by which that one is partitioned, one after the other (default: random,metis)",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--dir", required=True, help="a folder with room for the files")
    how.add_argument("--keep", action="store_true", help="do not delete that folder afterwards")
    how.add_argument("--ranks", type=int, default=2)
    how.add_argument("--threads", type=int, default=1, help="of each rank")
    how.add_argument("--cache", type=float, default=0.2, help="share of the features in a cache")
    how.add_argument("--batches", type=int, default=20, help="of each rank in an epoch")
    how.add_argument("--batch-size", type=int, default=512)
    how.add_argument("--num-neighbors", type=files.numbers, default=[15, 10], metavar="K,K,...")
    how.add_argument("--hidden", type=int, default=64)
    how.add_argument("--in-flight", type=int, default=4, help="batches")
    how.add_argument("--latency", type=float, default=0.05, help="seconds, added to answers")
    how.add_argument("--latency-batches", type=int, default=24, help="of each rank, while late")
    how.add_argument("--latency-batch-size", type=int, default=32, help="of these")
    how.add_argument(
        "--link",
        metavar="RATE",
        help="also on a network of this speed, such as 10gbit (needs root and iproute2)",
    )
    how.add_argument("--rows", type=files.count, default=40_000, help="of a message")
    how.add_argument("--messages", type=int, default=60, help="of a round")
    how.add_argument("--shared-batches", type=int, default=60, help="of each rank, mappings shared")
    how.add_argument("--rounds", type=int, default=9)
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--timeout", type=float, default=120.0, help="seconds, of a request")
    how.add_argument("--quick", action="store_true", help="a small graph, to see that it runs")
    files.add_output(parser)
    if "--quick" in argv:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(argv)
    for name, least in (("ranks", 2), ("batches", 1), ("rounds", 1), ("in_flight", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if not 0 < args.cache <= 1:
        parser.error("--cache must be a share, above 0 and at most 1")
    if args.link is not None:
        try:
            dist_link.rate(args.link)
        except ValueError as error:
            parser.error(f"--link: {error}")
    return args
