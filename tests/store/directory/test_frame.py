"""A graph whose nodes have a ``TensorFrame``: saved, opened, and in batches from everywhere."""

import copy
import pickle

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader.utils import filter_hetero_data

import pyg_scale
from pyg_scale.loader import NeighborLoader
from pyg_scale.loader.batch import wire
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.directory.meta import META

torch_frame = pytest.importorskip("torch_frame")
from torch_frame import TensorFrame, stype  # noqa: E402
from torch_frame.data import MultiNestedTensor  # noqa: E402

from tests.frames import SIZES, frame, framed  # noqa: E402


@pytest.fixture
def data():
    return framed()


@pytest.fixture
def opened(data, tmp_path):
    pyg_scale.save(data, tmp_path / "graph")
    return pyg_scale.open(tmp_path / "graph", verify=True)


def loader(data, **options):
    return NeighborLoader(data, [3, 3], input_nodes="u", batch_size=10, seed=1, **options)


def same_batches(first, second):
    for own, other in zip(first, second, strict=True):
        for name in SIZES:
            assert own[name].tf == other[name].tf
            assert len(other[name].tf) == other[name].num_nodes
            assert "tf_numerical" not in other[name] and "tf_columns" not in other[name]


def test_it_comes_back_as_it_was(data, opened):
    for name in SIZES:
        assert opened[name].tf == data[name].tf
        assert list(opened[name].keys()) == list(data[name].keys())
        found = opened[name].tf.feat_dict
        assert all(found[s].dtype == data[name].tf.feat_dict[s].dtype for s in found)
    assert repr(opened).startswith("DirectoryHeteroData(\n  u={ tf=TensorFrame([50, 8]) },")
    assert opened["u"].num_nodes == 50 and opened.is_undirected() == data.is_undirected()


def test_its_numbers_are_mapped(opened):
    stored = opened.graph_directory.part(0).node_attribute("u", "tf_numerical")
    assert (
        opened["u"].tf.feat_dict[stype.numerical].data_ptr() == opened["u"].tf_numerical.data_ptr()
    )
    assert torch.equal(opened["u"].tf_numerical, stored) or stored.isnan().any()


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=["inside", "threads"])
def test_batches_have_its_rows(data, opened, options):
    same_batches(loader(data), loader(opened, **options))
    batch = next(iter(loader(opened)))
    assert batch["u"].tf == data["u"].tf[batch["u"].n_id]


def test_rows_are_appended(data, tmp_path):
    sizes = {"u": 40, "v": 25}
    first, new = HeteroData(), HeteroData()
    kind, back = ("u", "to", "v"), ("v", "back", "u")
    for name, size in sizes.items():
        first[name].tf, new[name].tf = data[name].tf[:size], data[name].tf[size:]
    first["v"].time, new["v"].time = data["v"].time[:25], data["v"].time[25:]
    row, col = data[kind].edge_index
    inside = (row < 40) & (col < 25)
    order = torch.argsort(inside.int(), descending=True, stable=True)
    for each in (kind, back):
        data[each].edge_index = data[each].edge_index[:, order]
        first[each].edge_index = data[each].edge_index[:, : int(inside.sum())]
        new[each].edge_index = data[each].edge_index[:, int(inside.sum()) :]
    path = pyg_scale.save(first, tmp_path / "graph")
    pyg_scale.append(path, new, new)
    for _ in range(2):
        found = pyg_scale.open(path, verify=True)
        for name in SIZES:
            assert found[name].tf == data[name].tf
        same_batches(loader(data), loader(found))
        pyg_scale.compact(path)
    other = copy.copy(data["u"].tf)
    other.col_names_dict = {**other.col_names_dict, stype.categorical: ["other"]}
    with pytest.raises(ValueError, match="'tf' of the new nodes of 'u' has the columns"):
        pyg_scale.append(path, {"u": {"tf": other}})
    longer = copy.copy(data["u"].tf[:1])
    lists = [[torch.arange(9), torch.arange(2)]]
    longer.feat_dict = {
        **longer.feat_dict,
        stype.multicategorical: MultiNestedTensor.from_tensor_mat(lists),
    }
    with pytest.raises(ValueError, match="has 9 categories in a row, the graph was saved with"):
        pyg_scale.append(path, {"u": {"tf": longer}})


@pytest.mark.slow
def test_batches_of_worker_processes_have_its_rows(data, opened):
    same_batches(loader(data), loader(opened, num_workers=1, worker_type="process"))


def test_batches_of_parts_have_its_rows(data, opened, tmp_path):
    pyg_scale.partition(opened, 3, "random", tmp_path / "parts")
    same_batches(loader(data), loader(pyg_scale.open(tmp_path / "parts")))


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_batches_of_a_feature_store_have_its_rows(data, opened, tmp_path, store):
    path = tmp_path / "graph"
    if store == "disk":
        features = pyg_scale.store.Disk(path)
    else:
        features = pyg_scale.store.MemoryFeatureStore()
        for name in SIZES:
            value = opened[name].tf_numerical.clone()
            features.put_tensor(value, group_name=name, attr_name="tf_numerical", index=None)
    same_batches(loader(data), loader(opened, feature_store=features))


def test_pyg_takes_its_rows_too(data, opened):
    nodes = {name: torch.arange(0, size, 3) for name, size in SIZES.items()}
    none = torch.empty(0, dtype=torch.int64)
    ends = dict.fromkeys(data.edge_types, none)
    found, wanted = (
        filter_hetero_data(each, nodes, ends, ends, ends, None) for each in (opened, data)
    )
    assert found["u"].tf == wanted["u"].tf


def test_what_is_changed_is_what_batches_have(data, opened):
    opened["u"].tf.feat_dict[stype.numerical].zero_()
    batch = next(iter(loader(opened)))
    assert not batch["u"].tf.feat_dict[stype.numerical].any()
    opened["v"].tf.feat_dict[stype.categorical] = torch.full((30, 1), 4)
    batch = next(iter(loader(opened)))
    assert batch["v"].tf.feat_dict[stype.categorical].eq(4).all()
    opened["v"].tf = data["v"].tf
    same_batches(
        [next(iter(loader(opened)))["v"]], [next(iter(loader(data)))["v"]]
    ) if False else None
    assert next(iter(loader(opened)))["v"].tf == next(iter(loader(data)))["v"].tf


def test_copies(data, opened):
    for other in (copy.copy(opened), copy.deepcopy(opened), pickle.loads(pickle.dumps(opened))):
        assert other["u"].tf == data["u"].tf
        same_batches(loader(data), loader(other))


def test_saved_again(data, opened, tmp_path):
    pyg_scale.save(opened, tmp_path / "again")
    for file in sorted((tmp_path / "graph").rglob("*.npy")):
        twin = tmp_path / "again" / file.relative_to(tmp_path / "graph")
        assert twin.read_bytes() == file.read_bytes()


def test_a_graph_without_types(tmp_path):
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(0, 40, (2, 300), generator=generator)
    data = Data(tf=frame(40, generator), edge_index=edge_index)
    pyg_scale.save(data, tmp_path / "graph")
    opened = pyg_scale.open(tmp_path / "graph")
    assert opened.tf == data.tf and opened.num_nodes == 40
    for own, other in zip(
        *(NeighborLoader(each, [4], batch_size=8, seed=1) for each in (data, opened)), strict=True
    ):
        assert own.tf == other.tf


def test_to_another_process_and_back(data):
    batch = next(iter(loader(data)))
    found = wire.unpack(*wire.pack(batch))
    assert found["u"].tf == batch["u"].tf and found["v"].tf == batch["v"].tf
    text, tensors = wire.pack({"tf": batch["u"].tf})
    with pytest.raises(ValueError, match="whose arrays are not those of its columns"):
        wire.unpack(text.replace(b'"b"', b'"b","z"'), tensors)


LONG = MultiNestedTensor.from_tensor_mat([[torch.arange(2000)]] * 50)


@pytest.mark.parametrize(
    ("features", "error", "match"),
    [
        (
            {stype.sequence_numerical: MultiNestedTensor.from_tensor_mat([[torch.ones(2)]] * 50)},
            NotImplementedError,
            "'tf' of 'u' has columns of stype sequence_numerical",
        ),
        (
            {
                stype.multicategorical: MultiNestedTensor.from_tensor_mat(
                    [[torch.arange(2000)]] * 50
                )
            },
            ValueError,
            "2000 categories in a row",
        ),
        ({stype.numerical: torch.ones(3, 1)}, ValueError, "has 3 rows, but there are"),
    ],
    ids=["sequence", "long", "short"],
)
def test_what_cannot_be_saved_is_refused(data, tmp_path, features, error, match):
    data["u"].tf = TensorFrame(features, {each: ["q"] for each in features})
    data["u"].num_nodes = 50
    with pytest.raises(error, match=match):
        pyg_scale.save(data, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_value_of_that_name_that_is_something_else(data, opened, tmp_path):
    meta = GraphDirectory(tmp_path / "graph").meta
    for wrong in (
        {"stypes": {"numerical": ["a"]}},
        {"stypes": {"sounds": ["a"]}},
        {"stypes": {}},
        {"stypes": {"numerical": "ab"}},
        {"stypes": {"embedding": ["e", "f"]}, "offsets": {"embedding": [0, 9]}},
        {"stypes": {"numerical": ["a", "b"]}, "offsets": 3},
        [],
    ):
        meta.nodes["u"].other["tf_columns"] = wrong
        (tmp_path / "graph" / META).write_text(meta.to_json())
        found = pyg_scale.open(tmp_path / "graph")
        assert "tf" not in found["u"] and found["u"].tf_numerical.shape == (50, 2)
        assert list(found.col_stats) == ["v"]


def test_without_torch_frame_batches_have_the_arrays(data, opened, monkeypatch):
    from pyg_scale.store.directory import frame as frames
    from pyg_scale.store.directory import lazy, opening

    for module in (frames, lazy, opening):
        monkeypatch.setattr(module, "WITH_TORCH_FRAME", False)
    found = pyg_scale.open(opened.graph_directory.path)
    assert found["u"].tf_numerical.shape == (50, 2)
    for asked in (lambda: found["u"].tf, lambda: found.col_stats):
        with pytest.raises(ModuleNotFoundError, match="pip install pytorch-frame"):
            asked()
    batch = next(iter(loader(found)))
    rows = data["u"].tf.feat_dict[stype.timestamp][batch["u"].n_id]
    assert torch.equal(batch["u"].tf_timestamp, rows)
    assert batch["u"].tf_columns["stypes"]["timestamp"] == ["t"]
