"""``pyg-scale predict MODEL.py:NAME GRAPH --http`` as a process, and what it refuses."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
import uvicorn
from torch_geometric.nn import GraphSAGE

import pyg_scale
from pyg_scale.serving import Predictor
from pyg_scale_http.command import bound
from tests import preloaded

from .clients import HOPS, ask, in_background, predictions, wait_for

MODEL = """
import time
from pathlib import Path
import torch
from torch_geometric.nn import GraphSAGE
def make():
    torch.manual_seed(0)
    return GraphSAGE(8, 16, num_layers=2, out_channels=4)
def negative(model, batch):
    Path("entered").touch()
    until = time.monotonic() + 30
    while Path("hold").exists() and time.monotonic() < until:
        time.sleep(0.01)
    return -model(batch.x, batch.edge_index)[: batch.batch_size]
"""


@contextmanager
def command(tmp_path, data, *options):
    """The address of a server of ``pyg-scale predict``, and its process."""
    if not (tmp_path / "graph").exists():
        pyg_scale.save(data, tmp_path / "graph")
        (tmp_path / "model.py").write_text(MODEL)
    model, graph = f"{tmp_path / 'model.py'}:make", str(tmp_path / "graph")
    arguments = f"{model} {graph} --http 127.0.0.1:0 --num-neighbors 4,3 --attributes x".split()
    process = subprocess.Popen(
        [preloaded.python(), "-m", "pyg_scale.cli", "predict", *arguments, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    try:
        line = process.stdout.readline()
        if not line:
            raise AssertionError(process.communicate(timeout=30)[1])
        yield line.split()[-1], process
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_answers_leave_at_once():
    """Without it, the body of an answer waits 40 ms until the client confirms its head."""
    config = uvicorn.Config("nothing:app", host="127.0.0.1", port=0)
    with bound(config) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_the_command_serves_weights_and_ends_on_sigterm(tmp_path, data, predictor):
    torch.manual_seed(0)
    model = GraphSAGE(8, 16, num_layers=2, out_channels=4)
    for parameter in model.parameters():
        parameter.data.mul_(2)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    options = ["--weights", str(tmp_path / "model.pt")]
    options += ["--forward", f"{tmp_path / 'model.py'}:negative", "--max-connections", "4"]
    with command(tmp_path, data, *options) as (address, process):
        port = int(address.rstrip("/").rpartition(":")[2])
        status, content, _ = ask(port, {"ids": [7, 12]})
        assert status == 200
        with Predictor(model, data, HOPS) as expected:
            torch.testing.assert_close(-predictions(content), expected.predict([7, 12]))
        idle = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(4)]
        assert ask(port, {"ids": [7]})[0] == 503  # there are enough connections
        for each in idle:
            each.close()
        wait_for(lambda: ask(port, None, method="GET", path="/health")[0] == 200)

        # A request under way is answered, and no other one is taken.
        (tmp_path / "entered").unlink()
        (tmp_path / "hold").touch()
        client, found = in_background(port, [7, 12])
        wait_for((tmp_path / "entered").exists)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: not takes_connections(port))
        assert process.poll() is None
        (tmp_path / "hold").unlink()
        client.join(20)
        assert found[0][:2] == (200, content)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0
        assert set(err.splitlines()) <= {"WARNING:  Exceeded concurrency limit."}
        assert "answered 2 requests for 4 nodes" in out


def takes_connections(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=20).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_the_command_follows_the_graph(tmp_path, data):
    with command(tmp_path, data, "--follow", "0.02") as (address, _):
        port = int(address.rstrip("/").rpartition(":")[2])
        assert ask(port, {"ids": [data.num_nodes]})[0] == 404
        row = {name: data[name][:1] for name in data.node_attrs()}
        edges = torch.tensor([[7, 12], [data.num_nodes, data.num_nodes]])
        pyg_scale.append(tmp_path / "graph", row, edges)
        until = time.monotonic() + 30
        while b"pyg_scale_snapshot 1" not in ask(port, None, method="GET", path="/metrics")[1]:
            assert time.monotonic() < until
            time.sleep(0.01)
        status, content, _ = ask(port, {"ids": [data.num_nodes]})
        torch.manual_seed(0)
        model = GraphSAGE(8, 16, num_layers=2, out_channels=4)
        with Predictor(model, tmp_path / "graph", HOPS, attributes=["x"]) as expected:
            torch.testing.assert_close(predictions(content), expected.predict([data.num_nodes]))
        assert status == 200


def test_weights_do_not_run(tmp_path, data):
    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"a": Runs()}, tmp_path / "model.pt")
    from pyg_scale_http.command import load_model

    (tmp_path / "model.py").write_text(MODEL)
    with pytest.raises(Exception, match="weights_only"):
        load_model(f"{tmp_path / 'model.py'}:make", str(tmp_path / "model.pt"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("model.py", "FILE.py:NAME"),
        ("nothing.py:make", "no file"),
        ("model.py:other", "no 'other'"),
    ],
)
def test_models_that_are_none(tmp_path, target, what, capsys, monkeypatch):
    from pyg_scale_http.command import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    assert main([target, "graph", "--http"]) == 1
    assert what in capsys.readouterr().err


def test_a_forward_that_is_none(tmp_path):
    from pyg_scale_http.command import load_forward

    (tmp_path / "model.py").write_text(MODEL + "one = 1")
    assert load_forward(None) is None
    with pytest.raises(TypeError, match="is a int, and no function"):
        load_forward(f"{tmp_path / 'model.py'}:one")


def test_a_file_imports_its_neighbors(tmp_path, monkeypatch):
    from pyg_scale_http.command import load_forward, load_model

    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "layers_of_mine.py").write_text("import torch\nmade = torch.nn.Linear(3, 2)")
    (tmp_path / "json.py").write_text("raise RuntimeError('that of Python was meant')")
    text = "import json\nfrom layers_of_mine import made as model\ndef make(): return model"
    (tmp_path / "uses_layers.py").write_text(text + "\ndef forward(*_): return json.dumps(1)")
    assert load_model(f"{tmp_path / 'uses_layers.py'}:make", None).out_features == 2
    assert load_forward(f"{tmp_path / 'uses_layers.py'}:forward")() == "1"


def test_an_address_that_is_none(capsys):
    from pyg_scale_http.command import main

    with pytest.raises(SystemExit):
        main(["model.py:make", "graph", "--http", "127.0.0.1"])
    assert "HOST:PORT" in capsys.readouterr().err
