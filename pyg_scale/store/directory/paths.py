"""The files of a graph directory, as POSIX paths in it."""

from __future__ import annotations

from urllib.parse import quote

from pyg_scale.graph.topology import EdgeType, NodeType


def node_dir(node_type: NodeType, part: int | None = None) -> str:
    """The folder of the files of a node type, of a part or (the book) of all parts."""
    root = "book" if part is None else f"part-{part}"
    return f"{root}/nodes" if node_type is None else f"{root}/nodes/{quoted(node_type)}"


def edge_dir(edge_type: EdgeType, part: int | None = None) -> str:
    """The folder of the files of an edge type, of a part or (the book) of all parts."""
    root = "book" if part is None else f"part-{part}"
    if edge_type is None:
        return f"{root}/edges"
    return f"{root}/edges/{','.join(map(quoted, edge_type))}"


def attribute_file(directory: str, name: str) -> str:
    """The file of an attribute in the directory of its type."""
    return f"{directory}/attributes/{quoted(name)}.npy"


def set_file(node_type: NodeType, name: str) -> str:
    """The file of a named index set."""
    prefix = "sets" if node_type is None else f"sets/{quoted(node_type)}"
    return f"{prefix}/{quoted(name)}.npy"


def quoted(name: str) -> str:
    """A file name for any name; two names never share one."""
    out = quote(name, safe=" ")
    hidden = out.startswith(".") or not out.strip(".")
    return out.replace(".", "%2E") if hidden else out
