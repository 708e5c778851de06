"""Small data sets in the exact layout of OGB's files, in each of its forms."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch

NODES, EDGES = 60, 400


def table(file: Path, rows, header=None) -> None:
    """A table as OGB writes it: compressed, without a header."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt") as out:
        if header is not None:
            out.write(",".join(header) + "\n")
        for row in np.asarray(rows):
            row = row if np.ndim(row) else [row]
            out.write(",".join(map(str, row)) + "\n")


def node_split(folder: Path, size: int, random) -> dict[str, np.ndarray]:
    """Train, valid and test, in no order."""
    order = random.permutation(size)
    parts = {"train": order[: size // 2], "valid": order[size // 2 : -9], "test": order[-9:]}
    for name, ids in parts.items():
        table(folder / f"{name}.csv.gz", ids)
    return parts


def tables(folder: Path, files: dict[str, np.ndarray], version: int = 1, seed: int = 0) -> Path:
    """A homogeneous graph in tables; ``files`` are those beside the edges."""
    random = np.random.default_rng(seed)
    raw = folder / "raw"
    table(raw / "edge.csv.gz", random.integers(0, NODES, (EDGES, 2)))
    table(raw / "num-node-list.csv.gz", [NODES])
    table(raw / "num-edge-list.csv.gz", [EDGES])
    for name, rows in files.items():
        table(raw / f"{name}.csv.gz", rows)
    (folder / f"RELEASE_v{version}.txt").touch()
    return folder


def arxiv(root: Path) -> Path:
    """Fractions as features, whole years, whole labels."""
    random = np.random.default_rng(1)
    folder = tables(
        root / "ogbn_arxiv",
        {
            "node-feat": random.standard_normal((NODES, 5)),
            "node_year": random.integers(1990, 2021, (NODES, 1)),
            "node-label": random.integers(0, 40, (NODES, 1)),
        },
    )
    node_split(folder / "split" / "time", NODES, random)
    return folder


def products(root: Path) -> Path:
    """Inverse edges; features whose first rows are whole."""
    random = np.random.default_rng(2)
    x = random.standard_normal((NODES, 3)).astype(object)
    x[: NODES // 2] = random.integers(0, 9, (NODES // 2, 3))
    folder = tables(
        root / "ogbn_products", {"node-feat": x, "node-label": random.integers(0, 47, (NODES, 1))}
    )
    node_split(folder / "split" / "sales_ranking", NODES, random)
    return folder


def proteins(root: Path) -> Path:
    """Inverse edges with features, no features of nodes, several tasks, a file of another name."""
    random = np.random.default_rng(3)
    folder = tables(
        root / "ogbn_proteins",
        {
            "edge-feat": random.random((EDGES, 8)),
            "species": random.integers(3000, 10000, (NODES, 1)),
            "node-label": random.integers(0, 2, (NODES, 112)),
        },
    )
    node_split(folder / "split" / "species", NODES, random)
    return folder


def mag(root: Path) -> Path:
    """Types, of which one has features and labels."""
    random = np.random.default_rng(4)
    folder = root / "ogbn_mag"
    raw = folder / "raw"
    sizes = {"paper": NODES, "author": 30, "institution": 7, "field_of_study": 12}
    relations = [
        ("paper", "has_topic", "field_of_study"),
        ("author", "writes", "paper"),
        ("author", "affiliated_with", "institution"),
        ("paper", "cites", "paper"),
    ]
    table(raw / "num-node-dict.csv.gz", [list(sizes.values())], header=list(sizes))
    table(raw / "triplet-type-list.csv.gz", relations)
    for number, (source, relation, target) in enumerate(relations):
        where = raw / "relations" / f"{source}___{relation}___{target}"
        count = 50 + 10 * number
        pairs = [random.integers(0, sizes[end], count) for end in (source, target)]
        table(where / "edge.csv.gz", np.stack(pairs, 1))
        table(where / "num-edge-list.csv.gz", [count])
        table(where / "edge_reltype.csv.gz", np.full((count, 1), number))
    features = raw / "node-feat" / "paper"
    table(features / "node-feat.csv.gz", random.standard_normal((NODES, 4)))
    table(features / "node_year.csv.gz", random.integers(2010, 2020, (NODES, 1)))
    marks = [name == "paper" for name in sizes]
    table(raw / "nodetype-has-label.csv.gz", [marks], header=list(sizes))
    labels = random.integers(0, 349, (NODES, 1))
    table(raw / "node-label" / "paper" / "node-label.csv.gz", labels)
    where = folder / "split" / "time"
    node_split(where / "paper", NODES, random)
    table(where / "nodetype-has-split.csv.gz", [marks], header=list(sizes))
    (folder / "RELEASE_v2.txt").touch()
    return folder


def papers100M(root: Path, *, compressed: bool = True, half: bool = False) -> Path:
    """One archive; most labels are missing."""
    random = np.random.default_rng(5)
    folder = root / "ogbn_papers100M"
    (folder / "raw").mkdir(parents=True)
    save = np.savez_compressed if compressed else np.savez
    x = random.standard_normal((NODES, 6))
    save(
        folder / "raw" / "data.npz",
        edge_index=random.integers(0, NODES, (2, EDGES)),
        num_nodes_list=np.array([NODES]),
        num_edges_list=np.array([EDGES]),
        node_feat=x.astype(np.float16 if half else np.float32),
        node_year=random.integers(1990, 2021, (NODES, 1)),
    )
    label = random.integers(0, 172, (NODES, 1)).astype(np.float64)
    label[random.permutation(NODES)[: NODES - 9]] = np.nan
    save(folder / "raw" / "node-label.npz", node_label=label)
    node_split(folder / "split" / "time", NODES, random)
    (folder / "RELEASE_v1.txt").touch()
    return folder


def collab(root: Path) -> Path:
    """Links with weights and years; splits are dictionaries of arrays, saved by torch."""
    random = np.random.default_rng(6)
    folder = tables(
        root / "ogbl_collab",
        {
            "node-feat": random.standard_normal((NODES, 3)),
            "edge_weight": random.integers(1, 5, (EDGES, 1)),
            "edge_year": random.integers(1990, 2021, (EDGES, 1)),
        },
    )
    where = folder / "split" / "time"
    where.mkdir(parents=True)
    for name, count in (("train", EDGES), ("valid", 20), ("test", 30)):
        part = {
            "edge": random.integers(0, NODES, (count, 2)),
            "weight": random.integers(1, 5, count),
            "year": random.integers(1990, 2021, count),
        }
        if name != "train":
            part["edge_neg"] = random.integers(0, NODES, (50, 2))
        torch.save(part, where / f"{name}.pt", pickle_protocol=4)
    return folder


FORMS = {
    "ogbn-arxiv": arxiv,
    "ogbn-products": products,
    "ogbn-proteins": proteins,
    "ogbn-mag": mag,
    "ogbn-papers100M": papers100M,
    "ogbl-collab": collab,
}
