"""The answers of a rank: edges picked for nodes of its parts, their times, and attributes."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from pyg_scale.comm.service import Handler
from pyg_scale.distributed.columns import COLUMN
from pyg_scale.distributed.described import from_description
from pyg_scale.distributed.features.serve import FEATURES, FeatureAnswers
from pyg_scale.distributed.messages import Layout
from pyg_scale.distributed.records import from_record
from pyg_scale.errors import CommError
from pyg_scale.graph.topology import NodeType
from pyg_scale.sampler.hop import HopSampler
from pyg_scale.sampler.parts import PartAnswers, PartsRouter, node_times
from pyg_scale.store.directory import GraphDirectory

EDGES = "edges"
"""The request for edges of nodes; see :mod:`pyg_scale.distributed.messages` for its layout."""

TIMES = "times"
"""The request for times of nodes: the number of the node type, and the ids."""

_MOST_SAMPLERS = 64


def handlers_of(directory: GraphDirectory) -> dict[str, Handler]:
    """All handlers of a rank for a graph, by the name of the request."""
    serving = Serving(directory)
    return {
        EDGES: serving.edges,
        TIMES: serving.times,
        COLUMN: serving.column,
        FEATURES: FeatureAnswers(directory, directory.parts),
    }


class Serving:
    """Answers for the local parts.

    Args:
        directory: The graph.
    """

    def __init__(self, directory: GraphDirectory) -> None:
        meta = directory.meta
        self._directory, self._layout = directory, Layout(meta)
        by_src = meta.partition is not None and meta.partition.edge_assign_strategy == "by_src"
        direction = "backward" if by_src else "forward"
        num_nodes = {t: node.num_nodes for t, node in meta.nodes.items()}
        self._routers = {
            weighted: PartsRouter(
                directory,
                direction,
                PartAnswers(directory, num_nodes, direction, weighted=weighted),
            )
            for weighted in (False, True)
        }
        self._samplers: dict[bytes, tuple[HopSampler, bool]] = {}
        self._lock = threading.Lock()

    def edges(self, tensors: list[Tensor]) -> list[Tensor]:
        """Pick edges.

        Raises:
            CommError: If the message is not such a request.
            GraphDirectoryError: If a node is of a part that is not local.
        """
        record, asks = self._layout.read_request(tensors)
        sampler, weighted = self._sampler(record)
        return self._layout.answer(self._routers[weighted].expand(sampler, asks))

    def _sampler(self, record: Tensor) -> tuple[HopSampler, bool]:
        said = from_record(record, "a sampler")
        key = record.numpy().tobytes()
        with self._lock:
            if key not in self._samplers:
                if len(self._samplers) >= _MOST_SAMPLERS:
                    self._samplers.clear()
                if not isinstance(said, dict) or not isinstance(said.get("weighted"), bool):
                    raise CommError("the message does not describe a sampler")
                self._samplers[key] = from_description(said.get("sampler")), said["weighted"]
            return self._samplers[key]

    def times(self, tensors: list[Tensor]) -> list[Tensor]:
        """The (sortable) times of nodes.

        Raises:
            CommError: If the message is not such a request.
            GraphDirectoryError: If a node is of a part that is not local.
        """
        if len(tensors) != 2 or tensors[0].shape != (1,) or tensors[1].dim() != 1:
            raise CommError("the message is not a request for times")
        number, node = int(tensors[0]), tensors[1].to(torch.int64)
        types = list(self._directory.meta.nodes)
        if not 0 <= number < len(types):
            raise CommError(f"there is no node type number {number}")
        size = self._directory.meta.nodes[types[number]].num_nodes
        if node.numel() and (int(node.min()) < 0 or int(node.max()) >= size):
            raise CommError(f"there are only {size} nodes of type {types[number]!r}")
        return [node_times(self._directory, types[number], node)]

    def column(self, tensors: list[Tensor]) -> list[Tensor]:
        """An attribute of all nodes of a part.

        Raises:
            CommError: If the message is not such a request.
            GraphDirectoryError: If the part is not local.
        """
        asked = from_record(tensors[0], "a request") if len(tensors) == 1 else None
        if not isinstance(asked, dict) or type(asked.get("part")) is not int:
            raise CommError("the message is not a request for an attribute")
        node_type: NodeType = asked.get("type")
        node = self._directory.meta.nodes.get(node_type)
        if node is None or asked.get("name") not in node.attributes:
            raise CommError(f"there is no attribute {asked.get('name')!r} of {node_type!r}")
        return [self._directory.part(asked["part"]).node_attribute(node_type, asked["name"])]
