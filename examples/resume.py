"""Stop in the middle of an epoch, start again from a file, and get the same model to the bit.

    python examples/resume.py                    # about ten seconds
    python examples/resume.py --checkpoint my.pt
    python examples/resume.py --tiny             # to see that it runs

The first run trains without a break. The second one stops half-way through its second epoch and
saves model, optimizer and loader. The third one, with another number of workers, loads
them and goes on. The loader's state is a few integers: a batch follows from the seed, the epoch
and the batch's number. At the end both models are compared, bit for bit.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

from pyg_scale.datasets import planted_communities
from pyg_scale.loader import NeighborLoader


class Run:
    """What a training needs; all of its state can be saved."""

    def __init__(self, data, workers):
        torch.manual_seed(0)
        self.model = GraphSAGE(data.num_features, 32, 2, int(data.y.max()) + 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.loader = NeighborLoader(
            data,
            [10, 5],
            input_nodes=data.train_mask,
            batch_size=128,
            shuffle=True,
            num_workers=workers,
            seed=42,
        )

    def step(self, batch):
        self.optimizer.zero_grad()
        out = self.model(batch.x, batch.edge_index)[: batch.batch_size]
        F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
        self.optimizer.step()

    def save(self, path):
        parts = (self.model, self.optimizer, self.loader)
        torch.save([part.state_dict() for part in parts], path)

    def restore(self, path):
        parts = (self.model, self.optimizer, self.loader)
        for part, state in zip(parts, torch.load(path)):
            part.load_state_dict(state)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", help="where to save; default: a temporary file")
    parser.add_argument("--tiny", action="store_true", help="a small graph")
    args = parser.parse_args(argv)
    torch.use_deterministic_algorithms(True)
    size = (1_000, 10_000) if args.tiny else (20_000, 400_000)
    data = planted_communities(*size, num_classes=8)

    unbroken = Run(data, workers=2)
    for _ in range(2):
        for batch in unbroken.loader:
            unbroken.step(batch)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.checkpoint or Path(folder) / "checkpoint.pt")
        first = Run(data, workers=2)
        for batch in first.loader:
            first.step(batch)
        half = len(first.loader) // 2
        for number, batch in enumerate(first.loader, start=1):
            first.step(batch)
            if number == half:
                first.save(path)
                break
        print(f"stopped after batch {half} of {len(first.loader)} of the second epoch")

        second = Run(data, workers=1)
        second.restore(path)
        count = 0
        for batch in second.loader:
            second.step(batch)
            count += 1
    print(f"went on with another number of workers for {count} batches")

    same = all(
        torch.equal(a, b) for a, b in zip(unbroken.model.parameters(), second.model.parameters())
    )
    if not same:
        raise SystemExit("the models differ")
    print("the models are the same to the bit")


if __name__ == "__main__":
    main()
