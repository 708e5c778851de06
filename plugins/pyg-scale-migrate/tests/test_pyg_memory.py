"""PyG's local stores made of tensors: each rank holds its part in memory, without a directory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.distributed as pyg
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_scale.datasets import planted_communities, read_npz
from pyg_scale.distributed import (
    DistContext,
    DistLinkNeighborLoader,
    DistNeighborLoader,
    LocalFeatureStore,
    LocalGraphStore,
)
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader
from pyg_scale.testing.ranks import run_ranks
from tests.distributed.processes import free_port
from tests.loader.batches import assert_same

Stores = tuple[LocalFeatureStore, LocalGraphStore]


def _bare(data: Data) -> Data:
    return Data(x=data.x, y=data.y, edge_index=data.edge_index)


def _stores(data: Data, part: Tensor, rank: int, **more: str) -> Stores:
    """The part of a rank; ``more`` names attributes beside ``x``, ``y`` and ``edge_attr``."""
    num_parts = int(part.max()) + 1
    nodes = (part == rank).nonzero().view(-1).flip(0)  # in any order
    edges = (part[data.edge_index[1]] == rank).nonzero().view(-1)
    edges = edges[torch.randperm(edges.numel())]
    rows = data.edge_attr
    features = LocalFeatureStore.from_data(
        nodes, data.x[nodes], data.y[nodes], edges, None if rows is None else rows[edges]
    )
    for name, of in more.items():
        ids, group = (nodes, None) if of == "nodes" else (edges, (None, None))
        features.put_tensor(data[name][ids], group_name=group, attr_name=name)
    graph = LocalGraphStore.from_data(edges, data.edge_index[:, edges], int(data.num_nodes or 0))
    graph.node_pb, graph.num_partitions, graph.partition_idx = part, num_parts, rank
    return features, graph


def _on_ranks(size: int, work: Callable[[int, dict[str, Any]], Any]) -> list[Any]:
    """What ``work(rank, where the ranks meet)`` returns on every rank."""
    port = free_port()

    def run(group: Any) -> Any:
        context = DistContext(group.rank, group.rank, size, size, "memory")
        meeting = {"master_addr": "127.0.0.1", "master_port": port, "current_ctx": context}
        return work(group.rank, {**meeting, "rpc_timeout": 30})

    return run_ranks(size, run)


def _batches(loader: Any) -> list[Any]:
    found = list(loader)
    loader.close()
    return found


def _check(found: list[list[Any]], expected: list[list[Any]]) -> None:
    for mine, whole in zip(found, expected, strict=True):
        assert len(mine) == len(whole) > 0
        for one, other in zip(mine, whole, strict=True):
            assert_same(one, other)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("size", "shift"), [(1, 0), (2, 0), (3, 1)])
def test_batches_are_those_of_one_process(data_dir: Path, size: int, shift: int) -> None:
    data = _bare(read_npz(data_dir / "facebook_pages.npz"))
    torch.manual_seed(0)
    data.edge_attr = torch.randn(data.num_edges, 3)
    part = torch.randint(size, (int(data.num_nodes),))
    loading: dict[str, Any] = {"batch_size": 64, "shuffle": True, "seed": 3}
    seeds = [torch.arange(rank, 600, 3) for rank in range(size)]

    def work(rank: int, meeting: dict[str, Any]) -> list[Any]:
        stores = _stores(data, part, (rank + shift) % size)  # parts need not be in order
        loader = DistNeighborLoader(stores, [6, 4], input_nodes=seeds[rank], **meeting, **loading)
        return _batches(loader)

    expected = [list(NeighborLoader(data, [6, 4], ids, **loading)) for ids in seeds]
    _check(_on_ranks(size, work), expected)


def test_types(data_dir: Path) -> None:
    data = read_npz(data_dir / "dblp.npz")
    assert isinstance(data, HeteroData)
    torch.manual_seed(0)
    parts = {t: torch.randint(2, (data[t].num_nodes,)) for t in data.node_types}
    seed_type = next(t for t in data.node_types if "y" in data[t])
    seeds = [torch.arange(rank, data[seed_type].num_nodes, 9) for rank in range(2)]
    loading: dict[str, Any] = {"batch_size": 100, "seed": 2}

    def work(rank: int, meeting: dict[str, Any]) -> list[Any]:
        nodes = {t: (part == rank).nonzero().view(-1) for t, part in parts.items()}
        edges = {
            t: (parts[t[2]][data[t].edge_index[1]] == rank).nonzero().view(-1)
            for t in data.edge_types
        }
        features = LocalFeatureStore.from_hetero_data(
            nodes,
            {t: data[t].x[ids] for t, ids in nodes.items() if "x" in data[t]},
            {t: data[t].y[ids] for t, ids in nodes.items() if "y" in data[t]},
        )
        for name in ("train_mask", "val_mask", "test_mask"):
            if name in data[seed_type]:
                features.put_tensor(
                    data[seed_type][name][nodes[seed_type]],
                    group_name=seed_type,
                    attr_name=name,
                )
        graph = LocalGraphStore.from_hetero_data(
            edges,
            {t: data[t].edge_index[:, ids] for t, ids in edges.items()},
            {t: data[t].num_nodes for t in data.node_types},
        )
        graph.node_pb, graph.num_partitions, graph.partition_idx = parts, 2, rank
        loader = DistNeighborLoader(
            (features, graph), [4, 3], input_nodes=(seed_type, seeds[rank]), **meeting, **loading
        )
        return _batches(loader)

    expected = [list(NeighborLoader(data, [4, 3], (seed_type, s), **loading)) for s in seeds]
    _check(_on_ranks(2, work), expected)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("of", ["nodes", "edges", "weights"])
def test_times_and_weights(of: str, size: int) -> None:
    data = _bare(planted_communities(200, 1500))
    torch.manual_seed(1)
    part = torch.randint(size, (200,))
    name = {"nodes": "time", "edges": "edge_time", "weights": "weight"}[of]
    data[name] = {
        "nodes": torch.randint(50, (200,)),
        "edges": torch.randint(50, (data.num_edges,)).double() / 7,
        "weights": torch.rand(data.num_edges),
    }[of]
    argument = "weight_attr" if of == "weights" else "time_attr"
    loading: dict[str, Any] = {argument: name, "batch_size": 30, "seed": 1}
    more = {name: "nodes" if of == "nodes" else "edges"}
    if of == "edges":
        loading["input_time"] = torch.full((200,), 4.0).double()
    ids = torch.arange(200)

    def work(rank: int, meeting: dict[str, Any]) -> list[Any]:
        stores = _stores(data, part, rank, **more)
        loader = DistNeighborLoader(stores, [4, 4], input_nodes=ids, **meeting, **loading)
        return _batches(loader)

    _check(_on_ranks(size, work), [list(NeighborLoader(data, [4, 4], ids, **loading))] * size)


def test_links() -> None:
    data = _bare(planted_communities(300, 3000))
    labels = data.y + 7
    part = torch.arange(300) // 150  # a range: no book
    links = [data.edge_index[:, rank:400:2] for rank in range(2)]
    loading: dict[str, Any] = {"neg_sampling_ratio": 1.0, "batch_size": 64, "seed": 5}

    def work(rank: int, meeting: dict[str, Any]) -> list[Any]:
        stores = _stores(data, part, rank)
        stores[0].labels = labels
        loader = DistLinkNeighborLoader(
            stores, [5, 3], edge_label_index=links[rank], **meeting, **loading
        )
        return _batches(loader)

    found = _on_ranks(2, work)
    data.y = labels
    expected = [list(LinkNeighborLoader(data, [5, 3], each, **loading)) for each in links]
    _check(found, expected)


def test_stores_are_those_of_pyg() -> None:
    """Everything that PyG's stores of the same tensors answer."""
    data: Data = planted_communities(60, 300)
    data.edge_attr = torch.randn(300, 2)
    nodes, edges = torch.randperm(60)[:40], torch.randperm(300)[:200]
    found = []
    for module in (pyg, None):
        graphs: Any = LocalGraphStore if module is None else module.LocalGraphStore
        stores: Any = LocalFeatureStore if module is None else module.LocalFeatureStore
        graph = graphs.from_data(edges, data.edge_index[:, edges], 60)
        features = stores.from_data(nodes, data.x[nodes], None, edges, data.edge_attr[edges])
        graph.node_pb, graph.edge_pb = torch.arange(60) % 2, torch.arange(300) % 2
        assert graph.num_partitions == 1 and features.labels is None and graph.is_sorted is None
        row, col = graph.get_edge_index(None, "coo")
        ids = graph.get_edge_id(None, "coo")
        assert torch.equal(data.edge_index[:, ids], torch.stack([row, col]))
        assert bool((col[1:] >= col[:-1]).all())
        found.append(
            [
                col,
                ids.sort().values,
                graph.get_partition_ids_from_nids(torch.tensor([3, 4])),
                graph.get_partition_ids_from_eids(torch.tensor([5, 8])),
                features.get_global_id(None),
                features.get_tensor(None, "x"),
                features.get_tensor_from_global_id(
                    group_name=None, attr_name="x", index=nodes[3:9]
                ),
                features.get_tensor((None, None), "edge_attr", index=torch.tensor([1])),
                torch.tensor(features.get_tensor_size(None, "x")),
                torch.tensor(features.has_edge_attr()),
            ]
        )
        assert graph.get_all_edge_attrs()[0].size == (60, 60)
        assert graph.remove_edge_id(edge_type=None, layout="coo")
        assert graph.get_edge_id(edge_type=None, layout="coo") is None
        assert graph.remove_edge_index(edge_type=None, layout="coo")
        assert features.remove_global_id(None) and features.get_global_id(None) is None
        assert features.remove_tensor(None, "x", None)
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(theirs, ours)


def _alone(stores: Stores, **options: Any) -> DistNeighborLoader:
    context = DistContext(0, 0, 1, 1, "alone")
    return DistNeighborLoader(stores, [2], "127.0.0.1", free_port(), context, **options)


def test_what_does_not_fit_is_refused() -> None:
    data: Data = planted_communities(60, 300)
    part = torch.zeros(60, dtype=torch.int64)
    features, graph = _stores(data, part, 0)
    twice = LocalFeatureStore.from_data(torch.tensor([*range(60), 7]), torch.zeros(61, 2))
    with pytest.raises(ValueError, match="'x' of None has several rows of 7"):
        _alone((twice, graph))
    none = LocalFeatureStore.from_data(torch.arange(59), torch.zeros(59, 2))
    with pytest.raises(ValueError, match="'x' of None has no row of 59, which part 0 owns"):
        _alone((none, graph))
    graph.num_partitions = 2
    with pytest.raises(ValueError, match="needs 2 ranks with a part each, current_ctx has 1"):
        _alone((features, graph))
    for edge_id, edge_index, error in (
        (torch.tensor([0, 0]), torch.tensor([[0, 1], [1, 2]]), "two edges None have the id 0"),
        (torch.tensor([0, 2]), torch.tensor([[0, 1], [1, 2]]), "edge 2  of rank 0: ids of edges"),
        (torch.tensor([0, 1]), torch.tensor([[0, 1], [1, 60]]), "edge 1  has destination 60"),
    ):
        wrong = LocalGraphStore.from_data(edge_id, edge_index, 60)
        with pytest.raises((ValueError, IndexError), match=error):
            _alone((features, wrong))
    with pytest.raises(ValueError, match="edge_index \\[2, num_edges\\]"):
        LocalGraphStore.from_data(torch.arange(3), torch.zeros(2, 4, dtype=torch.int64), 60)
    with pytest.raises(ValueError, match="without edge_id"):
        LocalFeatureStore.from_data(torch.arange(3), edge_attr=torch.ones(3))
    with pytest.raises(ValueError, match="row for each of 3 ids"):
        LocalFeatureStore.from_data(torch.arange(3), torch.ones(4))
    with pytest.raises(ValueError, match="neither an attribute of nodes nor of edges"):
        _alone(_stores(data, part, 0), time_attr="when")
    with pytest.raises(ValueError, match="node_pb was not set"):
        LocalGraphStore().get_partition_ids_from_nids(torch.arange(3))


IDS, EDGES = torch.arange(3), torch.tensor([[0, 1, 2], [1, 2, 0]])
TYPE = ("u", "to", "v")


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: LocalGraphStore.from_data(None, EDGES, 3), TypeError, r"edge_id .*\(got NoneType"),
        (
            lambda: LocalGraphStore.from_data(IDS + 0.5, EDGES, 3),
            TypeError,
            "edge_id must be a tensor of integers .*float32",
        ),
        (
            lambda: LocalGraphStore.from_data(IDS, EDGES.tolist(), 3),
            TypeError,
            r"edge_index must be a tensor of integers \(got list\)",
        ),
        (
            lambda: LocalGraphStore.from_data(IDS, EDGES, "3"),
            TypeError,
            r"num_nodes must be an integer \(got '3'\)",
        ),
        (
            lambda: LocalGraphStore.from_hetero_data({TYPE: IDS}, {TYPE: EDGES}, {"u": 3}),
            KeyError,
            "num_nodes_dict lacks the node type 'v' of .*'to'",
        ),
        (
            lambda: LocalGraphStore.from_hetero_data({}, {TYPE: EDGES}, {"u": 3, "v": 3}),
            KeyError,
            "edge_id_dict lacks the edge type .*'to'",
        ),
        (
            lambda: LocalGraphStore.from_hetero_data(
                {TYPE: IDS}, {TYPE: EDGES}, {"u": 3, "v": True}
            ),
            TypeError,
            r"num_nodes_dict\['v'\] must be an integer",
        ),
        (
            lambda: LocalFeatureStore.from_data(IDS.double(), torch.ones(3, 1)),
            TypeError,
            "node_id must be a tensor of integers .*float64",
        ),
        (
            lambda: LocalFeatureStore.from_data(IDS, [[1.0]] * 3),
            TypeError,
            r"'x' of None must be a tensor \(got list\)",
        ),
        (
            lambda: LocalFeatureStore.from_hetero_data({"u": [0, 1]}),
            TypeError,
            r"node_id of 'u' must be a tensor of integers \(got list\)",
        ),
    ],
)
def test_arguments_of_a_wrong_type_are_named(
    make: Callable[[], Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make()


def test_ids_that_were_put_are_integers() -> None:
    features, graph = _stores(planted_communities(60, 300), torch.zeros(60, dtype=torch.int64), 0)
    ids = graph.get_edge_id(None, "coo")
    assert ids is not None
    graph.put_edge_id(ids + 0.5, edge_type=None, layout="coo")
    with pytest.raises(TypeError, match="ids of edges None must be a tensor of integers"):
        _alone((features, graph))
    graph.put_edge_id(ids, edge_type=None, layout="coo")
    features.put_global_id(torch.arange(60) + 0.5, None)
    with pytest.raises(TypeError, match="ids of features of None must be a tensor of integers"):
        _alone((features, graph))


def test_loaders_that_share_a_graph_have_the_same_stores() -> None:
    data: Data = planted_communities(60, 300)
    part = torch.arange(60) % 2

    def work(rank: int, meeting: dict[str, Any]) -> None:
        features, graph = _stores(data, part, rank)
        first = DistNeighborLoader((features, graph), [2], **meeting)
        DistNeighborLoader((features, graph), [2], **meeting)
        others, _ = _stores(data, part, rank)
        with pytest.raises(ValueError, match="another feature store, or the stores were changed"):
            DistNeighborLoader((others, graph), [2], **meeting)
        features.put_tensor(features.get_tensor(None, "x") + 1, None, "x", None)
        with pytest.raises(ValueError, match="another feature store, or the stores were changed"):
            DistNeighborLoader((features, graph), [2], **meeting)
        assert len(_batches(first))

    _on_ranks(2, work)


def test_ranks_that_differ_are_refused_everywhere() -> None:
    data: Data = planted_communities(60, 300)
    part = torch.arange(60) % 2

    def tried(change: Callable[[int, Stores], Any]) -> list[str]:
        def work(rank: int, meeting: dict[str, Any]) -> str:
            stores = _stores(data, part, rank)
            change(rank, stores)
            with pytest.raises(ValueError) as error:
                DistNeighborLoader(stores, [2], **meeting)
            return str(error.value)

        return _on_ranks(2, work)

    def other_book(rank: int, stores: Stores) -> None:
        if rank == 1:
            book = part.clone()
            book[5], book[4] = 0, 1
            stores[1].node_pb = book
            del stores[1]._edge_index[None, "coo"], stores[1]._edge_id[None, "coo"]
            empty = torch.empty(2, 0, dtype=torch.int64)
            attr = {"edge_type": None, "layout": "coo", "size": (60, 60)}
            stores[1].put_edge_index(empty, **attr)
            stores[1].put_edge_id(empty[0], **attr)
            stores[0].put_global_id(torch.arange(60), None)
            stores[0].put_tensor(data.x, None, "x", None)
            stores[0].put_tensor(data.y, None, "y", None)

    def same_part(rank: int, stores: Stores) -> None:
        if rank == 1:
            mine = _stores(data, part, 0)
            stores[1].__dict__.update(mine[1].__dict__)
            stores[0].__dict__.update(mine[0].__dict__)

    def no_book(rank: int, stores: Stores) -> None:
        if rank == 1:
            stores[1].node_pb = None

    def doubled(rank: int, stores: Stores) -> None:
        attr = {"edge_type": None, "layout": "coo"}
        ids = stores[1].get_edge_id(**attr)
        assert ids is not None
        stores[1].put_edge_id(torch.arange(ids.numel()), **attr)

    for change, error in (
        (other_book, "rank 1 and rank 0 differ in node types, node_pb"),
        (same_part, r"ranks hold the parts \[0, 0\]"),
        (no_book, "node_pb was not set"),
        (doubled, "edge 0  of rank 1: ids of edges"),
    ):
        for said in tried(change):
            assert re.search(error, said), said
