"""A real server and real clients, well-behaved and not."""

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow
import pytest
import torch
from torch_geometric.data import Data

from pyg_scale.serving import Neighborhoods, NewRows, Predictor
from pyg_scale.testing import graphs
from pyg_scale_http import messages
from pyg_scale_http.connection import PunctualProtocol

from .clients import HOPS, ask, in_background, predictions, predictor_of, serving, wait_for

ARROW = "application/vnd.apache.arrow.stream"
TOKEN = "0123456789abcdef"


def test_json(port, predictor):
    status, content, _ = ask(port, {"ids": [7, 12, 7]})
    assert status == 200
    torch.testing.assert_close(predictions(content), predictor.predict([7, 12, 7]))


def stream(columns, compression=None):
    """Columns as an Arrow stream."""
    table = columns if isinstance(columns, pyarrow.Table) else pyarrow.table(columns)
    sink = pyarrow.BufferOutputStream()
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with pyarrow.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def test_arrow(port, predictor):
    body = stream({"ids": pyarrow.array([7, 12], pyarrow.int32())})
    status, content, headers = ask(port, body, ARROW, Accept=ARROW)
    assert (status, headers["Content-Type"]) == (200, ARROW)
    found = pyarrow.ipc.open_stream(content).read_all()["predictions"].to_pylist()
    torch.testing.assert_close(torch.tensor(found), predictor.predict([7, 12]))


def strictly(content):
    """JSON as strict readers have it, which is without NaN and Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(content, parse_constant=refuse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_that_json_does_not_have(data, dtype):
    values = torch.tensor([[0.1, float("nan")], [float("-inf"), float("inf")]], dtype=dtype)

    def forward(model, batch):
        return values[batch.n_id[: batch.batch_size]]

    with (
        Predictor(torch.nn.Identity(), data, HOPS, forward=forward) as made,
        serving(made) as port,
    ):
        status, content, _ = ask(port, {"ids": [0, 1]})
        number = values[0, 0].item()
        assert (status, strictly(content)) == (200, {"predictions": [[number, None], [None, None]]})
        content = ask(port, {"ids": [0, 1]}, Accept=ARROW)[1]
        exact = pyarrow.ipc.open_stream(content).read_all()["predictions"].to_pylist()
        torch.testing.assert_close(torch.tensor(exact).to(dtype), values, equal_nan=True)


def test_new_rows(port, predictor):
    x, edges = [[0.5] * 8, [1.0] * 8], [[3, 9, 4], [0, 0, 1]]
    request = {"ids": [5], "new_rows": {"attributes": {"x": x}, "edge_index": edges}}
    status, content, _ = ask(port, request)
    assert status == 200
    rows = NewRows({"x": torch.tensor(x)}, torch.tensor(edges))
    torch.testing.assert_close(predictions(content), predictor.predict([5], new_rows=rows))


def test_times_and_types():
    """A node of a type, as of a time, with a new one and its edges in the request."""
    typed = graphs.hetero()
    seen = []

    def forward(model, batch):
        seen.append(batch)
        return batch["item"].n_id[: batch["item"].batch_size]

    options = {"input_type": "item", "time_attr": "when", "attributes": ["x"], "seed": 3}
    with (
        Predictor(torch.nn.Identity(), typed, HOPS, forward=forward, **options) as made,
        serving(made) as port,
    ):
        assert json.loads(ask(port, {"ids": [3, 1], "time": 5})[1]) == {"predictions": [3, 1]}
        assert ask(port, {"ids": [3, 1], "time": [5, 10**18]})[0] == 200
        body = stream({"ids": [3, 1], "time": [5, 10**18]})
        assert json.loads(ask(port, body, ARROW)[1]) == {"predictions": [3, 1]}
        assert_same(seen[-1], seen[-2])
        assert any(seen[-1][t].num_edges for t in seen[-1].edge_types)
        assert ask(port, {"ids": [3], "time": -(10**15)})[0] == 200  # before the first event
        assert not any(seen[-1][t].num_edges for t in seen[-1].edge_types)
        assert ask(port, {"ids": [3], "time": -(10**30)})[0] == 400
        status, content, _ = ask(port, {"ids": [3, 1]})
        assert status == 400
        assert b"time is missing" in content

        x, ends = [[0.5, 1.0, -1.0, 2.0]], [[4, 9], [0, 0]]
        buys = ("user", "buys", "item")
        rows = {"attributes": {"x": x}, "edge_index": {"user,buys,item": ends}}
        status, content, _ = ask(port, {"time": 5, "new_rows": rows})
        assert status == 400
        assert b"lack 'when'" in content
        rows["edge_attributes"] = {"user,buys,item": {"when": [4, 6]}}
        status, content, _ = ask(port, {"ids": [3], "time": 5, "new_rows": rows})
        assert (status, json.loads(content)) == (200, {"predictions": [3, 12]})
        served = seen[-1]
    whole = typed.clone()  # rebuilt with the new node at its end
    whole["item"].x = torch.cat([typed["item"].x, torch.tensor(x)])
    whole["item"].time = torch.cat([typed["item"].time, typed["item"].time[:1]])
    whole["item"].num_nodes = 13
    new = torch.tensor(ends) + torch.tensor([[0], [12]])
    whole[buys].edge_index = torch.cat([typed[buys].edge_index, new], dim=1)
    whole[buys].when = torch.cat([typed[buys].when, torch.tensor([4, 6])])
    whole[buys].weight = torch.cat([typed[buys].weight, typed[buys].weight[:2]])
    expected = Neighborhoods(whole, HOPS, **options).batch(
        torch.tensor([3, 12]), torch.tensor([5, 5])
    )
    assert_same(served, expected)
    assert 70 in served[buys].e_id  # the edge of time 4, which the request brought
    assert 71 not in served[buys].e_id  # that of time 6 is later than the request


def test_a_request_without_a_time_has_that_of_its_nodes():
    """A model that reads ``seed_time`` raised for it, which was a 500."""
    data = graphs.hostile()

    def forward(model, batch):
        return batch.seed_time

    options = {"time_attr": "time", "attributes": []}
    with (
        Predictor(torch.nn.Identity(), data, HOPS, forward=forward, **options) as made,
        serving(made) as port,
    ):
        status, content, _ = ask(port, {"ids": [4, 1]})
        assert (status, json.loads(content)) == (200, {"predictions": data.time[[4, 1]].tolist()})
        assert json.loads(ask(port, {"ids": [4], "time": 3})[1]) == {"predictions": [3]}


def assert_same(found, expected):
    """All that two batches have of nodes and edges is the same, as bytes."""
    for left, right in zip(found.stores, expected.stores, strict=True):
        for name in ("n_id", "e_id", "edge_index", "x", "batch"):
            assert (name in left) == (name in right)
            if name in left:
                assert left[name].numpy().tobytes() == right[name].numpy().tobytes(), name


def read_rows(dtype, values):
    """The rows of an attribute of a dtype in a JSON request."""
    data = Data(x=torch.zeros(3, 1, dtype=dtype), edge_index=torch.tensor([[1], [0]]))
    body = json.dumps({"new_rows": {"attributes": {"x": [[each] for each in values]}}})
    with Predictor(torch.nn.Identity(), data, [2]) as made:
        return messages.read(body.encode(), messages.JSON, made).new_rows.attributes["x"]


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.float64, [0.1, 1e300, 2**53, 1]),
        (torch.uint8, [0, 255]),
        (torch.int64, [-(2**63), 2**63 - 1]),
        (torch.bool, [True, 0, 1, False]),
    ],
)
def test_numbers_of_json_keep_their_digits(dtype, values):
    assert read_rows(dtype, values).flatten().tolist() == values


def test_a_time_of_json_is_not_rounded():
    """As float32 it would be 57.5 seconds later, and show what happened until then."""
    body = json.dumps({"ids": [0, 1], "time": [1_700_000_070.5, 1_700_000_000.1]})
    found = messages.read(body.encode(), messages.JSON, None).time
    assert found.tolist() == [1_700_000_070.5, 1_700_000_000.1]


@pytest.mark.parametrize(
    ("dtype", "values", "what"),
    [
        (torch.uint8, [0, 300], "0 to 255"),
        (torch.uint8, [-1], "0 to 255"),
        (torch.int8, [128], "-128 to 127"),
        (torch.int32, [2**31 + 5], "the range of torch.int32"),
        (torch.int64, [1, True], "must be integers"),
        (torch.int64, [1, 2.0], "must be integers"),
        (torch.float32, [1.5, True], "must be numbers"),
        (torch.bool, [1, 2], "true, false, 0 or 1"),
        (torch.bool, [0.0], "true, false, 0 or 1"),
    ],
)
def test_numbers_that_do_not_fit_their_attribute(dtype, values, what):
    with pytest.raises(messages.BadRequest, match=what):
        read_rows(dtype, values)


@pytest.mark.parametrize(
    ("body", "status", "what"),
    [
        (b"{", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[1]", 400, "must be an object"),
        (b'{"ids": [1], "time": NaN}', 400, "NaN is no number of JSON"),
        (b'{"ids": [1], "time": 1e999}', 400, "time must be numbers within the range"),
        (b'{"ids": [1], "time": [-1e999, 1]}', 400, "time must be numbers within the range"),
        ({"nodes": [1]}, 400, "unknown: nodes"),
        ({}, 400, "no predictions"),
        ({"ids": [[1]]}, 400, "list of integers"),
        ({"ids": 3}, 400, "list of integers"),
        ({"ids": [1.5]}, 400, "ids must be integers"),
        ({"ids": [True]}, 400, "ids must be integers"),
        ({"ids": [1, True]}, 400, "ids must be integers"),
        ({"ids": ["1"]}, 400, "ids must be"),
        ({"ids": [1, None]}, 400, "ids must be"),
        ({"ids": [10**30]}, 400, "ids must be"),
        ({"ids": [300]}, 404, "300 is out of range"),
        ({"ids": [-1]}, 404, "out of range"),
        ({"ids": list(range(9))}, 400, "max_batch=8"),
        ({"ids": [1], "time": 5}, 400, "no time_attr"),
        ({"ids": [1], "time": "now"}, 400, "time must be a number"),
        ({"ids": [1], "time": [[1]]}, 400, "time must be a number"),
        ({"ids": [1], "new_rows": [1]}, 400, "new_rows must have"),
        ({"new_rows": {"attributes": {"x": [[1.0]]}}}, 400, "rows of shape"),
        ({"new_rows": {"attributes": {"z": [[1.0]]}}}, 400, "no z"),
        ({"new_rows": {"attributes": {"x": [[1e39] * 8]}}}, 400, "the range of torch.float32"),
        ({"new_rows": {"attributes": {"x": [[None] * 8]}}}, 400, "x must be numbers"),
        ({"new_rows": {"attributes": {"x": [[1.0], [1.0, 2.0]]}}}, 400, "equal length"),
        ({"new_rows": {"attributes": {"x": [[0.0] * 8]}, "edge_index": [[1], [4]]}}, 404, "4"),
        ({"new_rows": {"attributes": {"x": [[0.0] * 8]}, "edge_index": {}}}, 400, "edge_index"),
    ],
)
def test_bad_requests_get_a_reason(port, body, status, what):
    found, content, _ = ask(port, body)
    assert (found, what in json.loads(content)["error"]) == (status, True), content


@pytest.mark.parametrize(
    "body", [b"", b"ARROW1", b"\xff\xff\xff\xff\x10\x00\x00\x00" + b"\x00" * 40]
)
def test_bad_arrow(port, body):
    status, content, _ = ask(port, body, ARROW)
    assert (status, "not an Arrow stream" in json.loads(content)["error"]) == (400, True)


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_arrow_that_would_grow_is_not_read(port, compression):
    """A body of a megabyte could stand for 30 gigabytes of ids."""
    body = stream({"ids": torch.zeros(1_000_000, dtype=torch.int64).numpy()}, compression)
    assert len(body) < 50_000
    before = pyarrow.total_allocated_bytes()
    status, content, _ = ask(port, body, ARROW)
    assert (status, "compressed" in json.loads(content)["error"]) == (400, True)
    assert pyarrow.total_allocated_bytes() - before < 1_000_000


def test_arrow_whose_dictionary_would_grow_is_not_read(port):
    """A dictionary is a message of its own, which may be compressed beside a plain batch."""

    def parts(text, compression):
        column = pyarrow.array([text]).dictionary_encode()
        return list(pyarrow.ipc.MessageReader.open_stream(stream({"ids": column}, compression)))

    schema, dictionary, _ = parts("a" * 20_000_000, "zstd")
    batch = parts("a", None)[-1]
    body = b"".join(each.serialize().to_pybytes() for each in (schema, dictionary, batch))
    assert len(body) < 50_000
    pool = pyarrow.default_memory_pool()
    before = pool.total_bytes_allocated()
    status, content, _ = ask(port, body, ARROW)
    assert (status, "got a dictionary" in json.loads(content)["error"]) == (400, True), content
    assert pool.total_bytes_allocated() - before < 1_000_000


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"ids": [1.5]}, "must be numbers"),
        ({"ids": ["1"]}, "must be numbers"),
        ({"ids": [None, 1]}, "missing values"),
        ({"ids": pyarrow.array([2**63], pyarrow.uint64())}, "column ids"),
        ({"nodes": [1]}, "must have a column ids"),
        ({"ids": [1], "time": [5]}, "no time_attr"),
        ({"ids": pyarrow.array([], pyarrow.int64())}, "is empty"),
    ],
)
def test_arrow_that_does_not_fit(port, columns, what):
    status, content, _ = ask(port, stream(columns), ARROW)
    assert (status, what in json.loads(content)["error"]) == (400, True), content


def test_arrow_with_a_column_twice(port):
    names = ["ids", "time", "ids"]
    table = pyarrow.Table.from_arrays([pyarrow.array([1])] * 3, names=names)
    status, content, _ = ask(port, stream(table), ARROW)
    expected = {"error": "an Arrow stream has the column ids more than once"}
    assert (status, json.loads(content)) == (400, expected)


def test_other_forms_and_paths(port):
    assert ask(port, b"ids=1", "application/x-www-form-urlencoded")[0] == 415
    assert ask(port, None, method="GET")[0] == 405
    assert ask(port, {"ids": [1]}, path="/nothing")[0] == 404
    status, content, headers = ask(port, None, method="GET", path="/")
    assert status == 200
    assert b"<h1>Predictions</h1>" in content
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert ask(port, None, method="GET", path="/health")[:2] == (200, b'{"status": "ok"}')


def test_metrics_are_in_the_form_of_prometheus(port):
    ask(port, {"ids": [1]})
    status, content, _ = ask(port, None, method="GET", path="/metrics")
    assert status == 200
    values = {}
    for line in content.decode().splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    assert values["pyg_scale_requests_total"] >= 1
    assert values['pyg_scale_http_answers_total{status="200"}'] >= 1
    assert values['pyg_scale_latency_seconds{quantile="0.99"}'] > 0


def test_bodies_that_are_too_large_or_too_slow(data):
    with serving(predictor_of(data), max_body=1000, body_seconds=0.3) as port:
        assert ask(port, b" " * 1001)[0] == 413
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            head = "POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            client.sendall(b"400\r\n" + b" " * 1024 + b"\r\n")
            assert b" 413 " in client.recv(4096)
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.sendall(f"{head}Content-Length: 20\r\n\r\n{{".encode())
            assert b" 408 " in client.recv(4096)
        assert ask(port, {"ids": [1]})[0] == 200


class Impatient(PunctualProtocol):
    head_seconds = 0.3


HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"ids": [7]}'
REQUEST = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


def answer(client):
    """One answer of a connection, whose head and body the server writes one after the other."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += client.recv(1000)
    head, _, body = found.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += client.recv(1000)
    return head.split()[1], body


@pytest.mark.parametrize(
    ("before", "part"),
    [
        pytest.param(b"", b"", id="nothing"),
        pytest.param(b"", HEAD[:1], id="one byte"),
        pytest.param(b"", HEAD, id="a part that grows"),
        pytest.param(REQUEST, HEAD, id="a part after a request"),
    ],
)
def test_heads_that_do_not_come_end_their_connection(data, before, part):
    with predictor_of(data) as made, serving(made, Impatient) as port:
        made.warm_up()
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            if before:
                client.sendall(before)
                assert answer(client)[0] == b"200"
            client.sendall(part)
            sender = threading.Thread(target=slowly, args=(client,))
            if part == HEAD:
                sender.start()
            assert answer(client)[0] == b"408"
            with contextlib.suppress(ConnectionResetError):  # for bytes that came after the end
                assert client.recv(1) == b""
            if part == HEAD:
                sender.join(20)
                assert not sender.is_alive()
        assert ask(port, {"ids": [7]})[0] == 200


def slowly(client):
    """A byte of a header from time to time, until the server closes the connection."""
    until = time.monotonic() + 15
    with contextlib.suppress(OSError):
        while time.monotonic() < until:
            time.sleep(0.05)
            client.sendall(b"a")


def test_a_limit_for_heads_is_none_for_bodies_and_answers(gated):
    model, made, _ = gated
    with (
        serving(made, Impatient) as port,
        socket.create_connection(("127.0.0.1", port), timeout=20) as client,
    ):
        for _ in range(2):
            model.open.clear()
            client.sendall(REQUEST[:-3])
            time.sleep(2 * Impatient.head_seconds)
            client.sendall(REQUEST[-3:])
            time.sleep(2 * Impatient.head_seconds)
            model.open.set()
            assert answer(client) == (b"200", b'{"predictions": [7]}')


def test_a_token(data):
    with serving(predictor_of(data), token=TOKEN) as port:
        assert ask(port, {"ids": [1]})[0] == 401
        assert ask(port, {"ids": [1]}, Authorization=f"Bearer {TOKEN}x")[0] == 401
        assert ask(port, {"ids": [1]}, Authorization=TOKEN)[0] == 401
        assert ask(port, {"ids": [1]}, Authorization=f"Bearer {TOKEN}")[0] == 200
        assert ask(port, None, method="GET", path="/metrics")[0] == 401
        assert ask(port, None, method="GET", path="/health")[0] == 200


class Gate(torch.nn.Module):
    """Lets a batch pass when it is opened."""

    def __init__(self):
        super().__init__()
        self.open, self.entered, self.ids = threading.Event(), threading.Event(), []

    @staticmethod
    def forward_batch(model, batch):
        model.entered.set()
        assert model.open.wait(20)
        found = batch.n_id[: batch.batch_size].clone()
        model.ids += found.tolist()
        if 13 in model.ids:
            raise ArithmeticError("secret of the model")
        return found


@pytest.fixture
def gated(data):
    model = Gate()
    options = {"max_batch": 1, "max_waiting": 2, "timeout": 15.0}
    with (
        Predictor(model, data, HOPS, forward=Gate.forward_batch, **options) as made,
        serving(made) as port,
    ):
        yield model, made, port
        model.open.set()


def test_overload_is_refused_at_once_and_the_rest_is_answered(gated):
    model, predictor, port = gated
    first, of_first = in_background(port, [1])
    assert model.entered.wait(20)
    others = [in_background(port, [k]) for k in (2, 3)]
    wait_for(lambda: predictor.stats()["waiting"] == 2)
    status, content, headers = ask(port, {"ids": [4]})
    assert (status, headers["Retry-After"]) == (429, "1")
    assert "2 nodes wait" in json.loads(content)["error"]
    model.open.set()
    for thread, found in [(first, of_first), *others]:
        thread.join(20)
        assert found[0][0] == 200


def test_many_clients_at_once_get_their_own_rows_or_a_refusal(gated):
    model, predictor, port = gated
    with ThreadPoolExecutor(24) as clients:
        asked = [clients.submit(ask, port, {"ids": [20 + k]}) for k in range(200)]
        wait_for(lambda: predictor.stats()["refused"] > 0)
        model.open.set()
        statuses = []
        for k, future in enumerate(asked):
            status, content, headers = future.result(60)
            statuses.append(status)
            if status == 200:
                assert json.loads(content) == {"predictions": [20 + k]}
            else:
                assert (status, headers["Retry-After"]) == (429, "1")
                assert "try again later" in json.loads(content)["error"]
    assert statuses.count(200) >= 3  # one under way and two that wait
    counts = ask(port, None, method="GET", path="/metrics")[1].decode()
    for status in (200, 429):
        assert f'answers_total{{status="{status}"}} {statuses.count(status)}\n' in counts


def test_nothing_is_computed_for_a_client_that_leaves(gated):
    model, predictor, port = gated
    first, _ = in_background(port, [1])
    assert model.entered.wait(20)
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    client.request("POST", "/predict", b'{"ids": [2]}', {"Content-Type": "application/json"})
    wait_for(lambda: predictor.stats()["waiting"] == 1)
    client.close()
    time.sleep(0.3)
    model.open.set()
    first.join(20)
    wait_for(lambda: predictor.stats()["cancelled"] == 1)
    assert model.ids == [1]


def test_a_model_that_raises_says_nothing_of_itself(gated):
    model, _, port = gated
    model.open.set()
    status, content, _ = ask(port, {"ids": [13]})
    assert status == 500
    assert b"secret" not in content
    assert b"log says why" in content


def test_a_fault_of_the_server_is_counted(data, monkeypatch):
    def read(*_):
        raise KeyError("secret of the server")

    monkeypatch.setattr(messages, "read", read)
    with predictor_of(data) as made, serving(made) as port:
        status, content, _ = ask(port, {"ids": [1]})
        assert (status, b"log says why" in content, b"secret" in content) == (500, True, False)
        counts = ask(port, None, method="GET", path="/metrics")[1].decode()
    assert 'answers_total{status="500"} 1\n' in counts


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_page_in_a_browser(port, predictor, data, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium, as Debian's package has it")

    def shown(port, ids):
        flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
        flags += " --disable-background-networking --disable-component-update --dump-dom"
        flags += f" --virtual-time-budget=8000 --user-data-dir={tmp_path / 'profile'}"
        return subprocess.run(
            [browser, *flags.split(), f"http://127.0.0.1:{port}/?ids={ids}"],
            capture_output=True,
            text=True,
            timeout=50,
        ).stdout

    page = shown(port, "7,12")
    for row in predictor.predict([7, 12]).tolist():
        assert f"{row[0]:.4f}" in page
    assert "300 is out of range" in shown(port, "300")

    values = torch.tensor([[float("nan"), 0.25], [float("inf"), float("-inf")]])

    def forward(model, batch):
        return values[batch.n_id[: batch.batch_size]]

    with (
        Predictor(torch.nn.Identity(), data, HOPS, forward=forward) as made,
        serving(made) as other,
    ):
        page = shown(other, "0,1")
    assert page.count("not finite") >= 3
    assert "0.2500" in page
    assert "<td>1</td>" in page  # the place of the largest number
    assert "<td>none</td>" in page
