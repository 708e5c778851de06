"""OGB's catalog of data sets, and the places of their files.

The entries are those of OGB 1.3.6 (Hu et al.: "Open Graph Benchmark: Datasets for Machine Learning
on Graphs", NeurIPS 2020, and ``master.csv`` of its package).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

_URL = "http://snap.stanford.edu/ogb/data"


@dataclass(frozen=True)
class Facts:
    """The entry of a data set.

    Attributes:
        name: Name of the data set, such as ``"ogbn-arxiv"``.
        archive: Name of its archive, and of the folder in the archive.
        split: The folder of its standard split.
        version: Version of its files.
        add_inverse_edge: True if OGB adds the reverse of every edge after it.
        node_files: Attributes of nodes in separate files.
        edge_files: Attributes of edges in separate files.
        is_hetero: True if it has types.
        binary: True if it is one ``data.npz`` instead of tables.
    """

    name: str
    archive: str
    split: str
    version: int = 1
    add_inverse_edge: bool = False
    node_files: tuple[str, ...] = ()
    edge_files: tuple[str, ...] = ()
    is_hetero: bool = False
    binary: bool = False

    @property
    def of_links(self) -> bool:
        """True if the task is to predict edges, not labels of nodes."""
        return self.name.startswith("ogbl-")

    @property
    def url(self) -> str:
        """The address of OGB's archive."""
        task = "linkproppred" if self.of_links else "nodeproppred"
        return f"{_URL}/{task}/{self.archive}.zip"


_ALL = (
    Facts(
        "ogbn-proteins", "proteins", "species", add_inverse_edge=True, node_files=("node_species",)
    ),
    Facts("ogbn-products", "products", "sales_ranking", add_inverse_edge=True),
    Facts("ogbn-arxiv", "arxiv", "time", node_files=("node_year",)),
    Facts(
        "ogbn-mag",
        "mag",
        "time",
        version=2,
        node_files=("node_year",),
        edge_files=("edge_reltype",),
        is_hetero=True,
    ),
    Facts("ogbn-papers100M", "papers100M-bin", "time", node_files=("node_year",), binary=True),
    Facts("ogbl-ppa", "ppassoc", "throughput", add_inverse_edge=True),
    Facts(
        "ogbl-collab",
        "collab",
        "time",
        add_inverse_edge=True,
        edge_files=("edge_weight", "edge_year"),
    ),
    Facts("ogbl-citation2", "citation-v2", "time", node_files=("node_year",)),
    Facts("ogbl-wikikg2", "wikikg-v2", "time", edge_files=("edge_reltype",)),
    Facts("ogbl-ddi", "ddi", "target", add_inverse_edge=True),
    Facts("ogbl-biokg", "biokg", "random", edge_files=("edge_reltype",), is_hetero=True),
    Facts("ogbl-vessel", "vessel", "spatial", binary=True),
)
FACTS = {facts.name: facts for facts in _ALL}
"""Every data set with one graph, by name."""


def facts_of(name: str) -> Facts:
    """The entry of a data set in OGB's catalog.

    Raises:
        ValueError: If the name is unknown, or the data set has many graphs; lists the known names.
    """
    if name in FACTS:
        return FACTS[name]
    close = difflib.get_close_matches(name, FACTS, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    if name.startswith("ogbg-"):
        hint = "it has many graphs, and neighbour loading takes one; "
    raise ValueError(f"unknown data set {name!r}; {hint}there are: {', '.join(FACTS)}")


def folder_of(facts: Facts, root: str | PathLike[str]) -> Path:
    """The folder of a data set: ``root/ogbn_arxiv``, or that of its archive (``root/arxiv``).

    Raises:
        FileNotFoundError: If it does not exist; names the download.
        ValueError: If it has another version.
    """
    root = Path(root)
    plain = facts.name.replace("-", "_")
    for folder in (root / f"{plain}_pyg", root / plain, root / facts.archive):
        if (folder / "raw").is_dir():
            break
    else:
        raise FileNotFoundError(
            f"{facts.name} is not in {str(root)!r} (looked for {plain}/raw and "
            f"{facts.archive}/raw): download {facts.url} and unpack it there, or say where it is "
            f"with root="
        )
    found = [re.fullmatch(r"RELEASE_v(\d+)\.txt", file.name) for file in folder.iterdir()]
    versions = sorted(int(match[1]) for match in found if match)
    if versions and facts.version not in versions:
        raise ValueError(
            f"{folder} holds version {versions[-1]} of {facts.name}, expected {facts.version}: "
            f"download {facts.url} anew"
        )
    return folder
