"""Train a GCN on batches of LABOR and other samplers, beside the whole graph.

    python examples/importance_sampling.py                   # a generated graph
    python examples/importance_sampling.py --data cora.npz   # an archive: pyg_scale.datasets
    python examples/importance_sampling.py --data tolokers.npz --neighbors 50 50 --epochs 50
    python examples/importance_sampling.py --samplers ladies fastgcn
    python examples/importance_sampling.py --samplers cost   # LABOR, batches of equal cost
    python examples/importance_sampling.py --layers          # whole layers, as in the papers
    python examples/importance_sampling.py --tiny            # seconds, to see that it runs

Self-loops are added to the graph, and each layer is a `GCNConv(normalize=False)` that sums sampled
in-edges by the weights of the batch: an unbiased estimate of the layer on the whole graph. Batches
of sampled neighbours bring none; there, an edge stands for as many as its node has per sampled one.
The model on the whole graph is the same one, with the weights of all edges. The test takes all
neighbours. Prints how many nodes the batches had, and the test accuracy of each; of two classes,
which are rarely of one size, the area under the ROC curve.
"""

import argparse
import itertools

import torch
import torch.nn.functional as F
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.transforms import AddSelfLoops, RandomNodeSplit

from pyg_scale.datasets import load, planted_communities
from pyg_scale.loader import Budget, NeighborLoader
from pyg_scale.nn import accelerate
from pyg_scale.sampler import FastGCN, Labor, Ladies, edges_by_layer

SAMPLERS = ("labor", "neighbours", "ladies", "fastgcn", "cost")


class GCN(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.convs = torch.nn.ModuleList(
            GCNConv(i, o, normalize=False) for i, o in itertools.pairwise(channels)
        )

    def forward(self, x, edges):
        """`edges` has an edge index and weights for each layer."""
        for conv, (edge_index, weight) in zip(self.convs, edges, strict=True):
            x = conv(x, edge_index, weight)
            if conv is not self.convs[-1]:
                x = F.dropout(x.relu(), 0.5, self.training)
        return x


def train(model, steps, epochs):
    """Train with what `steps()` yields each epoch; the mean number of nodes of a batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    nodes = []
    model.train()
    for _ in range(epochs):
        for x, edges, rows, y in steps():
            loss = F.cross_entropy(model(x, edges)[rows], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            nodes.append(x.size(0))
    return sum(nodes) / len(nodes)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="an .npz archive or a data set of PyG; default: generated")
    parser.add_argument("--samplers", choices=SAMPLERS, default=SAMPLERS[:2], nargs="+")
    parser.add_argument("--layers", action="store_true", help="expand nodes in every layer")
    parser.add_argument("--dependent", action="store_true", help="layers share random numbers")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--neighbors", type=int, default=[10, 10], nargs="+")
    parser.add_argument("--layer-nodes", type=int, default=4_096, help="of ladies and fastgcn")
    parser.add_argument("--budget", type=int, default=20_000, help="edges of a batch of equal cost")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small graph and two epochs")
    args = parser.parse_args(argv)
    if args.tiny:
        parser.set_defaults(epochs=2, batch_size=128, layer_nodes=256, budget=2_000)
        args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    size = (1_000, 10_000) if args.tiny else (20_000, 400_000)
    data = load(args.data) if args.data else planted_communities(*size, num_classes=5)
    if "train_mask" not in data:
        data = RandomNodeSplit(num_val=0.25, num_test=0.25)(data)
    data = AddSelfLoops()(data)
    channels = [data.num_features, *[64] * (len(args.neighbors) - 1), int(data.y.max()) + 1]
    whole = gcn_norm(data.edge_index, num_nodes=data.num_nodes, add_self_loops=False)
    everything = [whole] * len(args.neighbors)
    data.gcn_weight = whole[1]
    data.degree = torch.bincount(data.edge_index[1], minlength=data.num_nodes)

    options = {"weights": "gcn", "hops": "layers" if args.layers else "once"}
    labor = Labor(layer_dependency=args.dependent, **options)
    of_name = {"neighbours": None, "ladies": Ladies(**options), "fastgcn": FastGCN(**options)}

    def sampled(name):
        size = {"batch_size": args.batch_size}
        if name == "cost":
            size = {"batch_cost": Budget("edges", args.budget)}
        numbers = args.neighbors
        if name in ("ladies", "fastgcn"):
            numbers = [args.layer_nodes] * len(numbers)
        loader = NeighborLoader(
            data,
            numbers,
            data.train_mask,
            shuffle=True,
            num_workers=args.workers,
            seed=args.seed,
            neighbor_sampler=of_name.get(name, labor),
            **size,
        )

        def steps():
            for batch in loader:
                if args.layers and "edge_weight" in batch:
                    edges = edges_by_layer(batch)
                else:
                    weight = batch.edge_weight if "edge_weight" in batch else weights_of(batch)
                    edges = [(batch.edge_index, weight)] * len(args.neighbors)
                yield batch.x, edges, slice(batch.batch_size), batch.y[: batch.batch_size]

        return steps

    def full_batch():
        mask = data.train_mask
        for _ in range(-(-int(mask.sum()) // args.batch_size)):  # as many steps
            yield data.x, everything, mask, data.y[mask]

    ways = {name: sampled(name) for name in args.samplers} | {"whole graph": full_batch}
    for name, steps in ways.items():
        torch.manual_seed(args.seed)
        model = GCN(channels)
        accelerate(model)
        nodes = train(model, steps, args.epochs)
        model.eval()
        with torch.no_grad():
            out, y = model(data.x, everything)[data.test_mask], data.y[data.test_mask]
        if channels[-1] == 2:
            metric, value = "ROC AUC", roc_auc(out[:, 1] - out[:, 0], y)
        else:
            metric, value = "accuracy", float((out.argmax(dim=1) == y).float().mean())
        print(f"test {metric}, {name}: {value:.4f} ({nodes:,.0f} nodes per batch)", flush=True)


def roc_auc(score, y):
    """The probability that a node of class 1 has a higher score than one of class 0."""
    ones, zeros = score[y == 1], score[y == 0].sort().values
    below = torch.searchsorted(zeros, ones) + torch.searchsorted(zeros, ones, right=True)
    return float(below.double().mean() / 2 / zeros.numel())


def weights_of(batch):
    """The weights of uniformly sampled neighbours, of batches that bring none."""
    sampled = torch.bincount(batch.edge_index[1], minlength=batch.num_nodes)
    of_each = batch.degree / sampled.clamp(min=1)
    return batch.gcn_weight * of_each[batch.edge_index[1]]


if __name__ == "__main__":
    main()
