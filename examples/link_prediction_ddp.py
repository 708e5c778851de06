"""Predict missing links in a partitioned graph, with several processes.

    torchrun --standalone --nproc-per-node 2 examples/link_prediction_ddp.py        # generated
    torchrun --standalone --nproc-per-node 2 examples/link_prediction_ddp.py --data cora.npz
    python examples/link_prediction_ddp.py --tiny           # one process, to see that it runs

As link_prediction.py, on a graph that all ranks open together. Rank 0 hides a tenth of the links,
cuts the graph of the others into parts, and leaves the links to learn from and to be asked about in
files of their own, which every rank maps. The ranks share the links of every step; negatives are
drawn by LinkNeighborLoader. The area under the ROC curve is that of
all ranks together.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_geometric.nn import SAGEConv
from torch_geometric.transforms import RandomLinkSplit

import pyg_scale
from pyg_scale import comm, distributed, parallel
from pyg_scale.datasets import load, planted_communities
from pyg_scale.loader import LinkNeighborLoader


class Encoder(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels):
        super().__init__()
        self.conv1 = SAGEConv(in_channels, hidden_channels)
        self.conv2 = SAGEConv(hidden_channels, hidden_channels)

    def forward(self, x, edge_index, pairs):
        """A score for every pair ``[2, num_pairs]`` of rows."""
        z = self.conv2(self.conv1(x, edge_index).relu(), edge_index)
        return (z[pairs[0]] * z[pairs[1]]).sum(dim=-1)


def prepare(args, folder, world_size):
    """What rank 0 does before the others go on."""
    if args.data:
        data = load(args.data)
    else:
        size = (1_000, 20_000) if args.tiny else (20_000, 400_000)
        data = planted_communities(*size, num_communities=100, seed=args.seed)
    torch.manual_seed(args.seed)
    split = RandomLinkSplit(
        num_val=0.0, num_test=0.1, is_undirected=True, add_negative_train_samples=False
    )
    train, _, hidden = split(data)
    for name, part in (("train", train), ("test", hidden)):
        np.save(folder / f"{name}_links.npy", part.edge_label_index.numpy())
        np.save(folder / f"{name}_labels.npy", part.edge_label.numpy())
    del train.edge_label_index, train.edge_label
    pyg_scale.save(train, folder / "graph")
    pyg_scale.partition(folder / "graph", world_size, "fennel", folder / "parts", args.seed)
    return folder


def told_by_rank_0(path):
    """A path, sent as bytes of a tensor: objects would be unpickled where they come."""
    said = torch.zeros(4096, dtype=torch.uint8)
    if path is not None:
        name = torch.frombuffer(bytearray(os.fsencode(path)), dtype=torch.uint8)
        said[: name.numel()] = name
    dist.broadcast(said, 0)
    return Path(os.fsdecode(bytes(said.tolist()).rstrip(b"\0")))


def area_under_curve(score, label):
    """How often a link scores higher than a pair that is none; ties count half."""
    _, rank_of, count = score.unique(sorted=True, return_inverse=True, return_counts=True)
    rank = (count.cumsum(0) - (count - 1) / 2)[rank_of]
    num_pos, num_neg = int(label.sum()), int((label == 0).sum())
    return float((rank[label == 1].sum() - num_pos * (num_pos + 1) / 2) / (num_pos * num_neg))


@torch.no_grad()
def area(model, loader, ranks):
    model.eval()
    found = [torch.empty(2, 0)]
    for batch in loader:
        score = model(batch.x, batch.edge_index, batch.edge_label_index)
        found.append(torch.stack([score, batch.edge_label.float()]))
    score, label = torch.cat(ranks.all_gather(torch.cat(found, dim=1)), dim=1)
    return area_under_curve(score, label)


def fit(args, data, folder, ranks):
    def read(name):
        return torch.from_numpy(np.load(folder / name, mmap_mode="c"))

    def loader_of(split, **options):
        return LinkNeighborLoader(
            data,
            [10, 5],
            edge_label_index=read(f"{split}_links.npy"),
            batch_size=2048,
            num_workers=args.workers,
            seed=args.seed,
            **options,
        )

    # a step of all ranks has as many links as a batch of the test
    train = loader_of("train", shuffle=True, neg_sampling="binary", split_batches=True)
    test = loader_of("test", edge_label=read("test_labels.npy"))
    model = parallel.wrap(Encoder(data.num_features, 64), "ddp")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for epoch in range(args.epochs):
        model.train()
        for batch in train:
            optimizer.zero_grad()
            score = model(batch.x, batch.edge_index, batch.edge_label_index)
            loss = F.binary_cross_entropy_with_logits(score, batch.edge_label)
            model.backward(loss, batch.edge_label.numel())
            optimizer.step()
        found = area(model.module, test, ranks)
        if ranks.rank == 0:
            print(f"epoch {epoch + 1}: area under the curve {found:.4f}", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="an .npz archive or a data set of PyG; default: generated")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small graph and one epoch")
    args = parser.parse_args(argv)
    if args.tiny:
        parser.set_defaults(epochs=1)
        args = parser.parse_args(argv)
    with distributed.init(timeout=3600) as ranks, tempfile.TemporaryDirectory() as folder:
        made = prepare(args, Path(folder), ranks.world_size) if ranks.rank == 0 else None
        made = told_by_rank_0(made)  # and nobody goes on before it is done
        with pyg_scale.open(made / "parts") as data, comm.connect() as group:
            fit(args, data, made, group)
            group.barrier()  # the files are there until all are done


if __name__ == "__main__":
    main()
