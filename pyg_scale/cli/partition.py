"""Cut a graph into parts, and write them as a graph directory.

DATA is a graph directory, an .npz archive, or a data set of PyG by its name (Planetoid/Cora). The
parts come from a method (`pyg-scale plugins list` names them all) or, with --assignment, from a
file that another tool wrote: the part of node i in line i + 1, an .npy array, or the node_pb.pt of
GraphLearn-for-PyTorch. Prints what the parts are worth. Exit status: 0 if all went well, 1 if not,
2 for wrong usage.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale partition``."""
    parser = _parser()
    args = parser.parse_args(argv)
    options = dict(args.option)
    if len(options) < len(args.option):
        parser.error("the same --option is given twice")
    if args.assignment and (args.method or options):
        parser.error("--assignment brings the parts: leave --method and --option out")
    from pyg_scale.errors import GraphDirectoryError, PluginError

    try:
        report = _run(args, options)
    except (GraphDirectoryError, PluginError, ValueError, TypeError, LookupError, OSError) as error:
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
    parser.add_argument("--seed", type=int, default=0, help="of all random choices (default: 0)")
    parser.add_argument(
        "--balance",
        metavar="WHAT",
        default="nodes",
        help="nodes, edges and train, separated by commas: what to hold equal shares of",
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
        type=_option,
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
        help="parts that are known already; with types TYPE=FILE, once for each",
    )
    parser.add_argument("--root", metavar="DIR", default="data", help="where PyG keeps data sets")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _run(args: argparse.Namespace, options: dict[str, Any]) -> str:
    from pyg_scale.partitioner import assign, quality
    from pyg_scale.partitioner.report import describe
    from pyg_scale.partitioner.write import write_partition

    if args.out and Path(args.out).exists():
        raise FileExistsError(f"{args.out} is there already: take another path for --out")
    if args.edge_assign_strategy and not args.out:
        raise ValueError("--edge-assign-strategy is about writing: give --out too")
    data = _data(args.data, args.root)
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
    strategy = args.edge_assign_strategy or "by_dst"
    if args.out:
        write_partition(data, found, Path(args.out), edge_assign_strategy=strategy)
    report = quality(data, found, edge_assign_strategy=strategy)
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


def _data(name: str, root: str) -> Any:
    """A directory is left to who reads it; anything else is loaded."""
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
    """``TYPE=FILE``, or a file."""
    node_type, equals, path = text.partition("=")
    if not equals or Path(text).is_file():
        return None, text
    return node_type, path


def _option(text: str) -> tuple[str, Any]:
    """``key=value``; a value that is no Python literal is a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"write it as key=value (got {text!r})")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"write numbers with commas (got {text!r})") from None
