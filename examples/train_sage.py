"""Train a two-layer GraphSAGE with sampled neighbours, and draw what happened.

    python examples/train_sage.py                            # a generated graph, about a minute
    python examples/train_sage.py --data facebook_pages.npz  # an archive: pyg_scale.datasets
    python examples/train_sage.py --data Planetoid/PubMed    # one of PyG, downloaded to data/
    python examples/train_sage.py --accelerate               # with fused layers
    python examples/train_sage.py --full-batch               # also train on the whole graph
    python examples/train_sage.py --workers 4 --epochs 20 --num-neighbors 25 10 --out run.png
    python examples/train_sage.py --tiny                     # seconds, to see that it runs

The only line that differs from a script for PyG is the import of NeighborLoader. It prints the
validation accuracy of every epoch, the test accuracy of the epoch that validated best (both on
the whole graph, with all neighbours), and how many batches per second the loader
delivers, beside what PyG's own loader gives here, or why it gives none. It writes one picture
(train_sage.png). Without a GPU it trains on the CPU; with one, on that (--device cpu prevents
it). The same seed gives the same batches with any number of workers.
"""

import argparse
import copy
import functools
import time
import warnings
from itertools import islice

import torch
import torch.nn.functional as F
import torch_geometric.loader
from torch_geometric.nn import SAGEConv
from torch_geometric.transforms import RandomNodeSplit
from torch_geometric.utils import to_torch_csr_tensor

from pyg_scale.datasets import load, planted_communities
from pyg_scale.loader import NeighborLoader
from pyg_scale.nn import accelerate


class GraphSAGE(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, num_classes, dropout=0.5):
        super().__init__()
        self.conv1 = SAGEConv(in_channels, hidden_channels)
        self.conv2 = SAGEConv(hidden_channels, num_classes)
        self.dropout = dropout

    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index).relu()
        return self.conv2(F.dropout(x, self.dropout, self.training), edge_index)


def open_graph(args):
    if args.data is None:
        size = (2_000, 20_000) if args.tiny else (200_000, 4_000_000)
        return planted_communities(*size, homophily=0.6, signal=0.8, seed=args.seed)
    data = load(args.data)
    return data if "train_mask" in data else RandomNodeSplit(num_val=0.25, num_test=0.25)(data)


def rate(loader, batches):
    """Batches per second that a loader delivers when nothing is done with them."""
    iterator = islice(loader, batches + 3)
    for _ in range(3):
        next(iterator, None)
    start = time.perf_counter()
    return sum(1 for _ in iterator) / (time.perf_counter() - start)


def rate_of_pyg(data, batches, **kwargs):
    """The same of PyG's own loader, or its message."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = functools.partial(torch_geometric.loader.NeighborLoader, data)
        try:
            next(iter(make(**kwargs | {"num_workers": 0})))  # workers that fail end after 10 s
            return rate(make(**kwargs), batches)
        except ImportError as error:
            return str(error)


@torch.no_grad()
def test(model, x, adj_t, data):
    model.eval()
    right = model(x, adj_t).argmax(dim=1).cpu() == data.y
    return [float(right[mask].float().mean()) for mask in (data.val_mask, data.test_mask)]


def fit(args, data, batches_of_epoch, x, adj_t, name):
    """Train; returns (validation, test) accuracies per epoch and trained batches per second."""
    torch.manual_seed(args.seed)
    model = GraphSAGE(data.num_features, args.hidden, int(data.y.max()) + 1).to(args.device)
    if args.accelerate:
        print(accelerate(model), flush=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)
    history, count, seconds = [], 0, 0.0
    for epoch in range(args.epochs):
        model.train()
        start = time.perf_counter()
        for x_in, edge_index, y, rows in batches_of_epoch():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x_in, edge_index)[rows], y)
            loss.backward()
            optimizer.step()
            count += 1
        seconds += time.perf_counter() - start
        history.append(test(model, x, adj_t, data))
        if (epoch + 1) % max(1, args.epochs // 10) == 0:
            print(
                f"{name}, epoch {epoch + 1}: loss {loss:.3f}, validation {history[-1][0]:.4f}",
                flush=True,
            )
    return history, count / seconds


def draw(path, curves, rates, pyg):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    history = curves["sampled neighbours"]
    left.plot(
        range(1, len(history) + 1),
        [val for val, _ in history],
        "o-",
        color="#1b5e96",
        ms=4,
        label="sampled neighbours",
    )
    if "whole graph" in curves:
        best = max(val for val, _ in curves["whole graph"])
        left.axhline(best, color="#c2542d", ls="--", label="whole graph, best epoch")
    left.set(xlabel="epoch", ylabel="validation accuracy", title="GraphSAGE, two layers")
    left.legend(frameon=False, loc="lower right")
    bars = right.barh(list(rates), list(rates.values()), color="#1b5e96", height=0.6)
    bars[-1].set_color("#b9b9b9" if isinstance(pyg, float) else "#1b5e96")
    right.bar_label(bars, fmt="%.1f", padding=3)
    right.set(xlabel="batches per second, loading only", title="NeighborLoader")
    right.margins(x=0.18)
    right.invert_yaxis()
    if not isinstance(pyg, float):
        right.set_ylim(len(rates) + 0.4, -0.5)
        right.text(
            0,
            len(rates) - 0.1,
            f"PyG's own loader:\n{pyg}",
            fontsize=7.5,
            color="#777777",
            wrap=True,
        )
    for axis in (left, right):
        axis.grid(color="#e4e4e4")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="an .npz archive or a data set of PyG; default: generated")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--num-neighbors", type=int, nargs=2, default=[15, 10])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--accelerate", action="store_true", help="fuse the layers")
    parser.add_argument("--full-batch", action="store_true", help="train on the whole graph, too")
    parser.add_argument("--out", default="train_sage.png")
    parser.add_argument("--tiny", action="store_true", help="a small graph and two epochs")
    args = parser.parse_args(argv)
    if args.tiny:
        parser.set_defaults(epochs=2, batch_size=256)
        args = parser.parse_args(argv)

    warnings.filterwarnings("ignore", "Sparse ")  # torch says that its sparse tensors are new
    data = open_graph(args)
    kwargs = {
        "num_neighbors": args.num_neighbors,
        "batch_size": args.batch_size,
        "input_nodes": data.train_mask,
        "shuffle": True,
        "num_workers": args.workers,
    }
    loader = NeighborLoader(data, **kwargs)
    x = data.x.to(args.device)
    adj_t = to_torch_csr_tensor(data.edge_index.flip(0), size=(data.num_nodes,) * 2).to(args.device)
    print(f"{data.num_nodes:,} nodes, {data.num_edges:,} edges, {len(loader)} batches an epoch")

    def sampled():
        for batch in loader:
            batch = batch.to(args.device)
            yield batch.x, batch.edge_index, batch.y[: batch.batch_size], slice(batch.batch_size)

    def whole():
        mask = data.train_mask.to(args.device)
        yield x, adj_t, data.y.to(args.device)[mask], mask

    history, trained = fit(args, data, sampled, x, adj_t, "sampled")
    curves = {"sampled neighbours": history}
    if args.full_batch:
        full = copy.copy(args)
        full.epochs, full.lr = 10 * args.epochs, 0.01
        curves["whole graph"], _ = fit(full, data, whole, x, adj_t, "whole graph")
    result = {name: max(h)[1] for name, h in curves.items()}
    for name, accuracy in result.items():
        print(f"test accuracy, {name}: {accuracy:.4f}")

    batches = 3 if args.tiny else 60
    kwargs["input_nodes"] = None  # all nodes, so that there are batches enough
    alone = rate(NeighborLoader(data, **kwargs), batches)
    pyg = rate_of_pyg(data, batches, **kwargs)
    print(f"batches per second: training {trained:.1f}, loading only {alone:.1f}")
    print(f"PyG's own loader: {pyg if isinstance(pyg, str) else f'{pyg:.1f} batches per second'}")
    rates = {"pyg_scale": alone} | ({} if isinstance(pyg, str) else {"PyG": pyg})
    draw(args.out, curves, rates, pyg)
    print(f"wrote {args.out}")
    return result


if __name__ == "__main__":
    main()
