"""Sampled subgraphs and batches as JSON and raw tensors, to go to another process. No pickle.

``null``, booleans, numbers and strings stand for themselves, and so do lists. A tensor is
``{"$tensor": n}``, number ``n`` of those that go along; two rows that lie one after the other in
memory, as a sampler makes them, are one tensor. Tuples, dictionaries (with any of these as keys),
NumPy arrays, sampler outputs, ``Data``, ``HeteroData`` and a ``Batch`` of ``Data`` (that was not
collated from several) are objects of the one entry ``$tuple``, ``$dict``, ``$array``, ``$output``,
``$hetero_output``, ``$data``, ``$hetero_data`` and ``$batch``. A ``TensorFrame`` is ``$frame``: its
columns and its arrays.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.typing import TensorFrame

from pyg_scale.loader.batch.build import edge_index_of
from pyg_scale.ops import colptr
from pyg_scale.sampler.base import HeteroSamplerOutput, SamplerOutput
from pyg_scale.store.directory.frame import FrameColumns, taken_apart
from pyg_scale.store.directory.values import as_plain_tensor

MAX_DEPTH = 32
_OUTPUTS = {"$output": SamplerOutput, "$hetero_output": HeteroSamplerOutput}
_GRAPHS: dict[str, Any] = {"$data": Data, "$hetero_data": HeteroData, "$batch": type(Batch())}
_REFUSAL = (
    "cannot go to another process without pickle: make it a dense tensor, a number, a string, or a "
    "list or dictionary of these"
)
_PRIVATE = ("_orig_edge_index",)
"""Private members of batches, beside their attributes."""


def pack(value: Any, name: str = "it", refusal: str = _REFUSAL) -> tuple[bytes, list[Tensor]]:
    """A value as JSON and the tensors in it.

    Args:
        value: Made of ``None``, booleans, numbers, strings, tensors, arrays, lists, tuples,
            dictionaries, sampler outputs, ``Data``, ``HeteroData`` and ``Batch``.
        name: Its name in errors.
        refusal: What errors say of anything else.

    Raises:
        TypeError: If anything else is in it; says where.
    """
    packer = _Packer(refusal)
    found = packer.plain(value, name)
    return json.dumps(found, separators=(",", ":")).encode(), packer.tensors


def unpack(text: bytes, tensors: Sequence[Tensor]) -> Any:
    """The value that :func:`pack` was given; tensors are not copied.

    Raises:
        ValueError: If it is nothing that :func:`pack` makes.
    """
    try:
        found = json.loads(text)
        unpacker = _Unpacker(tensors)
        value = unpacker.value(found, 0)
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError, UnicodeError) as error:
        raise ValueError(f"it is no packed value ({type(error).__name__}: {error})") from None
    if unpacker.used != len(tensors):
        raise ValueError(f"{len(tensors)} tensors came, {unpacker.used} are in use")
    return value


def json_tensor(value: Any) -> Tensor:
    """Plain values as JSON in a tensor ``uint8``, for messages that consist of tensors."""
    return bytes_tensor(json.dumps(value, separators=(",", ":")).encode())


def bytes_tensor(text: bytes) -> Tensor:
    """Bytes as a tensor ``uint8``."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else _NO_BYTES.clone()


def tensor_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor ``uint8``.

    Raises:
        ValueError: If it is another tensor.
    """
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise ValueError(f"bytes are a uint8 tensor (got {tensor.dtype}, {list(tensor.shape)})")
    return tensor.numpy().tobytes()


_NO_BYTES = torch.empty(0, dtype=torch.uint8)


class _Packer:
    def __init__(self, refusal: str) -> None:
        self.tensors: list[Tensor] = []
        self._refusal = refusal

    def plain(self, value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Tensor | np.ndarray):
            tag = "$tensor" if isinstance(value, Tensor) else "$array"
            return {tag: self._add(self._tensor(value, where))}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, TensorFrame):
            columns, arrays = taken_apart(value, where)
            return {"$frame": [self.plain(columns.plain(), where), self.plain(arrays, where)]}
        if type(value) is list:
            return [self.plain(each, f"{where}[{i}]") for i, each in enumerate(value)]
        if type(value) is tuple:
            return {"$tuple": [self.plain(v, f"{where}[{i}]") for i, v in enumerate(value)]}
        if type(value) is dict:
            return {"$dict": [self._pair(k, v, where) for k, v in value.items()]}
        for tag, output in _OUTPUTS.items():
            if isinstance(value, output):
                return {tag: self._fields(value, where)}
        for tag, graph in _GRAPHS.items():
            if type(value) is graph and (tag != "$batch" or not hasattr(value, "_slice_dict")):
                return {tag: self._graph(value, where)}
        raise TypeError(f"{where} is a {type(value).__name__}, which {self._refusal}")

    def _tensor(self, value: Tensor | np.ndarray[Any, Any], where: str) -> Tensor:
        try:
            return as_plain_tensor(value, where)
        except TypeError:
            kind = f"a {type(value).__name__} of {value.dtype}"
            if isinstance(value, Tensor) and "sparse" in str(value.layout):
                kind = "sparse"
            raise TypeError(f"{where} is {kind}, which {self._refusal}") from None

    def _pair(self, key: Any, value: Any, where: str) -> list[Any]:
        return [self.plain(key, f"a key of {where}"), self.plain(value, f"{where}[{key!r}]")]

    def _add(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _fields(self, out: Any, where: str) -> dict[str, Any]:
        found = {f.name: getattr(out, f.name) for f in dataclasses.fields(out)}
        ends: Any = (found.pop("row"), found.pop("col"))
        if isinstance(ends[0], dict):
            pairs = [[list(t), self._ends(ends[0][t], ends[1][t])] for t in ends[0]]
            return {"$edges": pairs, **self._each(found, where)}
        return {"$edges": self._ends(*ends), **self._each(found, where)}

    def _ends(self, row: Tensor, col: Tensor) -> int:
        return self._add(edge_index_of(row, col))

    def _each(self, found: dict[str, Any], where: str) -> dict[str, Any]:
        return {k: self.plain(v, f"{where}.{k}") for k, v in found.items() if v is not None}

    def _graph(self, graph: Any, where: str) -> dict[str, Any]:
        if isinstance(graph, Data):
            return {"stores": [[None, *self._store(graph._store, where)]]}
        kinds = [("nodes", graph.node_items()), ("edges", graph.edge_items())]
        stores = [
            [
                of,
                kind if isinstance(kind, str) else list(kind),
                *self._store(s, f"{where}[{kind!r}]"),
            ]
            for of, items in kinds
            for kind, s in items
        ]
        return {"stores": [[None, *self._store(graph._global_store, where)], *stores]}

    def _store(self, store: Any, where: str) -> list[Any]:
        pointers = None
        if isinstance(store.get("edge_index"), Tensor):
            known = colptr.recall(store["edge_index"])
            pointers = None if known is None else self._add(known)
        names = [*store, *(name for name in _PRIVATE if name in store.__dict__)]
        return [[self._pair(name, getattr(store, name), where) for name in names], pointers]


class _Unpacker:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._seen: set[int] = set()

    @property
    def used(self) -> int:
        return len(self._seen)

    def value(self, found: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        if found is None or isinstance(found, bool | int | float | str):
            return found
        if isinstance(found, list):
            return [self.value(each, depth + 1) for each in found]
        ((tag, content),) = found.items()
        if tag == "$tensor":
            return self._tensor(content)
        if tag == "$array":
            return self._tensor(content).numpy()
        if tag == "$tuple":
            return tuple(self.value(each, depth + 1) for each in content)
        if tag == "$dict":
            return self._dict(content, depth + 1)
        if tag == "$frame":
            return self._frame(*(self.value(each, depth + 1) for each in content))
        if tag in _OUTPUTS:
            return self._output(_OUTPUTS[tag], content, depth + 1)
        if tag in _GRAPHS:
            return self._graph(tag, content, depth + 1)
        raise ValueError(f"it has an unknown entry {tag!r}")

    def _tensor(self, number: Any) -> Tensor:
        if type(number) is not int or not 0 <= number < len(self._tensors):
            raise ValueError(f"it has a tensor number {number!r} of {len(self._tensors)}")
        self._seen.add(number)
        return self._tensors[number]

    def _dict(self, pairs: Any, depth: int) -> dict[Any, Any]:
        return {self.value(key, depth): self.value(value, depth) for key, value in pairs}

    def _frame(self, columns: Any, arrays: dict[str, Tensor]) -> TensorFrame:
        rows = {name: tuple(array.shape[1:]) for name, array in arrays.items()}
        found = FrameColumns.of(columns, rows)
        if found is None or len({array.size(0) for array in arrays.values()}) != 1:
            raise ValueError("it has a frame whose arrays are not those of its columns")
        return found.frame(arrays)

    def _output(self, output: Any, content: dict[str, Any], depth: int) -> Any:
        fields = {field.name for field in dataclasses.fields(output)} - {"row", "col"}
        edges, rest = content["$edges"], {k: v for k, v in content.items() if k != "$edges"}
        if not rest.keys() <= fields:
            raise ValueError(f"a {output.__name__} has no {min(rest.keys() - fields)!r}")
        values = {name: self.value(value, depth) for name, value in rest.items()}
        row: Any
        col: Any
        if isinstance(edges, list):
            by_type = {_edge_type(kind): self._ends(number) for kind, number in edges}
            row, col = ({t: pair[end] for t, pair in by_type.items()} for end in (0, 1))
        else:
            row, col = self._ends(edges)
        return output(**{"edge": None, **values, "row": row, "col": col})

    def _ends(self, number: Any) -> Tensor:
        pair = self._tensor(number)
        if pair.dim() != 2 or pair.size(0) != 2:
            raise ValueError(f"edges are [2, n] (got {list(pair.shape)})")
        return pair

    def _graph(self, tag: str, content: dict[str, Any], depth: int) -> Any:
        graph: Any = _GRAPHS[tag]()
        for entry in content["stores"]:
            if entry[0] is None:
                hetero = tag == "$hetero_data"
                store, rest = graph._global_store if hetero else graph._store, entry[1:]
            else:
                kind = entry[1] if entry[0] == "nodes" else _edge_type(entry[1])
                store, rest = graph[kind], entry[2:]
            pairs, pointers = rest
            for name, value in self._dict(pairs, depth).items():
                if name in _PRIVATE:
                    store.__dict__[name] = value
                else:
                    store._mapping[name] = value
            if pointers is not None:
                colptr.keep(store, self._tensor(pointers))
        return graph


def _edge_type(kind: Any) -> tuple[str, str, str]:
    source, relation, destination = kind
    if not all(isinstance(part, str) for part in kind):
        raise ValueError(f"{kind!r} is no edge type")
    return source, relation, destination
