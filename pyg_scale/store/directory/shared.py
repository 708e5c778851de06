"""In-edges of a graph directory: one mapping per process."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_scale.graph.topology import CSC, EdgeType
from pyg_scale.store.directory import assemble
from pyg_scale.store.directory.lazy import Entry
from pyg_scale.store.directory.page_faults import no_readahead_beyond_memory
from pyg_scale.store.directory.reader import GraphDirectory

_FIELDS = ("indptr", "indices", "edge_id", "time", "weight_prefix")
_making = threading.Lock()


@dataclass(frozen=True)
class StoredCSC(CSC):
    """In-edges of a graph directory, which other processes read from the directory.

    Attributes:
        origin: The directory and the edge type. Fields may differ from the stored ones.
    """

    origin: tuple[GraphDirectory, EdgeType] | None = None

    def share_memory_(self) -> None:
        """Move tensors to shared memory, except mapped files, which processes share anyway."""
        for tensor in self._differing().values():
            if tensor is not None:
                tensor.share_memory_()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.origin, self._differing())

    def _differing(self) -> dict[str, Tensor | None]:
        assert self.origin is not None
        stored = stored_in_edges(*self.origin)
        values = {name: getattr(self, name) for name in _FIELDS}
        return {k: v for k, v in values.items() if v is not getattr(stored, k)}


def stored_in_edges(directory: GraphDirectory, edge_type: EdgeType) -> CSC | None:
    """The in-edges of a type, always the same object; ``None`` if out-edges are stored.

    Raises:
        GraphDirectoryError: If a file has wrong content.
    """
    with _making:
        if edge_type not in directory.grouped:
            with torch.inference_mode(False):  # tensors of inference mode have no version counter
                found = assemble.in_edges(directory, edge_type)
            if found is not None and directory.meta.num_parts == 1:
                found = dataclasses.replace(found, waits=no_readahead_beyond_memory(found))
            directory.grouped[edge_type] = found
        return directory.grouped[edge_type]


def shared_attribute(directory: GraphDirectory, entry: Entry) -> Tensor:
    """An attribute as it is stored; the same object for graphs that were opened separately.

    That of several parts is the entry's own, which takes memory.
    """
    if directory.meta.num_parts > 1:
        return entry.get()
    with _making:
        if entry.address not in directory.attributes:
            directory.attributes[entry.address] = entry.read()
        return directory.attributes[entry.address]


def with_origin(csc: CSC, directory: GraphDirectory, edge_type: EdgeType) -> StoredCSC:
    """The result of :func:`stored_in_edges`, with its origin."""
    fields = {name: getattr(csc, name) for name in _FIELDS}
    return StoredCSC(**fields, waits=csc.waits, origin=(directory, edge_type))


def _restore(origin: tuple[GraphDirectory, EdgeType], differing: dict[str, Any]) -> StoredCSC:
    stored = stored_in_edges(*origin)
    assert stored is not None, "only what is stored is an origin"
    return dataclasses.replace(with_origin(stored, *origin), **differing)
