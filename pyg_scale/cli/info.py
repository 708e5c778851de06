"""Describe a graph directory, and check it.

Exit status: 0 if all is well, 1 if it is damaged or not a graph directory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.store.directory import Attribute, GraphDirectory, Meta
from pyg_scale.store.directory.meta import VERSION
from pyg_scale.store.directory.paths import edge_dir, node_dir
from pyg_scale.store.directory.verify import verify


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale info``."""
    parser = argparse.ArgumentParser(
        prog="pyg-scale info",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", help="a graph directory")
    parser.add_argument(
        "--verify", action="store_true", help="read everything: checksums, ids, orders"
    )
    parser.add_argument("--snapshot", type=int, metavar="N", help="default: the newest")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    try:
        directory = GraphDirectory(args.directory, args.snapshot)
        if args.verify:
            verify(directory)
    except GraphDirectoryError as error:
        print(f"pyg-scale info: {error}", file=sys.stderr)
        return 1
    found = describe(directory)
    if args.verify:
        found["verified"] = True
    print(json.dumps(found, indent=2) if args.json else _text(found))
    return 0


def describe(directory: GraphDirectory) -> dict[str, Any]:
    """The output of ``pyg-scale info``, as plain values."""
    meta = directory.meta
    return {
        "path": str(directory.path),
        "version": VERSION,
        "is_hetero": meta.is_hetero,
        "num_parts": meta.num_parts,
        "parts_here": directory.parts,
        "snapshot": directory.snapshot,
        "snapshots": [directory.head.base, directory.head.newest],
        "appended_bytes": sum(file.bytes for file in directory.head.files.values()),
        "bytes": sum(file.bytes for file in meta.files.values()),
        "bytes_here": sum(file.bytes for file in directory.files_here().values()),
        "files": len(meta.files),
        "nodes": [
            {
                "type": node.name,
                "num_nodes": node.num_nodes,
                "attributes": _attributes(node.attributes),
                "other": list(node.other),
                "index_sets": meta.index_sets.get(node.name or "", {}),
                "part_nodes": node.part_nodes,
                "part_halo": node.part_halo,
                "bytes": _bytes(meta, "nodes", node.name),
            }
            for node in meta.nodes.values()
        ],
        "edges": [
            {
                "type": edge.name,
                "num_edges": edge.num_edges,
                "index_dtype": edge.index_dtype,
                "attributes": _attributes(edge.attributes),
                "other": list(edge.other),
                "part_edges": edge.part_edges,
                "bytes": _bytes(meta, "edges", edge.name),
            }
            for edge in meta.edges.values()
        ],
        "time_attr": meta.time_attr,
        "weight_attr": meta.weight_attr,
        "graph_attributes": meta.graph_attributes,
        "partition": None if meta.partition is None else vars(meta.partition),
    }


def _attributes(attributes: Mapping[str, Attribute]) -> dict[str, dict[str, Any]]:
    return {k: {"dtype": a.dtype, "row": list(a.row)} for k, a in attributes.items()}


def _bytes(meta: Meta, kind: str, name: Any) -> int:
    """Size in bytes of the files of a node or edge type, in all parts."""
    folders = [
        node_dir(name, part) if kind == "nodes" else edge_dir(name, part)
        for part in range(meta.num_parts)
    ]
    if kind == "nodes":
        folders.append(node_dir(name))
    return sum(
        file.bytes
        for path, file in meta.files.items()
        if any(path.startswith(f"{folder}/") for folder in folders)
    )


# Text #####################################################################################


def _text(found: Mapping[str, Any]) -> str:
    kind = "heterogeneous" if found["is_hetero"] else "homogeneous"
    parts, files = _count(found["num_parts"], "part"), _count(found["files"], "file")
    lines = [f"{found['path']}: a {kind} graph in {parts}, {_size(found['bytes'])} in {files}"]
    if len(found["parts_here"]) < found["num_parts"]:
        here = ", ".join(map(str, found["parts_here"])) or "none"
        lines.append(f"parts here: {here} ({_size(found['bytes_here'])})")
    if found["snapshots"] != [0, 0]:
        first, last = found["snapshots"]
        size = _size(found["appended_bytes"])
        lines.append(f"snapshot {found['snapshot']}, of {first} to {last}: {size} appended")
    for node in found["nodes"]:
        name = "nodes" if node["type"] is None else f"nodes of {node['type']!r}"
        lines += ["", f"{name}: {node['num_nodes']:,} ({_size(node['bytes'])})"]
        lines += _described(node)
        for set_name, size in node["index_sets"].items():
            lines.append(f"  set {set_name}: {size:,}")
        lines += _of_parts(node["part_nodes"], "nodes")
        if any(node["part_halo"]):
            lines += _of_parts(node["part_halo"], "halo nodes")
    for edge in found["edges"]:
        name = "edges" if edge["type"] is None else f"edges ({', '.join(edge['type'])})"
        lines += ["", f"{name}: {edge['num_edges']:,} ({_size(edge['bytes'])})"]
        lines.append(
            f"  edge_index: {edge['index_dtype']} [2, {edge['num_edges']}], made on demand"
        )
        lines += _described(edge)
        lines += _of_parts(edge["part_edges"], "edges")
    lines.append("")
    for name in ("time_attr", "weight_attr"):
        if found[name] is not None:
            lines.append(f"{name}: {found[name]}")
    for name in found["graph_attributes"]:
        lines.append(f"attribute of the graph: {name}")
    if found["partition"] is not None:
        lines += _partition(found["partition"])
    if found.get("verified"):
        lines.append("verified: checksums, ids and orders are correct")
    return "\n".join(lines).rstrip()


def _described(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, attribute in found["attributes"].items():
        shape = "".join(f" x {size}" for size in attribute["row"])
        lines.append(f"  {name}: {attribute['dtype']}{shape}")
    return lines + [f"  {name}" for name in found["other"]]


def _of_parts(sizes: Sequence[int], what: str) -> list[str]:
    if len(sizes) < 2:
        return []
    if len(sizes) > 16:
        return [f"  {what} in parts: {min(sizes):,} to {max(sizes):,}"]
    return [f"  {what} in parts: {_joined(f'{size:,}' for size in sizes)}"]


def _partition(partition: Mapping[str, Any]) -> list[str]:
    strategy = partition["edge_assign_strategy"]
    lines = [f"partitioned by {partition['method']} (seed {partition['seed']}), edges {strategy}"]
    if partition["options"]:
        lines.append("  " + _joined(f"{k}={v!r}" for k, v in partition["options"].items()))
    return lines


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _size(number: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
