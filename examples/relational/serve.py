"""From a trained model to predictions: in bulk, over HTTP, and while new orders arrive.

    python examples/relational/serve.py           # a minute or two
    python examples/relational/serve.py --tiny    # seconds, to see that it runs
    python examples/relational/serve.py --stay    # and try the page that it prints in a browser

The model of train.py learns from neighbourhoods as they were at the time of each seed. This script
shows that bulk inference and a server see the same neighbourhoods, byte for byte: the draws of a
customer at a time follow from the seed alone (redraw=False). Then customers order while the server
runs. It follows the graph directory, so predictions for the next day change. Those as of the day
before do not.

It needs: pip install './plugins/pyg-scale-tables[frame]' './plugins/pyg-scale-http[fast]'
"""

import argparse
import json
import sys
import tempfile
import threading
import time as clock
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import torch
import torch.nn.functional as F
import uvicorn

import pyg_scale
from pyg_scale.convert import convert
from pyg_scale.loader import NeighborLoader
from pyg_scale.serving import Predictor
from pyg_scale_http.app import Service

sys.path.insert(0, str(Path(__file__).parent))
from shop import write
from train import DAY, Model

HOPS = [24, 4]
SEED = 42  # of the draws, in training, in bulk and in the server
TOGETHER = 256  # customers of a batch
LIMIT = 60  # seconds for whatever is waited for


def loader(graph, nodes, time, **options):
    """Neighbourhoods of nodes as they were at times; the same whenever they are drawn."""
    return NeighborLoader(
        graph,
        HOPS,
        input_nodes=nodes,
        input_time=time,
        time_attr="time",
        redraw=False,
        seed=SEED,
        **options,
    )


def forward(model, batch):
    """The model on a batch of any of them: a score for each customer."""
    return model(batch, batch[model.entity].seed_time)


def train(graph, task, epochs, seed):
    """The model, and the first of the batches that it was trained on."""
    torch.manual_seed(seed)
    model = Model(graph, task.node_type)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    options = {"transform": task.train.transform, "batch_size": TOGETHER, "shuffle": True}
    first = None
    for _ in range(epochs):
        for batch in loader(graph, task.train.nodes, task.train.time, **options):
            optimizer.zero_grad()
            out = forward(model, batch)
            F.binary_cross_entropy_with_logits(out, batch[model.entity].y).backward()
            optimizer.step()
            first = batch if first is None else first
    return model.eval(), first


@torch.no_grad()
def predict_in_bulk(model, graph, ids, time):
    """The scores of customers at times, batch by batch."""
    found = loader(graph, (model.entity, ids), time, batch_size=TOGETHER)
    return torch.cat([forward(model, batch) for batch in found])


def neighborhood(batch, number):
    """All that a batch has around one of its seeds, as bytes: nodes, columns, times, edges."""
    found, position = [], {}
    for name in batch.node_types:
        store = batch[name]
        mine = (store.batch == number).nonzero().view(-1)
        position[name] = torch.full((store.num_nodes,), -1)
        position[name][mine] = torch.arange(len(mine))
        found += [store.n_id[mine], *store.tf[mine].feat_dict.values()]
        if "time" in store:
            found.append(store.time[mine])
    for edge_type in batch.edge_types:
        source, destination = batch[edge_type].edge_index
        mine = position[edge_type[2]][destination] >= 0
        found += [position[edge_type[0]][source[mine]], position[edge_type[2]][destination[mine]]]
        found.append(batch[edge_type].e_id[mine])
    return [each.numpy().tobytes() for each in found]


@contextmanager
def serving(predictor):
    """The address of a server in a thread of this process; ``pyg-scale predict`` starts another."""
    config = uvicorn.Config(Service(predictor).app(), port=0, log_level="warning", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive(), "the server to start")
    try:
        yield server.servers[0].sockets[0].getsockname()[:2]
    finally:
        server.should_exit = True
        thread.join(LIMIT)


def wait_until(condition, what):
    until = clock.monotonic() + LIMIT
    while not condition():
        if clock.monotonic() > until:
            raise TimeoutError(f"waited {LIMIT} seconds for {what}")
        clock.sleep(0.01)


def ask(address, ids, time):
    """The scores of customers at a time, over HTTP."""
    connection = HTTPConnection(*address, timeout=LIMIT)
    request = json.dumps({"ids": ids, "time": int(time)})
    connection.request("POST", "/predict", request, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    found = json.loads(answer.read())
    connection.close()
    if answer.status != 200:
        raise RuntimeError(found["error"])
    return torch.tensor(found["predictions"])


class Visitors:
    """Somebody who asks for predictions all the time, in a thread."""

    def __init__(self, address, ids, time):
        self.answered, self.error, self._left = 0, None, threading.Event()
        self._thread = threading.Thread(target=self._ask, args=(address, ids, time), daemon=True)

    def _ask(self, *request):
        try:
            while not self._left.is_set():
                ask(*request)
                self.answered += 1
        except Exception as error:
            self.error = error

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._left.set()
        self._thread.join(LIMIT)
        if self.error is not None:
            raise self.error


def order(path, customer, products, times):
    """Append orders of a customer, with the columns that the first orders have."""
    graph = pyg_scale.open(path)
    count, first = len(products), graph["orders"].num_nodes
    new = first + torch.arange(count)
    customers = torch.full((count,), customer)
    edges = {}
    for column, table, ends in (
        ("customer", "customers", customers),
        ("product", "products", torch.tensor(products)),
    ):
        edges["orders", f"f2p_{column}", table] = torch.stack([new, ends])
        edges[table, f"rev_f2p_{column}", "orders"] = torch.stack([ends, new])
    rows = {"tf": graph["orders"].tf[torch.arange(count)], "time": torch.tensor(times)}
    return pyg_scale.append(path, nodes={"orders": rows}, edges=edges)


def same(ours, theirs, what):
    """Say that two results are equal as bytes, which they must be."""
    if ours.numpy().tobytes() != theirs.numpy().tobytes():
        raise AssertionError(f"{what} differ by {float((ours - theirs).abs().max())}")
    print(f"{what}: the same bytes", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--customers", type=int, default=2000, help="of the generated shop")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small shop and one epoch")
    parser.add_argument("--stay", action="store_true", help="serve until interrupted")
    args = parser.parse_args(argv)
    if args.tiny:
        parser.set_defaults(customers=150, epochs=1)
        args = parser.parse_args(argv)

    with tempfile.TemporaryDirectory() as folder:
        source = write(Path(folder) / "shop", args.customers, args.seed).parent
        path = str(Path(folder) / "graph")
        convert(f"tables:{source}", path, quiet=True)
        graph = pyg_scale.open(path)
        task = graph.tasks["order"]
        model, trained_on = train(graph, task, args.epochs, args.seed)
        print(f"trained on {len(task.train.time):,} rows of {task.node_type}", flush=True)

        options = {"input_type": task.node_type, "time_attr": "time", "seed": SEED}
        options |= {"forward": forward, "max_batch": TOGETHER, "follow": 0.05}
        with Predictor(model, path, HOPS, **options) as predictor, serving(predictor) as address:
            compare(graph, task, trained_on, predictor)
            new_orders(path, graph, model, predictor, address)
            if args.stay:
                print("serving until you press Ctrl-C: http://{}:{}/".format(*address), flush=True)
                try:
                    threading.Event().wait()
                except KeyboardInterrupt:
                    pass


def compare(graph, task, trained_on, predictor):
    """A batch of training, one of bulk inference, and requests have the same neighbourhoods."""
    seeds = trained_on[task.node_type]
    ids, time = seeds.n_id[: seeds.batch_size], seeds.seed_time
    count = min(32, len(ids))
    nodes = task.node_type, ids.flip(0)  # among others than in training
    (bulk,) = loader(graph, nodes, time.flip(0), batch_size=TOGETHER)
    for i in range(count):
        served = predictor.neighborhoods.batch(ids[i : i + 1], time[i : i + 1])
        in_training = neighborhood(trained_on, i)
        in_bulk = neighborhood(bulk, len(ids) - 1 - i)
        if not in_training == in_bulk == neighborhood(served, 0):
            raise AssertionError(f"customer {int(ids[i])} has another neighbourhood when served")
    print(f"neighbourhoods of {count} customers, training = bulk = served: the same bytes")


def new_orders(path, graph, model, predictor, address):
    """Predictions in bulk and over HTTP, before and after new orders."""
    customers = graph[model.entity].num_nodes
    today = int(graph["orders"].time.max())
    tomorrow = today + DAY
    everybody = torch.arange(customers)
    scores = predict_in_bulk(model, graph, everybody, torch.full((customers,), today))
    some = everybody[:TOGETHER].tolist()
    same(scores[:TOGETHER], ask(address, some, today), f"{customers:,} predictions, bulk = HTTP")

    customer = int(scores.argmin())  # of whom an order is least expected
    before = [ask(address, [customer], time) for time in (today, tomorrow)]
    with Visitors(address, [customer], today) as visitors:
        hours = [today + h * DAY // 24 for h in (2, 3, 5)]
        snapshot = order(path, customer, [0, 1, 2], hours)
        wait_until(lambda: predictor.stats()["snapshot"] >= snapshot, f"snapshot {snapshot}")
        wait_until(lambda: visitors.answered or visitors.error, "an answer")
    # Alone in its batch again, as before: matrix products of other sizes round otherwise.
    after = [ask(address, [customer], time) for time in (today, tomorrow)]
    print(f"customer {customer} ordered {len(hours)} times: snapshot {snapshot} of the graph")
    same(before[0], after[0], "the prediction as of today, before = after")
    chances = [float(torch.sigmoid(each)) for each in (before[1], after[1])]
    if torch.equal(before[1], after[1]):
        raise AssertionError("the prediction for tomorrow did not change")
    print("the chance of an order, as of tomorrow: {:.4f}, and then {:.4f}".format(*chances))

    now = pyg_scale.open(path)
    scores = predict_in_bulk(model, now, everybody, torch.full((customers,), tomorrow))
    same(scores[:TOGETHER], ask(address, some, tomorrow), "with the new orders, bulk = HTTP")
    print(f"{visitors.answered} requests were answered meanwhile, none was refused or failed")


if __name__ == "__main__":
    main()
