"""Predict ratings of films where users have no features: learnable embeddings beside a dense table.

    python examples/embeddings.py                                       # one process
    torchrun --standalone --nproc-per-node 2 examples/embeddings.py     # users sharded over two
    python examples/embeddings.py --tiny

The graph is generated with the shape of MovieLens: users, films with genres as features, and
ratings from 1 to 5 that follow hidden tastes; a few films have most ratings. A rating is predicted
from the embedding of the user and what a user-film GNN says of both. A user is known by nothing but
the ratings that it gave, so all there is to know of it has to be learned: one row per user.

The same model is then trained with a dense table (torch.nn.Embedding) on one process, rank 0, with
the same batches and first values. Both are compared by the root of the mean squared error on
ratings that were held out.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import SAGEConv

from pyg_scale import distributed, parallel
from pyg_scale.loader import LinkNeighborLoader
from pyg_scale.train import NodeEmbedding, seed_everything

GENRES, TASTES, CHANNELS = 18, 6, 32
RATES, RATED_BY = ("user", "rates", "film"), ("film", "rated_by", "user")


def ratings(num_users, num_films, num_ratings, seed):
    """Ratings with tastes, and which of them are held out."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator)

    genres = (torch.rand(num_films, GENRES, generator=generator) < 0.15).float()
    tastes, kinds = normal(num_users, TASTES), genres @ normal(GENRES, TASTES)
    kinds = 0.6 * kinds + 0.8 * normal(num_films, TASTES)
    popular = torch.arange(1, num_films + 1) ** -0.8
    user = torch.randint(num_users, (num_ratings,), generator=generator)
    film = torch.multinomial(popular, num_ratings, replacement=True, generator=generator)
    likes = 1.2 * F.cosine_similarity(tastes[user], kinds[film]) + 0.5 * normal(num_users)[user]
    stars = (3.5 + likes + 0.3 * normal(num_ratings)).round().clamp(1, 5)
    held_out = torch.rand(num_ratings, generator=generator) < 0.1
    data = HeteroData()
    data["user"].num_nodes = num_users
    data["film"].x = genres
    data[RATES].edge_index = torch.stack([user, film])[:, ~held_out]
    data[RATED_BY].edge_index = data[RATES].edge_index.flip(0)
    edges = torch.stack([user, film])
    return data, (edges[:, ~held_out], stars[~held_out]), (edges[:, held_out], stars[held_out])


class Net(nn.Module):
    """A layer from users to films and one from films to users, and a rating from both."""

    def __init__(self):
        super().__init__()
        self.genres = nn.Linear(GENRES, CHANNELS)
        self.to_film = SAGEConv((CHANNELS, CHANNELS), CHANNELS)
        self.to_user = SAGEConv((CHANNELS, CHANNELS), CHANNELS)
        self.rate = nn.Sequential(nn.Linear(3 * CHANNELS, CHANNELS), nn.ReLU())
        self.rating = nn.Linear(CHANNELS, 1)

    def forward(self, user, batch):
        film = self.genres(batch["film"].x)
        films = film + self.to_film((user, film), batch[RATES].edge_index).relu()
        users = user + self.to_user((films, user), batch[RATED_BY].edge_index).relu()
        row, col = batch[RATES].edge_label_index
        both = torch.cat([users[row], films[col], user[row] * films[col]], dim=1)
        return 3.5 + self.rating(self.rate(both)).squeeze(1)


def loader_of(data, seeds, args, **options):
    return LinkNeighborLoader(
        data,
        {RATES: [8, 4], RATED_BY: [8, 4]},
        edge_label_index=(RATES, seeds[0]),
        edge_label=seeds[1],
        batch_size=args.batch_size,
        seed=args.seed,
        **options,
    )


def train(model, rows, of_rows, loader, epochs, backward):
    """The same loop for an embedding of ranks and for a dense table."""
    of_model = torch.optim.Adam(model.parameters(), lr=0.005)
    for _ in range(epochs):
        for batch in loader:
            label = batch[RATES].edge_label
            out = model(rows(batch["user"].n_id), batch)
            loss = F.mse_loss(out, label) if label.numel() else out.sum()
            backward(loss, label.numel())
            for optimizer in (of_rows, of_model):
                optimizer.step()
                optimizer.zero_grad()


@torch.no_grad()
def error(model, rows, loader):
    """The root of the mean squared error."""
    loader.set_epoch(0)
    total, count = 0.0, 0
    for batch in loader:
        label = batch[RATES].edge_label
        out = model(rows(batch["user"].n_id), batch)
        total, count = total + float((out - label).square().sum()), count + label.numel()
    return (total / max(1, count)) ** 0.5


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=6_000)
    parser.add_argument("--films", type=int, default=4_000)
    parser.add_argument("--ratings", type=int, default=200_000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=1024, help="ratings of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small graph and two epochs")
    args = parser.parse_args(argv)
    if args.tiny:
        args.users, args.films, args.ratings, args.epochs, args.batch_size = 200, 100, 4_000, 2, 256
    with distributed.init(timeout=3600) as ranks:
        compare(args, ranks.rank, ranks.world_size)


def compare(args, rank, world_size):
    data, seen, held_out = ratings(args.users, args.films, args.ratings, args.seed)
    mean = float((held_out[1] - seen[1].mean()).square().mean().sqrt())
    steps = loader_of(data, seen, args, shuffle=True, split_batches=True)
    test = loader_of(data, held_out, args, split_seeds=False)

    seed_everything(args.seed)
    core = Net()
    model = parallel.wrap(core, "ddp") if world_size > 1 else core
    with NodeEmbedding(data, CHANNELS, seed=args.seed) as embedding:
        of_rows = embedding.optimizer(torch.optim.SparseAdam, lr=0.01)
        backward = getattr(model, "backward", lambda loss, num_seeds: loss.backward())
        with torch.no_grad():  # the first values, for the dense table
            first = embedding({"user": torch.arange(args.users)})["user"]
        train(model, lambda ids: embedding({"user": ids})["user"], of_rows, steps, args.epochs,
              backward)  # fmt: skip
        if rank == 0:  # alone: the other ranks answer while they wait at the barrier
            found = error(core, lambda ids: embedding({"user": ids})["user"], test)
            share = embedding.own_ids("user").numel()
            print(f"predicting the mean: error {mean:.4f}")
            print(f"embedding, ranks {world_size}: error {found:.4f}, rank 0 has {share} rows")
            seed_everything(args.seed)
            alone = loader_of(data, seen, args, shuffle=True, split_seeds=False)
            table = nn.Embedding.from_pretrained(first, freeze=False, sparse=True)
            dense, of_table = Net(), torch.optim.SparseAdam(table.parameters(), lr=0.01)
            train(dense, table, of_table, alone, args.epochs, lambda loss, _: loss.backward())
            print(f"dense table, one process: error {error(dense, table, test):.4f}")
        if dist.is_initialized():
            dist.barrier()


if __name__ == "__main__":
    main()
