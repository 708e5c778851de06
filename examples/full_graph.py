"""Train a GCN on the full graph with several processes, each with its own parts: no sampling.

    torchrun --standalone --nproc-per-node 2 examples/full_graph.py              # generated
    torchrun --standalone --nproc-per-node 2 examples/full_graph.py --data facebook_pages.npz
    python examples/full_graph.py --tiny                 # one process, to see that it runs

Every rank computes its own nodes. Before each layer follows edges, ranks send each other the rows
that the others' edges start from. Results are those of one process with the whole graph, however
many ranks there are; --check trains that, too, and compares.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_geometric.nn import GCN

import pyg_scale
from pyg_scale import distributed, parallel
from pyg_scale.datasets import load, planted_communities


def prepare(args, folder, world_size):
    """What rank 0 does before the others go on: the graph in parts."""
    size = (1_000, 8_000) if args.tiny else (20_000, 200_000)
    data = load(args.data) if args.data else planted_communities(*size, signal=0.8)
    data.x = data.x.to(args.dtype)
    path = folder / "parts"
    pyg_scale.partition(data, max(2, world_size), "fennel", path, args.seed)
    return path


def told_by_rank_0(path):
    """A path, sent as bytes of a tensor: objects would be unpickled where they come."""
    said = torch.zeros(4096, dtype=torch.uint8)
    if path is not None:
        name = torch.frombuffer(bytearray(os.fsencode(path)), dtype=torch.uint8)
        said[: name.numel()] = name
    dist.broadcast(said, 0)
    return Path(os.fsdecode(bytes(said.tolist()).rstrip(b"\0")))


def model_of(args, data):
    torch.manual_seed(args.seed)
    return GCN(data.num_features, args.hidden, 2, int(data.y.max()) + 1).to(args.dtype)


def fit(args, data, own):
    """Train on the own nodes of this rank, or in one process on all; the share that is right."""
    model = model_of(args, data)
    if own:
        model = parallel.wrap(model, "halo", graph=data)
        nodes, inputs = model.own_nodes, ()  # those of the graph
    else:
        nodes, inputs = torch.arange(data.num_nodes), (data.x, data.edge_index.long())
    y, train, test = data.y[nodes], data.train_mask[nodes], data.test_mask[nodes]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(*inputs)[train], y[train])
        if own:
            model.backward(loss, int(train.sum()))  # the mean over the nodes of all ranks
        else:
            loss.backward()
        optimizer.step()
        if (not own or dist.get_rank() == 0) and (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}: loss of {int(train.sum())} nodes {loss.item():.4f}")
    with torch.no_grad():
        right = (model(*inputs).argmax(dim=1) == y)[test]
    counts = torch.tensor([right.sum(), right.numel()], dtype=torch.float64)
    if own:
        dist.all_reduce(counts)
    return float(counts[0] / counts[1].clamp(min=1))


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="an .npz archive or a data set of PyG; default: generated")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="compare with one process, in float64")
    parser.add_argument("--tiny", action="store_true", help="a small graph and ten epochs")
    args = parser.parse_args(argv)
    if args.tiny:
        parser.set_defaults(epochs=10, hidden=16)
        args = parser.parse_args(argv)
    args.dtype = torch.float64 if args.check else torch.float32
    with distributed.init(timeout=3600) as ranks, tempfile.TemporaryDirectory() as folder:
        parts = prepare(args, Path(folder), ranks.world_size) if ranks.rank == 0 else None
        parts = told_by_rank_0(parts)
        with pyg_scale.open(parts) as data:
            found = fit(args, data, own=True)
        if ranks.rank == 0:
            print(f"test accuracy, ranks {ranks.world_size}: {found:.4f}", flush=True)
            if args.check:
                alone = fit(args, pyg_scale.open(parts, comm="local"), own=False)
                print(f"test accuracy, one process: {alone:.4f}", flush=True)
        dist.barrier()


if __name__ == "__main__":
    main()
