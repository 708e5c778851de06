"""From the tables of a shop to a model that holds next week, and what a leak costs.

    python examples/relational/train.py             # a minute or two
    python examples/relational/train.py --tiny      # seconds, to see that it runs
    python examples/relational/train.py --data DIR  # a database of your own in RelBench's layout

A database of customers, products, orders and clicks becomes a graph directory. A two-layer
heterogeneous SAGE over encoders of torch_frame learns whether a customer orders within four weeks.
It is trained twice: on neighbourhoods as they were at the time of each seed, and on neighbourhoods
without times, in which a seed sees its own future. Offline, on past weeks, the second one looks
better. On the weeks that follow, whose future is not in the database, it is worse.

It needs: pip install './plugins/pyg-scale-tables[frame]'
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch_frame import stype
from torch_frame.nn.encoder import EmbeddingEncoder, LinearEncoder, StypeWiseFeatureEncoder
from torch_geometric.nn import HeteroConv, SAGEConv

import pyg_scale
from pyg_scale.convert import convert
from pyg_scale.loader import NeighborLoader

DAY = 86_400 * 10**9  # nanoseconds


class Columns(nn.Module):
    """The columns of a table, ``[rows, channels]``."""

    def __init__(self, frame, stats, channels):
        super().__init__()
        encoders = {stype.numerical: LinearEncoder(), stype.categorical: EmbeddingEncoder()}
        unknown = set(frame.col_names_dict) - set(encoders)
        if unknown:
            raise ValueError(f"no encoder for columns of {', '.join(map(str, unknown))}")
        self.encoder = StypeWiseFeatureEncoder(channels, stats, frame.col_names_dict, encoders)

    def forward(self, frame):
        return self.encoder(frame)[0].mean(dim=1)


class Age(nn.Module):
    """How long before the time of its seed a row was, ``[rows, channels]``."""

    def __init__(self, channels):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, channels), nn.ReLU(), nn.Linear(channels, channels)
        )

    def forward(self, time, seed_time):
        days = (seed_time - time) / DAY
        size = days.abs().log1p()
        return self.layers(torch.stack([days.sign(), size, torch.exp(-days.abs() / 14)], dim=1))


class Model(nn.Module):
    def __init__(self, graph, entity, channels=32):
        super().__init__()
        self.entity = entity
        stats = graph.col_stats
        self.columns = nn.ModuleDict(
            {name: Columns(graph[name].tf, stats[name], channels) for name in graph.node_types}
        )
        timed = [name for name in graph.node_types if "time" in graph[name]]
        self.ages = nn.ModuleDict({name: Age(channels) for name in timed})
        self.convs = nn.ModuleList(
            HeteroConv(
                {t: SAGEConv((channels, channels), channels, aggr="sum") for t in graph.edge_types}
            )
            for _ in range(2)
        )
        self.head = nn.Linear(channels, 1)

    def forward(self, batch, seed_time):
        x = {}
        for name in batch.node_types:
            x[name] = self.columns[name](batch[name].tf)
            if name in self.ages:
                x[name] = x[name] + self.ages[name](batch[name].time, seed_time[batch[name].batch])
        for conv in self.convs:
            x = x | {name: F.relu(out) for name, out in conv(x, batch.edge_index_dict).items()}
        return self.head(x[self.entity][: batch[self.entity].batch_size]).view(-1)


def batches(graph, seeds, temporal, shuffle=False):
    """Batches of a seed table, each neighbourhood by itself; without times if not temporal."""
    times = {"input_time": seeds.time, "time_attr": "time"} if temporal else {"disjoint": True}
    return NeighborLoader(
        graph,
        [24, 4],
        input_nodes=seeds.nodes,
        transform=seeds.transform,
        batch_size=256,
        shuffle=shuffle,
        num_workers=1,
        **times,
    )


def predicted(model, loader, seeds):
    """The scores and the targets of all seeds."""
    model.eval()
    scores, targets = [], []
    with torch.no_grad():
        for batch in loader:
            entity = batch[model.entity]
            scores.append(model(batch, seeds.time[entity.input_id]))
            targets.append(entity.y)
    return torch.cat(scores), torch.cat(targets)


def auc(scores, targets):
    """The area under the ROC curve: how often a positive has a higher score than a negative."""
    rank = torch.empty(len(scores), dtype=torch.float64)
    rank[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    positive = targets > 0.5
    few, many = int(positive.sum()), int((~positive).sum())
    return float((rank[positive].sum() - few * (few + 1) / 2) / max(1, few * many))


def trained(graph, task, temporal, epochs, seed):
    torch.manual_seed(seed)
    model = Model(graph, task.node_type)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    loader = batches(graph, task.train, temporal, shuffle=True)
    for _ in range(epochs):
        model.train()
        for batch in loader:
            entity = batch[model.entity]
            optimizer.zero_grad()
            out = model(batch, task.train.time[entity.input_id])
            F.binary_cross_entropy_with_logits(out, entity.y).backward()
            optimizer.step()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="a folder with manifest.yaml; default: a generated shop")
    parser.add_argument("--task", default="order", help="a task of binary classification")
    parser.add_argument("--graph", help="keep the graph directory here")
    parser.add_argument("--customers", type=int, default=2000, help="of the generated shop")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small shop and one epoch")
    args = parser.parse_args(argv)
    if args.tiny:
        parser.set_defaults(customers=150, epochs=1)
        args = parser.parse_args(argv)

    with tempfile.TemporaryDirectory() as folder:
        source = args.data
        if source is None:
            sys.path.insert(0, str(Path(__file__).parent))
            from shop import write

            source = write(Path(folder) / "shop", args.customers, args.seed).parent
        path = args.graph or str(Path(folder) / "graph")
        done = convert(f"tables:{source}", path, quiet=True)
        rows, edges = sum(done.num_nodes.values()), sum(done.num_edges.values())
        print(f"{len(done.num_nodes)} tables, {rows:,} rows, {edges:,} edges", flush=True)

        graph = pyg_scale.open(path)
        task = graph.tasks[args.task]
        print(task)
        for name, temporal in (("without times", False), ("as of their time", True)):
            model = trained(graph, task, temporal, args.epochs, args.seed)
            # Offline, a model is judged on batches like those that it was trained on.
            offline = auc(*predicted(model, batches(graph, task.val, temporal), task.val))
            # In use, the database ends today: what comes later is not in any neighbourhood.
            later = auc(*predicted(model, batches(graph, task.test, True), task.test))
            print(
                f"trained on neighbourhoods {name}: AUC offline {offline:.3f}, "
                f"in the next weeks {later:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
