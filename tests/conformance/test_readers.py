"""Every built-in reader does what a reader must."""

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

from pyg_scale.convert.data import DataReader
from pyg_scale.convert.generated import GeneratedReader
from pyg_scale.convert.npy import NpyReader
from pyg_scale.convert.npz import NpzReader
from pyg_scale.convert.tables import Tables
from pyg_scale.testing import ReaderTests
from tests.convert.graphs import Rows

RANDOM = np.random.default_rng(0)
EDGES = RANDOM.integers(0, 20, (2, 100))


class TestNpyReader(ReaderTests):
    @pytest.fixture(params=["2xE", "Ex2", "fortran", "int32", "pair"])
    def reader(self, request, tmp_path):
        file = tmp_path / "edges.npy"
        np.save(tmp_path / "x.npy", RANDOM.random((20, 3), dtype=np.float32))
        np.save(tmp_path / "w.npy", RANDOM.random(100))
        if request.param == "pair":
            np.save(tmp_path / "src.npy", EDGES[0])
            np.save(tmp_path / "dst.npy", EDGES[1])
            file = f"{tmp_path / 'src.npy'},{tmp_path / 'dst.npy'}"
        else:
            form = {
                "Ex2": EDGES.T.copy(),
                "fortran": np.asfortranarray(EDGES),
                "int32": EDGES.astype("i4"),
            }
            np.save(file, form.get(request.param, EDGES))
        return NpyReader(
            file, nodes={"x": tmp_path / "x.npy"}, edge_attributes={"w": tmp_path / "w.npy"}
        )


class TestNpzReader(ReaderTests):
    @pytest.fixture(params=["stored", "compressed", "sparse", "hetero"])
    def reader(self, request, tmp_path):
        file = tmp_path / "graph.npz"
        arrays = {"edge_index": EDGES, "num_nodes": 20, "y": np.arange(20)}
        arrays |= {"train_idx": np.array([3, 5]), "edge_attr": RANDOM.random((100, 2))}
        if request.param == "sparse":
            counts = RANDOM.integers(0, 4, 20)
            arrays["x_indptr"] = np.concatenate([[0], counts.cumsum()])
            arrays["x_indices"] = RANDOM.integers(0, 9, counts.sum())
            arrays["x_data"] = RANDOM.random(counts.sum(), dtype=np.float32)
            arrays["x_shape"] = np.array([20, 9])
        elif request.param == "hetero":
            arrays = {"a__to__b": EDGES, "num_a": 20, "num_b": 20, "b_x": RANDOM.random((20, 2))}
        else:
            arrays["x"] = RANDOM.random((20, 9))
        save = np.savez if request.param == "stored" else np.savez_compressed
        save(file, **arrays)
        return NpzReader(file)


class TestDataReader(ReaderTests):
    @pytest.fixture(params=["list", "adj_t"])
    def reader(self, request):
        data = HeteroData()
        data["a"].x = torch.rand(20, 3).bfloat16()
        data["b"].num_nodes = 20
        ends = torch.from_numpy(EDGES)
        if request.param == "list":
            data["a", "to", "b"].edge_index = ends
        else:
            matrix = torch.sparse_coo_tensor(ends.flip(0), torch.ones(100), (20, 20))
            data["a", "to", "b"].adj_t = matrix.to_sparse_csr()
        return DataReader(data)


class TestGeneratedReader(ReaderTests):
    @pytest.fixture
    def reader(self):
        return GeneratedReader("nodes=100,edges=900,features=4,classes=3,communities=5")


class TestTables(ReaderTests):
    @pytest.fixture
    def reader(self, tmp_path):
        np.save(tmp_path / "cites.npy", EDGES)
        np.save(tmp_path / "x.npy", RANDOM.random((20, 3)))
        writes = Rows(tmp_path / "writes", author=EDGES[0], paper=EDGES[1])
        return Tables(
            {
                ("paper", "cites", "paper"): tmp_path / "cites.npy",
                ("author", "writes", "paper"): writes,
            },
            {"paper": {"x": tmp_path / "x.npy"}},
            ids="position",
        )
