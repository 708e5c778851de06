"""The sampling that a loader wants, as a fixed record: agreed with a server once, checked there.

A record is JSON and the tensors in it. Its name is a digest of both, so that a server may forget it
at any time: it then asks for the record again when it receives the name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch_geometric.sampler import NumNeighbors
from torch_geometric.sampler.base import SubgraphType

from pyg_scale import plugins
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.loader.batch import wire
from pyg_scale.ops.raw_bytes import raw_bytes
from pyg_scale.sampler.negative import NegativeSampling

VERSION = 1
HGT = "hgt"
"""The name of the sampler of ``HGTLoader``."""
_OPTIONS = {
    "num_neighbors",
    "replace",
    "subgraph_type",
    "disjoint",
    "temporal_strategy",
    "time_attr",
    "weight_attr",
    "is_sorted",
    "redraw",
    "time_window",
    "strictly_earlier",
}
_HGT_OPTIONS = {"num_samples", "is_sorted"}

RowsOf = tuple[bool, NodeType | EdgeType, str]
"""An attribute with a row for each node or edge: true for edges, its type, its name."""


@dataclass(frozen=True)
class LoaderRecord:
    """The sampling that a loader wants.

    Attributes:
        sampler: A name of the kind ``sampler``, or ``"hgt"``.
        options: The options of the sampler.
        links: True if seeds are links.
        seed_type: The node or edge type of the seeds.
        timed: True if seeds have times of their own.
        rows: The attributes that are sent with a batch.
        negatives: Negative sampling of links.
    """

    sampler: str
    options: Mapping[str, Any]
    links: bool = False
    seed_type: NodeType | EdgeType = None
    timed: bool = False
    rows: tuple[RowsOf, ...] = ()
    negatives: NegativeSampling | None = field(default=None, compare=False)

    def pack(self) -> list[Tensor]:
        """Return it as a message; :meth:`unpack` undoes it."""
        content = {
            "version": VERSION,
            "sampler": self.sampler,
            "options": {name: _plain(value) for name, value in self.options.items()},
            "links": self.links,
            "seed_type": self.seed_type,
            "timed": self.timed,
            "rows": list(self.rows),
            "negatives": _negatives(self.negatives),
        }
        text, tensors = wire.pack(content)
        return [wire.bytes_tensor(text), *tensors]

    @classmethod
    def unpack(cls, message: Sequence[Tensor]) -> LoaderRecord:
        """The record of a message.

        Raises:
            ValueError: If it is not a valid record.
        """
        if not message:
            raise ValueError("a loader's record must have a text")
        found = wire.unpack(wire.tensor_bytes(message[0]), message[1:])
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise ValueError(
                f"a loader's record has version {VERSION}: client and server need the same release"
            )
        record = cls(
            sampler=found["sampler"],
            options={name: _rebuilt(name, v) for name, v in found["options"].items()},
            links=found["links"],
            seed_type=found["seed_type"],
            timed=found["timed"],
            rows=tuple(tuple(each) for each in found["rows"]),
            negatives=_rebuilt_negatives(found["negatives"]),
        )
        record._check()
        return record

    def _check(self) -> None:
        known = _HGT_OPTIONS if self.sampler == HGT else _OPTIONS
        if not isinstance(self.sampler, str) or not (
            self.sampler == HGT or self.sampler in plugins.names("sampler")
        ):
            raise ValueError(
                f"neighbor_sampler={self.sampler!r} is not installed on the server; it has "
                f"{', '.join(plugins.names('sampler'))}"
            )
        if not self.options.keys() <= known:
            raise ValueError(f"a sampler has no option {min(self.options.keys() - known)!r}")
        if type(self.links) is not bool or type(self.timed) is not bool:
            raise ValueError("links and timed must be true or false")
        if not all(len(each) == 3 and type(each[0]) is bool for each in self.rows):
            raise ValueError("rows must be (of_edges, type, name)")


def digest(message: Sequence[Tensor]) -> Tensor:
    """The name ``uint8`` ``[32]`` of a packed record."""
    found = hashlib.blake2b(digest_size=32, person=b"pyg_scale loader")
    for tensor in message:
        found.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        if tensor.numel():
            content: Any = raw_bytes(tensor.contiguous()).numpy()
            found.update(content)
    return wire.bytes_tensor(found.digest())


def _plain(value: Any) -> Any:
    """An option as it is sent."""
    if isinstance(value, NumNeighbors):
        values: Any = value.values
        if isinstance(values, dict):
            values = {"by_type": [[list(t.edge_type), _plain(v)] for t, v in values.items()]}
        return {"values": _plain(values), "default": _plain(value.default)}
    if isinstance(value, SubgraphType):
        return value.value
    if isinstance(value, Mapping):
        if any(isinstance(name, tuple) for name in value):
            return {"by_type": [[list(t), _plain(v)] for t, v in value.items()]}
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, str):
        return str(value)
    return value.item() if hasattr(value, "item") else value


def _rebuilt(name: str, value: Any) -> Any:
    if name == "time_window" and isinstance(value, dict):
        return {tuple(t): length for t, length in value["by_type"]}
    if name != "num_neighbors" or not isinstance(value, dict) or "values" not in value:
        return value
    values = value["values"]
    if not isinstance(values, dict):
        return NumNeighbors(values, value["default"])
    return NumNeighbors({tuple(t): numbers for t, numbers in values["by_type"]}, value["default"])


def _negatives(negatives: NegativeSampling | None) -> Any:
    if negatives is None:
        return None
    return {
        "mode": negatives.mode.value,
        "amount": negatives.amount,
        "src_weight": negatives.src_weight,
        "dst_weight": negatives.dst_weight,
        "exclude_positives": negatives.exclude_positives,
    }


def _rebuilt_negatives(found: Any) -> NegativeSampling | None:
    if found is None:
        return None
    exclude = found.pop("exclude_positives")
    if not isinstance(exclude, bool | Tensor):
        raise ValueError("exclude_positives must be true, false or links")
    return NegativeSampling(**found, exclude_positives=exclude)


def json_of(tensor: Tensor) -> Any:
    """The plain values of a tensor that :func:`pyg_scale.loader.batch.wire.json_tensor` made.

    Raises:
        ValueError: If they are not JSON.
    """
    try:
        return json.loads(wire.tensor_bytes(tensor))
    except (UnicodeError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
