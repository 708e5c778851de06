"""A run that other tests kill: `torchrun run_of_ranks.py FOLDER OUT [KIND@STEP ...]`.

Each `KIND@STEP` happens to rank 1 after a step, once: `kill` (SIGKILL) or `stop` (SIGTERM).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GraphSAGE

from pyg_scale import distributed, parallel
from pyg_scale.datasets import planted_communities
from pyg_scale.loader import NeighborLoader
from pyg_scale.train import Checkpoint

STEPS, EPOCHS = 9, 3


def pieces(
    world_size: int, batches: int
) -> tuple[nn.Module, torch.optim.Optimizer, NeighborLoader]:
    """So many batches for an epoch, the last one smaller; nothing is drawn in the model."""
    data = planted_communities(200, 1_500, 3, 8)
    data.x = data.x.double()
    loader = NeighborLoader(
        data,
        [4, 3],
        input_nodes=torch.arange(16 * batches - 6),
        batch_size=16,
        shuffle=True,
        seed=5,
        split_seeds="global" if world_size > 1 else None,
    )
    model = GraphSAGE(8, 16, 2, 3).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01), loader


def loss_of(model, batch):
    out = model(batch.x, batch.edge_index)[: batch.batch_size]
    return F.cross_entropy(out, batch.y[: batch.batch_size])


def happens(faults: list[str], folder: Path, step: int) -> None:
    for fault in faults:
        kind, _, at = fault.partition("@")
        done = folder.with_name(f"{fault}.done")
        if int(at) == step and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGTERM)


def main(folder: str, out: str, *faults: str) -> None:
    with distributed.init(timeout=60, start_timeout=60) as context:
        torch.manual_seed(context.rank)
        torch.set_num_threads(1)
        model, optimizer, loader = pieces(context.world_size, 3 * context.world_size)
        model = parallel.wrap(model)
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        options = {"every": 1, "keep_last": 100, "stop_on": ["SIGTERM"], "timeout": 60}
        with Checkpoint(folder, state, **options) as checkpoint:
            resumed = checkpoint.load()
            step, draws = resumed.step, []
            while loader.epoch < EPOCHS:
                with model.join(optimizer):
                    for batch in loader:
                        optimizer.zero_grad()
                        model.backward(loss_of(model, batch), batch.batch_size)
                        optimizer.step()
                        step += 1
                        draws.append(float(torch.rand(())))
                        if context.rank == 1:
                            happens(list(faults), Path(folder), step)
                        checkpoint.step(step)
            assert step == STEPS
        found = {
            "parameters": [p.flatten().tolist() for p in model.parameters()],
            "draws": draws,
            "resumed": resumed.step,
            "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        }
        Path(out, f"{context.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
