"""Conformance of readers of any format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pyg_scale.convert.base import Description, Reader
from pyg_scale.convert.journal import ConversionWorkspace, Journal
from pyg_scale.convert.options import Options
from pyg_scale.convert.run import run
from pyg_scale.files.npy import dtype_name
from pyg_scale.ops.raw_bytes import raw_bytes
from pyg_scale.store.directory import GraphDirectory

_ALL = 1 << 40
_MEMORY = 64 << 20


class ReaderTests:
    """Tests of a reader; return one of a small graph with 10 to 1,000 edges.

    A reader must yield the same rows for every first row and every length of chunks.
    """

    @pytest.fixture
    def reader(self) -> Reader:
        """A new reader under test."""
        raise NotImplementedError("return your reader")

    @pytest.fixture
    def described(self, reader: Reader, tmp_path: Path) -> Iterator[Description]:
        """The description of the prepared reader."""
        folder = tmp_path / "workspace"
        folder.mkdir()
        reader.prepare(
            ConversionWorkspace(folder, _MEMORY, Journal(folder / "steps.json", None), quiet=True)
        )
        yield reader.describe()
        reader.close()

    def test_the_description_is_complete(self, described: Description) -> None:
        assert described.nodes
        for edge_type in described.edges:
            ends = (None,) if edge_type is None else (edge_type[0], edge_type[2])
            assert set(ends) <= described.nodes.keys()
        assert (None in described.nodes) == (described.edges.keys() <= {None})

    def test_what_decides_about_a_restart_is_files_and_json(self, reader: Reader) -> None:
        import json

        json.dumps(dict(reader.options()))
        assert all(file.exists() for file in reader.files())

    def test_edges(self, reader: Reader, described: Description) -> None:
        for edge_type, edges in described.edges.items():

            def read(begin: int, rows: int, edge_type: Any = edge_type) -> Iterator[Tensor]:
                for src, dst in reader.edges(edge_type, begin, rows):
                    assert src.dtype in (torch.int64, torch.int32)
                    assert src.shape == dst.shape == (src.numel(),)
                    yield torch.stack([src.to(torch.int64), dst.to(torch.int64)], dim=1)

            whole = _same_in_pieces(read)
            assert edges.num_edges in (None, len(whole))

    def test_attributes(self, reader: Reader, described: Description) -> None:
        for node_type, nodes in described.nodes.items():
            for name, attribute in nodes.attributes.items():
                read = partial(reader.node_attribute, node_type, name)
                whole = _same_in_pieces(read)
                assert nodes.num_nodes == len(whole)
                assert (dtype_name(whole.dtype), tuple(whole.shape[1:])) == (
                    attribute.dtype,
                    tuple(attribute.row),
                )
        for edge_type, edges in described.edges.items():
            for name, attribute in edges.attributes.items():
                whole = _same_in_pieces(partial(reader.edge_attribute, edge_type, name))
                assert len(whole) == sum(len(s) for s, _ in reader.edges(edge_type, 0, _ALL))
                assert (dtype_name(whole.dtype), tuple(whole.shape[1:])) == (
                    attribute.dtype,
                    tuple(attribute.row),
                )

    def test_index_sets(self, reader: Reader, described: Description) -> None:
        for node_type, nodes in described.nodes.items():
            for name, size in nodes.index_sets.items():
                read = partial(reader.index_set, node_type, name)
                assert len(_same_in_pieces(read)) == size

    def test_it_is_converted(
        self, reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = reader.edges
        edges: dict[Any, list[tuple[Tensor, Tensor]]] = {}

        def edges_of(edge_type: Any, begin: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
            edges[edge_type] = []
            for pair in read(edge_type, begin, rows):
                edges[edge_type].append(pair)
                yield pair

        monkeypatch.setattr(reader, "edges", edges_of)
        path = tmp_path / "graph"
        run(reader, path, Options(), _MEMORY, overwrite=False, quiet=True)
        reader.close()
        part = GraphDirectory(path).part(0)
        for edge_type, pairs in edges.items():
            csc = part.csc(edge_type)
            if not pairs:
                assert csc.num_edges == 0
                continue
            src, dst = (torch.cat(ends).to(torch.int64).numpy() for ends in zip(*pairs))
            order = np.argsort(dst, kind="stable")
            assert csc.indices.tolist() == src[order].tolist()
            assert csc.original_id(torch.arange(len(order))).tolist() == order.tolist()
            assert (
                csc.indptr.diff().tolist()
                == np.bincount(dst, minlength=csc.indptr.numel() - 1).tolist()
            )


def _same_in_pieces(read: Callable[[int, int], Iterator[Tensor]]) -> Tensor:
    """Read all rows, and check that they are the same for any first row and length of chunks."""
    chunks = list(read(0, _ALL))
    assert all(len(chunk) for chunk in chunks), "a chunk is empty"
    if not chunks:
        return torch.empty(0)
    whole = torch.cat(chunks)
    for begin in sorted({0, 1, len(whole) // 2, len(whole) - 1, len(whole)}):
        for rows in (1, 7, len(whole)):
            pieces = list(read(begin, rows))
            assert all(0 < len(piece) <= rows for piece in pieces), f"chunks of {rows} rows"
            found = torch.cat([whole[:0], *pieces])
            assert _same_bits(found, whole[begin:]), f"from row {begin}, in chunks of {rows}"
    return whole


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Return True if tensors are equal to the bit, so that NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return not one.numel() or torch.equal(*(raw_bytes(each.contiguous()) for each in (one, other)))
