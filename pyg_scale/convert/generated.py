"""A reader without files: a graph of any size that is computed while it is converted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from pyg_scale.convert.base import Description, EdgeList, Nodes, Reader, Workspace
from pyg_scale.datasets.streamed import LINKS, NODES, StreamedCommunities
from pyg_scale.files.npy import dtype_name
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.store.directory.meta import Attribute

_NAMES = {
    "nodes": "num_nodes",
    "edges": "num_edges",
    "classes": "num_classes",
    "features": "num_features",
    "communities": "num_communities",
}
_FLOATS = ("homophily", "exponent", "signal", "label_noise")


class GeneratedReader(Reader):
    """``generated:nodes=40e6,edges=600e6,features=128``: power law, planted communities.

    The keys are the attributes of :class:`~pyg_scale.datasets.StreamedCommunities`, without
    ``num_``, and ``dtype`` of the features (``float16``).

    Args:
        source: What stands behind ``generated:``.

    Raises:
        ValueError: If a key is unknown, or a value is no number.
    """

    def __init__(self, source: str) -> None:
        values: dict[str, Any] = {}
        self._dtype = torch.float16
        for item in filter(None, source.split(",")):
            key, _, text = item.partition("=")
            name = _NAMES.get(key, key)
            if key == "dtype":
                self._dtype = getattr(torch, text, None) or torch.bool
                if not self._dtype.is_floating_point:
                    raise ValueError(f"generated: dtype must be floating point (got {text!r})")
            elif name in (*_NAMES.values(), "seed", *_FLOATS):
                values[name] = float(text) if name in _FLOATS else _count(key, text)
            else:
                known = ", ".join([*_NAMES, "seed", *_FLOATS, "dtype"])
                raise ValueError(f"generated: {key!r} is not one of {known}")
        missing = [key for key in ("nodes", "edges") if _NAMES[key] not in values]
        if missing:
            raise ValueError(f"generated: {' and '.join(missing)} must be given, as in nodes=40e6")
        self.graph = StreamedCommunities(**values)
        self._sizes: dict[str, int] = {}

    def options(self) -> Mapping[str, Any]:
        return {**asdict(self.graph), "dtype": dtype_name(self._dtype)}

    def prepare(self, work: Workspace) -> None:
        self._sizes = work.once("count index sets", self._count_sets)

    def _count_sets(self) -> dict[str, int]:
        found = {"train": 0, "val": 0, "test": 0}
        for begin in range(0, self.graph.num_nodes, NODES):
            end = min(begin + NODES, self.graph.num_nodes)
            for name, ids in self.graph.splits(begin, end).items():
                found[name] += ids.size
        return found

    def describe(self) -> Description:
        graph = self.graph
        attributes = {"y": Attribute("int64")}
        if graph.num_features:
            spec = Attribute(dtype_name(self._dtype), (graph.num_features,))
            attributes = {"x": spec, **attributes}
        return Description(
            {None: Nodes(graph.num_nodes, attributes, self._sizes)},
            {None: EdgeList(graph.num_edges)},
        )

    def edges(self, edge_type: EdgeType, begin: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        size = 2 * LINKS
        for chunk in range(begin // size, self.graph.num_chunks):
            source, destination = map(torch.from_numpy, self.graph.edges(chunk))
            skip = max(0, begin - chunk * size)
            for at in range(skip, source.numel(), rows):
                yield source[at : at + rows], destination[at : at + rows]

    def node_attribute(
        self, node_type: NodeType, name: str, begin: int, rows: int
    ) -> Iterator[Tensor]:
        for first in range(begin // NODES * NODES, self.graph.num_nodes, NODES):
            end = min(first + NODES, self.graph.num_nodes)
            if name == "x":
                values = self.graph.features(first, end, self._dtype)
            else:
                values = torch.from_numpy(self.graph.labels(first, end))
            for at in range(max(0, begin - first), end - first, rows):
                yield values[at : at + rows]

    def index_set(self, node_type: NodeType, name: str, begin: int, rows: int) -> Iterator[Tensor]:
        seen = 0
        for first in range(0, self.graph.num_nodes, NODES):
            end = min(first + NODES, self.graph.num_nodes)
            ids = torch.from_numpy(self.graph.splits(first, end)[name])
            for at in range(max(0, begin - seen), ids.numel(), rows):
                yield ids[at : at + rows]
            seen += ids.numel()


def _count(key: str, text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"generated: {key} must be a number (got {text!r})") from None
    if not value.is_integer():
        raise ValueError(f"generated: {key} must be a whole number (got {text!r})")
    return int(value)
