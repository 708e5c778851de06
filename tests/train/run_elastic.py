"""A run whose ranks come and go: ``run_elastic.py FOLDER LOG RANKS@STEP ...``.

``RANKS@STEP`` says how many ranks go on up to a step; as long as there are others, they wait. Each
rank writes a line for each step to ``LOG``: the step, who it is, and the seeds of its batch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GraphSAGE

from pyg_scale import distributed, parallel
from pyg_scale.datasets import planted_communities
from pyg_scale.loader import NeighborLoader
from pyg_scale.train import Checkpoint

EPOCHS, STEPS_OF_EPOCH, STEPS = 2, 6, 12
LIMIT = 120.0


def pieces() -> tuple[nn.Module, torch.optim.Optimizer, NeighborLoader]:
    """Steps of 18 seeds, the last one of each epoch of 2; all neighbours, nothing is drawn."""
    data = planted_communities(200, 1_000, 3, 8)
    data.x = data.x.double()
    loader = NeighborLoader(
        data,
        [-1, -1],
        input_nodes=torch.arange(92),
        batch_size=18,
        shuffle=True,
        seed=5,
        split_batches=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GraphSAGE(8, 16, 2, 3).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01), loader


def loss_of(model, batch):
    out = model(batch.x, batch.edge_index)[: batch.batch_size]
    return F.cross_entropy(out, batch.y[: batch.batch_size])


def wait_for_others(context, wanted: int) -> None:
    """Until there are as many ranks as are wanted, when this process is started again."""
    deadline = time.monotonic() + LIMIT
    while context.world_size != wanted:
        assert time.monotonic() < deadline, f"{context.world_size} ranks, and not {wanted}"
        dist.barrier()  # fails when one is gone
        time.sleep(0.1)


def main(folder: str, log: str, *plan: str) -> None:
    limits = [tuple(map(int, each.split("@"))) for each in plan]
    with distributed.init(timeout=60, start_timeout=60, device="cpu") as context:
        torch.set_num_threads(1)
        core, optimizer, loader = pieces()
        model = parallel.wrap(core)
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        with Checkpoint(folder, state, every=1, asynchronous=False, timeout=60) as checkpoint:
            step = checkpoint.load().step
            while loader.epoch < EPOCHS:
                for batch in loader:
                    wanted = next((ranks for ranks, until in limits if step < until), None)
                    if wanted is None:
                        return
                    wait_for_others(context, wanted)
                    optimizer.zero_grad()
                    model.backward(loss_of(model, batch), batch.batch_size)
                    optimizer.step()
                    step += 1
                    checkpoint.step(step)  # before its line: who reads that may kill this process
                    line = {"step": step, "rank": context.rank, "ranks": context.world_size}
                    line |= {"seeds": batch.input_id.tolist(), "pid": os.getpid()}
                    line["agent"] = os.environ.get("AGENT")
                    with open(log, "a") as out:  # one write, so that lines stay whole
                        out.write(json.dumps(line) + "\n")
        if context.rank == 0:
            found = [p.flatten().tolist() for p in core.parameters()]
            Path(f"{log}.new").write_text(json.dumps(found))
            os.replace(f"{log}.new", f"{log}.parameters")


if __name__ == "__main__":
    main(*sys.argv[1:])
