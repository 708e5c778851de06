"""Cut a graph into parts, and write these as a graph directory.

DATA is a graph directory, an .npz archive, or a data set of PyG by its name (Planetoid/Cora). The
parts come from a method (`pyg-scale plugins list` names them all) or, with --assignment, from a
file that another tool wrote: the part of node i in line i + 1, an .npy array, or the node_pb.pt of
GraphLearn-for-PyTorch. Prints measures of the partition or, with --compare, of those of several
methods. Exit status: 0 if all went well, 1 if not, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyg_scale.cli.key_value import option
from pyg_scale.errors import PluginError

_EXPECTED = (PluginError, ValueError, TypeError, LookupError, OSError, ImportError)


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale partition``."""
    parser = _parser()
    args = parser.parse_args(argv)
    options = dict(args.option)
    if len(options) < len(args.option):
        parser.error("the same --option is given twice")
    for name in ("method", "out", "balance", "compare", "png"):
        if getattr(args, name) == "":
            parser.error(f"--{name} is empty")
    if args.assignment and (args.method or options):
        parser.error("--assignment gives the parts: leave --method and --option out")
    if args.assignment and (args.shares or args.balance):
        parser.error("--assignment gives the parts: leave --shares and --balance out")
    if args.batch_size is not None and not args.num_neighbors:
        parser.error("--batch-size is that of sampled batches: give --num-neighbors too")
    if args.png and not Path(args.png).absolute().parent.is_dir():
        parser.error(f"--png {args.png}: there is no folder {Path(args.png).parent}")
    if args.png:
        from pyg_scale.partitioner.report import check_drawable

        try:
            check_drawable(args.png)
        except (ImportError, ValueError) as error:
            parser.error(f"--png: {error}")
    args.balance = args.balance or "nodes"
    args.batch_size = 1024 if args.batch_size is None else args.batch_size
    if args.compare and (args.assignment or args.method or options or args.out):
        parser.error("--compare only measures: leave --method, --option, --assignment, --out out")
    try:
        report = _run(args, options)
    except _EXPECTED as error:
        print(f"pyg-scale partition: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pyg-scale partition",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("data", metavar="DATA", help="the graph")
    parser.add_argument("num_parts", metavar="NUM_PARTS", type=int, help="number of parts")
    parser.add_argument("--method", metavar="NAME", help="the partitioner (default: fennel)")
    parser.add_argument("--out", metavar="DIR", help="write a graph directory; it must not exist")
    parser.add_argument("--seed", type=int, default=0, help="of random choices (default: 0)")
    parser.add_argument(
        "--balance",
        metavar="WHAT",
        help="nodes, edges and train, separated by commas: the quantities to balance (default: "
        "nodes)",
    )
    parser.add_argument(
        "--shares",
        metavar="A,B,...",
        type=_numbers,
        help="the share of each part, in any unit (default: equal)",
    )
    parser.add_argument(
        "--option",
        metavar="KEY=VALUE",
        type=option,
        action="append",
        default=[],
        help="an option of the method, such as passes=10; may be repeated",
    )
    parser.add_argument(
        "--edge-assign-strategy",
        choices=("by_dst", "by_src"),
        help="which end's part an edge is written to (default: by_dst)",
    )
    parser.add_argument(
        "--assignment",
        metavar="FILE",
        action="append",
        type=_file,
        help="a given assignment; with types TYPE=FILE, once for each",
    )
    parser.add_argument(
        "--compare", metavar="A,B,...", help="measure these methods, each with its defaults"
    )
    parser.add_argument(
        "--num-neighbors",
        metavar="K,K,...",
        type=_integers,
        help="sample batches with these neighbours per hop and count features of other parts",
    )
    parser.add_argument("--batch-size", type=int, help="of these (default: 1024)")
    parser.add_argument("--png", metavar="FILE", help="draw the measures; needs matplotlib")
    parser.add_argument("--root", metavar="DIR", default="data", help="folder of PyG's data sets")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _run(args: argparse.Namespace, options: dict[str, Any]) -> str:
    from pyg_scale.partitioner import assign, quality
    from pyg_scale.partitioner.report import describe, draw
    from pyg_scale.partitioner.write import write_partition

    if args.out and Path(args.out).exists():
        raise FileExistsError(f"{args.out} already exists: choose another path for --out")
    if args.compare:
        return _compare(args)
    if args.edge_assign_strategy and not args.out:
        raise ValueError("--edge-assign-strategy applies to writing: give --out too")
    data = _data(args.data, args.root)
    start = time.perf_counter()
    found, _ = assign(
        data,
        args.num_parts,
        args.method or "fennel",
        args.seed,
        shares=args.shares,
        balance=tuple(args.balance.split(",")),
        assignment=_assignment(args.assignment),
        options=options,
    )
    seconds = time.perf_counter() - start
    strategy = args.edge_assign_strategy or "by_dst"
    report = quality(
        data,
        found,
        edge_assign_strategy=strategy,
        num_neighbors=args.num_neighbors,
        batch_size=args.batch_size,
        cache=found.cache,
    )
    report.seconds = seconds
    if args.out:
        out = Path(args.out)
        write_partition(data, found, out, edge_assign_strategy=strategy, quality=report)
    if args.png:
        draw([report], args.png)
    if not args.json:
        return describe(report)
    written = str(Path(args.out).absolute()) if args.out else None
    return json.dumps(
        {
            "method": found.method,
            "options": found.options,
            "seed": found.seed,
            "out": written,
            "quality": report.to_dict(),
        },
        indent=2,
    )


def _compare(args: argparse.Namespace) -> str:
    """Compare the partitions of several methods."""
    from pyg_scale.partitioner import compare
    from pyg_scale.partitioner.report import draw, table

    found = compare(
        _data(args.data, args.root),
        args.num_parts,
        args.compare.split(","),
        seed=args.seed,
        shares=args.shares,
        balance=tuple(args.balance.split(",")),
        num_neighbors=args.num_neighbors,
        batch_size=args.batch_size,
        edge_assign_strategy=args.edge_assign_strategy or "by_dst",
    )
    if args.png:
        draw(found, args.png)
    return json.dumps([each.to_dict() for each in found], indent=2) if args.json else table(found)


def _integers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"write integers such as 15,10 (got {text!r})") from None


def _data(name: str, root: str) -> Any:
    """The path of a directory, which is opened later; any other data set is loaded."""
    if Path(name).is_dir():
        from pyg_scale.store.directory import GraphDirectory

        return GraphDirectory(Path(name))
    from pyg_scale.datasets import load

    return load(name, root)


def _assignment(given: list[tuple[str | None, str]] | None) -> Any:
    if given is None:
        return None
    by_type = dict(given)
    if len(by_type) < len(given):
        raise ValueError("--assignment is given twice for the same nodes")
    if None not in by_type:
        return by_type
    if len(by_type) > 1:
        raise ValueError("--assignment: write TYPE=FILE for every type, or FILE alone")
    return by_type[None]


def _file(text: str) -> tuple[str | None, str]:
    """Parse ``TYPE=FILE``, or a file."""
    node_type, equals, path = text.partition("=")
    if not equals or Path(text).is_file():
        return None, text
    return node_type, path


def _numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"write numbers with commas (got {text!r})") from None
