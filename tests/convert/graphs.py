"""Generated graphs, and what their directories must hold."""

from __future__ import annotations

import json

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData

from pyg_scale.convert import Column, Table
from pyg_scale.store import topology_of
from pyg_scale.store.directory.meta import edge_dir


def graph(num_nodes=40, num_edges=300, *, seed=0, kind="random", dtype=torch.int64):
    """A graph with attributes of nodes and edges, times and weights."""
    generator = torch.Generator().manual_seed(seed)

    def ids(size):
        return torch.randint(max(1, num_nodes), (size,), generator=generator)

    src, dst = ids(num_edges), ids(num_edges)
    if kind == "hub":
        dst[torch.rand(num_edges, generator=generator) < 0.8] = num_nodes // 2
    elif kind == "sorted":
        dst = dst.sort().values
    elif kind == "multi":
        src, dst = src % 3, dst % 3
    elif kind == "loops":
        src[::3] = dst[::3]
    return Data(
        edge_index=torch.stack([src, dst]).to(dtype),
        num_nodes=num_nodes,
        x=torch.rand(num_nodes, 5, generator=generator),
        y=torch.randint(4, (num_nodes,), generator=generator),
        train_mask=torch.rand(num_nodes, generator=generator) < 0.3,
        time=torch.randint(9, (num_nodes,), generator=generator),
        edge_attr=torch.rand(num_edges, 2, generator=generator),
        edge_time=torch.randint(5, (num_edges,), generator=generator),
        edge_weight=torch.randint(4, (num_edges,), generator=generator).float(),
    )


def hetero(seed=0):
    """Two node types and three edge types, one of them between nodes of one type."""
    generator = torch.Generator().manual_seed(seed)
    data = HeteroData()
    data["author"].num_nodes = 20
    data["paper"].x = torch.rand(30, 4, generator=generator)
    data["paper"].y = torch.randint(3, (30,), generator=generator)
    for src, relation, dst, size in (
        ("author", "writes", "paper", 100),
        ("paper", "cites", "paper", 200),
        ("paper", "by", "author", 0),
    ):
        sizes = [data[each].num_nodes for each in (src, dst)]
        ends = [torch.randint(n, (size,), generator=generator) for n in sizes]
        data[src, relation, dst].edge_index = torch.stack(ends)
        data[src, relation, dst].edge_weight = torch.rand(size, generator=generator)
    return data


def expected(data, **options):
    """The content of each file that samplers read."""
    topology = topology_of(data, **options)
    files = {}
    for edge_type, csc in topology.csc.items():
        folder = edge_dir(edge_type, 0)
        files[f"{folder}/indptr.npy"] = csc.indptr
        files[f"{folder}/indices.npy"] = csc.indices.to(torch.int32)
        if csc.edge_id is not None:
            files[f"{folder}/edge_id.npy"] = csc.edge_id.to(torch.int32)
        if csc.time is not None:
            files[f"{folder}/time.npy"] = csc.time
        if csc.weight_prefix is not None:
            files[f"{folder}/weight_prefix.npy"] = csc.weight_prefix
    return {name: value.contiguous().numpy() for name, value in files.items()}


def content(path, only=None):
    """Every array of a directory."""
    found = {}
    for file in sorted(path.rglob("*.npy")):
        name = file.relative_to(path).as_posix()
        if only is None or only in name:
            found[name] = np.load(file, allow_pickle=False)
    return found


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        np.testing.assert_array_equal(found[name], value, err_msg=name, strict=True)


def raw(path):
    """Every file of a directory, as bytes; META.json as values."""
    found = {}
    for file in sorted(path.rglob("*")):
        if file.is_file():
            name = file.relative_to(path).as_posix()
            found[name] = json.loads(file.read_text()) if name == "META.json" else file.read_bytes()
    return found


class Rows(Table):
    """Columns with ids, which are slow to read as far as a conversion knows.

    Args:
        path: A file that is written.
        **columns: Arrays ``[num_rows]``, of numbers or of bytes.
    """

    fast = False

    def __init__(self, path, **columns):
        self.path = path
        self._arrays = {name: np.asarray(values) for name, values in columns.items()}
        path.write_bytes(b"".join(each.tobytes() for each in self._arrays.values()))
        self.columns = {
            name: Column("text" if values.dtype.kind == "S" else str(values.dtype))
            for name, values in self._arrays.items()
        }

    def read(self, names, begin, rows):
        arrays = [self._arrays[name] for name in names]
        for first in range(begin, len(arrays[0]), rows):
            yield tuple(each[first : first + rows] for each in arrays)
