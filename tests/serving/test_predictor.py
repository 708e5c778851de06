"""Requests that share batches, wait, are refused, give up or fail."""

import threading
import time

import pytest
import torch
from torch_geometric.nn import GCN, GraphSAGE, SAGEConv, to_hetero

import pyg_scale
from pyg_scale.datasets import planted_communities
from pyg_scale.errors import OverloadError, PredictionTimeoutError
from pyg_scale.loader import NeighborLoader
from pyg_scale.serving import NewRows, Predictor
from pyg_scale.serving.predictor import _Line, _Request
from pyg_scale.testing import graphs

HOPS = [4, 3]


@pytest.fixture(scope="module")
def data():
    return planted_communities(500, 6_000, num_classes=4, num_features=8)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GraphSAGE(8, 16, num_layers=2, out_channels=4)


class Gate(torch.nn.Module):
    """A model that waits until it is let on, and remembers the sizes of its batches."""

    def __init__(self, raises_for=None):
        super().__init__()
        self.open, self.entered = threading.Event(), threading.Event()
        self.sizes, self.raises_for = [], raises_for

    def forward(self, x, edge_index):
        self.entered.set()
        assert self.open.wait(20)
        return x

    @staticmethod
    def ids(model, batch):
        model(batch.x, batch.edge_index)
        ids = batch.n_id[: batch.batch_size]
        model.sizes.append(ids.numel())
        if model.raises_for is not None and bool((ids == model.raises_for).any()):
            raise ArithmeticError("this node is at fault")
        return ids.clone()


@pytest.fixture
def gate(data):
    model = Gate()
    with Predictor(model, data, HOPS, forward=Gate.ids, max_batch=4, max_waiting=8) as predictor:
        yield model, predictor
        model.open.set()


def hold(model, predictor):
    """Let one request occupy the model, so that others wait."""
    first = predictor.submit([0])
    assert model.entered.wait(20)
    return first


def test_predictions_are_those_of_the_loader(data, model):
    loader = NeighborLoader(
        data, HOPS, torch.arange(100), disjoint=True, redraw=False, seed=7, batch_size=10
    )
    model.eval()
    expected = torch.cat([model(b.x, b.edge_index)[: b.batch_size] for b in loader])
    with Predictor(model, data, HOPS, seed=7) as predictor:
        found = predictor.predict(torch.arange(100))
        one = predictor.predict([42])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one, expected[42:43], rtol=1e-5, atol=1e-6)
    assert not found.requires_grad
    with Predictor(model, data, HOPS, seed=8) as predictor:
        assert not torch.allclose(predictor.predict(torch.arange(100)), expected)


def test_types(model):
    typed = graphs.hetero()
    torch.manual_seed(0)
    types = [(t, typed[t].x.size(1)) for t in typed.node_types]
    typed_model = to_hetero(_Sage(), typed.metadata())
    x = {t: typed[t].x.float() for t, _ in types}
    for t in typed.node_types:
        typed[t].x = x[t]
    with torch.no_grad():
        typed_model(typed.x_dict, typed.edge_index_dict)
    ids = torch.tensor([3, 0, 11])
    loader = NeighborLoader(
        typed, HOPS, ("item", ids), disjoint=True, redraw=False, seed=0, batch_size=3
    )
    (batch,) = loader
    typed_model.eval()
    expected = typed_model(batch.x_dict, batch.edge_index_dict)["item"][:3]
    with Predictor(typed_model, typed, HOPS, input_type="item") as predictor:
        torch.testing.assert_close(predictor.predict(ids), expected.detach())


class _Sage(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = SAGEConv((-1, -1), 8), SAGEConv((-1, -1), 3)

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).relu(), edge_index)


def test_what_waits_shares_a_batch(gate):
    model, predictor = gate
    first = hold(model, predictor)
    others = [predictor.submit([i, i + 100]) for i in (1, 2, 3)]
    model.open.set()
    assert first.result(20).tolist() == [0]
    assert [f.result(20).tolist() for f in others] == [[1, 101], [2, 102], [3, 103]]
    assert model.sizes == [1, 4, 2]


def test_many_callers_get_their_own_rows(data):
    model = Gate()
    model.open.set()
    wrong = []

    def ask(start):
        for i in range(start, 500, 7):
            ids = [i, (i * 31) % 500, i]
            if predictor.predict(ids).tolist() != ids:
                wrong.append(i)

    with Predictor(model, data, HOPS, forward=Gate.ids, workers=2, max_delay=0.001) as predictor:
        threads = [threading.Thread(target=ask, args=(k,)) for k in range(7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        stats = predictor.stats()
    assert not wrong
    assert stats["requests"] == 500
    assert stats["nodes"] == 1500
    assert stats["waiting"] == 0
    assert stats["nodes_per_batch"] == 1500 / stats["batches"]
    assert 0 < stats["latency"]["p50"] <= stats["latency"]["p99"] <= stats["latency"]["max"]


def test_a_long_request_is_several_batches(data):
    model = Gate()
    model.open.set()
    with Predictor(model, data, HOPS, forward=Gate.ids, max_batch=16) as predictor:
        assert predictor.predict(torch.arange(40)).tolist() == list(range(40))
        assert sorted(model.sizes) == [8, 16, 16]
        with pytest.raises(ValueError, match="max_batch=16"):
            predictor.submit(torch.arange(17))
        assert predictor.predict([]).tolist() == []


def test_what_exceeds_the_line_is_refused_at_once(gate):
    model, predictor = gate
    hold(model, predictor)
    waiting = [predictor.submit([1, 2, 3, 4]) for _ in range(2)]
    with pytest.raises(OverloadError, match="8 nodes wait"):
        predictor.predict([5])
    model.open.set()
    assert [f.result(20).tolist() for f in waiting] == [[1, 2, 3, 4]] * 2
    assert predictor.stats()["refused"] == 1


def test_overload_does_not_delay_what_was_taken(data):
    """An accepted request is answered within three batches, however many are refused."""
    model = Gate()
    model.open.set()
    waits, wrong, refused = [], [], 0

    def note(node, before):
        def noted(future):
            waits.append(len(model.sizes) - before)
            if future.result().tolist() != [node]:
                wrong.append(node)

        return noted

    with Predictor(model, data, HOPS, forward=Gate.ids, max_batch=4, max_waiting=8) as predictor:
        while len(waits) < 300 and refused < 10**6:
            node = len(waits) % 500
            try:
                future = predictor.submit([node])
            except OverloadError:
                refused += 1
                time.sleep(1e-4)  # lets the other thread go on
            else:  # counted from here: this thread may have stood still before it was taken
                future.add_done_callback(note(node, len(model.sizes)))
        assert predictor.stats()["refused"] == refused > 0
    # One under way, and the eight that wait, of whom four share a batch.
    assert len(waits) >= 300
    assert max(waits) <= 3
    assert not wrong


def test_a_request_gives_up_in_time(gate):
    model, predictor = gate
    hold(model, predictor)
    with pytest.raises(PredictionTimeoutError, match="1 nodes wait"):
        predictor.predict([5], timeout=0.05)
    model.open.set()
    assert predictor.predict([6]).tolist() == [6]
    assert model.sizes == [1, 1]  # nobody computed what was given up
    assert predictor.stats()["cancelled"] == 1


def test_a_request_at_fault_fails_alone(data):
    model = Gate(raises_for=13)
    with Predictor(model, data, HOPS, forward=Gate.ids, max_batch=4) as predictor:
        hold(model, predictor)
        futures = [predictor.submit([i]) for i in (12, 13, 14)]
        model.open.set()
        assert futures[0].result(20).tolist() == [12]
        with pytest.raises(ArithmeticError, match="at fault"):
            futures[1].result(20)
        assert futures[2].result(20).tolist() == [14]
        assert predictor.predict([15]).tolist() == [15]
        assert predictor.stats()["failed"] == 1


def test_closing_answers_those_who_wait(data):
    model = Gate()
    predictor = Predictor(model, data, HOPS, forward=Gate.ids, max_batch=1)
    hold(model, predictor)
    waiting = [predictor.submit([i]) for i in (1, 2)]
    threading.Timer(0.2, model.open.set).start()
    predictor.close()
    assert [f.result(0).tolist() for f in waiting] == [[1], [2]]
    with pytest.raises(RuntimeError, match="closed"):
        predictor.predict([3])
    predictor.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("predictor")]


def test_closing_gives_up_in_time(data):
    model = Gate()
    predictor = Predictor(model, data, HOPS, forward=Gate.ids, max_batch=1)
    under_way = hold(model, predictor)
    waiting, given_up = predictor.submit([1]), predictor.submit([2])
    assert given_up.cancel()
    predictor.close(timeout=0.05)
    for future in (under_way, waiting):
        with pytest.raises(RuntimeError, match="closed before"):
            future.result(0)
    assert given_up.cancelled()
    model.open.set()
    for thread in threading.enumerate():
        if thread.name.startswith("predictor"):
            thread.join(20)
            assert not thread.is_alive()


def test_closing_gives_up_what_waits_for_company(data):
    """A request that a thread has taken, and for which it waits for others to share its batch."""
    line = _Line(max_batch=4, max_waiting=8, max_delay=30.0)
    request = _Request(torch.tensor([1]), None, None, time.monotonic(), float("inf"))
    found = []
    thread = threading.Thread(target=lambda: found.append(line.take()), daemon=True)
    thread.start()
    line.put([request])
    until = time.monotonic() + 20
    while line.num_nodes and time.monotonic() < until:
        time.sleep(0.001)
    assert line.rest() == [request]
    line.close()
    thread.join(20)
    assert found == [[]]


def test_new_rows_share_a_batch_with_those_before(data):
    model, x = Gate(), torch.full((2, 8), 3.0)

    def rows(module, batch):
        module(batch.x, batch.edge_index)
        module.sizes.append(batch.batch_size)
        return batch.x[: batch.batch_size].clone()

    edges = torch.tensor([[7, 9, 11], [0, 0, 1]])
    with Predictor(model, data, HOPS, forward=rows, attributes=["x"]) as predictor:
        hold(model, predictor)
        old = predictor.submit([4])
        new = [predictor.submit([5], new_rows=NewRows({"x": x * k}, edges)) for k in (1, 2)]
        model.open.set()
        assert torch.equal(old.result(20), data.x[4:5])
        for k, future in zip((1, 2), new):
            assert torch.equal(future.result(20), torch.cat([data.x[5:6], x * k]))
    assert model.sizes == [1, 4, 3]


def test_times():
    data = graphs.hostile()
    model = Gate()
    model.open.set()
    with Predictor(model, data, HOPS, forward=Gate.ids, time_attr="when") as predictor:
        assert predictor.predict([3, 4], time=5).tolist() == [3, 4]
        assert predictor.predict([3, 4], time=[1.5, -1e300]).tolist() == [3, 4]
        for wrong, error in (
            (None, ValueError),
            ([1], ValueError),
            (float("nan"), ValueError),
            ([True, False], TypeError),
        ):
            with pytest.raises(error, match="time"):
                predictor.predict([3, 4], time=wrong)
    data.when = data.when.double()
    with (
        Predictor(model, data, HOPS, forward=Gate.ids, time_attr="when") as predictor,
        pytest.raises(ValueError, match="time: the integer 9007199254740993 would be rounded"),
    ):
        predictor.predict([3, 4], time=[1, 2**53 + 1])
    with (
        Predictor(model, data, HOPS, forward=Gate.ids) as predictor,
        pytest.raises(ValueError, match="time_attr"),
    ):
        predictor.predict([3], time=4)


def test_a_time_before_the_first_event_has_no_neighbors():
    def edges(model, batch):
        return batch.edge_index.new_full((batch.batch_size,), batch.num_edges)

    data = graphs.hostile()
    with Predictor(Gate(), data, HOPS, forward=edges, time_attr="when") as predictor:
        assert predictor.predict([8], time=-(10**6)).tolist() == [0]
        assert predictor.predict([8], time=10**6).tolist() != [0]


@pytest.mark.parametrize(
    ("options", "error", "what"),
    [
        ({"max_batch": 0}, ValueError, "max_batch"),
        ({"max_batch": True}, TypeError, "max_batch"),
        ({"max_waiting": 3}, ValueError, "max_waiting"),
        ({"max_delay": -1}, ValueError, "max_delay"),
        ({"timeout": 0}, ValueError, "timeout"),
        ({"workers": 0}, ValueError, "workers"),
        ({"input_type": "paper"}, ValueError, "paper"),
        ({"attributes": "x"}, TypeError, "attributes"),
        ({"temporal_strategy": "first"}, ValueError, "temporal_strategy"),
    ],
)
def test_wrong_options_are_refused(data, model, options, error, what):
    with pytest.raises(error, match=what):
        Predictor(model, data, HOPS, **options)
    assert not [t for t in threading.enumerate() if t.name.startswith("predictor")]


def test_models_that_remember_a_batch_are_refused(data):
    with pytest.raises(ValueError, match="cached=True"):
        Predictor(GCN(8, 4, num_layers=2, cached=True), data, HOPS)
    with pytest.raises(TypeError, match="Module"):
        Predictor(len, data, HOPS)


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([500], IndexError),
        ([-1], IndexError),
        ([3, 500, 4], IndexError),
        ([*range(100), 500], IndexError),
        ([*range(100), -1], IndexError),
        ([0.5], TypeError),
        ([[1]], TypeError),
    ],
)
def test_wrong_ids_are_refused(data, model, ids, error):
    with Predictor(model, data, HOPS) as predictor, pytest.raises(error, match="ids"):
        predictor.predict(ids)


def test_a_batch_is_counted_before_it_is_answered(data):
    model, seen = Gate(), []
    with Predictor(model, data, HOPS, forward=Gate.ids) as predictor:
        future = predictor.submit([1, 2])
        future.add_done_callback(lambda _: seen.append(predictor.stats()))
        model.open.set()
        assert future.result(20).tolist() == [1, 2]
    assert [(s["requests"], s["nodes"], s["batches"]) for s in seen] == [(1, 2, 1)]
    assert seen[0]["latency"]["max"] > 0


def test_a_forward_of_another_size_and_a_model_in_training_are_errors(data, model):
    with Predictor(model, data, HOPS, forward=lambda m, b: b.x) as predictor:
        with pytest.raises(ValueError, match="a row for each of the 2 nodes"):
            predictor.predict([1, 2])
        model.train()
        with pytest.raises(RuntimeError, match="training mode"):
            predictor.predict([1])


def test_warming_up_is_not_counted(data, model):
    with Predictor(model, data, HOPS) as predictor:
        predictor.warm_up()
        assert predictor.stats()["requests"] == predictor.stats()["batches"] == 0


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float64], ids=str)
def test_batches_without_a_time_have_those_of_their_nodes(place, dtype, tmp_path):
    graph, seen = graphs.hostile(), []
    graph.time = graph.time.to(dtype)
    expected = graph.time.to(torch.int64 if dtype == torch.int32 else dtype)
    if place == "disk":
        pyg_scale.save(graph, tmp_path / "graph", time_attr="time")
        graph = tmp_path / "graph"

    def forward(model, batch):
        ids = batch.n_id[: batch.batch_size]
        seen.append((ids, batch.seed_time))  # as models read that know how old a row is
        return ids

    options = {"time_attr": "time", "forward": forward, "max_batch": 5}
    with Predictor(torch.nn.Identity(), graph, HOPS, **options) as predictor:
        predictor.warm_up()
        assert predictor.predict([4, 1, 4]).tolist() == [4, 1, 4]  # of a request without a time
    assert sorted({len(ids) for ids, _ in seen}) == [1, 3, 5]
    assert all(torch.equal(time, expected[ids]) for ids, time in seen)


def test_a_delay_fills_batches(data):
    model = Gate()
    model.open.set()
    with Predictor(model, data, HOPS, forward=Gate.ids, max_batch=3, max_delay=20) as predictor:
        begin = time.monotonic()
        futures = [predictor.submit([i]) for i in range(3)]
        assert [f.result(10).tolist() for f in futures] == [[0], [1], [2]]
        assert time.monotonic() - begin < 10  # a full batch does not wait for its delay
    assert model.sizes == [3]
