"""Classify the nodes of one type in a partitioned heterogeneous graph, with several processes.

    torchrun --standalone --nproc-per-node 2 examples/hetero_ddp.py                  # generated
    torchrun --standalone --nproc-per-node 2 examples/hetero_ddp.py --data dblp.npz
    torchrun --standalone --nproc-per-node 4 examples/hetero_ddp.py --parts DIR
    python examples/hetero_ddp.py --tiny                      # one process, to see that it runs

As hetero_dblp.py, on a graph that all ranks open together (see train_ddp.py for several machines).
Ranks share the seeds of every step, and sample across the parts of all of them. A batch may lack a
type of nodes or edges, so that some parameters get no gradient: find_unused_parameters says so to
DDP. Types without features get learned vectors, which every rank has.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_geometric.nn import SAGEConv, to_hetero

import pyg_scale
from pyg_scale import distributed, parallel
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


def prepare(args, folder, world_size):
    """What rank 0 does before the others go on: the graph in parts."""
    parts = Path(args.parts or folder / "parts")
    if not parts.exists():
        size = (1_000, 500, 8_000, 4_000) if args.tiny else ()
        data = load(args.data) if args.data else hetero_communities(*size, seed=args.seed)
        pyg_scale.save(data, folder / "graph")
        pyg_scale.partition(folder / "graph", world_size, "hash", parts, args.seed)
    return parts


def told_by_rank_0(path):
    """A path, sent as bytes of a tensor: objects would be unpickled where they come."""
    said = torch.zeros(4096, dtype=torch.uint8)
    if path is not None:
        name = torch.frombuffer(bytearray(os.fsencode(path)), dtype=torch.uint8)
        said[: name.numel()] = name
    dist.broadcast(said, 0)
    return Path(os.fsdecode(bytes(said.tolist()).rstrip(b"\0")))


@torch.no_grad()
def accuracy(model, loader, target):
    """Over the seeds of all ranks, each of which counts its share."""
    model.eval()
    counts = torch.zeros(2)
    for batch in loader:
        size = batch[target].batch_size
        right = model(batch)[target][:size].argmax(1) == batch[target].y[:size]
        counts += torch.tensor([float(right.sum()), float(size)])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1].clamp(min=1))


def fit(args, data, rank):
    target = next(name for name in data.node_types if "y" in data[name])

    def loader_of(split, **options):
        return NeighborLoader(
            data,
            [15, 10],
            input_nodes=(target, data[target][f"{split}_mask"]),
            batch_size=256,
            num_workers=args.workers,
            seed=args.seed,
            **options,
        )

    torch.manual_seed(args.seed)
    train = loader_of("train", shuffle=True, split_batches=True)  # 256 for a step of all ranks
    test = loader_of("test")
    core = Model(data, int(data[target].y.max()) + 1)
    with torch.no_grad():  # sets the sizes of lazily made layers; every rank takes a batch
        core(next(iter(loader_of("train"))))
    model = parallel.wrap(core, "ddp", find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for epoch in range(args.epochs):
        core.train()
        for batch in train:
            optimizer.zero_grad()
            size = batch[target].batch_size
            loss = F.cross_entropy(model(batch)[target][:size], batch[target].y[:size])
            model.backward(loss, size)
            optimizer.step()
        found = accuracy(core, test, target)
        if rank == 0:
            print(f"epoch {epoch + 1}: test accuracy {found:.4f}", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="a heterogeneous .npz archive; default: generated")
    parser.add_argument("--parts", help="a partitioned graph directory, or where to make it")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small graph and one epoch")
    args = parser.parse_args(argv)
    if args.tiny:
        parser.set_defaults(epochs=1)
        args = parser.parse_args(argv)
    with distributed.init(timeout=3600) as ranks, tempfile.TemporaryDirectory() as folder:
        parts = prepare(args, Path(folder), ranks.world_size) if ranks.rank == 0 else None
        parts = told_by_rank_0(parts)  # and nobody goes on before it is done
        with pyg_scale.open(parts) as data:
            fit(args, data, ranks.rank)


if __name__ == "__main__":
    main()
