"""A reader of text with one edge per line, source and destination separated by a space."""

import itertools
from pathlib import Path

import torch

from pyg_scale.convert.base import Description, EdgeList, Nodes, Reader


class TemplateReader(Reader):
    """Reads lines such as `12 7`, for `convert("edges.template", path)`; counts the nodes.

    A reader describes a graph and yields its edges in pieces, from any edge on.
    """

    def __init__(self, source):
        self.path = Path(source)
        if not self.path.is_file():
            raise FileNotFoundError(f"there is no file {str(source)!r}")

    def files(self):
        return [self.path]

    def describe(self):
        return Description(nodes={None: Nodes()}, edges={None: EdgeList()})

    def edges(self, edge_type, begin, rows):
        with self.path.open() as file:
            lines = itertools.islice(file, begin, None)
            while chunk := list(itertools.islice(lines, rows)):
                pairs = torch.tensor([[int(each) for each in line.split()] for line in chunk])
                yield pairs[:, 0], pairs[:, 1]
