"""Train GraphSAGE on a graph that sampler servers hold; this process holds none of it.

    pyg-scale serve GRAPH --bind tcp://eth0:5555 --clients 1 --secret-file secret   # on servers
    PYG_SCALE_SECRET_FILE=secret python examples/server_client.py tcp://a:5555,tcp://b:5555
    python examples/server_client.py --tiny            # starts two servers of its own

GRAPH is a graph directory (pyg_scale.save, pyg-scale convert) with the index sets train and test;
every server has the same. Servers sample and read features; this process asks them for batches
ahead of the one in use. Batches are those of the graph in memory, to the bit, whichever server
makes them: one that dies, hangs or answers garbage is replaced by another. Servers end when as
many clients as --clients says have said goodbye.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import pyg_scale
from pyg_scale.datasets import planted_communities
from pyg_scale.distributed import SamplingOptions
from pyg_scale.loader import NeighborLoader


@contextlib.contextmanager
def own_servers(folder, count, seed):
    """Servers on this machine, of a graph that is made up."""
    data = planted_communities(2_000, 20_000, homophily=0.6, signal=0.8, seed=seed)
    sets = {name: data[f"{name}_mask"] for name in ("train", "test")}
    pyg_scale.save(data, folder / "graph", index_sets=sets)
    serve = [sys.executable, "-m", "pyg_scale.cli", "serve", str(folder / "graph")]
    serve += ["--bind", "tcp://127.0.0.1:0", "--clients", "1", "--threads", "1"]
    serve += ["--secret-file", str(folder / "secret")]
    servers = [subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        yield ",".join(server.stdout.readline().split()[-1] for server in servers)
        for server in servers:
            print(server.communicate(timeout=60)[0].strip())
    finally:
        for server in servers:
            server.kill()


def loader_of(data, name, args, sampling):
    return NeighborLoader(
        data,
        args.num_neighbors,
        input_nodes=data.index_set(name),
        batch_size=args.batch_size,
        shuffle=name == "train",
        seed=args.seed,
        sampling=sampling,
    )


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    right = total = 0
    for batch in loader:
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        right += int((out.argmax(dim=1) == batch.y[: batch.batch_size]).sum())
        total += batch.batch_size
    return right / total


def train(address, args):
    torch.manual_seed(args.seed)
    with pyg_scale.open(address, token=args.secret, timeout=args.timeout) as data:
        print(data)  # fetches nothing
        sampling = SamplingOptions(prefetch_size=args.prefetch_size)
        loaders = {name: loader_of(data, name, args, sampling) for name in ("train", "test")}
        classes = int(data.y.max()) + 1  # fetches the labels, and nothing else
        model = GraphSAGE(data.num_features, args.hidden, 2, classes, dropout=0.5)
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
        for epoch in range(args.epochs):
            model.train()
            for batch in loaders["train"]:
                optimizer.zero_grad()
                out = model(batch.x, batch.edge_index)[: batch.batch_size]
                F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
                optimizer.step()
            print(f"epoch {epoch + 1}: test accuracy {accuracy(model, loaders['test']):.4f}")
        seconds = loaders["train"].stats()["total"]["sample"]["seconds"]
        print(f"waited {seconds:.2f} seconds for batches of training")


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", nargs="?", help="tcp://host:port,tcp://host2:port")
    parser.set_defaults(secret=None)  # that of PYG_SCALE_SECRET or PYG_SCALE_SECRET_FILE
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for an answer")
    parser.add_argument("--prefetch-size", type=int, default=4, help="batches to ask for ahead")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--num-neighbors", type=int, nargs=2, default=[10, 5])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="two servers of its own, two epochs")
    args = parser.parse_args(argv)
    if args.address:
        return train(args.address, args)
    if not args.tiny:
        parser.error("give the address of servers, or --tiny")
    parser.set_defaults(epochs=2, batch_size=256)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, own_servers(Path(folder), 2, args.seed) as where:
        args.secret = (Path(folder) / "secret").read_text().strip()
        train(where, args)


if __name__ == "__main__":
    main()
