"""The features of a graph directory, in mapped pieces, never as a whole in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.files.npy import torch_dtype
from pyg_scale.loader.batch.features import HOMOGENEOUS_EDGES
from pyg_scale.store.directory.meta import Attribute
from pyg_scale.store.directory.reader import GraphDirectory, Part
from pyg_scale_redis.tensors import Key, Spec

Tensors = Iterator[tuple[Key, Spec, Iterator[tuple[Tensor | range, Tensor]]]]


def tensors_of(path: Any) -> Tensors:
    """Every feature of nodes and edges with its rows, by original ids, part by part.

    Raises:
        GraphDirectoryError: If it is not a graph directory, or a part is not on this machine.
    """
    directory = GraphDirectory(Path(path))
    missing = sorted(set(range(directory.meta.num_parts)) - set(directory.parts))
    if missing:
        raise GraphDirectoryError(
            f"{directory.path} lacks the parts {missing}: load from a machine that has all of them"
        )
    return _tensors(directory)


def _tensors(directory: GraphDirectory) -> Tensors:
    meta = directory.meta
    parts = [directory.part(number) for number in directory.parts]
    for node in meta.nodes.values():
        for name, attribute in node.attributes.items():
            key = (node.name, name)
            yield key, _spec(attribute, node.num_nodes), _node_rows(parts, *key)
    for edge in meta.edges.values():
        group = HOMOGENEOUS_EDGES if edge.name is None else edge.name
        for name, attribute in edge.attributes.items():
            rows = _edge_rows(parts, edge.name, name)
            yield (group, name), _spec(attribute, edge.num_edges), rows


def _spec(attribute: Attribute, rows: int) -> Spec:
    return Spec(torch_dtype(attribute.dtype), tuple(attribute.row), rows)


def _node_rows(parts: list[Part], node_type: Any, name: str) -> Iterator[tuple[Any, Tensor]]:
    for part in parts:
        value = part.node_attribute(node_type, name)
        yield _ids(part.orig_id, node_type, len(parts), value), value


def _edge_rows(parts: list[Part], edge_type: Any, name: str) -> Iterator[tuple[Any, Tensor]]:
    for part in parts:
        value = part.edge_attribute(edge_type, name)
        yield _ids(part.edge_ids, edge_type, len(parts), value), value


def _ids(
    ids: Callable[[Any], Tensor | None], kind: Any, num_parts: int, value: Tensor
) -> Tensor | range:
    found = None if num_parts == 1 else ids(kind)
    return range(value.size(0)) if found is None else found.to(torch.int64)
