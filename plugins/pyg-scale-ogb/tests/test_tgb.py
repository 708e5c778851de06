"""Files in the forms of the Temporal Graph Benchmark, made here, and what must come of them."""

import pickle

import numpy as np
import pytest
import torch

import pyg_scale
from pyg_scale import plugins
from pyg_scale.convert import convert
from pyg_scale.loader import NeighborLoader, TemporalDataLoader
from pyg_scale.testing import ReaderTests
from pyg_scale_ogb import tgb

WIKI = [(0, 0, 10, 0.5, -1.0), (2, 1, 10, 0.25, 2.0), (0, 1, 30, 1.0, 3.0), (1, 0, 45, 0.0, 4.0)]


def write(root, name, file, lines):
    folder = root / name.replace("-", "_")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text("\n".join(lines) + "\n")
    return folder


def wiki(root):
    """Sources 0 to 2; items are numbered after them, 3 and 4."""
    rows = [f"{u},{i},{t}.0,0,{a},{b}" for u, i, t, a, b in WIKI for _ in range(5)]
    return write(
        root, "tgbl-wiki", "tgbl-wiki_edgelist_v2.csv", ["user_id,item_id,ts,state,features", *rows]
    )


def coin(root):
    rows = ["time,src,dst,weight", "5,0xb,0xa,8.0", "6,0xa,0xc,0", "9,0xb,0xa,0.5"]
    return write(root, "tgbl-coin", "tgbl-coin_edgelist_v2.csv", rows * 1 + rows[1:] * 4)


def comment(root):
    rows = ["ts,src,dst,num_words,score", "1,x,y,2500,7", "2,y,NA,50,-3", "2,x,NA,0,1"]
    return write(root, "tgbl-comment", "tgbl-comment_edgelist.csv", rows + rows[1:] * 4)


def flight(root):
    rows = ["day,src,dst,callsign,typecode", "2019-01-01,A,B,AB12,B738"]
    rows.append("2019-01-02,B,A,,too-long9")
    return write(root, "tgbl-flight", "tgbl-flight_edgelist_v2.csv", rows + rows[1:] * 5)


FORMS = {"tgbl-wiki": wiki, "tgbl-coin": coin, "tgbl-comment": comment, "tgbl-flight": flight}


class TestTGBReader(ReaderTests):
    @pytest.fixture(params=FORMS)
    def reader(self, request, tmp_path):
        FORMS[request.param](tmp_path)
        return plugins.get("reader", "tgb")(request.param, root=tmp_path)


def test_the_form_of_jodie(tmp_path):
    wiki(tmp_path)
    data = tgb.load("tgbl-wiki", tmp_path)
    assert data.src[::5].tolist() == [0, 2, 0, 1]
    assert data.dst[::5].tolist() == [3, 4, 4, 3]
    assert data.t[::5].tolist() == [10, 10, 30, 45]
    assert data.msg[::5].tolist() == [[0.5, -1.0], [0.25, 2.0], [1.0, 3.0], [0.0, 4.0]]
    assert data.msg.dtype == torch.float32


def test_nodes_are_numbered_as_they_first_occur(tmp_path):
    coin(tmp_path)
    data = tgb.load("tgbl-coin", tmp_path)
    assert data.src[:3].tolist() == [0, 1, 0]
    assert data.dst[:3].tolist() == [1, 2, 1]
    assert data.msg[:3].tolist() == [[3.0], [0.0], [-1.0]]  # a logarithm to the base 2
    comment(tmp_path)
    data = tgb.load("tgbl-comment", tmp_path)
    assert data.src[:3].tolist() == [0, 1, 0]
    assert data.dst[:3].tolist() == [1, 2, 2]  # "NA" is a name as others
    assert torch.allclose(data.msg[:3], torch.tensor([[0.5, 0.5, 7], [0.01, 0.01, -3], [0, 0, 1]]))


def test_letters_of_flights(tmp_path):
    flight(tmp_path)
    data = tgb.load("tgbl-flight", tmp_path)
    assert data.t[:2].tolist() == [1546300800, 1546387200]
    assert data.msg[0].tolist() == [30, 31, 1, 2, *[-1] * 4, 31, 7, 3, 8, *[-1] * 4]
    assert data.msg[1].tolist() == [-1] * 16


def test_the_split_is_by_time(tmp_path):
    rows = [f"{i % 7},{i % 5},{i},0,1" for i in range(100)]
    write(tmp_path, "tgbl-uci", "tgbl-uci_edgelist.csv", ["header", *rows])
    data = tgb.load("tgbl-uci", tmp_path)
    assert data.t[data.train_mask].tolist() == list(range(70))
    assert data.t[data.val_mask].tolist() == list(range(70, 85))
    assert data.t[data.test_mask].tolist() == list(range(85, 100))


def test_a_converted_graph_has_the_events(tmp_path):
    wiki(tmp_path)
    convert("tgb:tgbl-wiki", tmp_path / "graph", root=tmp_path, quiet=True)
    data, events = pyg_scale.open(tmp_path / "graph"), tgb.load("tgbl-wiki", tmp_path)
    assert data.num_nodes == 5
    assert torch.equal(data.edge_index, torch.stack([events.src, events.dst]))
    assert torch.equal(data.t, events.t)
    assert torch.equal(data.msg, events.msg)
    assert torch.equal(data.split == 2, events.test_mask)


def test_from_events_to_ranks(tmp_path):
    folder = wiki(tmp_path)
    data = tgb.load("tgbl-wiki", tmp_path)
    part = data[data.test_mask] if data.test_mask.any() else data
    of = {
        (np.int64(s), np.int64(d), np.int64(t)): np.array([3, 4, 3])
        for s, d, t in zip(data.src.tolist(), data.dst.tolist(), data.t.tolist())
    }
    with open(folder / "tgbl-wiki_test_ns_v2.pkl", "wb") as file:
        pickle.dump(of, file, protocol=pickle.HIGHEST_PROTOCOL)
    negatives, evaluator = tgb.Negatives("tgbl-wiki", "test", tmp_path), tgb.Evaluator("tgbl-wiki")
    assert len(negatives) == 4
    found = []
    for batch in TemporalDataLoader(part, batch_size=3):
        others = negatives(batch.src, batch.dst, batch.t)
        assert [each.tolist() for each in others] == [[3, 4, 3]] * batch.num_events
        score = {"y_pred_pos": batch.dst.double(), "y_pred_neg": torch.stack(others).double()}
        found.append(evaluator.eval(score))
    assert all(0 < each["mrr"] <= 1 for each in found)
    loader = NeighborLoader(
        torch_graph(data), [2], torch.tensor([0]), torch.tensor([30]), time_attr="t",
        time_window=15, temporal_strategy="last",
    )  # fmt: skip
    assert next(iter(loader)).num_nodes == 1


def torch_graph(events):
    from torch_geometric.data import Data

    return Data(edge_index=torch.stack([events.src, events.dst]), t=events.t, num_nodes=5)


def test_ranks_in_closed_form():
    pos, neg = torch.tensor([0.5, 0.9, 0.1]), torch.full((3, 20), 0.5)
    neg[0, :4] = 0.6  # 4 before it, 16 with its score: between the ranks 5 and 21
    found = tgb.Evaluator(k=13).eval({"y_pred_pos": pos, "y_pred_neg": neg})
    ranks = [13.0, 1.0, 21.0]
    assert found["mrr"] == pytest.approx(sum(1 / r for r in ranks) / 3)
    assert found["hits@13"] == pytest.approx(2 / 3)
    assert tgb.Evaluator().eval({"y_pred_pos": pos, "y_pred_neg": neg})["hits@10"] == (
        pytest.approx(1 / 3)
    )
    one = tgb.Evaluator().eval({"y_pred_pos": np.array([0.5]), "y_pred_neg": np.array([0.1, 0.7])})
    assert one["mrr"] == 0.5
    lists = tgb.Evaluator().eval_lists(torch.tensor([1.0, 0.0]), [torch.zeros(5), torch.ones(2)])
    assert lists["mrr"] == pytest.approx((1 + 1 / 3) / 2)


@pytest.mark.parametrize(
    ("scores", "error", "match"),
    [
        ({"y_pred_neg": torch.zeros(1, 2)}, KeyError, "y_pred_pos is missing"),
        (
            {"y_pred_pos": torch.zeros(2), "y_pred_neg": torch.zeros(3, 2)},
            ValueError,
            "a row for each of the 2 events",
        ),
        (
            {"y_pred_pos": torch.tensor([torch.nan]), "y_pred_neg": torch.zeros(1, 2)},
            ValueError,
            "y_pred_pos has a NaN",
        ),
        ({"eval_metric": ["auc"]}, ValueError, "'auc' is not one of mrr, hits@"),
        ({"eval_metric": [3]}, ValueError, "3 is not one of mrr, hits@"),
        (
            {"y_pred_pos": torch.zeros(2, 2), "y_pred_neg": torch.zeros(4, 3)},
            ValueError,
            r"y_pred_pos must be of shape \[n\] or \[n, 1\]",
        ),
        ({"y_pred_pos": None, "y_pred_neg": torch.zeros(1, 2)}, TypeError, "y_pred_pos must be a"),
        ([], TypeError, "scores must be a dictionary"),
    ],
)
def test_scores_that_are_none(scores, error, match):
    with pytest.raises(error, match=match):
        tgb.Evaluator().eval(scores)


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "10"])
def test_a_rank_that_is_none(k):
    with pytest.raises(ValueError, match="k must be an integer, at least 1"):
        tgb.Evaluator(k=k)


@pytest.mark.parametrize(
    "negatives",
    ["ab", [1.5], [-1], [[1, 2], [3]], None, {"a": 1}, [2**70], [float("nan")]],
    ids=str,
)
def test_negatives_that_are_no_nodes(tmp_path, negatives):
    file = wiki(tmp_path) / "tgbl-wiki_val_ns_v2.pkl"
    file.write_bytes(pickle.dumps({(1, 2, 3): negatives}))
    found = tgb.Negatives("tgbl-wiki", "val", tmp_path)
    with pytest.raises(ValueError, match=r"val_ns_v2.pkl must have node numbers .* \(1, 2, 3\)"):
        found(torch.tensor([1]), torch.tensor([2]), torch.tensor([3]))


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_nothing_of_a_pickle_is_run(tmp_path):
    folder = wiki(tmp_path)
    file = folder / "tgbl-wiki_val_ns_v2.pkl"
    file.write_bytes(pickle.dumps({(1, 2, 3): Runs(tmp_path / "ran")}))
    with pytest.raises(ValueError, match="tgbl-wiki_val_ns_v2.pkl is damaged, or holds more"):
        tgb.Negatives("tgbl-wiki", "val", tmp_path)
    assert not (tmp_path / "ran").exists()
    for key in ((1, 2), (1.5, 2, 3), ("1", 2, 3)):
        file.write_bytes(pickle.dumps({key: np.array([1])}))
        with pytest.raises(ValueError, match=r"the key \(.*\), which is no \(src, dst, t\)"):
            tgb.Negatives("tgbl-wiki", "val", tmp_path)
    file.write_bytes(pickle.dumps([1]))
    with pytest.raises(ValueError, match="must hold a dictionary"):
        tgb.Negatives("tgbl-wiki", "val", tmp_path)
    file.write_bytes(pickle.dumps({(1, 2, 3): np.array([1])}))
    negatives = tgb.Negatives("tgbl-wiki", "val", tmp_path)
    with pytest.raises(KeyError, match=r"no negatives of the event \(src, dst, t\) = \(1, 2, 4\)"):
        negatives(torch.tensor([1]), torch.tensor([2]), torch.tensor([4]))
    with pytest.raises(ValueError, match="'val' and of 'test'"):
        tgb.Negatives("tgbl-wiki", "train", tmp_path)
    with pytest.raises(FileNotFoundError, match="tgbl-wiki_test_ns_v2.pkl"):
        tgb.Negatives("tgbl-wiki", "test", tmp_path)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ("1,2,x,0,5,6", "among rows 1 to 21 that is no event"),
        ("1,-2,3,0,5,6", "a node is no number from 0 on"),
        ("1,2.5,3,0,5,6", "a node is no number from 0 on"),
        ("1,,3,0,5,6", "a number is missing"),
        ("1,2,3,0,inf,6", "a number is missing or infinite"),
        ("1e300,2,3,0,5,6", "a node or a time is beyond"),
        ("1,2,-1e300,0,5,6", "a node or a time is beyond"),
    ],
)
def test_a_damaged_table_is_named(tmp_path, row, match):
    folder = wiki(tmp_path)
    with open(folder / "tgbl-wiki_edgelist_v2.csv", "a") as file:
        file.write(row + "\n")
    with pytest.raises(ValueError, match=rf"tgbl-wiki_edgelist_v2.csv has a row .*{match}|{match}"):
        tgb.load("tgbl-wiki", tmp_path)


@pytest.mark.parametrize(
    ("form", "row", "match"),
    [
        ("tgbl-coin", "99999999999999999999,a,b,1", "too large"),
        ("tgbl-coin", "1,a,b,-3", "a weight is negative"),
        ("tgbl-coin", "1,a,b,inf", "a number is missing or infinite"),
        ("tgbl-coin", "1,a,b,", "could not convert"),
        ("tgbl-comment", "1,a,b,nan,1", "a number is missing or infinite"),
        ("tgbl-flight", "2019-13-01,a,b,C,T", "2019-13-01"),
    ],
)
def test_a_damaged_table_of_texts_is_named(tmp_path, form, row, match):
    (file,) = FORMS[form](tmp_path).iterdir()
    file.write_text(file.read_text() + row + "\n")
    with pytest.raises(ValueError, match=rf"{file.name} has a row .*{match}"):
        tgb.load(form, tmp_path)
    with pytest.raises(ValueError, match=rf"{file.name} has a row .*{match}"):
        convert(f"tgb:{form}", tmp_path / "graph", root=tmp_path, quiet=True)
    assert not (tmp_path / "graph").exists()


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("tgbn-trade", "node properties"),
        ("tkgl-icews", "knowledge graphs"),
        ("thgl-software", "heterogeneous graphs"),
    ],
)
def test_data_sets_of_other_tasks_are_refused_by_name(tmp_path, name, task):
    with pytest.raises(NotImplementedError, match=f"{name} is a data set of {task}"):
        tgb.load(name, tmp_path)
    with pytest.raises(NotImplementedError, match=f"{name} is a data set of {task}"):
        convert(f"tgb:{name}", tmp_path / "graph", root=tmp_path, quiet=True)


def test_what_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="unknown data set 'tgbl-wikis': did you mean 'tgbl-wiki'"):
        tgb.load("tgbl-wikis", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"tgbl-coin_edgelist_v2.csv.*version 2"):
        tgb.load("tgbl-coin", tmp_path)
