"""PyG's own example scripts of these loaders and walks, with the import changed and small data.

    python -m tests.parity.pyg_examples /path/to/pytorch_geometric

Every script runs as it is written, but for what stands here: it imports its loaders from
:mod:`pyg_scale.loader`, with :mod:`pyg_scale.compat` installed for walks; its data set is
generated; it makes two epochs, asks for no torch-sparse, and shows no picture. ``make pyg-suite``
runs it after PyG's tests.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch_geometric.datasets
from torch_geometric.data import HeteroData

from pyg_scale import compat
from pyg_scale.datasets import planted_communities

EPOCHS = 2


class Generated(list[Any]):
    """Graphs in the place of a data set of PyG, with what its scripts ask of one."""

    def __init__(self, graphs: Sequence[Any], num_classes: int = 5) -> None:
        super().__init__(graphs)
        self.num_features = self.num_node_features = getattr(graphs[0], "num_features", 0)
        self.num_classes, self.processed_dir = num_classes, os.getcwd()


def one_graph(*_: Any, **__: Any) -> Generated:
    """A graph with classes and masks, as Reddit, Flickr and Cora are."""
    return Generated([planted_communities(3_000, 30_000, num_classes=5)])


def many_graphs(*_: Any, **__: Any) -> Generated:
    """Graphs whose nodes have several labels each, as PPI is."""
    graphs = [planted_communities(300, 2_000, num_classes=5, seed=number) for number in range(4)]
    for data in graphs:
        data.y = torch.nn.functional.one_hot(data.y, 5).float()
    return Generated(graphs)


def papers(*_: Any, **__: Any) -> Generated:
    """Authors, papers and venues, as in AMiner."""
    generator = torch.Generator().manual_seed(0)
    size, data = {"author": 300, "paper": 600, "venue": 8}, HeteroData()
    for name, number in size.items():
        data[name].num_nodes = number
    for source, kind, target, back in (
        ("author", "writes", "paper", "written_by"),
        ("paper", "published_in", "venue", "publishes"),
    ):
        ends = [
            torch.randint(size[name], (2_000,), generator=generator) for name in (source, target)
        ]
        data[source, kind, target].edge_index = torch.stack(ends)
        data[target, back, source].edge_index = torch.stack(ends[::-1])
    data["author"].y = torch.arange(200) % 4
    data["author"].y_index = torch.arange(200)
    return Generated([data])


SCRIPTS: dict[str, tuple[str, Callable[..., Generated]]] = {
    "cluster_gcn_reddit.py": ("Reddit", one_graph),
    "cluster_gcn_ppi.py": ("PPI", many_graphs),
    "graph_saint.py": ("Flickr", one_graph),
    "shadow.py": ("Flickr", one_graph),
    "node2vec.py": ("Planetoid", one_graph),
    "hetero/metapath2vec.py": ("AMiner", papers),
}
"""Scripts, and the data sets in whose place others are."""

CHANGES = (
    (r"from torch_geometric\.loader import", "from pyg_scale.loader import"),
    (r"if not WITH_TORCH_SPARSE:", "if False:"),
    (r"range\(1, \d+\)", f"range(1, {EPOCHS + 1})"),
    (r"plot_points\(colors\)$", ""),
    (r"num_parts=1500", "num_parts=100"),  # of which a batch has 20; there are fewer nodes
    (r"hidden_channels=1024", "hidden_channels=64"),
)
"""Patterns, and what stands instead of them."""


def changed(text: str) -> str:
    """A script as it is run."""
    for pattern, instead in CHANGES:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text


def run(script: Path, name: str, make: Callable[..., Generated]) -> None:
    """Run one of PyG's scripts here.

    Args:
        script: Its file.
        name: The data set that it imports.
        make: Makes another in its place.
    """
    text = changed(script.read_text())
    arguments = mock.patch.object(sys, "argv", [str(script)])
    data = mock.patch.object(torch_geometric.datasets, name, make)
    with arguments, data, compat.install():
        exec(compile(text, str(script), "exec"), {"__name__": "__main__", "__file__": str(script)})


def main(argv: Sequence[str]) -> None:
    """Run all of them, each in an empty folder."""
    examples = Path(argv[0]).absolute() / "examples"
    torch.set_num_threads(1)
    here = os.getcwd()
    for script, (name, make) in SCRIPTS.items():
        print(f"== {script}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                run(examples / script, name, make)
            finally:
                os.chdir(here)


if __name__ == "__main__":
    main(sys.argv[1:])
