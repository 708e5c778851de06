"""Servers in this process, and what a client asks them."""

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

import torch
import uvicorn
from torch_geometric.nn import GraphSAGE

from pyg_scale.serving import Predictor
from pyg_scale_http.app import Service

HOPS = [4, 3]


@contextmanager
def serving(predictor, http="auto", **options):
    """The port of a server in a thread."""
    service = Service(predictor, **options)
    config = uvicorn.Config(service.app(), http=http, log_level="critical", lifespan="on")
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    until = time.monotonic() + 20
    while not server.started and time.monotonic() < until:
        time.sleep(0.01)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()


def predictor_of(data):
    torch.manual_seed(0)
    model = GraphSAGE(8, 16, num_layers=2, out_channels=4)
    return Predictor(model, data, HOPS, attributes=["x"], max_batch=8)


def ask(port, body, content_type="application/json", method="POST", path="/predict", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = json.dumps(body).encode() if not isinstance(body, bytes | None) else body
    headers = {"Content-Type": content_type, **{k.replace("_", "-"): v for k, v in headers.items()}}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, answer.headers


def predictions(content):
    return torch.tensor(json.loads(content)["predictions"])


def in_background(port, ids):
    found = []
    thread = threading.Thread(target=lambda: found.append(ask(port, {"ids": ids})))
    thread.start()
    return thread, found


def wait_for(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
