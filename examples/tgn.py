"""Train TGN on a stream of events: PyG's training loop, with the import of its loaders changed.

    python examples/tgn.py                  # about two minutes
    python examples/tgn.py --buffer pyg     # the same with PyG's own LastNeighborLoader
    python examples/tgn.py --checkpoint run # saves; goes on where it was stopped
    python examples/tgn.py --tiny           # to see that it runs

Which item does a user turn to next? The stream is generated: users come back to what they like, and
change what they like. For each event the model tells the item from a random one. Memory and
neighbourhoods know what was before the batch, and nothing of the batch itself.
"""

import argparse

import torch
from torch import nn
from torch_geometric.nn import TGNMemory, TransformerConv
from torch_geometric.nn.models import tgn

from pyg_scale.datasets import event_stream
from pyg_scale.loader import LastNeighborLoader, TemporalDataLoader
from pyg_scale.train import Checkpoint


class Model(nn.Module):
    """The memory of nodes, attention over their last events, and a score of pairs of nodes."""

    def __init__(self, num_nodes, msg_dim, dim=32):
        super().__init__()
        message = tgn.IdentityMessage(msg_dim, dim, dim)
        self.memory = TGNMemory(num_nodes, msg_dim, dim, dim, message, tgn.LastAggregator())
        self.conv = TransformerConv(dim, dim // 2, heads=2, dropout=0.1, edge_dim=msg_dim + dim)
        self.source, self.target = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.score = nn.Linear(dim, 1)

    def forward(self, n_id, edge_index, t, msg):
        """Embeddings of nodes from their memory and their last events."""
        x, last_update = self.memory(n_id)
        since = self.memory.time_enc((last_update[edge_index[0]] - t).to(x.dtype))
        return self.conv(x, edge_index, torch.cat([since, msg], dim=-1))

    def predict(self, source, target):
        return self.score((self.source(source) + self.target(target)).relu()).view(-1)


class Run:
    """A model, its optimizer, and the past of the stream."""

    def __init__(self, data, buffer):
        torch.manual_seed(0)
        self.data = data
        self.model = Model(data.num_nodes, data.msg.size(1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003)
        loader = LastNeighborLoader if buffer == "ours" else tgn.LastNeighborLoader
        self.neighbors = loader(data.num_nodes, size=10)
        self.place = torch.empty(data.num_nodes, dtype=torch.int64)

    def forget(self):
        """Begin at the beginning of time."""
        self.model.memory.reset_state()
        self.neighbors.reset_state()

    def scores(self, batch):
        """The scores of the events of a batch, and of their negatives."""
        n_id, edge_index, e_id = self.neighbors(batch.n_id)
        self.place[n_id] = torch.arange(n_id.numel())
        z = self.model(n_id, edge_index, self.data.t[e_id], self.data.msg[e_id])
        source, target, other = (z[self.place[v]] for v in (batch.src, batch.dst, batch.neg_dst))
        return self.model.predict(source, target), self.model.predict(source, other)

    def remember(self, batch):
        self.model.memory.update_state(batch.src, batch.dst, batch.t, batch.msg)
        self.neighbors.insert(batch.src, batch.dst)

    def train_step(self, batch):
        self.model.train()
        self.optimizer.zero_grad()
        good, bad = self.scores(batch)
        criterion = nn.functional.binary_cross_entropy_with_logits
        loss = criterion(good, torch.ones_like(good)) + criterion(bad, torch.zeros_like(bad))
        self.remember(batch)
        loss.backward()
        self.optimizer.step()
        self.model.memory.detach()
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self, loader):
        """The average precision (AP) over the batches of a loader."""
        self.model.eval()
        found = []
        for batch in loader:
            found.append(average_precision(*self.scores(batch)))
            self.remember(batch)
        return sum(found) / len(found)


def average_precision(good, bad):
    """The mean of the precision at the rank of each event, among events and negatives."""
    score = torch.cat([good, bad])
    label = torch.cat([torch.ones_like(good), torch.zeros_like(bad)])
    label = label[score.argsort(descending=True, stable=True)]
    precision = label.cumsum(0) / torch.arange(1, label.numel() + 1)
    return float(precision[label == 1].mean())


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--buffer", choices=["ours", "pyg"], default="ours")
    parser.add_argument("--epochs", type=int, help="default: 5")
    parser.add_argument("--events", type=int, default=20_000, help="how long the stream is")
    parser.add_argument("--checkpoint", help="a folder to save to, and to go on from")
    parser.add_argument("--tiny", action="store_true", help="a short stream")
    args = parser.parse_args(argv)
    if args.checkpoint and args.buffer == "pyg":
        parser.error("PyG's LastNeighborLoader has no state that could be saved")
    events = 800 if args.tiny else args.events
    epochs = args.epochs or (2 if args.tiny else 5)
    data = event_stream(events, events // 30 + 1, events // 130 + 1, seed=1)
    train, val, test = data.train_val_test_split(val_ratio=0.15, test_ratio=0.15)
    loader, val_loader, test_loader = (
        TemporalDataLoader(part, batch_size=200, neg_sampling_ratio=1.0, seed=seed)
        for seed, part in enumerate((train, val, test))
    )
    run = Run(data, args.buffer)
    checkpoint, step = None, 0
    if args.checkpoint:
        state = {
            "model": run.model,
            "optimizer": run.optimizer,
            "loader": loader,
            "neighbors": run.neighbors,
        }
        checkpoint = Checkpoint(args.checkpoint, state, every=10, stop_on=["SIGTERM", "SIGINT"])
        step = checkpoint.load().step
    while loader.epoch < epochs:
        if step % len(loader) == 0:
            run.forget()
        for batch in loader:
            loss = run.train_step(batch)
            step += 1
            if checkpoint:
                checkpoint.step(step)
        print(f"epoch {loader.epoch}: loss {loss:.3f}")
    val_loader.set_epoch(0)
    test_loader.set_epoch(0)
    print(f"validation AP {run.evaluate(val_loader):.4f}")
    print(f"test AP {run.evaluate(test_loader):.4f}")
    if checkpoint:
        checkpoint.close()


if __name__ == "__main__":
    main()
