"""Scripts in the form of PyG's distributed examples: partition, then each rank its own part."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.distributed as pyg
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NegativeSampling

import pyg_scale.distributed as ours
from pyg_scale.datasets import hetero_communities, planted_communities, read_npz
from pyg_scale.distributed import (
    DistContext,
    DistLinkNeighborLoader,
    DistNeighborLoader,
    LocalFeatureStore,
    LocalGraphStore,
    Partitioner,
)
from pyg_scale.errors import CommTimeoutError, GraphDirectoryError
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader
from pyg_scale.testing.ranks import run_ranks
from tests.distributed.across import spread
from tests.distributed.processes import end, free_port, start
from tests.loader.batches import assert_same


def _cut(data: Any, folder: Path, num_parts: int = 2, **options: Any) -> list[Path]:
    """A directory for each rank, which has its own part alone."""
    Partitioner(data, num_parts, str(folder / "parts"), **options).generate_partition()
    return spread(folder / "parts", [[part] for part in range(num_parts)])


def _context(rank: int, world_size: int) -> DistContext:
    return DistContext(rank, rank, world_size, world_size, "test-sage")


def _stores(path: Path, rank: int) -> tuple[LocalFeatureStore, LocalGraphStore]:
    return LocalFeatureStore.from_partition(str(path), rank), LocalGraphStore.from_partition(
        str(path), rank
    )


def _on_ranks(paths: list[Path], work: Callable[[int, Any, dict[str, Any]], Any]) -> list[Any]:
    """What ``work(rank, stores, where the ranks meet)`` returns on every rank."""
    port = free_port()

    def run(group: Any) -> Any:
        rank = group.rank
        meeting = {
            "master_addr": "127.0.0.1",
            "master_port": port,
            "current_ctx": _context(rank, len(paths)),
            "rpc_timeout": 30,
        }
        return work(rank, _stores(paths[rank], rank), meeting)

    return run_ranks(len(paths), run)


def _check(found: list[list[Any]], expected: list[list[Any]]) -> None:
    for mine, whole in zip(found, expected, strict=True):
        assert len(mine) == len(whole) > 0
        for one, other in zip(mine, whole, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize(
    "name",
    [
        "Partitioner",
        "DistNeighborLoader",
        "DistLinkNeighborLoader",
        *(
            f"{store}{method}"
            for store in ("LocalGraphStore", "LocalFeatureStore")
            for method in ("", ".from_data", ".from_hetero_data", ".from_partition")
        ),
    ],
)
def test_arguments_are_those_of_pyg(name: str) -> None:
    theirs = list(inspect.signature(operator.attrgetter(name)(pyg)).parameters)
    mine = list(inspect.signature(operator.attrgetter(name)(ours)).parameters)
    theirs = [each for each in theirs if each != "kwargs"]
    assert mine[: len(theirs)] == theirs


@pytest.fixture(scope="module")
def pages(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Data, list[Path]]:
    data = read_npz(data_dir / "facebook_pages.npz")
    return data, _cut(data, tmp_path_factory.mktemp("pages"))


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "options", [{}, {"concurrency": 2, "num_workers": 2}, {"async_sampling": False}]
)
def test_nodes(pages: tuple[Data, list[Path]], options: dict[str, Any]) -> None:
    data, paths = pages
    labels = data.y + 100
    seeds = [torch.arange(rank, 600, 7 - 4 * rank) for rank in range(2)]  # unequal numbers
    loading: dict[str, Any] = {"batch_size": 64, "shuffle": True, "seed": 3}

    def work(rank: int, stores: Any, meeting: dict[str, Any]) -> list[Any]:
        stores[0].labels = labels
        loader = DistNeighborLoader(
            stores, [8, 5], input_nodes=seeds[rank], **meeting, **loading, **options
        )
        assert isinstance(loader, NeighborLoader)
        batches = list(loader)
        with loader as batches_again:
            assert next(batches_again).batch_size == 64
        loader.close()
        return batches

    whole = data.clone()
    whole.y = labels
    expected = [list(NeighborLoader(whole, [8, 5], ids, **loading)) for ids in seeds]
    _check(_on_ranks(paths, work), expected)


def test_all_nodes_are_shared(tmp_path: Path) -> None:
    data = planted_communities(200, 1500)
    paths = _cut(data, tmp_path, method="random")

    def work(rank: int, stores: Any, meeting: dict[str, Any]) -> list[Any]:
        loader = DistNeighborLoader(stores, [4], **meeting, batch_size=30, seed=1)
        batches = list(loader)
        loader.close()
        return batches

    whole = list(NeighborLoader(data, [4], batch_size=30, seed=1))
    _check(_on_ranks(paths, work), [whole[0::2], whole[1::2]])


def test_links(pages: tuple[Data, list[Path]]) -> None:
    data, paths = pages
    links = [data.edge_index[:, rank:400:2] for rank in range(2)]
    loading: dict[str, Any] = {
        "neg_sampling": NegativeSampling("binary", 1.0),
        "batch_size": 64,
        "seed": 5,
    }

    def work(rank: int, stores: Any, meeting: dict[str, Any]) -> list[Any]:
        loader = DistLinkNeighborLoader(
            stores, [5, 3], edge_label_index=links[rank], **meeting, **loading
        )
        batches = list(loader)
        loader.close()
        return batches

    expected = [list(LinkNeighborLoader(data, [5, 3], each, **loading)) for each in links]
    _check(_on_ranks(paths, work), expected)


def test_types(data_dir: Path, tmp_path: Path) -> None:
    data = read_npz(data_dir / "dblp.npz")
    paths = _cut(data, tmp_path)
    node_type = next(t for t in data.node_types if "y" in data[t])
    labels = data[node_type].y.flip(0)
    seeds = [(node_type, torch.arange(rank, data[node_type].num_nodes, 9)) for rank in range(2)]
    others = [(node_type, torch.arange(rank, 400, 5)) for rank in range(2)]
    loading: dict[str, Any] = {"batch_size": 100, "seed": 2}

    def work(rank: int, stores: Any, meeting: dict[str, Any]) -> list[Any]:
        stores[0].labels = labels
        train = DistNeighborLoader(stores, [4, 3], input_nodes=seeds[rank], **meeting, **loading)
        test = DistNeighborLoader(stores, [2], input_nodes=others[rank], **meeting, **loading)
        assert test.data.ranks is train.data.ranks  # one address, one connection
        batches = [*train, *test]
        train.close()
        return batches

    whole = data.clone()
    whole[node_type].y = labels
    expected = [
        [
            *NeighborLoader(whole, [4, 3], seeds[rank], **loading),
            *NeighborLoader(whole, [2], others[rank], **loading),
        ]
        for rank in range(2)
    ]
    _check(_on_ranks(paths, work), expected)


def test_times(tmp_path: Path) -> None:
    data = planted_communities(200, 1500)
    torch.manual_seed(1)
    data.time = torch.randint(50, (200,))
    data.edge_attr = torch.randn(data.num_edges, 2)
    paths = _cut(data, tmp_path, time_attr="time")
    loading: dict[str, Any] = {"time_attr": "time", "batch_size": 30, "seed": 1}
    seeds = [torch.arange(rank, 200, 3) for rank in range(2)]

    def work(rank: int, stores: Any, meeting: dict[str, Any]) -> list[Any]:
        loader = DistNeighborLoader(stores, [4, 4], input_nodes=seeds[rank], **meeting, **loading)
        batches = list(loader)
        loader.close()
        return batches

    expected = [list(NeighborLoader(data, [4, 4], ids, **loading)) for ids in seeds]
    _check(_on_ranks(paths, work), expected)


def test_a_script_trains(tmp_path: Path) -> None:
    """Processes, DDP beside the loaders, nothing closed: as PyG's example."""
    data = planted_communities(600, 6000, homophily=0.8, signal=1.0, seed=1)
    paths = _cut(data, tmp_path)
    torch.save(data.y, tmp_path / "label.pt")
    code = f"""
import os, torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE
import pyg_scale.distributed as pyg_dist
from pyg_scale.distributed import DistContext, LocalFeatureStore, LocalGraphStore

rank, size = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
port = int(os.environ.pop("MASTER_PORT")); del os.environ["MASTER_ADDR"]
root = {[str(path) for path in paths]!r}[rank]
graph = LocalGraphStore.from_partition(root, rank)
feature = LocalFeatureStore.from_partition(root, rank)
feature.labels = torch.load({str(tmp_path / "label.pt")!r})
ids = (graph.node_pb == rank).nonzero().view(-1)
ctx = DistContext(rank=rank, global_rank=rank, world_size=size, global_world_size=size,
                  group_name="distributed-sage")
torch.distributed.init_process_group("gloo", rank=rank, world_size=size,
                                     init_method=f"tcp://127.0.0.1:{{port}}")
torch.manual_seed(rank)
common = dict(data=(feature, graph), current_ctx=ctx, device=torch.device("cpu"),
              num_neighbors=[5, 5], batch_size=32, master_addr="127.0.0.1",
              concurrency=2, async_sampling=True)
train = pyg_dist.DistNeighborLoader(input_nodes=ids[:256], shuffle=True, drop_last=True,
                                    num_workers=1, persistent_workers=True,
                                    master_port={free_port()}, **common)
test = pyg_dist.DistNeighborLoader(input_nodes=ids[256:], num_workers=0,
                                   master_port="{free_port()}", **common)
torch.manual_seed(0)
classes = int(feature.labels.max()) + 1
model = DistributedDataParallel(GraphSAGE({data.num_features}, 16, 2, classes))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for epoch in range(4):
    with train.enable_multithreading(2):
        for batch in train:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[:batch.batch_size]
            F.cross_entropy(out, batch.y[:batch.batch_size]).backward()
            optimizer.step()
right = total = 0
with torch.no_grad():
    for batch in test:
        out = model.module(batch.x, batch.edge_index)[:batch.batch_size].argmax(-1)
        right += int((out == batch.y[:batch.batch_size]).sum()); total += batch.batch_size
assert total == ids.numel() - 256
print("accuracy", right / total, 1 / classes)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""
    found = end(start(tmp_path, code, 2))
    assert [code for code, _ in found] == [0, 0], found
    for _, output in found:
        right, by_chance = map(float, output.split("accuracy ")[1].split()[:2])
        assert right > 2 * by_chance


def test_stores(tmp_path: Path) -> None:
    data = planted_communities(120, 900)
    data.edge_attr = torch.arange(data.num_edges)
    paths = _cut(data, tmp_path, num_parts=3, method="random")
    ids, edges = [], []
    for part in range(3):
        features, graph = _stores(paths[part], part)
        assert graph.num_partitions == features.num_partitions == 3
        assert graph.partition_idx == features.partition_idx == part
        assert graph.meta is not None and graph.meta["num_parts"] == 3
        assert graph.meta["is_hetero"] is False and graph.is_sorted
        own = features.get_global_id(None)
        assert isinstance(own, Tensor)
        assert graph.get_partition_ids_from_nids(own).eq(part).all()
        assert graph.node_pb[own].eq(part).all() and features.node_feat_pb[own].eq(part).all()
        assert features.get_tensor(None, "x").equal(data.x[own])
        assert features.get_tensor_from_global_id(None, "x", own[3:5]).equal(data.x[own[3:5]])
        with pytest.raises(IndexError, match=f"not in part {part}"):
            features.get_tensor_from_global_id(None, "x", (graph.node_pb != part).nonzero()[0])
        edge_index, edge_id = graph.get_edge_index(None, "coo"), graph.get_edge_id(None, "coo")
        assert torch.stack(edge_index).equal(data.edge_index[:, edge_id])
        assert graph.node_pb[edge_index[1]].eq(part).all()
        assert graph.get_partition_ids_from_eids(edge_id).eq(part).all()
        assert graph.edge_pb[edge_id].eq(part).all()
        assert features.get_tensor((None, None), "edge_attr").equal(
            features.get_global_id((None, None))
        )
        assert features.has_edge_attr()
        assert ("x" in {attr.attr_name for attr in features.get_all_tensor_attrs()}) and (
            features.get_tensor_size(None, "x") == (own.numel(), data.num_features)
        )
        ids.append(own)
        edges.append(edge_id)
        with pytest.raises(NotImplementedError, match="read-only"):
            features.put_tensor(data.x, None, "x")
    assert torch.cat(ids).sort().values.equal(torch.arange(120))
    assert torch.cat(edges).sort().values.equal(torch.arange(data.num_edges))
    with pytest.raises(GraphDirectoryError, match="part 1 is not local"):
        LocalGraphStore.from_partition(paths[0], 1)


def test_stores_with_types(tmp_path: Path) -> None:
    data = hetero_communities()
    assert isinstance(data, HeteroData)
    alone = _stores(_cut(data, tmp_path)[1], 1)[1]
    features, graph = _stores(tmp_path / "parts", 1)
    assert graph.meta["node_types"] == data.node_types
    assert [tuple(each) for each in graph.meta["edge_types"]] == data.edge_types
    for node_type in data.node_types:
        ids = features.get_global_id(node_type)
        assert graph.node_pb[node_type][ids].eq(1).all()
        assert graph.get_partition_ids_from_nids(ids, node_type).eq(1).all()
        if "x" in data[node_type]:
            assert features.get_tensor(node_type, "x").equal(data[node_type].x[ids])
    for edge_type in data.edge_types:
        row, col = graph.get_edge_index(edge_type, "coo")
        ids = graph.get_edge_id(edge_type, "coo")
        assert torch.stack([row, col]).equal(data[edge_type].edge_index[:, ids])
        assert graph.get_partition_ids_from_eids(ids, edge_type).eq(1).all()
        assert graph.edge_pb[edge_type].eq(1).sum() == ids.numel()
    with pytest.raises(GraphDirectoryError, match="part 0, which would, is not here"):
        alone.get_partition_ids_from_eids(torch.arange(3), data.edge_types[0])


def test_partitioner(tmp_path: Path) -> None:
    data = planted_communities(60, 300)
    root = tmp_path / "new" / "parts"
    root.mkdir(parents=True)
    Partitioner(data, 2, str(root)).generate_partition()
    assert sorted(path.name for path in root.parent.iterdir()) == ["parts"]
    with pytest.raises(FileExistsError, match="overwrite=True"):
        Partitioner(data, 3, str(root)).generate_partition()
    Partitioner(data, 3, str(root), overwrite=True, method="random").generate_partition()
    assert LocalGraphStore.from_partition(root, 2).num_partitions == 3
    with pytest.raises(ValueError, match="recursive=True"):
        Partitioner(data, 2, "x", recursive=True, method="random")
    with pytest.raises(ValueError, match="num_parts"):
        Partitioner(data, 0, "x")
    with pytest.raises(TypeError, match="Data or HeteroData"):
        Partitioner([data], 2, "x")  # type: ignore[arg-type]


def test_wrong_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = planted_communities(60, 300)
    _cut(data, tmp_path)
    stores = _stores(tmp_path / "parts", 0)
    for method in (stores[1].put_edge_id, stores[0].put_global_id):
        with pytest.raises(NotImplementedError, match="read-only"):
            method(torch.arange(3), None)
    in_memory = LocalGraphStore.from_data(torch.arange(3), data.edge_index[:, :3], 60)
    with pytest.raises(ValueError, match="different parts"):
        DistNeighborLoader((stores[0], in_memory), [2], "127.0.0.1", 1, _context(0, 1))
    monkeypatch.delenv("MASTER_PORT", raising=False)

    def make(stores: Any = stores, port: Any = None, rank: int = 1, **options: Any) -> None:
        port = free_port() if port is None else port
        DistNeighborLoader(stores, [2], "127.0.0.1", port, _context(rank, 2), **options)

    with pytest.raises(NotImplementedError, match="neighbor_sampler="):
        make(dist_sampler=object())
    with pytest.raises(ValueError, match="concurrency"):
        make(concurrency=0)
    with pytest.raises(ValueError, match="async_sampling=True"):
        make(concurrency=2, async_sampling=False)
    with pytest.raises(ValueError, match="master_port must be"):
        make(port="elsewhere")
    with pytest.raises(ValueError, match="master_port is missing"):
        DistNeighborLoader(stores, [2], "127.0.0.1", None, _context(0, 2))
    with pytest.raises(ValueError, match="rank 5 of 2"):
        make(rank=5)
    with pytest.raises(TypeError, match=r"current_ctx must be a DistContext .*\(got None\)"):
        DistNeighborLoader(stores, [2], "127.0.0.1", free_port(), None)
    for part in ("0", None, 0.0, True):
        for store in (LocalGraphStore, LocalFeatureStore):
            with pytest.raises(TypeError, match=f"pid must be an integer .got {part!r}"):
                store.from_partition(tmp_path / "parts", part)
    with pytest.raises(ValueError, match="rpc_timeout"):
        make(rpc_timeout=0)
    with pytest.raises(TypeError, match="LocalFeatureStore"):
        make(stores=(data, data))
    with pytest.raises(CommTimeoutError, match="rank 0 did not come within 0.3 seconds"):
        make(rpc_timeout=0.3)
    stores[0].labels = data.y[1:]
    with pytest.raises(ValueError, match="row for each of 60 nodes"):
        DistNeighborLoader(stores, [2], "127.0.0.1", 1, _context(0, 1))
    with pytest.raises(RuntimeError, match="set them before"):
        stores[0].labels = data.y


def test_one_rank(tmp_path: Path) -> None:
    data: Data = planted_communities(60, 300)
    Partitioner(data, 1, tmp_path / "parts").generate_partition()
    loader = DistNeighborLoader(
        _stores(tmp_path / "parts", 0),
        [3],
        "127.0.0.1",
        free_port(),
        pyg.DistContext(0, 0, 1, 1, "g"),
        batch_size=20,
        seed=0,
    )
    _check([list(loader)], [list(NeighborLoader(data, [3], batch_size=20, seed=0))])
    loader.close()
