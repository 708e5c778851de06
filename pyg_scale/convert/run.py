"""Convert a graph of any form to a graph directory."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData

from pyg_scale import plugins
from pyg_scale.convert.base import Reader, suffix
from pyg_scale.convert.conversion import Conversion
from pyg_scale.convert.journal import ConversionWorkspace, Journal
from pyg_scale.convert.options import Options, dtype_option, file_identity
from pyg_scale.errors import UnknownPluginError
from pyg_scale.files.byte_size import byte_size
from pyg_scale.graph.topology import NodeType
from pyg_scale.ops import library
from pyg_scale.ops.memory import trim
from pyg_scale.store.directory import DirectoryWriter, GraphDirectory
from pyg_scale.store.directory.meta import META, Meta, is_graph_directory

LEAST = 32 << 20
"""Bytes that a conversion needs beside what Python, torch and PyG take."""

_RESERVE = 48 << 20  # of allocators and stacks; what the peak went beyond the limit by, at most
_TEMPORARY = "temporary"
_COMPLETE = "complete"


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        path: The graph directory.
        num_nodes: Nodes of each type.
        num_edges: Edges of each type.
        seconds: Wall-clock time.
        peak_memory: The most memory that the process had resident so far, in bytes.
        skipped: Steps that a run before had finished.
    """

    path: Path
    num_nodes: dict[Any, int]
    num_edges: dict[Any, int]
    seconds: float
    peak_memory: int
    skipped: list[str]


def convert(
    source: Any,
    path: str | os.PathLike[str],
    *,
    memory: int | str = "4GB",
    overwrite: bool = False,
    undirected: bool = False,
    remove_self_loops: bool = False,
    time_attr: str | None = None,
    weight_attr: str | None = None,
    num_nodes: int | Mapping[NodeType, int] | None = None,
    index_dtype: str | torch.dtype | None = None,
    feature_dtype: str | torch.dtype | None = None,
    link_features: bool = False,
    index_sets: Mapping[Any, str | os.PathLike[str]] | None = None,
    quiet: bool = False,
    **reader_options: Any,
) -> Converted:
    """Convert a graph to a graph directory of one part, in bounded memory.

    A conversion that is killed leaves a hidden directory ``.NAME.partial`` beside the result; the
    same call goes on with it. If the input or an option changed, it begins anew, and says so.
    Edges are grouped by destination, within one by edge id, or by time and then edge id.

    Args:
        source: A file (``edges.npy``, ``cora.npz``, ``edges.csv``, ...), ``name:rest`` for the
            reader of that name, a :class:`~pyg_scale.convert.base.Reader` (such as
            :class:`~pyg_scale.convert.Tables` for several files), ``Data`` or ``HeteroData``.
        path: The graph directory to write.
        memory: The most memory that the process may have resident, all included.
        overwrite: Replace a graph directory that is there.
        undirected: Add the reverse of every edge that is no self-loop, behind the edges of its
            type, or as a type ``(dst, "rev_" + relation, src)`` where the ends are of two types.
        remove_self_loops: Leave out edges from a node to itself.
        time_attr: The attribute, of nodes or of edges, that holds times.
        weight_attr: The attribute of edges that holds weights.
        num_nodes: Number of nodes, by type if there are types; without it as many as features
            have rows, or edges need.
        index_dtype: ``"int64"`` or ``"int32"``, what batches hold; by default what the reader
            says, for files ``"int64"``.
        feature_dtype: Convert the attribute ``x`` of nodes to this floating point dtype.
        link_features: Take ``x`` from its ``.npy`` file by a hard link instead of copying it.
        index_sets: More named sets, ``{"train": "train.npy"}`` or ``{("paper", "train"): ...}``.
        quiet: Show no progress.
        **reader_options: For the reader of a file or name.

    Raises:
        FileNotFoundError: If a file is missing.
        FileExistsError: If something is at ``path``, and ``overwrite`` is not set.
        OSError: If the disk has not enough room; before anything is written, as far as can be said.
        ValueError: If input or options are wrong; names the file and the row, or the argument.
        IndexError: If an edge has a node that does not exist.
        TypeError: If something is of another type.
    """
    begin = time.monotonic()
    options = Options(
        undirected=undirected,
        remove_self_loops=remove_self_loops,
        time_attr=time_attr,
        weight_attr=weight_attr,
        num_nodes=_by_type(num_nodes),
        index_dtype=dtype_option(index_dtype),
        feature_dtype=dtype_option(feature_dtype),
        link_features=link_features,
        index_sets={_set_key(k): Path(v) for k, v in (index_sets or {}).items()},
    )
    limit = byte_size(memory, "memory")
    reader = reader_of(source, reader_options)
    try:
        library.compiled()  # loaded now, so that it is counted with what is there
        trim()  # what earlier loaders of this process left is free
        budget = limit - resident() - _RESERVE
        if budget < LEAST:
            need = resident() + _RESERVE + LEAST
            raise ValueError(
                f"memory is {limit / 1e6:.0f} MB, of which Python, torch and what is loaded take "
                f"{resident() / 1e6:.0f} MB: give at least {need / 1e6:.0f} MB"
            )
        meta, journal = run(reader, Path(path), options, budget, overwrite=overwrite, quiet=quiet)
    finally:
        reader.close()
    return Converted(
        Path(path).absolute(),
        {each: node.num_nodes for each, node in meta.nodes.items()},
        {each: edge.num_edges for each, edge in meta.edges.items()},
        time.monotonic() - begin,
        _peak(),
        journal.skipped,
    )


def run(
    reader: Reader, path: Path, options: Options, memory: int, *, overwrite: bool, quiet: bool
) -> tuple[Meta, Journal]:
    """Convert with a given amount of memory for the conversion alone."""
    identity = [
        f"{type(reader).__module__}.{type(reader).__qualname__}",
        [file_identity(file) for file in _files(reader)],
        dict(reader.options()),
        options.identity(),
    ]
    path = path.resolve()
    journal = Journal(path.with_name(f".{path.name}.steps.json"), identity)
    if journal.finished(_COMPLETE) and _in_place(path, journal.file):
        return _cleared(path, journal), journal
    with DirectoryWriter(path, overwrite=overwrite, resume=True) as writer:
        root, temporary = writer.staging, writer.staging / _TEMPORARY
        complete = journal.finished(_COMPLETE) and any(root.rglob("*.npy"))
        if not complete and not temporary.is_dir():
            journal.forget()  # somebody removed the files
        if not journal.resumed:
            if journal.changed and not quiet:
                print(
                    f"{path}: an unfinished conversion of another input or with other options was "
                    "found; beginning anew",
                    file=sys.stderr,
                )
            journal.write()
            _empty(root)
        if complete:  # temporary files may be gone: nothing is looked at but what was found
            meta = Meta.from_json(journal.result(_COMPLETE), journal.file, draft=True)
            journal.skipped = journal.names()
        else:
            temporary.mkdir(exist_ok=True)
            work = ConversionWorkspace(temporary, memory, journal, quiet)
            try:
                meta = Conversion(reader, root, work, options).run()
            except (ValueError, IndexError, TypeError, NotImplementedError):
                shutil.rmtree(root)  # what is wrong stays wrong
                journal.file.unlink(missing_ok=True)
                raise
            except OSError as error:
                raise _explained(error, root) from None
            journal.finish(_COMPLETE, meta.to_json())
        if temporary.is_dir():
            shutil.rmtree(temporary)
        writer.commit(meta)
    journal.file.unlink(missing_ok=True)
    return meta, journal


def _explained(error: OSError, root: Path) -> OSError:
    """The error to raise for one of the system: where no more can be written, with the way out."""
    file = root / _TEMPORARY if error.filename is None else Path(str(error.filename))
    if root not in file.parents:  # of the input, or it says all there is to say
        return error
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OSError(
            error.errno,
            "the disk is full: make room and give the same command again, which goes on where "
            "this one was, or delete",
            str(root),
        )
    if error.errno == errno.EFBIG:
        reason = os.strerror(error.errno)
        return OSError(error.errno, f"cannot be written: {reason}: see `ulimit -f`", str(file))
    return error


def reader_of(source: Any, options: Mapping[str, Any]) -> Reader:
    """The reader of what a user gave.

    Raises:
        FileNotFoundError: If it looks like a file, and there is none.
        ValueError: If there is no reader for it.
        TypeError: If it is of a type that cannot be read.
    """
    if isinstance(source, Reader):
        if options:
            raise ValueError(f"give {', '.join(options)} to the reader itself")
        return source
    if isinstance(source, Data | HeteroData):
        return plugins.get("reader", "data")(source, **options)
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            "source must be a path, 'name:rest', a Reader, Data or HeteroData "
            f"(got {type(source).__name__})"
        )
    text = os.fspath(source)
    name, colon, rest = text.partition(":")
    if colon and not Path(text).exists() and name.replace("-", "").replace("_", "").isalnum():
        return _made(name, rest, options)
    name = suffix(Path(text))
    if not Path(text).exists() and name not in plugins.names("reader"):
        raise FileNotFoundError(f"there is no file {text!r}, and no reader of that name")
    if is_graph_directory(Path(text)):
        raise ValueError(
            f"{text!r} is a graph directory already: pyg_scale.convert(pyg_scale.open({text!r}), "
            "path, ...) writes another one of it"
        )
    if name in ("pt", "pth") and name not in plugins.names("reader"):
        raise ValueError(
            f"{text!r} is a file of torch, which can hold anything: load it in Python, and hand "
            "over what it holds: pyg_scale.save(torch.load(...), path)"
        )
    if not name:
        raise ValueError(f"{text!r} has no suffix that says how to read it: give 'name:{text}'")
    return _made(name, text, options)


def _made(name: str, source: str, options: Mapping[str, Any]) -> Reader:
    try:
        cls = plugins.get("reader", name)
    except UnknownPluginError as error:
        raise ValueError(f"{source!r} cannot be read: {error}") from None
    try:
        made = cls(source, **options)
    except TypeError as error:
        if options and "unexpected keyword argument" in str(error):
            raise ValueError(f"reader {name!r}: {error}") from None
        raise
    if not isinstance(made, Reader):
        raise TypeError(
            f"reader {name!r} must stand for a subclass of Reader (it is {cls!r}, a fault of the "
            "plugin)"
        )
    return made


def _files(reader: Reader) -> list[Path]:
    """The files of a reader, which are paths."""
    files: Any = reader.files()
    listed: list[Any] = list(files) if isinstance(files, Iterable) else [None]
    if not all(isinstance(each, Path) for each in listed):
        raise TypeError(
            f"{type(reader).__name__}.files() must return a list of pathlib.Path (got {files!r}, a "
            "fault of the plugin)"
        )
    return listed


def resident() -> int:
    """Bytes that this process has resident."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _peak() -> int:
    """The most bytes that this process had resident; ``ru_maxrss`` may be that of its parent."""
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resident()


def _in_place(path: Path, steps: Path) -> bool:
    """Return True if a conversion was killed when its directory had taken its place already."""
    meta, staging = path / META, path.with_name(f".{path.name}.partial")
    if not meta.is_file() or meta.stat().st_mtime_ns < steps.stat().st_mtime_ns:
        return False
    # what was there before may still lie where the new directory was written
    return not staging.exists() or (staging / META).is_file()


def _cleared(path: Path, journal: Journal) -> Meta:
    """Remove what such a conversion left."""
    with DirectoryWriter(path, overwrite=True, resume=True) as writer:
        shutil.rmtree(writer.staging)
    journal.file.unlink()
    journal.skipped = journal.names()
    return GraphDirectory(path).meta


def _empty(folder: Path) -> None:
    for each in folder.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        elif each.suffix == ".npy":
            each.unlink()


def _by_type(num_nodes: int | Mapping[NodeType, int] | None) -> dict[NodeType, int]:
    if num_nodes is None:
        return {}
    return {None: num_nodes} if isinstance(num_nodes, int) else dict(num_nodes)


def _set_key(key: Any) -> tuple[NodeType, str]:
    return (None, key) if isinstance(key, str) else (key[0], key[1])
