"""Train GraphSAGE with several processes, on one machine or many, each with parts of the graph.

    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py                 # generated
    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py --data facebook_pages.npz
    python examples/train_ddp.py --tiny                     # one process, to see that it runs

Without --parts rank 0 makes a partitioned directory, for one machine. For several, cut the graph
first (pyg-scale partition), copy META.json, the book and some parts to each, and start on all

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/train_ddp.py --parts DIR

The loader is the one that a single process would use: it samples across the parts of all ranks,
which share the training nodes: the steps of an epoch do not depend on their number, and each rank
has a piece of every step's nodes (split_batches=True). All ranks evaluate together, taking turns
with batches that are the same for any number of ranks. At the end rank 0 evaluates alone, with a
loader of its own (split_seeds=False), while the others wait at a barrier; the result is the same.
With --record DIR, `pyg-scale report DIR` shows how the ranks spent their time. With --layerwise
DIR all ranks compute all nodes with all neighbours: what the whole graph would give.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import pyg_scale
from pyg_scale import distributed, parallel
from pyg_scale.datasets import load, planted_communities
from pyg_scale.loader import NeighborLoader
from pyg_scale.train import Recorder, seed_everything


class Net(torch.nn.Module):
    """GraphSAGE on features that are made narrow first: wide ones would go along every edge."""

    num_layers = 2  # asked for by layerwise_inference, as is inference_per_layer

    def __init__(self, in_channels, hidden_channels, num_classes):
        super().__init__()
        self.narrow = torch.nn.Linear(in_channels, hidden_channels)
        self.convs = GraphSAGE(hidden_channels, hidden_channels, 2, num_classes, dropout=0.5)

    def forward(self, x, edge_index):
        return self.convs(self.narrow(x).relu(), edge_index)

    def inference_per_layer(self, layer, x, edge_index, batch_size):
        x = self.narrow(x).relu() if layer == 0 else x
        return self.convs.inference_per_layer(layer, x, edge_index, batch_size)


def prepare(args, folder, world_size):
    """What rank 0 does before the others go on: the graph in parts."""
    parts = Path(args.parts or folder / "parts")
    if not parts.exists():
        size = (2_000, 20_000) if args.tiny else (100_000, 2_000_000)
        data = load(args.data) if args.data else planted_communities(*size, signal=0.8)
        pyg_scale.save(data, folder / "graph")
        pyg_scale.partition(folder / "graph", world_size, "fennel", parts, args.seed)
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
def accuracy(model, loader, together):
    """Over the seeds of the loader; `together` adds up what all ranks have counted."""
    model.eval()
    counts = torch.zeros(2)
    loader.set_epoch(0)  # the same neighbours in every evaluation
    for batch in loader:
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        right = out.argmax(dim=1) == batch.y[: batch.batch_size]
        counts += torch.tensor([right.sum(), right.numel()])
    if together:
        dist.all_reduce(counts)
    return float(counts[0] / counts[1].clamp(min=1))


def fit(args, data, rank, world_size):
    def loader_of(split, **options):
        return NeighborLoader(
            data,
            [10, 5],
            input_nodes=data[f"{split}_mask"],
            batch_size=args.batch_size,
            num_workers=1,
            seed=args.seed,
            **options,
        )

    seed_everything(args.seed)  # dropout differs between ranks
    core = Net(data.num_features, 64, int(data.y.max()) + 1)
    model = parallel.wrap(core, "ddp")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.epochs)
    train = loader_of("train", shuffle=True, split_seeds=args.split_seeds, split_batches=True)
    validation, test = loader_of("val"), loader_of("test")
    print(f"rank {rank} of {world_size}: {len(train)} steps an epoch", flush=True)
    recorder = Recorder(args.record, model=model)  # for `pyg-scale report`
    for epoch in range(args.epochs):
        core.train()
        for batch in recorder(train):  # a last step of few seeds has none for some ranks
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            model.backward(loss, batch.batch_size)  # the mean over the seeds of all ranks
            optimizer.step()
            recorder.log(loss=loss)
        schedule.step()
        found = accuracy(core, validation, together=True)
        if rank == 0:
            print(f"epoch {epoch + 1}: validation accuracy {found:.4f}", flush=True)
    recorder.close()
    result = accuracy(core, test, together=True)
    if rank == 0:
        alone = accuracy(core, loader_of("test", split_seeds=False), together=False)
        print(f"test accuracy, ranks {world_size}: {result:.4f}, rank 0 alone: {alone:.4f}")
    dist.barrier()  # the others wait here
    if args.layerwise:
        found = pyg_scale.layerwise_inference(core, data, args.layerwise).argmax(dim=1)
        exact = (found == data.y)[data.test_mask].float().mean()
        if rank == 0:
            print(f"test accuracy, all neighbours: {exact:.4f}")


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="an .npz archive or a data set of PyG; default: generated")
    parser.add_argument("--parts", help="a partitioned graph directory, or where to make it")
    parser.add_argument("--split-seeds", choices=["global", "part"], default="global")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=512, help="seeds of a training step")
    parser.add_argument("--layerwise", help="compute all nodes exactly, into this directory")
    parser.add_argument("--record", help="a folder to record the run in, for pyg-scale report")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small graph and two epochs")
    args = parser.parse_args(argv)
    if args.tiny:
        parser.set_defaults(epochs=2, batch_size=256)
        args = parser.parse_args(argv)
    with distributed.init(timeout=3600) as ranks, tempfile.TemporaryDirectory() as folder:
        args.record = args.record or Path(folder, "run")
        parts = prepare(args, Path(folder), ranks.world_size) if ranks.rank == 0 else None
        parts = told_by_rank_0(parts)  # and nobody goes on before it is done
        with pyg_scale.open(parts) as data:
            fit(args, data, ranks.rank, ranks.world_size)


if __name__ == "__main__":
    main()
