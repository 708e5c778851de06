"""``pyg_scale.partition``: arguments, options, results, and errors before any work."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import pyg_scale
from pyg_scale import save
from pyg_scale.partitioner import Partitioner, assign, partition_graph
from pyg_scale.partitioner.random import RandomPartitioner, part_sizes
from pyg_scale.partitioner.range import ranges
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.testing import graphs


class Last(Partitioner):
    """Everything goes to the last part."""

    balances = ()

    def __init__(self, result=None, strength=3):
        self.result = result
        self.strength = strength

    def assign(self, graph, num_parts, *, seed, shares):
        if self.result is not None:
            return self.result
        return torch.full((graph.num_nodes,), num_parts - 1, dtype=torch.int64)


def test_gives_int32_of_every_node():
    part = pyg_scale.partition(graphs.hostile(), 3, "random")
    assert part.dtype == torch.int32 and part.shape == (100,)
    assert torch.bincount(part).tolist() == [34, 33, 33]


def test_gives_a_tensor_for_each_type():
    part = pyg_scale.partition(graphs.hetero(), 3, "random", seed=2)
    assert {t: p.numel() for t, p in part.items()} == {"user": 20, "item": 12, "tag": 5, "ghost": 3}
    for each in part.values():
        count = torch.bincount(each, minlength=3)
        assert int(count.max() - count.min()) <= 1


def test_an_instance_and_its_name():
    mine = Last(strength=5)
    assert pyg_scale.partition(graphs.hostile(), 4, mine).tolist() == [3] * 100
    found, _ = assign(graphs.hostile(), 4, mine, 7)
    assert (found.method, found.seed, found.options["strength"]) == ("Last", 7, 5)
    found, graph = assign(graphs.hostile(), 4, "hash", 7)
    assert (found.method, found.options, found.num_parts) == ("hash", {}, 4)
    again, _ = assign(graphs.hostile(), 4, "hash", 7, graph=graph)
    assert torch.equal(again.assignment[None], found.assignment[None])


@pytest.mark.parametrize("method", ["random", "hash", "range"])
def test_shares(method):
    data = Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=10_000)
    part = pyg_scale.partition(data, 3, method, shares=[1, 2, 5])
    size = torch.bincount(part, minlength=3)
    slack = 200 if method == "hash" else 1
    assert bool(((size - torch.tensor([1250, 2500, 6250])).abs() <= slack).all())


def test_one_part_and_no_nodes():
    assert pyg_scale.partition(graphs.hostile(), 1, "range").tolist() == [0] * 100
    assert pyg_scale.partition(graphs.nothing(0), 1, "random").tolist() == []
    assert pyg_scale.partition(graphs.one_loop(), 1, "hash").tolist() == [0]
    assert sorted(pyg_scale.partition(graphs.nothing(5), 5, "random").tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_parts": 0}, ValueError, "at least 1"),
        ({"num_parts": True}, ValueError, "at least 1"),
        ({"num_parts": 2.0}, ValueError, "at least 1"),
        ({"num_parts": 101}, ValueError, "only 100 nodes"),
        ({"seed": "x"}, TypeError, "seed must be"),
        ({"method": "fenel"}, LookupError, "unknown partitioner 'fenel'"),
        ({"method": 3}, TypeError, "method must be"),
        ({"strength": 4}, TypeError, "'random' has no option 'strength'"),
        ({"method": Last(), "strength": 4}, TypeError, "instance already has its options"),
        ({"shares": [1, 2]}, ValueError, "shares must have"),
        ({"shares": [1, 2, 0]}, ValueError, "above 0"),
        ({"shares": [1, 2, float("nan")]}, ValueError, "above 0"),
        ({"balance": "edges"}, ValueError, "'random' balances nodes, not edges"),
        ({"method": "hash", "balance": "edges"}, ValueError, "balances nothing"),
        ({"method": "range", "balance": ("nodes", "edges")}, ValueError, "not several at once"),
        ({"method": Last(torch.zeros(99))}, TypeError, "expected an integer"),
        ({"method": Last(torch.zeros(99).int())}, ValueError, "shape"),
        ({"method": Last(torch.full((100,), 3))}, ValueError, "returned parts 3 to 3"),
        ({"method": Last("no")}, TypeError, "returned 'no'"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    arguments = {"num_parts": 3, "method": "random", **arguments}
    with pytest.raises(error, match=message):
        pyg_scale.partition(graphs.hostile(), **arguments)


def test_a_balance_that_is_promised_and_not_kept_is_said():
    class Promises(Last):
        balances = ("nodes",)

    with pytest.warns(RuntimeWarning, match="part 2 holds 100 nodes, at most 36 were expected"):
        pyg_scale.partition(graphs.hostile(), 3, Promises())


def test_more_parts_than_nodes_of_nothing():
    with pytest.raises(ValueError, match="only 0 nodes"):
        pyg_scale.partition(graphs.nothing(0), 2, "random")


# Simple methods ################################################################################


def test_hash_is_a_function_of_the_id_alone():
    small = pyg_scale.partition(graphs.nothing(50), 4, "hash", seed=3)
    large = pyg_scale.partition(graphs.nothing(5000), 4, "hash", seed=3)
    assert torch.equal(large[:50], small)
    assert not torch.equal(pyg_scale.partition(graphs.nothing(50), 4, "hash", seed=4), small)
    size = torch.bincount(large).double()
    assert float(((size - 1250) ** 2 / 1250).sum()) < 16.3  # chi-square, 3 degrees, p = 0.001


def test_range_by_nodes_and_by_edges():
    data = graphs.hostile()
    part = pyg_scale.partition(data, 4, "range")
    assert part.tolist() == [v // 25 for v in range(100)]
    part = pyg_scale.partition(data, 4, "range", balance="edges")
    assert part.tolist() == sorted(part.tolist())
    load = torch.zeros(4).index_add_(
        0, part, torch.bincount(data.edge_index[1], minlength=100) + 0.0
    )
    assert float(load.max()) <= data.num_edges / 4 + 60


def test_ranges_of_weights():
    weight = torch.tensor([5, 0, 0, 5, 1, 4, 5, 0])
    assert ranges(weight, torch.full((4,), 0.25).double()).tolist() == [0, 1, 1, 1, 2, 2, 3, 3]
    assert ranges(weight * 0, torch.full((4,), 0.25).double()).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_part_sizes():
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    assert part_sizes(9, third).tolist() == [3, 3, 3]
    assert part_sizes(10, third).tolist() == [4, 3, 3]
    assert part_sizes(11, third).tolist() == [4, 4, 3]
    assert part_sizes(0, third).tolist() == [0, 0, 0]
    assert part_sizes(3, torch.tensor([0.01, 0.01, 0.98]).double()).tolist() == [0, 0, 3]


def test_random_depends_on_the_seed_alone():
    data = graphs.hostile()
    one = pyg_scale.partition(data, 4, RandomPartitioner(), seed=1)
    data.edge_index = data.edge_index.flip(1)
    assert torch.equal(pyg_scale.partition(data, 4, "random", seed=1), one)
    assert not torch.equal(pyg_scale.partition(data, 4, "random", seed=2), one)


# Imported parts ################################################################################


def text(path, lines):
    path.write_text("\n".join(map(str, lines)) + "\n")
    return path


def test_parts_from_files(tmp_path):
    wanted = [(v * 7) % 3 for v in range(100)]
    np.save(tmp_path / "a.npy", np.array(wanted, dtype=np.uint8))
    np.save(tmp_path / "b.npy", np.array(wanted, dtype=np.uint64))
    np.save(tmp_path / "c.npy", np.array(wanted, dtype=np.float32))
    for given in (
        tmp_path / "a.npy",
        str(tmp_path / "b.npy"),
        tmp_path / "c.npy",
        text(tmp_path / "d.txt", wanted),
        torch.tensor(wanted),
        np.array(wanted),
    ):
        part = pyg_scale.partition(graphs.hostile(), 3, assignment=given)
        assert part.tolist() == wanted and part.dtype == torch.int32
    found, _ = assign(graphs.hostile(), 3, assignment=tmp_path / "a.npy")
    assert found.method == "imported"


def test_parts_of_types():
    sizes = {"user": 20, "item": 12, "tag": 5, "ghost": 3}
    given = {t: torch.arange(n) % 2 for t, n in sizes.items()}
    part = pyg_scale.partition(graphs.hetero(), 2, assignment=given)
    assert all(torch.equal(part[t].long(), given[t]) for t in sizes)
    with pytest.raises(TypeError, match="several node types"):
        pyg_scale.partition(graphs.hetero(), 2, assignment=given["user"])
    with pytest.raises(ValueError, match="no assignment of 'ghost'"):
        pyg_scale.partition(
            graphs.hetero(), 2, assignment={t: v for t, v in given.items() if t != "ghost"}
        )
    with pytest.raises(ValueError, match="'extra'"):
        pyg_scale.partition(graphs.hetero(), 2, assignment={**given, "extra": given["tag"]})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda lines: lines[:-1], ValueError, "99 lines, expected 100"),
        (lambda lines: [*lines, 0], ValueError, "101 lines, expected 100"),
        (lambda lines: [0, -1, *lines[2:]], ValueError, "line 2 is -1"),
        (lambda lines: [*lines[:99], 3], ValueError, "line 100 is 3, expected a part from 0 to 2"),
        (lambda lines: ["nan", *lines[1:]], ValueError, "line 1 is 'nan'"),
        (lambda lines: [0, "1 2", *lines[2:]], ValueError, "line 2 is '1 2'"),
        (lambda lines: [0, 1, "", *lines[3:]], ValueError, "line 3 is ''"),
        (lambda lines: [0, "1_0", *lines[2:]], ValueError, "line 2 is '1_0'"),
        (lambda lines: ["9" * 30, *lines[1:]], ValueError, "line 1 is"),
        (lambda lines: [], ValueError, "0 lines, expected 100"),
    ],
)
def test_wrong_text_files(change, error, message, tmp_path):
    path = text(tmp_path / "parts.txt", change([v % 3 for v in range(100)]))
    with pytest.raises(error, match=message) as caught:
        pyg_scale.partition(graphs.hostile(), 3, assignment=path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.full(100, np.nan), "entry 0 is nan"),
        (np.full(100, 0.5), "entry 0 is 0.5"),
        (np.full(100, 2**64 - 1, dtype=np.uint64), "entry 0 is"),
        (np.full(100, -1, dtype=np.int8), "entry 0 is -1"),
        (np.zeros((100, 1), dtype=np.int64), "shape"),
        (np.zeros(100, dtype=bool), "integers"),
        (np.array(["a"] * 100), "integers"),
        (np.array([None] * 100), "not a plain .npy file"),
    ],
)
def test_wrong_arrays(array, message, tmp_path):
    np.save(tmp_path / "parts.npy", array, allow_pickle=True)
    with pytest.raises((ValueError, TypeError), match=message):
        pyg_scale.partition(graphs.hostile(), 3, assignment=tmp_path / "parts.npy")


def test_no_file_and_a_damaged_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="no assignment file"):
        pyg_scale.partition(graphs.hostile(), 3, assignment=tmp_path / "none.txt")
    (tmp_path / "bad.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(ValueError, match="not a plain .npy file"):
        pyg_scale.partition(graphs.hostile(), 3, assignment=tmp_path / "bad.npy")
    with pytest.raises(TypeError, match="imported parts have no option 'strength'"):
        pyg_scale.partition(graphs.hostile(), 3, assignment=tmp_path / "bad.npy", strength=1)


# Writing #######################################################################################


def test_writes_a_directory_and_cuts_it_anew(tmp_path):
    """What stands there is what was returned; the options of writing reach the writer."""
    data = graphs.hostile()
    save(data, tmp_path / "whole")
    part = pyg_scale.partition(
        tmp_path / "whole", 4, "random", tmp_path / "g", seed=5, edge_assign_strategy="by_src"
    )
    directory = GraphDirectory(tmp_path / "g")
    assert torch.equal(directory.books[None].assignment(), part.long())
    written = directory.meta.partition
    assert (written.method, written.seed) == ("random", 5)
    assert written.edge_assign_strategy == "by_src"
    of_parts, of_data = partition_graph(tmp_path / "g"), partition_graph(data)
    assert torch.equal(of_parts.indptr, of_data.indptr)
    assert torch.equal(of_parts.indices, of_data.indices)
    again = pyg_scale.partition(tmp_path / "g", 3, "range")
    assert torch.equal(again, pyg_scale.partition(data, 3, "range"))


def test_options_of_writing(tmp_path):
    with pytest.raises(TypeError, match="with path= also"):
        pyg_scale.partition(graphs.hostile(), 4, "random", edge_assign_strategy="by_src")
    with pytest.raises(TypeError, match="no option 'strength'.*edge_assign_strategy"):
        pyg_scale.partition(graphs.hostile(), 4, "random", tmp_path / "g", strength=1)
    assert not (tmp_path / "g").exists()


def test_what_is_there_is_refused_before_any_work(tmp_path):
    class Never(Partitioner):
        def assign(self, graph, num_parts, *, seed, shares):
            raise AssertionError("was called")

    (tmp_path / "g").mkdir()
    with pytest.raises(FileExistsError, match="overwrite"):
        pyg_scale.partition(graphs.hostile(), 4, Never(), tmp_path / "g")
