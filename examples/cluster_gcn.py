"""Train on clusters of a graph (Cluster-GCN), on small subgraphs around roots (ShaDow, PageRank,
IBMB), or on random nodes.

    python examples/cluster_gcn.py                   # a generated graph, seconds
    python examples/cluster_gcn.py --loader shadow   # subgraphs of depth 2 around the roots
    python examples/cluster_gcn.py --loader ppr      # the nodes of the largest PageRank
    python examples/cluster_gcn.py --loader ibmb     # the same groups of roots in every epoch
    python examples/cluster_gcn.py --loader random   # all edges among a tenth of the nodes
    python examples/cluster_gcn.py --data cora.npz   # an archive: pyg_scale.datasets
    python examples/cluster_gcn.py --tiny            # a second, to see that it runs

The only line that differs from a script for PyG is the import of the loaders. It prints the loss
and the test accuracy of every epoch. With each loader, a GraphSAGE learns from subgraphs that
have all their edges; the test takes all neighbours of all nodes at once. The same seed gives the
same batches with any number of workers. At last the same model learns from the whole graph, in
equally many steps.
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE
from torch_geometric.transforms import RandomNodeSplit

from pyg_scale.datasets import load, planted_communities
from pyg_scale.loader import (
    ClusterData,
    ClusterLoader,
    IBMBNodeLoader,
    NodeLoader,
    RandomNodeLoader,
    ShaDowKHopSampler,
)
from pyg_scale.sampler import PPRSampler

LOADERS = ("clusters", "shadow", "ppr", "ibmb", "random")


class Net(torch.nn.Module):
    def __init__(self, channels, classes, hidden=64):
        super().__init__()
        self.narrow = torch.nn.Linear(channels, hidden)  # first, so that messages are small
        self.rest = GraphSAGE(hidden, hidden, num_layers=2, out_channels=classes)

    def forward(self, x, edge_index):
        return self.rest(self.narrow(x).relu(), edge_index)


def loader_of(data, args):
    options = {"num_workers": args.workers, "seed": args.seed}
    if args.loader == "shadow":
        options |= {"node_idx": data.train_mask, "batch_size": 256, "shuffle": True}
        return ShaDowKHopSampler(data, depth=2, num_neighbors=5, **options)
    if args.loader == "ppr":
        options |= {"input_nodes": data.train_mask, "batch_size": 256, "shuffle": True}
        return NodeLoader(data, PPRSampler(data, k=16), **options)
    if args.loader == "random":
        return RandomNodeLoader(data, num_parts=10, shuffle=True, **options)
    if args.loader == "ibmb":
        options |= {"num_auxiliary_nodes": 32, "num_nodes_per_batch": 256}
        return IBMBNodeLoader(data, "rand", data.train_mask, **options)
    clusters = ClusterData(data, num_parts=args.parts)
    return ClusterLoader(clusters, batch_size=max(1, args.parts // 10), shuffle=True, **options)


def predictions(model, batch):
    """What the model says of the nodes that a batch is for, and what is true of them."""
    out = model(batch.x, batch.edge_index)
    if "root_n_id" in batch:  # y has the rows of roots alone
        return out[batch.root_n_id], batch.y
    if "batch_size" in batch:  # seeds come first
        return out[: batch.batch_size], batch.y[: batch.batch_size]
    mask = batch.output_node_mask if "output_node_mask" in batch else batch.train_mask
    return out[mask], batch.y[mask]


def train(data, batches, args, say):
    """Train a new model on what `batches()` yields each epoch; its accuracy on the test nodes."""
    torch.manual_seed(args.seed)
    model = Net(data.num_features, int(data.y.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        total = number = 0
        for batch in batches():
            found, wanted = predictions(model, batch)
            if not wanted.numel():
                continue
            loss = F.cross_entropy(found, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * wanted.numel()
            number += wanted.numel()
        with torch.no_grad():
            found = model(data.x, data.edge_index).argmax(dim=1)
        accuracy = float((found == data.y)[data.test_mask].float().mean())
        if say:
            loss = total / number
            print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)
    return accuracy


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="an .npz archive or a data set of PyG; default: generated")
    parser.add_argument("--loader", choices=LOADERS, default=LOADERS[0])
    parser.add_argument("--parts", type=int, default=100, help="number of clusters")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small graph and two epochs")
    args = parser.parse_args(argv)
    if args.tiny:
        parser.set_defaults(epochs=2, parts=20)
        args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    size = (1_000, 10_000) if args.tiny else (20_000, 400_000)
    data = load(args.data) if args.data else planted_communities(*size, num_classes=5)
    if "train_mask" not in data:
        data = RandomNodeSplit(num_val=0.25, num_test=0.25)(data)
    loader = loader_of(data, args)
    found = train(data, lambda: loader, args, say=True)
    print(f"test accuracy, {args.loader}: {found:.4f}", flush=True)
    found = train(data, lambda: [data] * len(loader), args, say=False)
    print(f"test accuracy, whole graph: {found:.4f}", flush=True)


if __name__ == "__main__":
    main()
