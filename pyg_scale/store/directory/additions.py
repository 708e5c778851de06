"""Adds named sets and attributes of nodes to a graph directory, also from files."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.files.npy import dtype_name, npy_header
from pyg_scale.files.place import Lock, flush, replace_file, sync
from pyg_scale.files.plain_pickle import load_plain
from pyg_scale.graph.source import of
from pyg_scale.graph.topology import NodeType
from pyg_scale.store.directory.index_sets import checked_sets
from pyg_scale.store.directory.meta import META, Attribute, FileMeta, Meta
from pyg_scale.store.directory.paths import attribute_file, node_dir, set_file
from pyg_scale.store.directory.reader import GraphDirectory
from pyg_scale.store.directory.values import as_plain_tensor
from pyg_scale.store.directory.writer import refused, write_rows


def read_tensor(path: str | PathLike[str]) -> Tensor:
    """The tensor in a file, or in the files of a folder. No code in a file is run.

    Args:
        path: An ``.npy`` file, a ``.pt`` file that holds a tensor or an array, or a folder with one
            such file per part whose names end in numbers (``partition0.pt``, ``partition1.pt``,
            ..., as GraphLearn-for-PyTorch keeps seeds and labels), which are joined in that order.

    Raises:
        FileNotFoundError: If it does not exist.
        ValueError: If it has other content, or a file of the folder is missing.
    """
    path = Path(path)
    if path.is_dir():
        return torch.cat([read_tensor(file) for file in _files_by_number(path)])
    try:
        if path.suffix == ".npy":
            value = np.load(path, mmap_mode="r", allow_pickle=False)
        elif path.suffix in (".pt", ".pth"):
            value = load_plain(path, mmap=True)
        else:
            raise ValueError("its name must end in .npy or .pt")
    except FileNotFoundError:
        raise
    except Exception as error:  # any error that a wrong file causes in its reader
        first = str(error).partition("\n")[0]
        raise ValueError(f"{path} cannot be read: {first}") from None
    if isinstance(value, np.ndarray):
        value = as_plain_tensor(np.array(value), str(path))
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{path} holds a {type(value).__name__}, expected a tensor: save the one that is "
            "meant in a file of its own"
        )
    return as_plain_tensor(value, str(path))


def _files_by_number(folder: Path) -> list[Path]:
    found: dict[int, Path] = {}
    for file in folder.iterdir():
        match = re.search(r"(\d+)\.(pt|npy)$", file.name)
        if match is not None:
            number = int(match[1])
            if number in found:
                raise ValueError(f"{folder} has two files of part {number}: {file.name} is one")
            found[number] = file
    missing = [number for number in range(max(found, default=0) + 1) if number not in found]
    if missing:
        raise ValueError(f"{folder} has no file of part {missing[0]} (such as partition0.pt)")
    return [found[number] for number in sorted(found)]


def add_index_sets(path: str | PathLike[str], index_sets: Mapping[str, Any]) -> None:
    """Add named sets of nodes to a graph directory.

    Args:
        path: The directory.
        index_sets: ``{name: ids}``, in a heterogeneous graph ``{node type: {name: ids}}``. The path
            of a file or folder may replace ids or a mask, see :func:`read_tensor`.

    Raises:
        ValueError: If a set of that name exists, the node type does not, or a file has other
            content.
        TypeError: If a set is neither integers nor a mask.
        IndexError: If a node does not exist.
        GraphDirectoryError: If the directory is damaged, another process writes it, or the disk is
            full. It is then unchanged.

    Example::

        add_index_sets("products", {"train": "split/train.pt", "test": "split/test.npy"})
    """
    with _adding(path) as adding:
        meta = adding.directory.meta
        sizes = {node_type: node.num_nodes for node_type, node in meta.nodes.items()}
        for node_type, named in checked_sets(_read_all(index_sets), sizes).items():
            known = meta.index_sets.setdefault(node_type or "", {})
            for name, ids in named.items():
                if name in known:
                    raise ValueError(
                        f"{adding.directory.path} has an index set {name!r}{of(node_type)} already"
                    )
                adding.write(set_file(node_type, name), ids)
                known[name] = ids.numel()


def _read_all(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _read_all(each) for name, each in value.items()}
    return read_tensor(value) if isinstance(value, str | PathLike) else value


def add_node_attribute(
    path: str | PathLike[str], name: str, value: Any, node_type: NodeType = None
) -> None:
    """Add an attribute of nodes, such as labels, to a graph directory with all its parts.

    Args:
        path: The directory.
        name: The attribute, such as ``"y"``.
        value: A tensor ``[num_nodes, ...]`` by original id, or the path of a file or folder, see
            :func:`read_tensor`.
        node_type: The node type.

    Raises:
        ValueError: If an attribute of that name exists, the node type does not, or the value has
            another number of rows.
        TypeError: If a graph directory cannot hold the value.
        GraphDirectoryError: If the directory is damaged, a part is missing, another process writes
            it, or the disk is full. It is then unchanged.
    """
    if isinstance(value, str | PathLike):
        value = read_tensor(value)
    value = as_plain_tensor(torch.as_tensor(value), f"{name!r}{of(node_type)}")
    with _adding(path) as adding:
        meta = adding.directory.meta
        node = meta.nodes.get(node_type)
        if node is None:
            known = ", ".join(map(repr, meta.nodes))
            raise ValueError(f"the graph has no node type {node_type!r}, only {known}")
        if value.dim() == 0 or len(value) != node.num_nodes:
            raise ValueError(
                f"{name!r}{of(node_type)} has the shape {list(value.shape)}, expected "
                f"{node.num_nodes} rows, one per node"
            )
        if name in _names(meta, node_type):
            raise ValueError(f"{adding.directory.path} has {name!r}{of(node_type)} already")
        for number in range(meta.num_parts):
            own = adding.directory.part(number).orig_id(node_type)
            rows = value if meta.num_parts == 1 else value[own]
            adding.write(attribute_file(node_dir(node_type, number), name), rows)
        node.attributes[name] = Attribute(dtype_name(value.dtype), tuple(value.shape[1:]))
        keys = node.keys if meta.is_hetero else meta.keys
        if keys is not None:
            keys.append(name)


def _names(meta: Meta, node_type: NodeType) -> set[str]:
    node = meta.nodes[node_type]
    names = {*node.attributes, *node.other, "num_nodes"}
    if not meta.is_hetero:
        names |= {*meta.graph_attributes, "edge_index"}
        names |= {n for edge in meta.edges.values() for n in (*edge.attributes, *edge.other)}
    return names


class _Adding:
    """New files of a directory, which take effect when ``META.json`` lists them."""

    def __init__(self, directory: GraphDirectory) -> None:
        self.directory = directory

    def write(self, name: str, value: Tensor) -> None:
        file = self.directory.path / name
        with refused(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            # an existing file is of a writer that died before META.json listed it
            with file.open("wb") as out:
                header = npy_header(dtype_name(value.dtype), tuple(value.shape))
                out.write(header)
                crc, size = write_rows(out, value, value.dtype, zlib.crc32(header))
                flush(out)
            sync(file.parent)
        self.directory.meta.files[name] = FileMeta(size + len(header), crc)

    def finish(self) -> None:
        self.directory.meta.check()
        path = self.directory.path
        with refused(path / META):
            replace_file(path / META, self.directory.meta.to_json())


@contextmanager
def _adding(path: str | PathLike[str]) -> Iterator[_Adding]:
    resolved = Path(path).resolve()
    GraphDirectory(resolved)  # checks that there is a directory to lock
    with refused(resolved):
        lock = Lock(resolved)
    try:
        adding = _Adding(GraphDirectory(resolved))
        absent = set(range(adding.directory.meta.num_parts)).difference(adding.directory.parts)
        if absent:
            raise GraphDirectoryError(
                f"{resolved} lacks parts ({min(absent)}): add to it where all of them are"
            )
        if adding.directory.delta is not None:
            raise GraphDirectoryError(
                f"{resolved} has appended rows, which files of the base do not count: fold them in "
                "first, pyg_scale.compact(path)"
            )
        yield adding
        adding.finish()
    finally:
        lock.release()
