"""Convert a graph of any form to a graph directory, in bounded memory."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from pyg_scale.cli.key_value import option

_EPILOG = """\
examples:
  pyg-scale convert edges.npy graph --nodes x=features.npy --nodes y=labels.npy
  pyg-scale convert edges.csv graph --weight-attr weight --memory 8GB
  pyg-scale convert cora.npz cora
  pyg-scale convert ogb:ogbn-arxiv arxiv --root dataset
  pyg-scale convert graph --edges author,writes,paper=writes.npy --nodes paper:x=features.npy

A conversion that was killed is resumed when the same command is run again.
"""


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale convert``."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        edges, edge_attributes = _edges(args.edges)
        nodes = _nodes(args.nodes, edges is not None and None not in edges)
        options: dict[str, Any] = {}
        for name, value in args.option:
            _put(options, name, value, "--option")
        if args.root is not None:
            _put(options, "root", args.root, "--root")
        numbers: dict[Any, int] = {}
        for each in args.num_nodes:
            _put(numbers, *_number(each), "--num-nodes")
        sets: dict[Any, str] = {}
        for each in args.index_set:
            _put(sets, *_index_set(each), "--index-set")
    except ValueError as error:
        parser.error(str(error))
    if len(args.paths) > 2 or (len(args.paths) == 1) == (edges is None):
        parser.error("give SOURCE and DIR, or DIR and one or more --edges with lists of edges")

    from pyg_scale.convert import Tables, convert  # imported now, so that --help stays quick

    begun = False
    try:
        source: Any = args.paths[0]
        if edges is not None and None in edges:
            source, edges = edges[None], None
        if edges is not None:
            source = Tables(edges, nodes or None, edge_attributes or None, **options)
            options = {}
        elif args.edges or nodes:
            source = Tables(source, nodes.get(None), edge_attributes.get(None), **options)
            options = {}
        begun = True
        done = convert(
            source,
            args.paths[-1],
            memory=args.memory,
            overwrite=args.overwrite,
            undirected=args.undirected,
            remove_self_loops=args.remove_self_loops,
            time_attr=args.time_attr,
            weight_attr=args.weight_attr,
            num_nodes=numbers or None,
            index_dtype=args.index_dtype,
            feature_dtype=args.feature_dtype,
            link_features=args.link_features,
            index_sets=sets or None,
            quiet=args.quiet,
            **options,
        )
    except (OSError, ValueError, IndexError, TypeError) as error:
        print(f"pyg-scale convert: {_message(error)}", file=sys.stderr)
        return 1 if begun else 2
    _report(done, args)
    return 0


def _report(done: Any, args: argparse.Namespace) -> None:
    num_nodes, num_edges = sum(done.num_nodes.values()), sum(done.num_edges.values())
    if args.json:
        print(
            json.dumps(
                {
                    "path": str(done.path),
                    "num_nodes": {_name(k): v for k, v in done.num_nodes.items()},
                    "num_edges": {_name(k): v for k, v in done.num_edges.items()},
                    "seconds": round(done.seconds, 3),
                    "peak_memory": done.peak_memory,
                    "skipped": done.skipped,
                }
            )
        )
    elif not args.quiet:
        print(
            f"{done.path}: {num_nodes:,} nodes, {num_edges:,} edges, {done.seconds:.1f} s "
            f"({num_edges / max(done.seconds, 1e-9) / 1e6:.1f} M edges/s), at most "
            f"{done.peak_memory / 1e9:.2f} GB of memory"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pyg-scale convert",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("paths", nargs="+", metavar="[SOURCE] DIR", help="the input, and the directory to write")
    many: dict[str, Any] = {"action": "append", "default": []}
    add(
        "--edges",
        **many,
        metavar="[TYPE=]FILE",
        help="an edge list: FILE, SRC,RELATION,DST=FILE, or for a further attribute "
        "[SRC,RELATION,DST:]NAME=FILE",
    )
    add(
        "--nodes",
        **many,
        metavar="[TYPE:]NAME=FILE",
        help="an attribute of nodes, one row per node, or a table of nodes: TYPE=FILE, or =FILE",
    )
    add("--num-nodes", **many, metavar="[TYPE=]N", help="number of nodes")
    add("--index-set", **many, metavar="[TYPE:]NAME=FILE", help="a named set of nodes, .npy or .pt")
    add("--option", "-o", **many, type=option, metavar="KEY=VALUE", help="an option of the reader")
    add("--root", metavar="DIR", help="the folder of data sets, for ogb:NAME and pyg:NAME")
    add("--memory", default="4GB", help="the most memory to use (default: 4GB)")
    add("--time-attr", metavar="NAME", help="order edges by this attribute of nodes or edges")
    add("--weight-attr", metavar="NAME", help="the attribute of edges that has their weights")
    add("--undirected", action="store_true", help="add the reverse of every edge")
    add("--remove-self-loops", action="store_true", help="leave out edges from a node to itself")
    add("--index-dtype", choices=["int64", "int32"], help="dtype of node ids in batches")
    add("--feature-dtype", metavar="DTYPE", help="convert the nodes' x, for example to float16")
    add("--link-features", action="store_true", help="hard-link the nodes' x instead of copying")
    add("--overwrite", action="store_true", help="replace an existing graph directory")
    add("--json", action="store_true", help="print the result as JSON")
    add("--quiet", action="store_true", help="print nothing but errors")
    return parser


# Arguments ####################################################################################


def _edges(values: Sequence[str]) -> tuple[Any, dict[Any, dict[str, str]]]:
    """Edge lists by type (``None`` if SOURCE is the graph), and attributes by type."""
    lists: dict[Any, str] = {}
    attributes: dict[Any, dict[str, str]] = {}
    for value in values:
        left, equals, file = value.partition("=")
        kind, colon, name = left.rpartition(":")
        if equals and left.count(",") == 2 and not colon:
            _put(lists, tuple(left.split(",")), file, "--edges")
        elif equals and "," not in name and (not colon or kind.count(",") == 2):
            edge_type = tuple(kind.split(",")) if colon else None
            _put(attributes.setdefault(edge_type, {}), name, file, "--edges", edge_type)
        elif not equals:
            _put(lists, None, value, "--edges")
        else:
            raise ValueError(f"--edges {value}: write FILE, SRC,RELATION,DST=FILE or NAME=FILE")
    if len(lists) > 1 and None in lists:
        raise ValueError("--edges: give every edge list a type, or one list and no type")
    return lists or None, attributes


def _nodes(values: Sequence[str], typed: bool) -> dict[Any, dict[str, str]]:
    """Files by type and name; the table of a type has the name ``""``."""
    found: dict[Any, dict[str, str]] = {}
    for value in values:
        left, equals, file = value.partition("=")
        kind, colon, name = left.rpartition(":")
        if not equals or not file:
            raise ValueError(f"--nodes {value}: write [TYPE:]NAME=FILE, or TYPE=FILE for a table")
        if typed and not colon:
            kind, name = name, ""
        node_type = kind if typed else None
        _put(found.setdefault(node_type, {}), name, file, "--nodes", node_type)
    return found


def _number(value: str) -> tuple[str | None, int]:
    kind, equals, number = value.rpartition("=")
    if not number.isdecimal():
        raise ValueError(f"--num-nodes {value}: write N or TYPE=N")
    return (kind if equals else None), int(number)


def _index_set(value: str) -> tuple[tuple[str | None, str], str]:
    left, equals, file = value.partition("=")
    kind, colon, name = left.rpartition(":")
    if not equals or not name or not file:
        raise ValueError(f"--index-set {value}: write [TYPE:]NAME=FILE")
    return (kind if colon else None, name), file


def _put(found: dict[Any, Any], name: Any, value: Any, given: str, kind: Any = None) -> None:
    """Note what an option gives for a name.

    Raises:
        ValueError: If it was given before, as one of the two would be lost.
    """
    if name in found:
        parts = name if given == "--index-set" else (kind, name)
        what = ":".join(_name(part) for part in parts if part)
        raise ValueError(
            f"{given}: {what or 'the same without a type'} is given twice: {found[name]} and "
            f"{value}"
        )
    found[name] = value


def _name(kind: Any) -> str:
    return "" if kind is None else kind if isinstance(kind, str) else ",".join(kind)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)
