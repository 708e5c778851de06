"""Partition directories in the form in which GraphLearn-for-PyTorch (GLT) writes them."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

CHUNK = 7


def append(file: Path, value: Tensor) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as out:
        pickle.dump(value, out)


def save(value: object, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, file)


def write_features(folder: Path, values: Tensor, ids: Tensor, old: bool) -> None:
    """A part's features: appended pickles, or (before them) one file."""
    if old:
        save(values[ids], folder / "feats.pt")
        save(ids, folder / "ids.pt")
        return
    for chunk in ids.split(CHUNK):
        append(folder / "feats.pkl", values[chunk])
        append(folder / "ids.pkl", chunk.clone())
    save(values[:2], folder / "cache_feats.pt")
    save(torch.arange(2), folder / "cache_ids.pt")


def write_glt(
    path: Path,
    num_nodes: dict,
    edge_index: dict,
    parts: dict,
    *,
    node_feat: dict | None = None,
    edge_feat: dict | None = None,
    weights: dict | None = None,
    strategy: str = "by_src",
    caching: bool = False,
    old: bool = False,
    shuffled: bool = False,
) -> None:
    """Write a graph; everything is by type, ``{None: ...}`` if it is homogeneous.

    Args:
        parts: The part of each node.
        strategy: Whose part an edge is in.
        caching: Whether all edges lie in one place (``graph_caching``).
        old: Features as in earlier releases.
        shuffled: Edges of a part in no order.
    """
    num_parts = 1 + max(int(part.max()) for part in parts.values())
    hetero = None not in num_nodes
    node_feat, edge_feat, weights = node_feat or {}, edge_feat or {}, weights or {}

    def below(folder: Path, kind: object) -> Path:
        return folder if kind is None else folder / text(kind)

    def text(kind: object) -> str:
        return kind if isinstance(kind, str) else "__".join(kind)

    for kind, part in parts.items():
        file = path / "node_pb.pt" if kind is None else path / "node_pb" / f"{text(kind)}.pt"
        save(part, file)
        for number in range(num_parts):
            (path / f"part{number}").mkdir(exist_ok=True)
            if kind in node_feat:
                ids = (part == number).nonzero().view(-1)
                folder = below(path / f"part{number}" / "node_feat", kind)
                write_features(folder, node_feat[kind], ids, old)
    for kind, (rows, cols) in edge_index.items():
        ends = (None, None) if kind is None else (kind[0], kind[2])
        end, ids = (ends[0], rows) if strategy == "by_src" else (ends[1], cols)
        owner = parts[end][ids]
        whole = []
        for number in range(num_parts):
            eids = (owner == number).nonzero().view(-1)
            if shuffled:
                eids = eids[torch.randperm(len(eids), generator=torch.Generator().manual_seed(1))]
            whole.append(eids)
            if not caching:
                write_edges(
                    below(path / f"part{number}" / "graph", kind),
                    rows,
                    cols,
                    eids,
                    weights.get(kind),
                )
            if kind in edge_feat:
                folder = below(path / f"part{number}" / "edge_feat", kind)
                write_features(folder, edge_feat[kind], eids, old)
        if caching:
            folder = below(path / "graph", kind)
            write_edges(folder, rows, cols, torch.cat(whole), weights.get(kind))
            if kind not in edge_feat:
                (folder / "eids.pt").unlink()
        file = path / "edge_pb.pt" if kind is None else path / "edge_pb" / f"{text(kind)}.pt"
        save(owner, file)
    meta = {
        "num_parts": num_parts,
        "data_cls": "hetero" if hetero else "homo",
        "node_types": list(num_nodes) if hetero else None,
        "edge_types": list(edge_index) if hetero else None,
    }
    with (path / "META").open("wb") as out:
        pickle.dump(meta, out, pickle.HIGHEST_PROTOCOL)


def write_edges(folder: Path, rows: Tensor, cols: Tensor, eids: Tensor, weights: Tensor | None):
    save(rows[eids], folder / "rows.pt")
    save(cols[eids], folder / "cols.pt")
    save(eids, folder / "eids.pt")
    if weights is not None:
        save(weights[eids], folder / "weights.pt")
