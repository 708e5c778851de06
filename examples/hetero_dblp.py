"""Classify the nodes of one type in a heterogeneous graph.

    python examples/hetero_dblp.py                  # generated papers and authors
    python examples/hetero_dblp.py --data dblp.npz  # DBLP: authors, papers, terms, conferences
    python examples/hetero_dblp.py --tiny           # seconds, to see that it runs

GraphSAGE for one type of nodes is made into one for all types by PyG's to_hetero. Types
without features get learned vectors, looked up by the batch's n_id. It prints the accuracy on
the labelled type, and at last that of the same model trained on the whole graph, in equally many
steps.
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch_geometric.nn import SAGEConv, to_hetero

from pyg_scale.datasets import hetero_communities, load
from pyg_scale.loader import NeighborLoader


class GraphSAGE(torch.nn.Module):
    def __init__(self, channels, num_classes):
        super().__init__()
        self.conv1 = SAGEConv((-1, -1), channels)
        self.conv2 = SAGEConv((-1, -1), num_classes)
        self.dropout = torch.nn.Dropout(0.5)  # a module, which eval() switches off in every type

    def forward(self, x, edge_index):
        return self.conv2(self.dropout(self.conv1(x, edge_index).relu()), edge_index)


class Model(torch.nn.Module):
    """Features where there are some, else learned vectors, then GraphSAGE over all types."""

    def __init__(self, data, num_classes, channels=64):
        super().__init__()
        self.vector = torch.nn.ModuleDict(
            {
                name: torch.nn.Embedding(data[name].num_nodes, channels)
                for name in data.node_types
                if "x" not in data[name]
            }
        )
        self.gnn = to_hetero(GraphSAGE(channels, num_classes), data.metadata(), aggr="sum")

    def forward(self, batch):
        x = {
            name: self.vector[name](batch[name].n_id) if name in self.vector else batch[name].x
            for name in batch.node_types
        }
        return self.gnn(x, batch.edge_index_dict)


def train(model, optimizer, batches, target):
    """Train with batches and the rows of each that count; the last loss."""
    model.train()
    for batch, rows in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch)[target][rows], batch[target].y[rows])
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def test(model, loader, target):
    model.eval()
    right = total = 0
    for batch in loader:
        size = batch[target].batch_size
        right += int((model(batch)[target][:size].argmax(1) == batch[target].y[:size]).sum())
        total += size
    return right / total


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="a heterogeneous .npz archive; default: generated")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small graph and one epoch")
    args = parser.parse_args(argv)
    if args.tiny:
        parser.set_defaults(epochs=1)
        args = parser.parse_args(argv)
    torch.manual_seed(args.seed)

    if args.data is not None:
        data = load(args.data)
    elif args.tiny:
        data = hetero_communities(1_000, 500, 8_000, 4_000, seed=args.seed)
    else:
        data = hetero_communities(seed=args.seed)
    target = next(name for name in data.node_types if "y" in data[name])

    def loader(split, **kwargs):
        mask = data[target][f"{split}_mask"]
        return NeighborLoader(
            data,
            num_neighbors=[15, 10],
            input_nodes=(target, mask),
            batch_size=256,
            num_workers=args.workers,
            **kwargs,
        )

    train_loader, test_loader = loader("train", shuffle=True), loader("test")

    def new():
        torch.manual_seed(args.seed)
        model = Model(data, int(data[target].y.max()) + 1)
        with torch.no_grad():
            model(next(iter(test_loader)))  # sets the sizes of lazily made layers
        return model, torch.optim.Adam(model.parameters(), lr=0.005)

    model, optimizer = new()
    for epoch in range(args.epochs):
        batches = ((batch, slice(batch[target].batch_size)) for batch in train_loader)
        loss = train(model, optimizer, batches, target)
        accuracy = test(model, test_loader, target)
        print(f"epoch {epoch + 1}: loss {loss:.3f}, test accuracy {accuracy:.4f}", flush=True)
    print(f"test accuracy, sampled neighbours: {accuracy:.4f}", flush=True)

    whole = copy.copy(data)
    for name in data.node_types:
        whole[name].n_id = torch.arange(data[name].num_nodes)
    model, optimizer = new()
    steps = [(whole, data[target].train_mask)] * (args.epochs * len(train_loader))
    train(model, optimizer, steps, target)
    print(f"test accuracy, whole graph: {test(model, test_loader, target):.4f}", flush=True)
    return accuracy


if __name__ == "__main__":
    main()
