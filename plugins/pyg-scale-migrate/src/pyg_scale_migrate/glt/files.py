"""The files of a graph that GraphLearn-for-PyTorch (GLT) partitioned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_scale.files.plain_pickle import iterate_pickles, load_pickle, load_plain
from pyg_scale.graph.source import of
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale_migrate.glt.book import INTEGERS, read_book

_ROWS = 10_000  # GLT's own chunk
_LONGEST_NAME = 255 - len(".pt")  # bytes that file systems allow


@dataclass(frozen=True)
class Layout:
    """The layout of a partition directory of GLT.

    Attributes:
        path: The directory.
        num_parts: Number of parts.
        node_types: The node types; ``(None,)`` if homogeneous.
        edge_types: The edge types; ``(None,)`` if homogeneous.
    """

    path: Path
    num_parts: int
    node_types: tuple[NodeType, ...]
    edge_types: tuple[EdgeType, ...]

    @property
    def is_hetero(self) -> bool:
        return self.node_types != (None,)

    def book(self, group: str, kind: NodeType | EdgeType) -> Tensor:
        """The part of each node (``node_pb``) or edge (``edge_pb``) of a type.

        Raises:
            FileNotFoundError: If the file is missing.
            ValueError: If it has other content, or a part that does not exist; names it.
        """
        file = (
            self.path / f"{group}.pt" if kind is None else self.path / group / f"{_text(kind)}.pt"
        )
        parts = read_book(file)
        wrong = (parts < 0) | (parts >= self.num_parts)
        if bool(wrong.any()):
            bad = int(wrong.nonzero()[0])
            raise ValueError(
                f"{file}: {bad} is in part {int(parts[bad])}, META says {self.num_parts} parts"
            )
        return parts

    def graph_folders(self, edge_type: EdgeType) -> list[Path]:
        """The folders of the edges: in each part, or (``graph_caching``) once for all."""
        whole = _below(self.path / "graph", edge_type)
        if (whole / "rows.pt").is_file():
            return [whole]
        return [_below(self.path / f"part{i}" / "graph", edge_type) for i in range(self.num_parts)]

    def feature_folders(self, group: str, kind: NodeType | EdgeType) -> list[Path]:
        """The folders of the features, one per part; empty if there are no features.

        Raises:
            FileNotFoundError: If only some parts have them.
        """
        folders = [_below(self.path / f"part{i}" / group, kind) for i in range(self.num_parts)]
        there = [folder for folder in folders if folder.is_dir()]
        if there and len(there) < len(folders):
            missing = next(folder for folder in folders if not folder.is_dir())
            raise FileNotFoundError(f"there is no {missing}, but there is {there[0]}")
        return there


def read_layout(path: str | PathLike[str]) -> Layout:
    """Open a partition directory of GLT.

    Raises:
        FileNotFoundError: If it has no ``META``, or a part is missing.
        ValueError: If ``META`` is damaged or has other content.
    """
    folder = Path(path)
    if not (folder / "META").is_file():
        raise FileNotFoundError(f"{folder} is not a partition of GLT: it has no file META")
    found = load_pickle(folder / "META")
    try:
        num_parts, hetero = found["num_parts"], found["data_cls"] == "hetero"
        node_types = tuple(found["node_types"]) if hetero else (None,)
        edge_types: Any = (None,)
        if hetero:
            edge_types = tuple(tuple(each) for each in found["edge_types"])
        wrong = type(num_parts) is not int or num_parts < 1
        wrong |= hetero and not all(isinstance(each, str) for each in node_types)
        wrong |= hetero and not all(
            len(each) == 3 and all(isinstance(part, str) for part in each) for each in edge_types
        )
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"{folder / 'META'} is not what GLT writes: {type(error).__name__}: {error}"
        ) from None
    if wrong:
        raise ValueError(f"{folder / 'META'} is not what GLT writes: {found}")
    for name in filter(None, map(_text, (*node_types, *edge_types))):
        if len(name.encode("utf-8", "surrogatepass")) > _LONGEST_NAME:
            raise ValueError(
                f"{folder / 'META'} has a type that no file is called after, as its name is too "
                f"long: {name[:40]}..."
            )
    layout = Layout(folder, num_parts, node_types, edge_types)
    for number in range(num_parts):
        if not (folder / f"part{number}").is_dir():
            raise FileNotFoundError(
                f"{folder} has {num_parts} parts, but no part{number}: copy all parts there"
            )
    return layout


class Edges:
    """The edges of a type, in the order of their ids.

    Args:
        layout: The layout of the directory.
        edge_type: The type of the edges.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If files do not fit each other, or an edge is missing or repeated.
    """

    def __init__(self, layout: Layout, edge_type: EdgeType) -> None:
        self._name = of(edge_type)
        self._parts: list[dict[str, Tensor]] = []
        folders = layout.graph_folders(edge_type)
        for folder in folders:
            self._parts.append(_edges_of(folder, folder.is_relative_to(layout.path / "graph")))
        weighted = ["weights" in part for part in self._parts]
        if any(weighted) and not all(weighted):
            missing = folders[weighted.index(False)] / "weights.pt"
            raise FileNotFoundError(f"there is no {missing}, but other parts have weights")
        for name in self._parts[0]:
            for folder, part in zip(folders, self._parts, strict=True):
                if name != "eids" and part[name].dtype != self._parts[0][name].dtype:
                    raise ValueError(
                        f"{folder / name}.pt holds {part[name].dtype}, {folders[0] / name}.pt "
                        f"{self._parts[0][name].dtype}"
                    )
        self.num_edges = sum(part["rows"].numel() for part in self._parts)
        self.has_weight = all(weighted)
        self._check_ids()

    def read(self, names: tuple[str, ...], begin: int, rows: int) -> Iterator[tuple[Tensor, ...]]:
        """``rows``, ``cols`` or ``weights`` of consecutive edges, by id."""
        for first in range(begin, self.num_edges, rows):
            end = min(self.num_edges, first + rows)
            out = [torch.empty(end - first, dtype=self._parts[0][name].dtype) for name in names]
            for part in self._parts:
                low, high = torch.searchsorted(part["ids"], torch.tensor([first, end])).tolist()
                place = part["ids"][low:high] - first
                where: Any = slice(low, high)
                if "order" in part:
                    where = part["order"][low:high]
                for name, column in zip(names, out, strict=True):
                    column[place] = part[name][where]
            yield tuple(out)

    @property
    def weight_dtype(self) -> torch.dtype:
        return self._parts[0]["weights"].dtype

    def _check_ids(self) -> None:
        begin = 0
        for part in self._parts:
            count = part["rows"].numel()
            ids = part.pop("eids", None)
            if ids is None:  # ids are positions, as GLT kept the whole graph in one place
                ids = torch.arange(begin, begin + count)
            elif bool((ids[1:] <= ids[:-1]).any()):
                part["order"] = ids.argsort()
                ids = ids[part["order"]]
            part["ids"] = ids.to(torch.int64)
            begin += count
        seen = torch.zeros(self.num_edges, dtype=torch.bool)
        for part in self._parts:
            ids = part["ids"]
            if ids.numel() and (int(ids[0]) < 0 or int(ids[-1]) >= self.num_edges):
                wrong = int(ids[0]) if int(ids[0]) < 0 else int(ids[-1])
                raise ValueError(
                    f"there is an edge {wrong}{self._name}, but all parts have {self.num_edges} "
                    "edges: a part is missing or old"
                )
            if bool(seen[ids].any()) or bool((ids[1:] == ids[:-1]).any()):
                raise ValueError(f"an edge{self._name} is there twice: in two parts, or in one")
            seen[ids] = True


def feature_chunks(folder: Path, rows: int = _ROWS) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids ``[n]`` and features ``[n, ...]`` of one part, without copies of other parts' rows.

    If a file has none, they are empty once: its dtype and shape may be all that is known.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If one is damaged, or they do not fit each other; names it.
    """
    if any((folder / f"{name}.pkl").is_file() for name in ("ids", "feats")):
        pairs = _appended(folder / "ids.pkl", folder / "feats.pkl")
    else:  # older versions of GLT, which did not append
        pairs = iter([(load_plain(folder / "ids.pt"), load_plain(folder / "feats.pt", mmap=True))])
    for ids, values in pairs:
        for name, value in (("ids", ids), ("features", values)):
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                raise ValueError(f"the {name} in {folder} must be tensors")
        if ids.dtype not in INTEGERS:
            raise ValueError(f"the ids in {folder} must be integers (got {ids.dtype})")
        if ids.dim() != 1 or values.dim() < 1 or len(ids) != len(values):
            raise ValueError(f"{folder} has {len(ids)} ids and {len(values)} features")
        for begin in range(0, max(1, len(ids)), rows):
            yield ids[begin : begin + rows].to(torch.int64), values[begin : begin + rows]


def _appended(ids: Path, values: Path) -> Iterator[tuple[Any, Any]]:
    end = object()
    of_ids, of_values = iterate_pickles(ids), iterate_pickles(values)
    while True:
        one, other = next(of_ids, end), next(of_values, end)
        if (one is end) != (other is end):
            raise ValueError(f"{ids} and {values.name} hold different numbers of chunks")
        if one is end:
            return
        yield one, other


def _edges_of(folder: Path, whole: bool) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name in ("rows", "cols", "eids", "weights"):
        file = folder / f"{name}.pt"
        if name in ("eids", "weights") and not file.is_file():
            continue
        value = load_plain(file, mmap=True)
        if not isinstance(value, Tensor) or value.dim() != 1:
            raise ValueError(f"{file} must hold a tensor of shape [num_edges]")
        if name != "weights" and value.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{file} must hold int64 or int32 (got {value.dtype})")
        if value.numel() != out.get("rows", value).numel():
            raise ValueError(f"{file} has {value.numel()} edges, rows.pt {out['rows'].numel()}")
        out[name] = value
    if "eids" not in out and not whole:
        raise FileNotFoundError(f"there is no file {str(folder / 'eids.pt')!r}")
    return out


def _below(folder: Path, kind: NodeType | EdgeType) -> Path:
    return folder if kind is None else folder / _text(kind)


def _text(kind: NodeType | EdgeType) -> str:
    """The name of a type in GLT's file names."""
    return kind if isinstance(kind, str) else "__".join(kind or ())


def books(layout: Layout) -> Mapping[NodeType, Tensor]:
    """The part of each node, by type."""
    return {node_type: layout.book("node_pb", node_type) for node_type in layout.node_types}
