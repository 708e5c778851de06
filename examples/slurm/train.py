"""Train GraphSAGE on a partitioned graph in a SLURM job that may be stopped, requeued and resumed.

    sbatch examples/slurm/train.sbatch                                # 2 nodes, 2 tasks on each
    sbatch --nodes 4 examples/slurm/train.sbatch --epochs 20          # arguments of this script
    torchrun --standalone --nproc-per-node 2 examples/slurm/train.py  # the same, on one machine
    python examples/slurm/train.py --tiny                             # one process, as a trial

`pyg_scale.distributed.init()` finds the other tasks by what srun (or torchrun) says: the first host
of the node list is where they meet. --folder is one that all nodes see. `--prepare` makes the
graph directory in it, in one part for each task or any other number; the batch script does that
first, as one process. Each rank owns some parts and answers the others for them, and all share the
training nodes: each has a piece of the nodes of every step, and the steps of an epoch are the same
whatever the number of ranks.

120 seconds before the time limit SLURM sends SIGTERM to the tasks. All of them finish the step,
save the run, and leave with status 75, upon which the batch script puts the job back into the
queue. It resumes in the middle of the epoch, with the steps that would have come next, also with
another number of nodes.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import pyg_scale
from pyg_scale import distributed, parallel
from pyg_scale.datasets import load, planted_communities
from pyg_scale.loader import NeighborLoader
from pyg_scale.train import Checkpoint


def prepare(args, parts):
    """Make the graph and cut it; what is there already is left as it is."""
    if not parts.exists():
        size = (2_000, 20_000) if args.tiny else (100_000, 2_000_000)
        options = {"homophily": 0.6, "signal": 0.8, "seed": args.seed}
        data = load(args.data) if args.data else planted_communities(*size, **options)
        pyg_scale.save(data, parts.with_name("graph"), overwrite=True)
        pyg_scale.partition(parts.with_name("graph"), args.num_parts, args.method, parts)


def loader_of(args, data, split, **options):
    return NeighborLoader(
        data,
        [10, 5],
        input_nodes=data[f"{split}_mask"],
        batch_size=args.batch_size,
        num_workers=1,
        seed=args.seed,
        **options,
    )


@torch.no_grad()
def accuracy(model, loader, device):
    """Over the seeds of all ranks."""
    model.eval()
    counts = torch.zeros(2)
    loader.set_epoch(0)  # the same neighbours in every evaluation
    for batch in loader:
        batch = batch.to(device)
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        right = out.argmax(dim=1) == batch.y[: batch.batch_size]
        counts += torch.tensor([right.sum(), right.numel()])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1].clamp(min=1))


def fit(args, data, context):
    torch.manual_seed(args.seed)
    core = GraphSAGE(data.num_features, 64, 2, int(data.y.max()) + 1).to(context.device)
    model = parallel.wrap(core, "ddp")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    train = loader_of(args, data, "train", shuffle=True, split_batches=True)
    validation = loader_of(args, data, "val")
    state = {"model": model, "optimizer": optimizer, "loader": train}
    with Checkpoint(
        Path(args.folder) / "checkpoints", state, every=args.save_every, stop_on=["SIGTERM"]
    ) as checkpoint:
        step = checkpoint.load().step
        if context.rank == 0:
            print(f"{context.world_size} ranks, from step {step}", flush=True)
        while train.epoch < args.epochs:
            core.train()
            for batch in train:
                batch = batch.to(context.device)
                optimizer.zero_grad()
                out = model(batch.x, batch.edge_index)[: batch.batch_size]
                loss = F.cross_entropy(out, batch.y[: batch.batch_size])
                model.backward(loss, batch.batch_size)  # the mean over the seeds of all ranks
                optimizer.step()
                step += 1
                checkpoint.step(step)
            found = accuracy(core, validation, context.device)
            if context.rank == 0:
                print(f"epoch {train.epoch}: validation accuracy {found:.4f}", flush=True)
        checkpoint.save(step)
    if context.rank == 0:
        print(f"done after {step} steps")


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default="run", help="one that all nodes see")
    parser.add_argument("--prepare", action="store_true", help="make the graph, and no more")
    parser.add_argument("--data", help="an .npz archive or a data set of PyG; default: generated")
    parser.add_argument("--num-parts", type=int, default=4)
    parser.add_argument("--method", default="fennel", help="how to cut it")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=512, help="seeds of a training step")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--bind", choices=["exclusive", "node", "socket"], help="cores of a rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small graph and two epochs")
    args = parser.parse_args(argv)
    if args.tiny:  # what else was asked for counts
        parser.set_defaults(epochs=2, batch_size=256)
        args = parser.parse_args(argv)
    parts = Path(args.folder) / "parts"
    if args.prepare:
        prepare(args, parts)
        return
    with distributed.init(bind=args.bind) as context:
        if context.rank == 0:
            prepare(args, parts)
        dist.barrier()
        with pyg_scale.open(parts) as data:
            fit(args, data, context)


if __name__ == "__main__":
    main()
