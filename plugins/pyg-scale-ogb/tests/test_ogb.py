"""Against OGB's own loader, bit for bit, with what breaks it under a current torch mended here."""

import contextlib
import importlib.util
import io

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

from pyg_scale_ogb import Evaluator, load, split
from pyg_scale_ogb.catalog import FACTS

from . import layout

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ogb") is None, reason="ogb is not installed: pip install ogb"
)


@pytest.fixture
def own_loader(monkeypatch):
    """OGB's loader, which needs ``torch.load`` as it was before torch 2.6."""
    monkeypatch.setenv("OUTDATED_IGNORE", "1")
    Evaluator("ogbn-arxiv")  # imports ogb without asking the network
    from ogb.linkproppred import PygLinkPropPredDataset
    from ogb.nodeproppred import PygNodePropPredDataset

    old = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: old(*a, **{"weights_only": False, **k}))

    def open_it(name, root):
        cls = PygLinkPropPredDataset if name.startswith("ogbl") else PygNodePropPredDataset
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return cls(name, root=str(root))

    return open_it


def same(ours, theirs):
    assert isinstance(ours, torch.Tensor)
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    # Bits: missing numbers are equal to themselves.
    assert torch.equal(
        ours.contiguous().view(-1).view(torch.uint8), theirs.contiguous().view(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("name", layout.FORMS)
def test_equal_to_ogbs_own(name, tmp_path, own_loader):
    layout.FORMS[name](tmp_path)
    ours = load(name, tmp_path)  # before OGB renames a file
    dataset = own_loader(name, tmp_path)
    theirs = dataset[0]
    assert ours.num_nodes == (
        sum(theirs.num_nodes_dict.values()) if name == "ogbn-mag" else theirs.num_nodes
    )
    masks = {f"{part}_mask" for part in ("train", "val", "test")}
    if not isinstance(ours, HeteroData):
        names = set(ours.keys()) - {"num_nodes"} - masks
        assert names == {key for key in theirs.to_dict() if key != "num_nodes"}
        for key in names:
            same(ours[key], theirs[key])
    else:
        assert ours.node_types == list(theirs.num_nodes_dict)
        assert ours.edge_types == list(theirs.edge_index_dict)
        count = 0
        for key, value in theirs.to_dict().items():
            if key == "num_nodes_dict":
                assert {t: ours[t].num_nodes for t in ours.node_types} == value
                continue
            for kind, tensor in value.items():
                same(ours[kind][key.removesuffix("_dict")], tensor)
                count += 1
        stored = sum(
            len(set(store.keys()) - masks - {"num_nodes"})
            for store in (*ours.node_stores, *ours.edge_stores)
        )
        assert count == stored
    check_split(name, tmp_path, ours, dataset)


def check_split(name, root, ours, dataset):
    found = split(name, root)
    if name.startswith("ogbl"):
        wanted = dataset.get_edge_split()
        for part in ("train", "valid", "test"):
            assert found[part].keys() == wanted[part].keys()
            for key, tensor in wanted[part].items():
                same(found[part][key], tensor)
        return
    wanted = dataset.get_idx_split()
    for part, mask_name in (("train", "train_mask"), ("valid", "val_mask"), ("test", "test_mask")):
        by_type = wanted[part] if name == "ogbn-mag" else {None: wanted[part]}
        for node_type, ids in by_type.items():
            same(found[part] if node_type is None else found[part][node_type], ids)
            store = ours if node_type is None else ours[node_type]
            assert torch.equal(store[mask_name].nonzero().view(-1), ids.sort().values)


@pytest.mark.parametrize("kind", ["nodeproppred", "linkproppred"])
def test_the_catalogue_says_what_ogb_says(kind):
    import importlib.resources

    import pandas as pd

    Evaluator("ogbn-arxiv")
    table = importlib.resources.files(f"ogb.{kind}") / "master.csv"
    master = pd.read_csv(str(table), index_col=0, keep_default_na=False)
    prefix = {"nodeproppred": "ogbn-", "linkproppred": "ogbl-"}[kind]
    assert sorted(master) == sorted(name for name in FACTS if name.startswith(prefix))
    for name in master:
        said, facts = master[name], FACTS[name]
        listed = [
            tuple(said[f"additional {of} files"].replace("None", "").split(","))
            for of in ("node", "edge")
        ]
        assert facts.archive == said["download_name"]
        assert facts.url == said["url"]
        assert facts.version == int(said["version"])
        assert facts.split == said["split"]
        assert [facts.node_files or ("",), facts.edge_files or ("",)] == listed
        for field, key in (
            ("add_inverse_edge", "add_inverse_edge"),
            ("is_hetero", "is hetero"),
            ("binary", "binary"),
        ):
            assert str(getattr(facts, field)) == said[key], (name, key)


def test_evaluator_is_ogbs():
    y_true, y_pred = torch.tensor([[3], [1], [4], [1]]), torch.tensor([[3], [1], [5], [9]])
    assert Evaluator("ogbn-arxiv").eval({"y_true": y_true, "y_pred": y_pred}) == {"acc": 0.5}
    # Of two positive scores, 0.9 is above both negatives and 0.4 above one: 3 of 4 pairs are right.
    y_true = np.tile(np.array([1, 1, 0, 0])[:, None], 112)
    y_pred = np.tile(np.array([0.9, 0.4, 0.5, 0.1])[:, None], 112)
    found = Evaluator("ogbn-proteins").eval({"y_true": y_true, "y_pred": y_pred})
    assert found == {"rocauc": pytest.approx(0.75)}
    hits = Evaluator("ogbl-ddi")
    hits.K = 2  # the second best negative scores 0.6: one of four positives is above it
    positive, negative = torch.tensor([0.9, 0.5, 0.6, 0.1]), torch.tensor([0.7, 0.6, 0.2])
    assert hits.eval({"y_pred_pos": positive, "y_pred_neg": negative}) == {"hits@2": 0.25}


@pytest.mark.slow
def test_importing_ogb_leaves_the_process_as_it_was():
    import subprocess
    import sys

    code = (
        "import os, sys, threading; before = dict(os.environ)\n"
        "from pyg_scale_ogb import Evaluator; Evaluator('ogbn-arxiv')\n"
        "added = set(os.environ) - set(before)\n"
        "assert added <= {'KMP_INIT_AT_FORK', 'KMP_DUPLICATE_LIB_OK'}, added\n"
        "assert all(os.environ[name] == value for name, value in before.items())\n"
        "assert sys.modules.get('outdated') is None and 'outdated' not in sys.modules\n"
        "assert not [t for t in threading.enumerate() if 'check' in t.name], threading.enumerate()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_evaluator_without_ogb_says_so(monkeypatch):
    import sys

    for name in [n for n in sys.modules if n.partition(".")[0] == "ogb"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ogb", None)
    with pytest.raises(ImportError, match="pip install ogb"):
        Evaluator("ogbn-arxiv")
