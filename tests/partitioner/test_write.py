"""Parts on disk, compared with what the edge list says that they must be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import pyg_scale
from pyg_scale import save
from pyg_scale.datasets import load
from pyg_scale.errors import GraphDirectoryError
from pyg_scale.partitioner import Partition, write_partition
from pyg_scale.partitioner.rows import RowWriter
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.topology import topology_of

K = 4


def homogeneous(weighted: bool = False) -> Data:
    g = torch.Generator().manual_seed(1)
    n, e = 300, 2_000
    data = Data(
        x=torch.randn(n, 5, generator=g),
        bits=torch.randn(n, 2, generator=g).to(torch.bfloat16),
        y=torch.randint(0, 3, (n,), generator=g),
        edge_index=torch.randint(0, n - 7, (2, e), generator=g),  # the last nodes have no edge
        edge_attr=torch.randn(e, 3, generator=g),
        train_mask=torch.rand(n, generator=g) < 0.3,
    )
    if weighted:
        data.edge_weight = torch.rand(e, generator=g)
    return data


def edge_times() -> Data:
    data = homogeneous()
    data.edge_time = torch.randint(0, 20, (data.num_edges,))  # many are equal
    return data


GRAPHS = {
    "homogeneous": (homogeneous, {}),
    "weighted": (lambda: homogeneous(weighted=True), {"weight_attr": "edge_weight"}),
    "edge times": (edge_times, {"time_attr": "edge_time"}),
    "dblp": (None, {}),
    "history": (None, {"time_attr": "time"}),
}


@pytest.fixture(params=GRAPHS, scope="module")
def case(request, tmp_path_factory):
    """A graph, its directory of one part, options, and what it was cut into."""
    make, options = GRAPHS[request.param]
    data = make() if make else load(request.getfixturevalue("data_dir") / f"{request.param}.npz")
    folder = tmp_path_factory.mktemp("write")
    save(data, folder / "graph", **options)
    partition = random_parts(data)
    for strategy, memory in (("by_dst", "1MiB"), ("by_src", "1MiB"), ("by_dst", "1GB")):
        write_partition(
            folder / "graph",
            partition,
            folder / f"{strategy}-{memory}",
            edge_assign_strategy=strategy,
            memory=memory,
        )
    return data, folder, options, partition


def store_of(data, kind):
    return data if kind is None else data[kind]


def random_parts(data, num_parts: int = K, seed: int = 0) -> Partition:
    counts = topology_of(data).num_nodes
    g = torch.Generator().manual_seed(seed)
    parts = {t: torch.randint(0, num_parts, (n,), generator=g) for t, n in counts.items()}
    return Partition(parts, num_parts, "random", {"a": 1}, seed=7, extra={"kept": [1, 2]})


def edges_of(data, edge_type):
    edge_index = store_of(data, edge_type).edge_index
    ends = (None, None) if edge_type is None else (edge_type[0], edge_type[2])
    return edge_index[0], edge_index[1], *ends


def expected(data, edge_type, parts, number, options, by_src):
    """Pointers, neighbours and edge ids of a part, from the edge list."""
    near, far, near_type, far_type = edges_of(data, edge_type)
    if not by_src:
        near, far, near_type, far_type = far, near, far_type, near_type
    part = parts[near_type]
    edge_id = (part[near] == number).nonzero().view(-1).numpy()
    time = np.zeros(far.numel(), dtype=np.int64)
    name = options.get("time_attr")
    if name is not None and name in store_of(data, edge_type):
        time = store_of(data, edge_type)[name].numpy()
    elif name is not None and name in store_of(data, far_type):
        time = store_of(data, far_type)[name].numpy()[far.numpy()]
    order = np.lexsort([edge_id, time[edge_id], near.numpy()[edge_id]])
    edge_id = edge_id[order]
    mine = (part == number).nonzero().view(-1)
    degree = np.bincount(near.numpy()[edge_id], minlength=part.numel())[mine.numpy()]
    return np.concatenate([[0], degree.cumsum()]), far.numpy()[edge_id], edge_id


@pytest.mark.parametrize("strategy", ["by_dst", "by_src"])
def test_every_part_has_its_edges_with_their_ids(case, strategy):
    data, folder, options, partition = case
    found, by_src = GraphDirectory(folder / f"{strategy}-1MiB"), strategy == "by_src"
    whole = topology_of(data, direction="backward" if by_src else "forward", **options)
    for edge_type, csc in whole.csc.items():
        seen = []
        neighbor_time = whole.node_time.get(whole.neighbor_type(edge_type))
        if neighbor_time is not None:  # parts have these beside their edges
            csc = replace(csc, time=neighbor_time[csc.indices.long()])
        for number in range(K):
            part = found.part(number).csc(edge_type)
            want = expected(data, edge_type, partition.assignment, number, options, by_src)
            assert part.indptr.tolist() == want[0].tolist()
            assert part.indices.tolist() == want[1].tolist()
            assert part.edge_id.tolist() == want[2].tolist()
            assert part.indices.dtype == torch.int32 and part.edge_id.dtype == torch.int32
            seen += part.edge_id.tolist()
            assert (part.time is None) == (csc.time is None)
            assert (part.weight_prefix is None) == (csc.weight_prefix is None)
            at = np.argsort(whole_ids(csc))[part.edge_id.numpy()]  # its position in the whole
            for name in ("time", "weight_prefix"):
                if getattr(csc, name) is not None:
                    assert torch.equal(getattr(part, name), getattr(csc, name)[at])
            assert torch.equal(found.part(number).edge_ids(edge_type), part.edge_id.sort().values)
        assert sorted(seen) == list(range(csc.num_edges))


def whole_ids(csc):
    return csc.original_id(torch.arange(csc.num_edges)).numpy()


def test_memory_changes_nothing(case):
    _, folder, _, _ = case
    little, much = (GraphDirectory(folder / f"by_dst-{memory}") for memory in ("1MiB", "1GB"))
    assert little.meta.files == much.meta.files


@pytest.mark.parametrize("strategy", ["by_dst", "by_src"])
def test_the_parts_together_are_the_graph(case, strategy):
    data, folder, options, _ = case
    found = pyg_scale.open(folder / f"{strategy}-1MiB", verify=True)
    assert found.to_dict().keys() == data.to_dict().keys()
    for store, other in zip(data.stores, found.stores):
        assert list(store.keys()) == list(other.keys())
        for name, value in store.items():
            same = other[name]
            assert torch.equal(same, value) if isinstance(value, torch.Tensor) else same == value
    direction = "backward" if strategy == "by_src" else "forward"
    for edge_type, csc in topology_of(found, direction=direction, **options).csc.items():
        want = topology_of(data, direction=direction, **options).csc[edge_type]
        assert torch.equal(csc.indptr, want.indptr) and torch.equal(csc.indices, want.indices)


def test_attributes_follow_their_nodes_and_edges_to_the_bit(case):
    data, folder, _, partition = case
    found, checked = GraphDirectory(folder / "by_dst-1MiB"), 0
    for node_type, part in partition.assignment.items():
        for name in found.meta.nodes[node_type].attributes:
            whole = store_of(data, node_type)[name]
            for number in range(K):
                rows = found.part(number).node_attribute(node_type, name)
                assert rows.dtype == whole.dtype
                assert torch.equal(bits(rows), bits(whole[part == number]))
                checked += 1
    for edge_type, edge in found.meta.edges.items():
        for name in edge.attributes:
            whole = store_of(data, edge_type)[name]
            for number in range(K):
                ids = found.part(number).edge_ids(edge_type)
                assert torch.equal(found.part(number).edge_attribute(edge_type, name), whole[ids])
                checked += 1
    assert checked


def bits(x):
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def test_the_book_is_a_bijection(case):
    _, folder, _, partition = case
    found = GraphDirectory(folder / "by_dst-1MiB")
    for node_type, part in partition.assignment.items():
        book = found.books[node_type]
        node = torch.arange(part.numel())
        assert torch.equal(book.part_of(node), part)
        back = torch.full_like(node, -1)
        for number in range(K):
            ids = found.part(number).orig_id(node_type)
            assert torch.equal(ids, (part == number).nonzero().view(-1))
            assert torch.equal(book.local_of(ids), torch.arange(ids.numel()))
            back[ids] = ids
        assert torch.equal(back, node)


@pytest.mark.parametrize("strategy", ["by_dst", "by_src"])
def test_halo_nodes_are_the_neighbours_that_others_own(case, strategy):
    data, folder, _, partition = case
    found = GraphDirectory(folder / f"{strategy}-1MiB")
    for number in range(K):
        want = {t: set() for t in partition.assignment}
        for edge_type in found.meta.edges:
            near, far, near_type, far_type = edges_of(data, edge_type)
            if strategy == "by_dst":
                near, far, near_type, far_type = far, near, far_type, near_type
            mine = partition.assignment[near_type][near] == number
            other = partition.assignment[far_type][far] != number
            want[far_type] |= set(far[mine & other].tolist())
        for node_type, nodes in want.items():
            assert found.part(number).halo(node_type).tolist() == sorted(nodes)


@pytest.mark.parametrize("strategy", ["by_dst", "by_src"])
def test_a_graph_in_parts_can_be_cut_anew(case, tmp_path, strategy):
    data, folder, _, _ = case
    other = random_parts(data, 2, seed=5)
    write_partition(folder / f"{strategy}-1MiB", other, tmp_path / "anew")
    write_partition(folder / "graph", other, tmp_path / "direct")
    anew, direct = (GraphDirectory(tmp_path / name).meta for name in ("anew", "direct"))
    assert anew.files == direct.files
    assert (anew.time_attr, anew.weight_attr) == (direct.time_attr, direct.weight_attr)


def test_graphs_in_memory_with_everything_else_that_they_have(tmp_path):
    data = homogeneous()
    data.name, data.centre = "a graph", torch.tensor([1.0, 2.0])
    found = write_partition(data, random_parts(data), tmp_path / "p")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p"]
    again = pyg_scale.open(found.path)
    assert again.name == "a graph" and torch.equal(again.centre, data.centre)
    assert torch.equal(again.x, data.x) and torch.equal(again.edge_index, data.edge_index)


def test_index_sets_go_along(tmp_path):
    data = homogeneous()
    save(data, tmp_path / "g", index_sets={"train": torch.tensor([5, 3, 200])})
    found = write_partition(tmp_path / "g", random_parts(data), tmp_path / "p")
    assert found.index_set("train").tolist() == [5, 3, 200]
    counted = found.meta.partition.extra["quality"]["node_types"][0]["train"]
    part = random_parts(data).assignment[None][torch.tensor([5, 3, 200])]
    assert counted == torch.bincount(part, minlength=K).tolist()
    write_partition(tmp_path / "p", random_parts(data, 2), tmp_path / "q")
    assert GraphDirectory(tmp_path / "q").index_set("train").tolist() == [5, 3, 200]


def test_ranges_of_ids_need_no_book(tmp_path):
    data = homogeneous()
    save(data, tmp_path / "g")
    part = torch.arange(300) * K // 300
    found = write_partition(tmp_path / "g", Partition({None: part}, K, "range"), tmp_path / "p")
    assert not found.meta.nodes[None].book
    assert not [name for name in found.meta.files if "orig_id" in name or "book/nodes" in name]
    assert found.edge_book(None).tolist() == part[data.edge_index[1]].tolist()
    assert torch.equal(found.books[None].part_of(torch.arange(300)), part)
    assert found.part(2).orig_id(None).tolist() == (part == 2).nonzero().view(-1).tolist()


def test_one_part_is_the_graph_itself(tmp_path):
    data = homogeneous()
    save(data, tmp_path / "g")
    part = torch.zeros(300, dtype=torch.int64)
    found = write_partition(tmp_path / "g", Partition({None: part}, 1, "hash"), tmp_path / "p")
    before = GraphDirectory(tmp_path / "g")
    for name, file in before.meta.files.items():
        assert found.meta.files[name] == file
    assert found.meta.nodes[None].part_halo == [0]


def test_empty_parts_and_more_parts_than_a_byte_counts(tmp_path):
    data = homogeneous()
    save(data, tmp_path / "g")
    part = torch.full((300,), 256)
    part[::2] = 3
    found = write_partition(tmp_path / "g", Partition({None: part}, 257, "x"), tmp_path / "p")
    assert found.books[None].part.dtype == torch.int32
    assert torch.equal(found.books[None].part_of(torch.arange(300)), part)
    assert found.part(0).csc(None).num_edges == 0
    assert found.part(255).node_attribute(None, "x").shape == (0, 5)
    ids = torch.cat([found.part(p).csc(None).edge_id for p in (3, 256)])
    assert ids.sort().values.tolist() == list(range(2_000))


def test_a_graph_without_edges_or_nodes(tmp_path):
    data = Data(x=torch.randn(5, 2), edge_index=torch.empty(2, 0, dtype=torch.int64))
    save(data, tmp_path / "g")
    part = torch.tensor([1, 0, 1, 0, 1])
    found = write_partition(tmp_path / "g", Partition({None: part}, 2, "x"), tmp_path / "p")
    assert torch.equal(found.part(1).node_attribute(None, "x"), data.x[part == 1])
    assert found.meta.partition.extra["quality"]["cut"] == 0


def test_what_the_partition_was_is_kept(tmp_path):
    data = homogeneous()
    save(data, tmp_path / "g")
    cache = {
        None: [
            torch.tensor([5, 2]),
            *[torch.empty(0, dtype=torch.int64)] * 2,
            torch.tensor([299], dtype=torch.int32),
        ]
    }
    write_partition(tmp_path / "g", random_parts(data), tmp_path / "p", cache=cache)
    found = GraphDirectory(tmp_path / "p")
    kept = found.meta.partition
    assert (kept.method, kept.options, kept.seed) == ("random", {"a": 1}, 7)
    assert kept.extra["kept"] == [1, 2]
    assert [found.part(p).cache(None).tolist() for p in range(K)] == [[5, 2], [], [], [299]]


# Bad input ################################################################################


def wrong_partitions(data):
    part = random_parts(data).assignment[None]
    return [
        (Partition({None: part[:-1]}, K, "x"), ValueError, "299 entries for 300 nodes"),
        (Partition({None: part}, 3, "x"), ValueError, "is assigned to part 3, expected 0 to 2"),
        (Partition({None: part - 1}, K, "x"), ValueError, "to part -1"),
        (Partition({None: part.float()}, K, "x"), TypeError, "integer tensor"),
        (Partition({None: part}, 301, "x"), ValueError, "only 300 nodes"),
        (Partition({"a": part}, K, "x"), ValueError, "node types 'a', expected .* None"),
    ]


@pytest.mark.parametrize("number", range(6))
def test_wrong_assignments_are_refused_and_nothing_changes(tmp_path, number):
    data = homogeneous()
    save(data, tmp_path / "g")
    write_partition(tmp_path / "g", random_parts(data), tmp_path / "p")
    before = (tmp_path / "p" / "META.json").read_text()
    partition, error, message = wrong_partitions(data)[number]
    with pytest.raises(error, match=message):
        write_partition(tmp_path / "g", partition, tmp_path / "p", overwrite=True)
    assert (tmp_path / "p" / "META.json").read_text() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g", "p"]


def test_what_is_there_is_replaced_only_if_asked(tmp_path):
    data = homogeneous()
    save(data, tmp_path / "g")
    write_partition(tmp_path / "g", random_parts(data), tmp_path / "p")
    with pytest.raises(FileExistsError):
        write_partition(tmp_path / "g", random_parts(data), tmp_path / "p")
    write_partition(tmp_path / "g", random_parts(data, 2), tmp_path / "g", overwrite=True)
    assert GraphDirectory(tmp_path / "g").meta.num_parts == 2


@pytest.mark.parametrize("count", [0, 3, 13, 21, 25])
def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch, count):
    data, left = homogeneous(), [count]
    save(data, tmp_path / "g")
    write_partition(tmp_path / "g", random_parts(data), tmp_path / "p")
    before = (tmp_path / "p" / "META.json").read_text()
    append = RowWriter.append

    def fail(self, rows):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        append(self, rows)

    monkeypatch.setattr(RowWriter, "append", fail)
    with pytest.raises(OSError, match="No space left"):
        write_partition(tmp_path / "g", random_parts(data, 2), tmp_path / "p", overwrite=True)
    assert (tmp_path / "p" / "META.json").read_text() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g", "p"]
    pyg_scale.open(tmp_path / "p", verify=True)


def test_a_damaged_input_is_refused(tmp_path):
    data = homogeneous()
    save(data, tmp_path / "g")
    (tmp_path / "g" / "part-0" / "edges" / "indices.npy").write_bytes(b"")
    with pytest.raises(GraphDirectoryError, match=r"indices\.npy"):
        write_partition(tmp_path / "g", random_parts(data), tmp_path / "p")
    assert [p.name for p in tmp_path.iterdir()] == ["g"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"edge_assign_strategy": "by_edge"}, "'by_dst', 'by_src'"),
        ({"cache": {None: []}}, "0 lists for 4 parts"),
        ({"cache": {"paper": []}}, "no such node type"),
        ({"memory": "much"}, "memory must be bytes"),
    ],
)
def test_wrong_options(tmp_path, options, message):
    data = homogeneous()
    save(data, tmp_path / "g")
    with pytest.raises(ValueError, match=message):
        write_partition(tmp_path / "g", random_parts(data), tmp_path / "p", **options)
