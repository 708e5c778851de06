"""Train PyG's Node2Vec with nothing but PyPI, and tell classes apart by the embeddings.

    python examples/node2vec.py                   # a generated graph
    python examples/node2vec.py --data cora.npz   # an archive: pyg_scale.datasets
    python examples/node2vec.py --p 0.5 --q 2     # walks that stay near where they began
    python examples/node2vec.py --tiny            # seconds, to see that it runs

The only line that differs from a script for PyG is the one that installs pyg_scale.compat. It
prints the accuracy after every epoch: nodes of the test set get the class of most of the
training nodes whose embeddings are nearest. The same seed gives the same walks.
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.nn import Node2Vec

import pyg_scale.compat
from pyg_scale.datasets import load, planted_communities


def accuracy(z, y, is_train):
    z = F.normalize(z, dim=1)
    near = (z[~is_train] @ z[is_train].t()).topk(5, dim=1).indices
    return float((y[is_train][near].mode(dim=1).values == y[~is_train]).float().mean())


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="an .npz archive or a data set of PyG; default: generated")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--p", type=float, default=1.0, help="return parameter")
    parser.add_argument("--q", type=float, default=1.0, help="in-out parameter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small graph and two epochs")
    args = parser.parse_args(argv)
    if args.tiny:
        parser.set_defaults(epochs=2)
        args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    size = (500, 10_000) if args.tiny else (5_000, 100_000)
    data = load(args.data) if args.data else planted_communities(*size, num_classes=5)
    with pyg_scale.compat.install():
        model = Node2Vec(
            data.edge_index,
            embedding_dim=64,
            walk_length=10,
            context_size=5,
            walks_per_node=4,
            p=args.p,
            q=args.q,
            num_nodes=data.num_nodes,
            sparse=True,
        )
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.05)
    is_train = torch.rand(data.num_nodes) < 0.5
    for epoch in range(args.epochs):
        total = 0.0
        for positive, negative in model.loader(batch_size=256, shuffle=True):
            optimizer.zero_grad()
            loss = model.loss(positive, negative)
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
        found = accuracy(model().detach(), data.y, is_train)
        print(f"epoch {epoch + 1}: loss {total:.2f}, test accuracy {found:.4f}", flush=True)


if __name__ == "__main__":
    main()
