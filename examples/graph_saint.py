"""Train on random subgraphs with the norms of GraphSAINT, beside the whole graph.

    python examples/graph_saint.py                   # a generated graph
    python examples/graph_saint.py --data cora.npz   # an archive: pyg_scale.datasets
    python examples/graph_saint.py --plain           # without the norms
    python examples/graph_saint.py --tiny            # seconds, to see that it runs

The only line that differs from a script for PyG is the import of the sampler. A batch is the
subgraph among the nodes of some walks. `edge_norm` makes its sums estimates of those of the whole
graph, and `node_norm` its loss. The model on the whole graph is the same one, with equally many
steps. Prints how many nodes the batches had, and the test accuracy of each.
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphConv
from torch_geometric.transforms import RandomNodeSplit
from torch_geometric.utils import degree

from pyg_scale.datasets import load, planted_communities
from pyg_scale.loader import GraphSAINTRandomWalkSampler


class Net(torch.nn.Module):
    def __init__(self, channels, classes, hidden=64):
        super().__init__()
        self.narrow = torch.nn.Linear(channels, hidden)  # first, so that messages are small
        self.first, self.last = GraphConv(hidden, hidden), GraphConv(hidden, classes)

    def forward(self, x, edge_index, weight):
        x = self.first(self.narrow(x).relu(), edge_index, weight).relu()
        return self.last(F.dropout(x, 0.5, self.training), edge_index, weight)


def train(model, steps, epochs):
    """Train with the batches of `steps()` each epoch; the mean number of nodes of a batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    nodes = []
    model.train()
    for _ in range(epochs):
        for batch, weight, share in steps():
            mask = batch.train_mask
            loss = F.cross_entropy(
                model(batch.x, batch.edge_index, weight)[mask], batch.y[mask], reduction="none"
            )
            loss = (loss * share[mask]).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            nodes.append(batch.num_nodes)
    return sum(nodes) / len(nodes)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="an .npz archive or a data set of PyG; default: generated")
    parser.add_argument("--plain", action="store_true", help="without the norms")
    parser.add_argument("--walks", type=int, default=6_000, help="walks of a batch")
    parser.add_argument("--length", type=int, default=2, help="steps of a walk")
    parser.add_argument("--steps", type=int, default=10, help="batches of an epoch")
    parser.add_argument("--coverage", type=int, default=500, help="samples per node for the norms")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small graph and two epochs")
    args = parser.parse_args(argv)
    if args.tiny:
        parser.set_defaults(epochs=2, walks=200)
        args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    size = (1_000, 10_000) if args.tiny else (20_000, 400_000)
    data = load(args.data) if args.data else planted_communities(*size, num_classes=5)
    if "train_mask" not in data:
        data = RandomNodeSplit(num_val=0.25, num_test=0.25)(data)
    data.edge_weight = 1 / degree(data.edge_index[1], data.num_nodes)[data.edge_index[1]]  # means
    loader = GraphSAINTRandomWalkSampler(
        data,
        batch_size=args.walks,
        walk_length=args.length,
        num_steps=args.steps,
        sample_coverage=0 if args.plain else args.coverage,
        num_workers=args.workers,
        seed=args.seed,
        log=False,
    )

    def subgraphs():
        for batch in loader:
            if args.plain:
                number = max(1, int(batch.train_mask.sum()))
                there = degree(batch.edge_index[1], batch.num_nodes)[batch.edge_index[1]]
                yield batch, 1 / there, torch.full((batch.num_nodes,), 1 / number)
            else:
                yield batch, batch.edge_norm * batch.edge_weight, batch.node_norm

    def whole_graph():
        for _ in range(args.steps):
            yield data, data.edge_weight, torch.full((data.num_nodes,), 1 / data.num_nodes)

    for name, steps in {"GraphSAINT": subgraphs, "whole graph": whole_graph}.items():
        torch.manual_seed(args.seed)
        model = Net(data.num_features, int(data.y.max()) + 1)
        nodes = train(model, steps, args.epochs)
        model.eval()
        with torch.no_grad():
            right = model(data.x, data.edge_index, data.edge_weight).argmax(dim=1) == data.y
        accuracy = float(right[data.test_mask].float().mean())
        print(f"test accuracy, {name}: {accuracy:.4f} ({nodes:,.0f} nodes per batch)", flush=True)


if __name__ == "__main__":
    main()
