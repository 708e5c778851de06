"""Generated graphs have the statistics they promise; archives are read as written."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import contains_self_loops, is_undirected

from pyg_scale.datasets import hetero_communities, load, planted_communities, read_npz
from tests import preloaded


@pytest.fixture(scope="module")
def graph() -> Data:
    return planted_communities(20_000, 400_000, 8, 32, seed=3)


def edge_set(data: Data) -> set[tuple[int, int]]:
    return set(map(tuple, data.edge_index.t().tolist()))


def test_the_graph_is_simple_and_goes_both_ways(graph: Data) -> None:
    assert graph.edge_index.shape == (2, 400_000)
    assert graph.edge_index.dtype == torch.int64
    assert graph.num_nodes == 20_000
    assert not contains_self_loops(graph.edge_index)
    assert is_undirected(graph.edge_index)
    assert len(edge_set(graph)) == 400_000
    assert int(graph.edge_index.min()) >= 0 and int(graph.edge_index.max()) < 20_000


def test_degrees_follow_the_power_law(graph: Data) -> None:
    # The largest likelihood exponent of the tail (Clauset, Shalizi, Newman 2009, eq. 3.7); its
    # standard error is (exponent - 1) / sqrt(n), and the cut-off at sqrt(num_edges) adds a bias.
    degree = torch.bincount(graph.edge_index[1], minlength=20_000).double().numpy()
    tail = degree[degree >= 30]
    assert len(tail) > 2000
    exponent = 1 + len(tail) / np.log(tail / 29.5).sum()
    assert 2.3 < exponent < 2.8
    steeper = planted_communities(20_000, 400_000, 8, 0, exponent=3.5, seed=3)
    degree = torch.bincount(steeper.edge_index[1], minlength=20_000).double().numpy()
    tail = degree[degree >= 30]
    assert 3.0 < 1 + len(tail) / np.log(tail / 29.5).sum() < 4.0


def test_degrees_do_not_depend_on_ids_or_communities(graph: Data) -> None:
    degree = torch.bincount(graph.edge_index[1], minlength=20_000).double()
    ids = torch.arange(20_000).double()
    # No correlation: |r| below 4 standard errors of independent values.
    assert abs(torch.corrcoef(torch.stack([degree.log(), ids]))[0, 1]) < 4 / 20_000**0.5
    log = degree.log()
    means = torch.stack([log[graph.community == c].mean() for c in range(8)])
    assert (means - log.mean()).abs().max() < 5 * log.std() / (20_000 / 8) ** 0.5


@pytest.mark.parametrize("homophily", [0.0, 0.5, 0.9])
def test_edge_homophily_is_what_was_asked_for(homophily: float) -> None:
    data = planted_communities(20_000, 200_000, 8, 0, homophily=homophily, seed=1)
    src, dst = data.edge_index
    share = (data.community[src] == data.community[dst]).double().mean()
    # Parallel edges, which are left out, are a little more frequent inside communities.
    assert share == pytest.approx(homophily + (1 - homophily) / 8, abs=0.01)


def test_classes_are_balanced_and_masks_split_the_nodes(graph: Data) -> None:
    count = torch.bincount(graph.y, minlength=8)
    assert (count - 2500).abs().max() < 5 * 2500**0.5
    masks = torch.stack([graph.train_mask, graph.val_mask, graph.test_mask])
    assert masks.sum(0).eq(1).all()
    assert masks.double().mean(1).tolist() == pytest.approx([0.5, 0.25, 0.25], abs=0.015)
    noisy = (graph.y != graph.community).double().mean()
    assert noisy == pytest.approx(0.02 * 7 / 8, abs=0.005)


def nearest_centre_accuracy(data: Data, x: torch.Tensor) -> float:
    centre = torch.stack([x[data.train_mask & (data.y == c)].mean(0) for c in range(8)])
    right = torch.cdist(x, centre).argmin(1) == data.y
    return float(right[data.test_mask].double().mean())


def test_neighbours_say_more_than_the_node_alone(graph: Data) -> None:
    src, dst = graph.edge_index
    mean = torch.zeros_like(graph.x).index_add_(0, dst, graph.x[src])
    mean /= torch.bincount(dst, minlength=graph.num_nodes).clamp(min=1)[:, None]
    alone = nearest_centre_accuracy(graph, graph.x)
    assert 1 / 8 + 0.1 < alone < 0.7
    assert nearest_centre_accuracy(graph, mean) > alone + 0.2
    mute = planted_communities(20_000, 400_000, 8, 32, signal=0.0, seed=3)
    assert nearest_centre_accuracy(mute, mute.x) == pytest.approx(1 / 8, abs=0.03)


def test_every_order_holds_the_same_edges() -> None:
    args = {
        "num_nodes": 500,
        "num_edges": 4000,
        "num_features": 0,
        "edge_time": True,
        "edge_weight": True,
        "seed": 5,
    }
    graphs = {
        o: planted_communities(**args, edge_order=o) for o in ("random", "source", "destination")
    }
    tables = [
        {
            (int(a), int(b)): (int(t), float(w))
            for a, b, t, w in zip(*g.edge_index, g.edge_time, g.edge_weight, strict=True)
        }
        for g in graphs.values()
    ]
    assert tables[0] == tables[1] == tables[2]
    assert all(tables[0][b, a] == value for (a, b), value in tables[0].items())
    for order, major in (("source", 0), ("destination", 1)):
        index = graphs[order].edge_index
        key = index[major] * 500 + index[1 - major]
        assert (key[1:] > key[:-1]).all()
    col = graphs["random"].edge_index[1]
    assert not (col[1:] >= col[:-1]).all()


def test_int32_is_the_same_graph() -> None:
    wide = planted_communities(500, 4000, num_features=0)
    narrow = planted_communities(500, 4000, num_features=0, index_dtype=torch.int32)
    assert narrow.edge_index.dtype == torch.int32
    assert torch.equal(wide.edge_index, narrow.edge_index.long())


def test_the_seed_decides_and_threads_do_not() -> None:
    code = (
        "import sys, torch; torch.set_num_threads(int(sys.argv[1]));"
        "from hashlib import sha256;"
        "from pyg_scale.datasets import planted_communities as p;"
        "d = p(50_000, 5_000_000, num_features=64, seed=7);"
        "print(*(sha256(x.numpy().tobytes()).hexdigest() for x in (d.edge_index, d.x)))"
    )
    out = [
        subprocess.run(
            [preloaded.python(), "-c", code, threads],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for threads in ("1", "2")
    ]
    assert out[0] == out[1]
    one, two = (planted_communities(500, 4000, 4, 8, seed=seed) for seed in (1, 2))
    assert not torch.equal(one.edge_index, two.edge_index)
    assert not torch.equal(one.x, two.x)


def test_defaults_of_torch_do_not_matter() -> None:
    expected = planted_communities(500, 3000, num_features=4, seed=1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = planted_communities(500, 3000, num_features=4, seed=1)
    finally:
        torch.set_default_dtype(before)
    assert found.x.dtype == torch.float32
    assert torch.equal(found.x, expected.x) and torch.equal(found.edge_index, expected.edge_index)
    assert expected.x.data_ptr() % 64 == 0


def test_times_and_weights_have_their_ranges() -> None:
    data = planted_communities(
        2000, 40_000, num_features=0, node_time=True, edge_time=True, edge_weight=True
    )
    for time, size in ((data.time, 2000), (data.edge_time, 40_000)):
        assert time.dtype == torch.int64 and time.shape == (size,)
        assert time.double().mean() == pytest.approx(2**29, rel=0.05)
        assert int(time.min()) >= 0 and int(time.max()) < 2**30
    assert data.edge_weight.dtype == torch.float32
    assert float(data.edge_weight.min()) > 0 and float(data.edge_weight.max()) <= 1
    assert float(data.edge_weight.mean()) == pytest.approx(0.5, abs=0.02)


def test_few_edges_leave_no_community_out() -> None:
    data = planted_communities(4000, 2000, 4, 0)
    count = torch.bincount(data.community[data.edge_index[0]], minlength=4)
    assert (count - 500).abs().max() < 6 * 500**0.5
    assert planted_communities(10, 0, 2, 3).edge_index.shape == (2, 0)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"num_nodes": 1}, "num_nodes"),
        ({"num_edges": 3}, "num_edges"),
        ({"num_nodes": 10, "num_edges": 80}, "num_edges"),
        ({"num_classes": 0}, "num_classes"),
        ({"num_communities": 2}, "num_communities"),
        ({"homophily": 1.5}, "homophily"),
        ({"exponent": 2.0}, "exponent"),
        ({"edge_order": "sorted"}, "edge_order"),
        ({"index_dtype": torch.int16}, "index_dtype"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        planted_communities(**arguments)


def test_what_does_not_fit_says_so() -> None:
    with pytest.raises(ValueError, match="fewer edges"):
        planted_communities(100, 4000, 20, 0, homophily=1.0)


def test_heterogeneous_graph() -> None:
    data = hetero_communities(3000, 2000, 30_000, 20_000, 4, 16, node_time=True, seed=2)
    data.validate()
    assert data.edge_types == [
        ("paper", "cites", "paper"),
        ("author", "writes", "paper"),
        ("paper", "rev_writes", "author"),
    ]
    writes = data["author", "writes", "paper"].edge_index
    assert writes.shape == (2, 20_000)
    assert torch.equal(writes.flip(0), data["paper", "rev_writes", "author"].edge_index)
    assert data["paper", "cites", "paper"].edge_index.shape == (2, 30_000)
    assert int(writes[0].max()) < 2000 and int(writes[1].max()) < 3000
    assert data["author"].x.shape == (2000, 16) and "y" not in data["author"]
    assert data["paper"].time.shape == (3000,)
    src, dst = data["paper", "cites", "paper"].edge_index
    same = (data["paper"].community[src] == data["paper"].community[dst]).double().mean()
    assert same == pytest.approx(0.8 + 0.2 / 4, abs=0.02)
    # A paper's number says nothing about how often it cites or is cited.
    for end in (src, dst):
        degree = torch.bincount(end, minlength=3000).double()
        ids = torch.arange(3000).double()
        assert abs(torch.corrcoef(torch.stack([degree.log1p(), ids]))[0, 1]) < 4 / 3000**0.5
    assert (src != dst).all()
    # Papers of one author resemble each other: authors have communities, too.
    first = writes[:, writes[0].argsort(stable=True)]
    pair = first[0][1:] == first[0][:-1]
    left, right = first[1][:-1][pair], first[1][1:][pair]
    assert (data["paper"].y[left] == data["paper"].y[right]).double().mean() > 0.6


# Reading ######################################################################################


def test_read_a_homogeneous_archive(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "g.npz",
        edge_index=np.array([[0, 1, 2], [1, 2, 0]], np.int32),
        y=np.array([0, 1, 0]),
        num_nodes=3,
        train_idx=np.array([0]),
        val_idx=np.array([2]),
        test_idx=np.array([1]),
        x_indptr=np.array([0, 1, 1, 3]),
        x_indices=np.array([1, 0, 3]),
        x_data=np.array([2, 3, 4], np.float32),
        x_shape=np.array([3, 4]),
    )
    data = load(tmp_path / "g.npz")
    assert isinstance(data, Data)
    assert data.edge_index.dtype == torch.int64
    assert data.x.tolist() == [[0, 2, 0, 0], [0, 0, 0, 0], [3, 0, 0, 4]]
    assert data.val_mask.tolist() == [False, False, True]
    assert read_npz(tmp_path / "g.npz", torch.int32).edge_index.dtype == torch.int32


def test_arrays_in_column_order_become_rows(tmp_path: Path) -> None:
    """pyg-lib sorts edges for PyG's loaders, and refuses a strided row of them."""
    edges = np.asfortranarray([[0, 1, 2], [1, 2, 0]])
    np.savez(tmp_path / "g.npz", edge_index=edges, num_nodes=3)
    np.savez(tmp_path / "h.npz", a__a=edges, num_a=3)
    for found in (read_npz(tmp_path / "g.npz"), read_npz(tmp_path / "h.npz")["a", "to", "a"]):
        assert found.edge_index.is_contiguous()
        assert found.edge_index.tolist() == edges.tolist()


def test_the_number_of_nodes_of_an_archive(tmp_path: Path) -> None:
    edges = np.array([[0], [1]])
    sparse = {
        "x_indptr": np.array([0, 1, 1]),
        "x_indices": np.array([0]),
        "x_data": np.array([2.0]),
        "x_shape": np.array([2, 1]),
    }
    for number, (size, arrays) in enumerate(
        [(3, {"x": np.zeros((3, 2))}), (4, {"y": np.zeros(4)}), (2, sparse)]
    ):
        path = tmp_path / f"{number}.npz"
        np.savez(path, edge_index=edges, **arrays)  # type: ignore[arg-type]
        assert read_npz(path).num_nodes == size
    np.savez(tmp_path / "edges.npz", edge_index=edges)
    with pytest.raises(ValueError, match=r"edges.npz.*does not say how many nodes"):
        read_npz(tmp_path / "edges.npz")


def test_read_a_heterogeneous_archive(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "h.npz",
        a__likes__b=np.array([[0, 1], [2, 0]], np.int32),
        b__a=np.array([[1], [0]], np.int32),
        num_a=2,
        num_b=3,
        b_y=np.array([1, 0, 1]),
        a_time=np.array([5, 6]),
        train_idx=np.array([2]),
    )
    data = load(tmp_path / "h.npz")
    assert isinstance(data, HeteroData)
    assert set(data.edge_types) == {
        ("a", "likes", "b"),
        ("b", "rev_likes", "a"),
        ("b", "to", "a"),
        ("a", "rev_to", "b"),
    }
    assert data["b", "rev_likes", "a"].edge_index.tolist() == [[2, 0], [0, 1]]
    assert data["a"].time.tolist() == [5, 6]
    assert data["b"].num_nodes == 3
    assert data["b"].train_mask.tolist() == [False, False, True]
    assert len(read_npz(tmp_path / "h.npz", reverse=False).edge_types) == 2


def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load(tmp_path / "missing.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ValueError, match="no plain NumPy"):
        load(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", a=np.zeros(2))
    with pytest.raises(ValueError, match="holds no graph"):
        load(tmp_path / "other.npz")
    np.savez(tmp_path / "object.npz", edge_index=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="no plain NumPy"):
        load(tmp_path / "object.npz")
    with pytest.raises(ValueError, match="did you mean Reddit"):
        load("Redditt")
    with pytest.raises(ValueError, match="Planetoid/NAME"):
        load("Planetoid", tmp_path)
    with pytest.raises(ValueError, match="one graph"):
        load("KarateClub/x", tmp_path)


def test_pyg_datasets_by_name(tmp_path: Path) -> None:
    assert load("KarateClub", tmp_path).num_nodes == 34  # comes with PyG, needs no network


def test_the_real_graphs(data_dir: Path) -> None:
    pages = read_npz(data_dir / "facebook_pages.npz")
    assert pages.x.shape == (22_470, 4714) and pages.num_edges == 341_646
    assert pages.validate() and is_undirected(pages.edge_index)
    history = read_npz(data_dir / "history.npz")
    assert history.validate() and history["commit"].time.shape == (7997,)
