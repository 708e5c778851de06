"""A predictor that follows the snapshots of a graph directory."""

import threading
import time

import pytest
import torch
from torch_geometric.nn import GraphSAGE

import pyg_scale
from pyg_scale.datasets import planted_communities
from pyg_scale.errors import GraphDirectoryError
from pyg_scale.loader import NeighborLoader
from pyg_scale.serving import NewRows, Predictor
from pyg_scale.store import Disk
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same
from tests.store.directory.appended import between, first, grown, in_order

HOPS = [4, 3]
STEPS = 3


@pytest.fixture(scope="module")
def data():
    return in_order(planted_communities(300, 3_000, num_classes=4, num_features=8), STEPS)


@pytest.fixture
def path(data, tmp_path):
    """A directory at the first of three snapshots."""
    return pyg_scale.save(first(data, 0, STEPS), tmp_path / "graph")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GraphSAGE(8, 16, num_layers=2, out_channels=4).eval()


def append(path, data, step):
    new = between(first(data, step - 1, STEPS), first(data, step, STEPS))
    return pyg_scale.append(path, new, new)


def predictions(model, graph, ids):
    loader = NeighborLoader(
        graph, HOPS, ids, disjoint=True, redraw=False, seed=7, batch_size=len(ids)
    )
    batch = next(iter(loader))
    return model(batch.x, batch.edge_index)[: len(ids)]


@pytest.mark.parametrize("given", ["path", "opened", "disk"])
def test_refresh(data, path, model, given):
    graph = pyg_scale.open(path) if given == "opened" else path
    store = "disk" if given == "disk" else None
    ids = torch.arange(90)
    with Predictor(model, graph, HOPS, seed=7, feature_store=store) as predictor:
        for step in range(STEPS):
            if step:
                assert append(path, data, step) == step
                assert predictor.stats()["snapshot"] == step - 1
            assert predictor.refresh() == step
            state = first(data, step, STEPS)
            expected = predictions(model, state, ids)
            torch.testing.assert_close(predictor.predict(ids), expected, rtol=1e-5, atol=1e-6)
            last = torch.tensor([state.num_nodes - 1])
            torch.testing.assert_close(
                predictor.predict(last), predictions(model, state, last), rtol=1e-5, atol=1e-6
            )
            with pytest.raises(IndexError):
                predictor.predict([state.num_nodes])
        pyg_scale.compact(path)
        assert predictor.refresh() == STEPS - 1
        torch.testing.assert_close(predictor.predict(ids), predictions(model, data, ids))


@pytest.mark.parametrize("options", [{}, {"time_attr": "when"}, {"time_attr": "time"}], ids=str)
def test_the_neighbourhoods_are_those_of_the_loader(tmp_path, options):
    data = in_order(graphs.hostile(), STEPS)
    states = grown(data, tmp_path / "graph", STEPS, **options)
    model = torch.nn.Identity()
    ids = torch.arange(0, 30, 3)
    when = torch.full((10,), 5) if options else None
    with Predictor(model, tmp_path / "graph", HOPS, seed=7, **options) as predictor:
        for number, state in enumerate(states):
            found = pyg_scale.open(tmp_path / "graph", snapshot=number)
            with (
                Predictor(model, found, HOPS, seed=7, **options) as at,
                Predictor(model, state, HOPS, seed=7, **options) as expected,
            ):
                ours, theirs = (p.neighborhoods.batch(ids, when) for p in (at, expected))
                assert_same(ours, theirs)
        if not options:
            new = NewRows(
                {n: data[n][:1] for n in ("x", "y", "time")},
                torch.tensor([[3], [0]]),
                {n: data[n][:1] for n in ("when", "weight", "edge_attr")},
            )
            with Predictor(model, data, HOPS, seed=7) as expected:
                batches = (p.neighborhoods.batch(ids, None, new) for p in (predictor, expected))
                assert_same(*batches)


def test_follow(data, path, model):
    ids = torch.arange(90)
    with Predictor(model, path, HOPS, seed=7, follow=0.01) as predictor:
        for step in (1, 2):
            append(path, data, step)
            wait_for(predictor, "snapshot", step)
        torch.testing.assert_close(
            predictor.predict(ids), predictions(model, data, ids), rtol=1e-5, atol=1e-6
        )
    assert not [t for t in threading.enumerate() if t.name == "predictor-follows"]


def wait_for(predictor, name, value):
    until = time.monotonic() + 30
    while predictor.stats()[name] != value:
        assert time.monotonic() < until, predictor.stats()
        time.sleep(0.005)


def test_requests_while_the_graph_grows_and_is_compacted(data, path, model):
    """Each answer is that of some snapshot, and they do not go back."""
    ids, edge = torch.arange(30), torch.zeros(2, 1, dtype=torch.int64)
    ends = {name: data[name][:1] for name in data.edge_attrs() if name != "edge_index"}
    expected = [predictions(model, pyg_scale.open(path), ids)]
    states = 6
    done = threading.Event()
    seen, errors = [], []

    def ask():
        while not done.is_set():
            try:
                seen.append(predictor.predict(ids))
            except Exception as error:
                errors.append(error)

    with Predictor(model, path, HOPS, seed=7, follow=0.005) as predictor:
        thread = threading.Thread(target=ask)
        thread.start()
        try:
            for number in range(1, states):
                edge[0] = number * 10
                pyg_scale.append(path, edges={"edge_index": edge, **ends})
                expected.append(predictions(model, pyg_scale.open(path), ids))
                if number % 2:
                    pyg_scale.compact(path)
                wait_for(predictor, "snapshot", number)
        finally:
            done.set()
            thread.join(30)
    assert not errors
    at = 0
    for out in seen:
        while not torch.allclose(out, expected[at], rtol=1e-5, atol=1e-6):
            at += 1
            assert at < states, "an answer of no snapshot, or of an earlier one"


def test_what_cannot_be_followed(data, path, model, tmp_path):
    for follow, graph in ((True, data), (0.5, (None, None))):
        with pytest.raises(ValueError, match="only a graph directory has snapshots"):
            Predictor(model, graph, HOPS, follow=follow)
    changed = pyg_scale.open(path)
    changed.edge_index = changed.edge_index.flip(0)
    with pytest.raises(ValueError, match="without changes"):
        Predictor(model, changed, HOPS, follow=True)
    for follow in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="follow must be"):
            Predictor(model, path, HOPS, follow=follow)
    with pytest.raises(TypeError, match="follow must be"):
        Predictor(model, path, HOPS, follow="soon")
    with pytest.raises(ValueError, match="an instance has one graph"):
        Predictor(model, path, HOPS, follow=True, feature_store=Disk(path))
    with Predictor(model, data, HOPS) as predictor:
        assert predictor.stats()["snapshot"] is None
        with pytest.raises(ValueError, match="only a graph directory"):
            predictor.refresh()


def test_another_graph_in_its_place(data, path, model):
    append(path, data, 1)
    state = first(data, 1, STEPS)
    ids = torch.arange(50)
    with Predictor(model, path, HOPS, seed=7, follow=0.01) as predictor:
        pyg_scale.save(data, path, overwrite=True)
        with pytest.raises(GraphDirectoryError, match="another graph is at"):
            predictor.refresh()
        wait_for(predictor, "snapshot", 1)
        until = time.monotonic() + 30
        # A look while the directory was being replaced may have found some of its files missing.
        while "another graph is at" not in str(predictor.stats()["follow_error"]):
            assert time.monotonic() < until
            time.sleep(0.005)
        torch.testing.assert_close(predictor.predict(ids), predictions(model, state, ids))
