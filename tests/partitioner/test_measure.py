"""Quality of partitions, compared with counting edge by edge and with closed forms."""

from __future__ import annotations

import json

import pytest
import torch
from torch_geometric.data import Data

from pyg_scale import save
from pyg_scale.datasets import load
from pyg_scale.partitioner import Partition, Quality, compare, quality, write_partition
from pyg_scale.partitioner.report import describe, draw, table

pytestmark = pytest.mark.matrix(2)

K = 3
WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")


def two_squares() -> Data:
    """Two cycles of four nodes with an edge between 3 and 4, both directions."""
    cycles = [(0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4), (3, 4)]
    edge_index = torch.tensor([*cycles, *[(b, a) for a, b in cycles]]).t()
    data = Data(edge_index=edge_index, num_nodes=8, x=torch.randn(8, 2))
    data.train_mask = torch.tensor([1, 1, 1, 0, 1, 0, 0, 0]).bool()
    return data


def test_numbers_of_a_graph_that_one_can_count():
    found = quality(two_squares(), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))
    assert found.cut == 2 / 18 and found.cut_edges == {None: 2}
    assert found.nodes == {None: [4, 4]} and found.edges == {None: [9, 9]}
    assert found.halo == {None: [1, 1]} and found.largest_halo == 1
    assert found.replication == 10 / 8
    assert found.train == {None: [3, 1]} and found.train_balance == 1.5
    assert (found.node_balance, found.edge_balance) == (1, 1)
    assert found.remote is None


@pytest.mark.matrix(3)
@pytest.mark.parametrize("strategy", ["by_dst", "by_src"])
@pytest.mark.parametrize("memory", [1, "1GB"])
def test_types_are_counted_edge_by_edge(data_dir, strategy, memory):
    data = load(data_dir / "dblp.npz")
    g = torch.Generator().manual_seed(0)
    parts = {t: torch.randint(0, K, (data[t].num_nodes,), generator=g) for t in data.node_types}
    found = quality(data, parts, edge_assign_strategy=strategy, memory=memory)
    halo = {t: [set() for _ in range(K)] for t in data.node_types}
    for edge_type in data.edge_types:
        near, far = 2, 0
        edges = data[edge_type].edge_index.tolist()
        if strategy == "by_src":
            near, far = far, near
        cut, sizes = 0, [0] * K
        for n, f in zip(edges[near // 2], edges[far // 2]):
            p, q = int(parts[edge_type[near]][n]), int(parts[edge_type[far]][f])
            sizes[p] += 1
            if p != q:
                cut += 1
                halo[edge_type[far]][p].add(f)
        assert found.edges[edge_type] == sizes and found.cut_edges[edge_type] == cut
    assert found.halo == {t: [len(nodes) for nodes in sets] for t, sets in halo.items()}


@pytest.mark.parametrize("strategy", ["by_dst", "by_src"])
def test_a_directory_keeps_the_numbers_that_recounting_gives(data_dir, tmp_path, strategy):
    data = load(data_dir / "dblp.npz")
    g = torch.Generator().manual_seed(1)
    parts = {t: torch.randint(0, K, (data[t].num_nodes,), generator=g) for t in data.node_types}
    save(data, tmp_path / "g")
    partition = Partition(parts, K, "by hand")
    path = tmp_path / "p"
    write_partition(tmp_path / "g", partition, path, edge_assign_strategy=strategy)
    recounted = quality(data, partition, edge_assign_strategy=strategy)
    assert quality(path) == recounted
    assert quality(tmp_path / "g", partition, edge_assign_strategy=strategy) == recounted


def test_all_neighbours_of_all_nodes_are_the_halo(data_dir):
    data = load(data_dir / "cora.npz")
    del data.train_mask
    g = torch.Generator().manual_seed(2)
    parts = torch.randint(0, K, (data.num_nodes,), generator=g)
    found = quality(data, parts, num_neighbors=[-1], batch_size=data.num_nodes, num_batches=K)
    assert found.remote.num_batches == K
    assert found.remote.per_batch == pytest.approx(sum(found.halo[None]) / K)
    cache = {None: [torch.arange(0, data.num_nodes, 2)] * K}
    cached = quality(
        data, parts, num_neighbors=[-1], batch_size=data.num_nodes, num_batches=K, cache=cache
    )
    even = sum(len({n for n in halo_of(data, parts, p) if n % 2 == 0}) for p in range(K))
    assert cached.remote.cached == pytest.approx(even / K)


def halo_of(data, parts, number):
    src, dst = data.edge_index
    return set(src[(parts[dst] == number) & (parts[src] != number)].tolist())


def test_remote_features_are_estimated_within_their_error(data_dir):
    data = load(data_dir / "facebook_pages.npz")
    parts = torch.arange(data.num_nodes) % 2
    options = {"num_neighbors": [5, 5], "batch_size": 64}
    few = quality(data, parts, num_batches=40, seed=1, **options).remote
    many = quality(data, parts, num_batches=300, seed=2, **options).remote
    assert many.std_error < few.std_error
    error = (few.std_error**2 + many.std_error**2) ** 0.5
    assert abs(few.per_batch - many.per_batch) < 4 * error
    assert 0.3 < many.share < 0.6  # half of the nodes, less the seeds


def test_the_error_is_how_far_estimates_lie_apart(data_dir):
    data = load(data_dir / "facebook_pages.npz")
    parts = (torch.arange(data.num_nodes) % 10 > 6).long()  # seven tenths and three tenths
    found = [
        quality(data, parts, num_neighbors=[3], batch_size=32, num_batches=10, seed=s).remote
        for s in range(40)
    ]
    spread = float(torch.tensor([each.per_batch for each in found]).std())
    stated = sum(each.std_error for each in found) / len(found)
    assert 0.75 < stated / spread < 1.3


def test_reports_go_through_json():
    found = quality(
        two_squares(), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), num_neighbors=[2], num_batches=2
    )
    found.method, found.seconds = "by hand", 0.5
    text = json.dumps(found.to_dict())
    assert Quality.from_dict(json.loads(text)) == found
    with pytest.raises(ValueError, match="not a quality report: KeyError"):
        Quality.from_dict({"num_parts": 2})


def test_table_and_picture(tmp_path):
    one = quality(two_squares(), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))
    two = quality(two_squares(), torch.tensor([0, 1] * 4), num_neighbors=[1], num_batches=2)
    one.method, two.method = "by hand", "odd"
    lines = table([one, two]).splitlines()
    assert lines[0].split("  ")[0] == "method" and "remote per batch" in lines[0]
    assert lines[1].split()[:3] == ["by", "hand", "2"] and "0.111" in lines[1]
    assert "1.000" in lines[2]  # every edge is cut
    assert "remote" not in table([one])
    assert describe(one).splitlines()[-1].split() == ["1", "4", "9", "1", "1"]
    draw([one, two], str(tmp_path / "q.png"))
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")


def test_graphs_without_edges_and_empty_parts():
    data = Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=3)
    found = quality(data, torch.zeros(3, dtype=torch.int64), num_parts=2, num_neighbors=[3])
    assert (found.cut, found.replication, found.node_balance) == (0, 1, 2)
    assert found.remote.per_batch == 0


@pytest.mark.parametrize(
    ("assignment", "options", "error", "message"),
    [
        (torch.zeros(7).long(), {}, ValueError, "7 entries for 8 nodes"),
        (torch.zeros(8), {}, TypeError, "integer"),
        (torch.full((8,), -1), {}, ValueError, "part -1"),
        (None, {}, ValueError, "pass an assignment"),
        (torch.zeros(8).long(), {"num_parts": 9}, ValueError, "only 8 nodes"),
        (torch.zeros(8).long(), {"edge_assign_strategy": "x"}, ValueError, "'by_src'"),
        (torch.zeros(8).long(), {"num_neighbors": [2], "batch_size": 0}, ValueError, "batch_size"),
        (torch.zeros(8).long(), {"num_neighbors": {}}, TypeError, "per hop"),
    ],
)
def test_bad_input(assignment, options, error, message):
    with pytest.raises(error, match=message):
        quality(two_squares(), assignment, **options)


def test_methods_side_by_side(data_dir):
    data = load(data_dir / "cora.npz")
    found = compare(data, 4, ["random", "multilevel"], num_neighbors=[5, 5], num_batches=8)
    assert [each.method for each in found] == ["random", "multilevel"]
    assert found[1].cut < 0.3 < 0.7 < found[0].cut
    assert found[1].remote.per_batch < found[0].remote.per_batch
    assert all(each.seconds > 0 for each in found)
    with pytest.raises(ValueError, match="list of partitioners"):
        compare(data, 4, "random")
