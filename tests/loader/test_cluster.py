"""Batches of clusters are the subgraphs that PyG's would be, from any partitioner."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.loader
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import subgraph

from pyg_scale import plugins
from pyg_scale.errors import UnknownPluginError
from pyg_scale.loader import ClusterData, ClusterLoader, cluster
from pyg_scale.ops.induced_edges import Induced
from pyg_scale.ops.join_clusters import join_clusters
from pyg_scale.partitioner.multilevel import MultilevelPartitioner
from tests.loader.batches import assert_same_batches

WORKERS: list[dict[str, Any]] = [
    {"num_workers": 2},
    {"num_workers": 2, "worker_type": "process"},
    {"num_workers": 1, "worker_type": "ring"},
]


def graph(num_nodes: int = 60, num_edges: int = 300) -> Data:
    """Directed, with self-loops, parallel edges and nodes without any."""
    random = torch.Generator().manual_seed(1)
    edge_index = torch.randint(num_nodes - 3, (2, num_edges), generator=random)
    edge_index[:, -3:] = edge_index[:, :3]
    return Data(
        x=torch.arange(num_nodes).view(-1, 1).float(),
        edge_index=edge_index,
        edge_attr=torch.arange(num_edges),
        y=torch.arange(num_nodes) % 3,
        face=torch.arange(3 * num_nodes).view(3, -1),  # concatenated in another dimension
        name="of all",
    )


DATA = graph()
FORMATS: Any = pytest.mark.parametrize("sparse_format", ["csr", "csc"])


def clusters(num_parts: int = 7, data: Data = DATA, **kwargs: Any) -> ClusterData:
    return ClusterData(data, num_parts, log=False, **{"method": "multilevel"} | kwargs)


def same_edges(batch: Data, nodes: Tensor) -> None:
    """A batch has all edges among its nodes, and their attributes."""
    assert torch.equal(batch.x[:, 0].long(), nodes)
    _, ids = subgraph(nodes, DATA.edge_index, DATA.edge_attr, num_nodes=60)
    assert torch.equal(batch.edge_attr.sort().values, ids)
    assert torch.equal(nodes[batch.edge_index], DATA.edge_index[:, batch.edge_attr])
    assert torch.equal(batch.y, DATA.y[nodes]) and batch.name == "of all"


@FORMATS
def test_a_batch_is_the_subgraph_of_its_clusters(sparse_format: Any) -> None:
    data = clusters(sparse_format=sparse_format)
    members = data.partition.node_perm.split(data.partition.partptr.diff().tolist())
    loader = ClusterLoader(data, batch_size=3, shuffle=True, seed=2)
    assert len(loader) == 3
    for index in ([0], [4, 1, 6], [2, 5], range(7)):
        same_edges(loader(list(index)), torch.cat([members[i] for i in index]))
    seen = torch.cat([batch.x[:, 0] for batch in loader])
    assert torch.equal(seen.sort().values, torch.arange(60.0))


@FORMATS
@pytest.mark.parametrize("keep", [False, True])
def test_batches_equal_those_of_pyg(sparse_format: Any, keep: bool) -> None:
    data = clusters(sparse_format=sparse_format, keep_inter_cluster_edges=keep)
    options: dict[str, Any] = {"batch_size": 2, "sampler": [6, 0, 3, 1, 2, 5, 4]}
    assert_same_batches(
        torch_geometric.loader.ClusterLoader(data, **options), ClusterLoader(data, **options)
    )


def test_ids_of_edges_are_found_only_for_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = DATA.clone()
    del bare.edge_attr
    asked = []

    def joined(*given: Any, positions: bool, **options: Any) -> Induced:
        asked.append(positions)
        return join_clusters(*given, positions=positions, **options)

    monkeypatch.setattr(cluster, "join_clusters", joined)
    loaders = (ClusterLoader(clusters(data=data), batch_size=7) for data in (bare, DATA))
    batch, other = (next(iter(loader)) for loader in loaders)
    assert asked == [False, True]
    assert torch.equal(batch.edge_index, other.edge_index) and "edge_attr" not in batch


@FORMATS
@pytest.mark.parametrize("keep", [False, True])
def test_one_cluster_with_and_without_edges_to_others(sparse_format: Any, keep: bool) -> None:
    data = clusters(sparse_format=sparse_format, keep_inter_cluster_edges=keep)
    members = data.partition.node_perm.split(data.partition.partptr.diff().tolist())
    assert len(data) == 7 and isinstance(data, torch_geometric.loader.ClusterData)
    own = 0 if sparse_format == "csr" else 1
    for i, nodes in enumerate(members):
        if not keep:
            same_edges(data[i], nodes)
            continue
        ids = torch.isin(DATA.edge_index[own], nodes).nonzero().view(-1)
        assert torch.equal(data[i].edge_attr.sort().values, ids)
        ends = [
            nodes[data[i].edge_index[own]],
            data.partition.node_perm[data[i].edge_index[1 - own]],
        ]
        assert torch.equal(
            torch.stack(ends if own == 0 else ends[::-1]), DATA.edge_index[:, data[i].edge_attr]
        )


def test_empty_clusters() -> None:
    data = clusters()
    cluster = torch.tensor([1, 1, 4, 4, 5, 1]).repeat(10)
    data.partition = data._partition(DATA.edge_index, cluster)
    data.data = data._permute_data(DATA, data.partition)
    for options in ({"batch_size": 2}, {"batch_size": 1}, {"batch_size": 7}):
        for batch, other in zip(
            ClusterLoader(data, **options), clusters_of_pyg(data, **options), strict=True
        ):
            assert torch.equal(batch.x, other.x) and torch.equal(batch.edge_attr, other.edge_attr)
            assert torch.equal(batch.edge_index, other.edge_index)
    loader = ClusterLoader(data)
    backwards, forwards = loader(range(6, -1, -1)), loader(range(7))
    assert torch.equal(backwards.x, torch.cat([loader([i]).x for i in range(6, -1, -1)]))
    assert torch.equal(backwards.edge_attr.sort().values, forwards.edge_attr.sort().values)
    assert torch.equal(
        backwards.x[:, 0].long()[backwards.edge_index], DATA.edge_index[:, backwards.edge_attr]
    )


def clusters_of_pyg(data: ClusterData, batch_size: int) -> list[Data]:
    """Plain torch, as PyG's loader fails on a batch of nothing."""
    made = []
    for begin in range(0, len(data), batch_size):
        bounds = data.partition.partptr[[begin, min(begin + batch_size, len(data))]].tolist()
        row = torch.arange(60).repeat_interleave(data.partition.indptr.diff())
        edges = torch.stack([row, data.partition.index])
        inside = ((edges >= bounds[0]) & (edges < bounds[1])).all(0)
        made.append(
            Data(
                x=data.data.x[slice(*bounds)],
                edge_index=edges[:, inside] - bounds[0],
                edge_attr=data.data.edge_attr[inside],
            )
        )
    return made


def test_a_batch_of_no_cluster() -> None:
    batch = ClusterLoader(clusters())([])
    assert batch.num_nodes == 0 and list(batch.edge_index.shape) == [2, 0]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_batches_do_not_depend_on_workers(workers: dict[str, Any]) -> None:
    options: dict[str, Any] = {"batch_size": 2, "shuffle": True, "seed": 3}
    data = clusters()
    alone, with_workers = ClusterLoader(data, **options), ClusterLoader(data, **options, **workers)
    for _ in range(2):
        assert_same_batches(alone, with_workers)


@pytest.mark.parametrize("workers", [{}, *WORKERS], ids=str)
def test_resumes_in_the_middle(workers: dict[str, Any]) -> None:
    options: dict[str, Any] = {"batch_size": 2, "shuffle": True, "seed": 3}
    data = clusters()
    whole = ClusterLoader(data, **options)
    expected = [*whole, *whole]
    first = ClusterLoader(data, **options, **workers)
    begun = list(itertools.islice(first, 2))
    second = ClusterLoader(clusters(), **options, **workers)
    second.load_state_dict(first.state_dict())
    assert_same_batches(expected, [*begun, *second, *second])


@pytest.mark.parametrize("method", ["multilevel", "random", "fennel", MultilevelPartitioner()])
def test_any_partitioner(method: Any) -> None:
    data = clusters(method=method)
    assert torch.equal(data.partition.node_perm.sort().values, torch.arange(60))
    assert len(list(ClusterLoader(data, batch_size=4))) == 2


def test_metis_if_it_is_there(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    ClusterData(DATA, 3)
    named = "metis" if "metis" in plugins.names("partitioner") else "multilevel"
    assert named in capsys.readouterr().err
    monkeypatch.setattr(plugins, "names", lambda kind: ["multilevel"])
    ClusterData(DATA, 3)
    assert "multilevel" in capsys.readouterr().err


def test_recursive_is_for_metis() -> None:
    for method in ("multilevel", MultilevelPartitioner()):
        with pytest.raises(NotImplementedError, match=r"recursive=True is for method='metis'"):
            clusters(method=method, recursive=True)
    if "metis" in plugins.names("partitioner"):
        assert len(clusters(method="metis", recursive=True)) == 7


# The file ##################################################################################


def test_the_file_is_read_the_next_time(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    first = clusters(save_dir=str(tmp_path))
    assert [p.relative_to(tmp_path) for p in tmp_path.rglob("*.*")] == [Path("part_7/clusters.npz")]
    with np.load(tmp_path / "part_7" / "clusters.npz", allow_pickle=False) as found:
        assert found["cluster"].dtype == np.int32
    monkeypatch.setattr("pyg_scale.loader.cluster.partition", None)  # nobody calls it
    again = ClusterData(DATA, 7, save_dir=str(tmp_path), sparse_format="csc")
    assert not capsys.readouterr().err
    assert torch.equal(first.partition.node_perm, again.partition.node_perm)
    assert again.partition.sparse_format == "csc"


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    clusters(save_dir=str(tmp_path), filename="mine.npz")
    file = tmp_path / "part_7" / "mine.npz"

    def again(data: Data = DATA, **kwargs: Any) -> ClusterData:
        return clusters(data=data, save_dir=str(tmp_path), filename="mine.npz", **kwargs)

    assert again()
    other = Data(edge_index=DATA.edge_index, num_nodes=61)
    with pytest.raises(ValueError, match=r"60 nodes.*has 61.*remove"):
        again(other)
    other = graph()
    other.edge_index = other.edge_index.flip(0)
    with pytest.raises(ValueError, match=r"other edges"):
        again(other)
    other.edge_index = DATA.edge_index[:, torch.arange(299, -1, -1)]
    assert again(other)  # the same edges in another order
    with pytest.raises(ValueError, match=r"made by method='multilevel', not 'random'"):
        again(method="random")
    content = file.read_bytes()
    versions = [f"clusters {number}".encode("utf-32-le") for number in (1, 9)]
    assert versions[0] in content
    for wrong in (content[:100], b"", content.replace(*versions)):
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"no file of 'pyg_scale clusters 1'"):
            again()
    torch.save({"cluster": 1}, file)
    with pytest.raises(ValueError, match=r"no file of 'pyg_scale clusters 1', perhaps one of PyG"):
        again()


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space"):
        clusters(save_dir=str(tmp_path))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# Arguments #################################################################################


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"num_parts": 61}, ValueError, "num_parts=61.*only 60 nodes"),
        ({"num_parts": 0}, ValueError, "num_parts must be a number of at least 1"),
        ({"num_parts": 2.0}, ValueError, "num_parts must be a number"),
        ({"sparse_format": "coo"}, ValueError, "sparse_format must be one of 'csr', 'csc'"),
        ({"keep_inter_cluster_edges": "no"}, TypeError, "keep_inter_cluster_edges"),
        ({"recursive": 7}, TypeError, "recursive"),
        ({"method": "mettis"}, UnknownPluginError, "mettis"),
        ({"method": 3}, TypeError, "method must be a name or a Partitioner"),
        ({"data": HeteroData()}, NotImplementedError, "HeteroData"),
        ({"data": DATA.edge_index}, TypeError, "data must be a Data"),
        ({"data": Data(x=DATA.x)}, ValueError, "no edge_index"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], says: str) -> None:
    arguments: dict[str, Any] = {"data": DATA, "num_parts": 5} | change
    with pytest.raises(error, match=says):
        ClusterData(**arguments, log=False)


def test_bad_arguments_of_the_loader() -> None:
    with pytest.raises(TypeError, match=r"cluster_data must be a ClusterData.*wrap"):
        ClusterLoader(DATA)
    with pytest.raises(NotImplementedError, match=r"transform="):
        ClusterLoader(clusters(), transform=print)
    with pytest.raises(ValueError, match=r"split_seeds='part'"):
        ClusterLoader(clusters(), split_seeds="part")


def test_states_of_other_clusters_are_refused() -> None:
    """As many nodes and clusters, but others: nodes would be left out, or come twice."""
    state = ClusterLoader(clusters(), batch_size=2, seed=0).state_dict()
    other = ClusterData(DATA, 7, log=False, method="random")
    with pytest.raises(ValueError, match="a loader with clusters="):
        ClusterLoader(other, batch_size=2, seed=0).load_state_dict(state)


def test_steps_of_pyg_that_are_overridden_are_refused() -> None:
    mine = type("Mine", (ClusterLoader,), {"_collate": print, "__module__": "mine"})
    with pytest.raises(NotImplementedError, match=r"Mine\._collate overrides a step"):
        mine(clusters())


def test_a_loop_of_pyg_trains() -> None:
    """The loop of PyG's examples/cluster_gcn_reddit.py, with another import."""
    torch.manual_seed(0)
    conv = SAGEConv(1, 3)
    optimizer = torch.optim.Adam(conv.parameters())
    cluster_data = ClusterData(DATA, num_parts=8, recursive=False, log=False)
    loader = ClusterLoader(cluster_data, batch_size=3, shuffle=True, num_workers=2)
    for batch in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(conv(batch.x, batch.edge_index), batch.y)
        loss.backward()
        optimizer.step()
    assert bool(loss.isfinite()) and loader.stats()["epoch"]["batches"] == 3


def test_a_damaged_file_is_refused_or_the_same(tmp_path: Path) -> None:
    first = ClusterData(DATA, 5, save_dir=str(tmp_path), log=False)
    (file,) = tmp_path.glob("*/clusters.npz")
    whole, rng = file.read_bytes(), np.random.default_rng(3)
    refused = 0
    for number in range(300):
        damaged = bytearray(whole[: len(whole) if number % 3 else rng.integers(len(whole))])
        for place in rng.integers(0, max(1, len(damaged)), 1 + number % 4):
            damaged[place : place + 1] = bytes([rng.integers(256)])
        file.write_bytes(damaged)
        try:
            found = ClusterData(DATA, 5, save_dir=str(tmp_path), log=False)
        except ValueError as error:
            refused += "clusters.npz" in str(error)
        else:
            assert torch.equal(found.partition.node_perm, first.partition.node_perm)
    assert refused > 200
