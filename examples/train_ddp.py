"""Train GraphSAGE with several processes, each on the seeds of its own part of the graph.

    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py                 # generated
    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py --data facebook_pages.npz
    torchrun --standalone --nproc-per-node 4 examples/train_ddp.py --graph DIR --parts DIR
    python examples/train_ddp.py --tiny                     # one process, to see that it runs

The graph lies in a graph directory, which every process opens: its tensors are memory-mapped, so
that all processes of a machine share one copy. Rank 0 makes it first, and a second directory in
which the graph is cut into as many parts as there are ranks. A rank trains on the training nodes
of its part, so that the neighbours and features that it reads are mostly those that no other rank
reads. Gradients are averaged by DistributedDataParallel over gloo. Ranks with fewer batches wait
for the others in join().
"""

import argparse
import contextlib
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

import pyg_scale
from pyg_scale.datasets import load, planted_communities
from pyg_scale.loader import NeighborLoader
from pyg_scale.store.directory import GraphDirectory

PATIENCE = timedelta(minutes=10)  # that a rank waits for another one


class Net(torch.nn.Module):
    """GraphSAGE on features that are made narrow first: wide ones would go along every edge."""

    def __init__(self, in_channels, hidden_channels, num_classes):
        super().__init__()
        self.narrow = torch.nn.Linear(in_channels, hidden_channels)
        self.convs = GraphSAGE(hidden_channels, hidden_channels, 2, num_classes, dropout=0.5)

    def forward(self, x, edge_index):
        return self.convs(self.narrow(x).relu(), edge_index)


def prepare(args, folder, world_size):
    """What rank 0 does before the others go on: the graph, and the parts."""
    graph, parts = Path(args.graph or folder / "graph"), Path(args.parts or folder / "parts")
    if not graph.exists():
        if args.data is None:
            size = (2_000, 20_000) if args.tiny else (100_000, 2_000_000)
            data = planted_communities(*size, homophily=0.6, signal=0.8, seed=args.seed)
        else:
            data = load(args.data)
        pyg_scale.save(data, graph)
    if not parts.exists():
        balance = ("nodes", "train")  # so that ranks have about as much to do
        pyg_scale.partition(graph, world_size, args.method, parts, args.seed, balance=balance)
    return graph, parts


def seeds_of_rank(parts, data, rank, world_size):
    """The training nodes of the parts of a rank; parts go to ranks in turn."""
    part = GraphDirectory(parts).books[None].assignment()
    mine = part % world_size == rank
    return {
        name: (data[f"{name}_mask"] & mine).nonzero().view(-1) for name in ("train", "val", "test")
    }


def loader_of(data, seeds, args, rank, steps, train):
    return NeighborLoader(
        data,
        args.num_neighbors,
        input_nodes=seeds,
        batch_size=max(1, -(-seeds.numel() // steps)),  # as many batches on every rank
        shuffle=train,
        num_workers=args.workers,
        seed=args.seed * 1_000_003 + rank,  # every rank draws for itself
    )


@torch.no_grad()
def accuracy(model, loader):
    """Over the nodes of all ranks."""
    model.eval()
    counts = torch.zeros(2)
    for batch in loader:
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        right = out.argmax(dim=1) == batch.y[: batch.batch_size]
        counts += torch.tensor([float(right.sum()), float(right.numel())])
    if dist.is_initialized():
        dist.all_reduce(counts)
    return float(counts[0] / counts[1].clamp(min=1))


def fit(args, data, seeds, rank, world_size):
    torch.manual_seed(args.seed)  # the same weights on every rank
    core = Net(data.num_features, args.hidden, int(data.y.max()) + 1)
    model = core if world_size == 1 else DistributedDataParallel(core)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.epochs)
    loaders = {}
    for name, ids in seeds.items():
        steps = max(1, round(int(data[f"{name}_mask"].sum()) / args.batch_size))
        loaders[name] = loader_of(data, ids, args, rank, steps, train=name == "train")
    for epoch in range(args.epochs):
        core.train()
        with contextlib.nullcontext() if world_size == 1 else model.join():
            for batch in loaders["train"]:
                optimizer.zero_grad()
                out = model(batch.x, batch.edge_index)[: batch.batch_size]
                F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
                optimizer.step()
        schedule.step()
        found = accuracy(core, loaders["val"])
        if rank == 0:
            print(f"epoch {epoch + 1}: validation accuracy {found:.4f}", flush=True)
    return accuracy(core, loaders["test"])


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="an .npz archive or a data set of PyG; default: generated")
    parser.add_argument("--graph", help="a graph directory of one part, or where to make it")
    parser.add_argument("--parts", help="the same graph in parts, or where to make that")
    parser.add_argument("--method", default="fennel", help="how to cut it")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=512, help="seeds of all ranks together")
    parser.add_argument("--num-neighbors", type=int, nargs=2, default=[10, 5])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small graph and two epochs")
    args = parser.parse_args(argv)
    if args.tiny:
        args.epochs, args.batch_size = 2, 256

    rank, world_size = (
        int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1))
    )
    if world_size > 1:
        dist.init_process_group("gloo", timeout=PATIENCE)
    with tempfile.TemporaryDirectory() as folder:  # that of rank 0 is used
        paths = [prepare(args, Path(folder), world_size)] if rank == 0 else [None]
        if world_size > 1:
            dist.broadcast_object_list(paths)  # and nobody goes on before it is done
        graph, parts = paths[0]
        data = pyg_scale.open(graph)
        seeds = seeds_of_rank(parts, data, rank, world_size)
        print(f"rank {rank} of {world_size}: {seeds['train'].numel():,} training nodes", flush=True)
        result = fit(args, data, seeds, rank, world_size)
        if rank == 0:
            print(f"test accuracy, ranks {world_size}: {result:.4f}")
        if world_size > 1:
            dist.barrier()  # the directory is there until all are done
            dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main()
