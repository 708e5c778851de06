"""Predict missing links with GraphSAGE and sampled neighbours.

    python examples/link_prediction.py                            # a generated graph
    python examples/link_prediction.py --data cora.npz            # an archive
    python examples/link_prediction.py --tiny                     # seconds, to see that it runs

A tenth of the links is hidden, the model learns from the others to tell links from random
pairs, and is asked about the hidden ones. LinkNeighborLoader draws the pairs: the same pairs
for the same seed, with any number of workers. It prints the area under the ROC curve.
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.nn import SAGEConv
from torch_geometric.transforms import RandomLinkSplit

from pyg_scale.datasets import load, planted_communities
from pyg_scale.loader import LinkNeighborLoader


class Encoder(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels):
        super().__init__()
        self.conv1 = SAGEConv(in_channels, hidden_channels)
        self.conv2 = SAGEConv(hidden_channels, hidden_channels)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def score(model, batch):
    """A score for every pair ``edge_label_index`` of a batch, ``[num_pairs]``."""
    z = model(batch.x, batch.edge_index)
    src, dst = batch.edge_label_index
    return (z[src] * z[dst]).sum(dim=-1)


def area_under_curve(score, label):
    """How often a link scores higher than a pair that is none; ties count half."""
    _, rank_of, count = score.unique(sorted=True, return_inverse=True, return_counts=True)
    rank = (count.cumsum(0) - (count - 1) / 2)[rank_of]
    num_pos, num_neg = int(label.sum()), int((label == 0).sum())
    return float((rank[label == 1].sum() - num_pos * (num_pos + 1) / 2) / (num_pos * num_neg))


@torch.no_grad()
def test(model, loader):
    model.eval()
    found = [(score(model, batch), batch.edge_label) for batch in loader]
    return area_under_curve(torch.cat([s for s, _ in found]), torch.cat([t for _, t in found]))


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="an .npz archive or a data set of PyG; default: generated")
    parser.add_argument("--epochs", type=int, default=3)
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
    else:
        size = (1_000, 20_000) if args.tiny else (20_000, 400_000)
        data = planted_communities(*size, num_communities=100, seed=args.seed)
    split = RandomLinkSplit(
        num_val=0.0, num_test=0.1, is_undirected=True, add_negative_train_samples=False
    )
    train, _, hidden = split(data)
    kwargs = {"num_neighbors": [10, 5], "batch_size": 2048, "num_workers": args.workers}
    train_loader = LinkNeighborLoader(
        train,
        edge_label_index=train.edge_label_index,
        neg_sampling="binary",
        shuffle=True,
        **kwargs,
    )
    test_loader = LinkNeighborLoader(
        hidden, edge_label_index=hidden.edge_label_index, edge_label=hidden.edge_label, **kwargs
    )

    model = Encoder(data.num_features, 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(score(model, batch), batch.edge_label)
            loss.backward()
            optimizer.step()
        area = test(model, test_loader)
        print(f"epoch {epoch + 1}: loss {loss:.3f}, area under the curve {area:.4f}", flush=True)
    return area


if __name__ == "__main__":
    main()
