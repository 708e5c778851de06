"""Fingerprints that tell if two directories hold the same graph, however it is cut."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass

from torch import Tensor

from pyg_scale.distributed.server.loader_record import json_of
from pyg_scale.loader.batch import wire
from pyg_scale.store.directory.meta import Meta


@dataclass(frozen=True)
class Fingerprint:
    """Checksums that tell graphs apart.

    Attributes:
        form: A checksum of types, counts, dtypes and orders.
        content: A checksum of the checksums of all files; ``None`` if the graph is cut into parts,
            whose files differ with the cut.
    """

    form: int
    content: int | None

    @classmethod
    def of(cls, meta: Meta) -> Fingerprint:
        """The fingerprint of an opened directory."""
        form = {
            "nodes": [
                [n.name, n.num_nodes, sorted((k, a.dtype, a.row) for k, a in n.attributes.items())]
                for n in meta.nodes.values()
            ],
            "edges": [
                [
                    [e.name, e.num_edges, e.index_dtype, e.has_time, e.has_weight],
                    sorted((k, a.dtype, a.row) for k, a in e.attributes.items()),
                ]
                for e in meta.edges.values()
            ],
            "order": [meta.time_attr, meta.time_of_edges, meta.float_time, meta.weight_attr],
            "index_sets": meta.index_sets,
        }
        content = None
        if meta.num_parts == 1:
            files = sorted((name, file.bytes, file.crc32) for name, file in meta.files.items())
            content = _checksum(files)
        return cls(_checksum(form), content)

    def fits(self, other: Fingerprint) -> bool:
        """Return True if the graphs are the same, as far as is known."""
        known = self.content is not None and other.content is not None
        return self.form == other.form and (not known or self.content == other.content)

    def pack(self) -> Tensor:
        """Return it as a tensor; :meth:`unpack` undoes it."""
        return wire.json_tensor(asdict(self))

    @classmethod
    def unpack(cls, message: Tensor) -> Fingerprint:
        """The fingerprint in a message.

        Raises:
            ValueError: If it does not contain one.
        """
        found = json_of(message)
        if not isinstance(found, dict) or found.keys() != {"form", "content"}:
            raise ValueError("a fingerprint must have a form and a content")
        return cls(**found)


def _checksum(value: object) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
