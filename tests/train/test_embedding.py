"""Embeddings that ranks share are a dense table, and cost what the touched rows cost."""

from __future__ import annotations

import copy
import io
import itertools
import json
import os
import resource
import signal
import time
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import SAGEConv

import pyg_scale
from pyg_scale import parallel
from pyg_scale.comm import Counting
from pyg_scale.datasets import planted_communities
from pyg_scale.errors import CheckpointError, CommError, CommTimeoutError
from pyg_scale.loader import NeighborLoader
from pyg_scale.parallel.mesh import DIMENSIONS
from pyg_scale.testing.processes import WaitingProcesses
from pyg_scale.train import Checkpoint, NodeEmbedding, RowAdagrad, storage
from pyg_scale.train.embedding.gradients import Gradients
from pyg_scale.train.embedding.table import ShardAnswers
from tests.train.embeddings import (
    CHANNELS,
    NODES,
    OPTIMIZERS,
    Run,
    comm_for,
    cut,
    dense,
    head,
    table,
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[WaitingProcesses]:
    with WaitingProcesses(3) as started:
        yield started


def close(found: Tensor, expected: Tensor) -> None:
    assert torch.allclose(found, expected, rtol=0, atol=1e-12), (found - expected).abs().max()


# The same as a dense table ####################################################################


def trained(kind: str, folder: str | None, distinct: bool) -> tuple[Tensor, dict[str, Tensor]]:
    name = f"{kind}-{folder is None}-{distinct}"
    if folder is None:
        run = Run(kind, name)
        run.train(range(7), distinct)
        found = run.rows(), run.parameters()
        run.close()
        return found
    with pyg_scale.open(folder, comm=comm_for(f"{name}-graph")) as data:
        run = Run(kind, name, data)
        owned = len(data.owners.owned())
        mine = sum(
            data.partition_books[None].nodes_of(part).numel() for part in data.owners.owned()
        )
        assert owned and run.embedding.own_rows().size(0) == mine < NODES
        run.train(range(7), distinct)
        found = run.rows(), run.parameters()
        run.close()
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_process_is_a_dense_table(kind):
    rows, parameters = dense(kind, range(7))
    run = Run(kind, "alone")
    run.train(range(7))
    assert torch.equal(run.rows(), rows) or torch.allclose(run.rows(), rows, rtol=0, atol=1e-15)
    for name, value in parameters.items():
        close(run.parameters()[name], value)
    run.close()


@pytest.mark.parametrize(
    ("world_size", "kind"), [(1, "adagrad"), *itertools.product((3, 2), OPTIMIZERS)]
)
def test_ranks_are_a_dense_table(ranks, kind, world_size):
    rows, parameters = dense(kind, range(7))
    found = ranks.run(trained, kind, None, kind == "adagrad", world_size=world_size)
    for mine, of_model in found:
        assert torch.equal(mine, found[0][0]), "all ranks read the same bits"
        close(mine, rows)
        for name, value in parameters.items():
            close(of_model[name], value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_of_a_graph_are_a_dense_table(ranks, tmp_path, world_size):
    folder = cut(tmp_path, 4)  # one rank of three has two parts
    rows, _ = dense("sparse_adam", range(7))
    found = ranks.run(trained, "sparse_adam", str(folder), False, world_size=world_size)
    for mine, _ in found:
        close(mine, rows)


def trained_beside_shards() -> Tensor:
    run = Run("adagrad", "fsdp", wrapper="fsdp")
    run.train(range(7))
    found = run.rows()
    run.close()
    return found


def test_a_model_of_shards_is_divided_by_the_same_seeds(ranks):
    rows, _ = dense("adagrad", range(7))
    for mine in ranks.run(trained_beside_shards, world_size=2):
        close(mine, rows)


class OfNodes(nn.Module):
    """A model of a whole graph without features: rows of nodes, and two layers."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        torch.manual_seed(4)
        self.first, self.last = SAGEConv(CHANNELS, 4).double(), SAGEConv(4, 2).double()

    def forward(self, n_id: Tensor, edge_index: Tensor) -> Tensor:
        x = self.embedding(n_id)
        return self.last(self.first(x, edge_index).relu(), edge_index)


def steps_on_a_graph(model: Any, call: Any, y: Tensor, of_rows: Any, own: Tensor) -> None:
    """Three steps, in which every third node is a seed."""
    of_model = torch.optim.SGD(model.parameters(), lr=0.3)
    for number in range(3):
        seeds = (own + number) % 3 == 0
        loss = nn.functional.cross_entropy(call()[seeds], y[own][seeds], reduction="sum")
        loss = loss / max(1, int(seeds.sum()))
        if isinstance(model, OfNodes):
            loss.backward()
        else:
            model.backward(loss, int(seeds.sum()))
        for each in (of_rows, of_model):
            each.step()
            each.zero_grad()


def trained_in_parts(folder: str, wrapper: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=DIMENSIONS) if shape else None
    name, first = f"{wrapper}-{shape}", table()
    with pyg_scale.open(folder, comm=comm_for(f"{name}-graph")) as graph:
        embedding = NodeEmbedding(
            graph,
            CHANNELS,
            dtype=torch.float64,
            init=lambda ids: first[ids],
            comm=comm_for(f"{name}-rows"),
        )
        model = parallel.wrap(
            OfNodes(embedding), wrapper, graph=graph, inputs=("n_id", "edge_index"), mesh=mesh
        )
        of_rows = embedding.optimizer(torch.optim.SparseAdam, lr=0.05)
        steps_on_a_graph(model, model, torch.arange(NODES) % 2, of_rows, model.own_nodes)
        with torch.no_grad():
            found = embedding(torch.arange(NODES)), model.module.first.lin_l.weight.detach()
        embedding.close()
    return found


@pytest.mark.parametrize(
    ("wrapper", "shape"),
    [
        ("halo", ()),
        ("feature", ()),
        ("mesh", (2, 1, 1)),
        ("mesh", (1, 2, 1)),
        ("mesh", (1, 1, 2)),
    ],
)
def test_models_of_a_whole_graph_have_the_rows_of_a_dense_table(ranks, tmp_path, wrapper, shape):
    parts = str(cut(tmp_path, 2 if not shape or shape[0] == 2 else 1))
    data = pyg_scale.open(tmp_path / "graph")
    dense = nn.Embedding.from_pretrained(table(), freeze=False, sparse=True)
    model, own = OfNodes(dense), torch.arange(NODES)
    of_rows = torch.optim.SparseAdam(dense.parameters(), lr=0.05)
    del model.embedding  # whose rows are no parameters of the other
    object.__setattr__(model, "embedding", dense)
    call = partial(model, own, data.edge_index)
    steps_on_a_graph(model, call, torch.arange(NODES) % 2, of_rows, own)
    for rows, weight in ranks.run(trained_in_parts, parts, wrapper, shape, world_size=2):
        close(rows, dense.weight.detach())
        close(weight, model.first.lin_l.weight.detach())


def test_row_adagrad_is_its_formula():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 3, dtype=torch.float64))
    expected, sums = weight.detach().clone(), torch.zeros(6, dtype=torch.float64)
    optimizer = RowAdagrad([weight], lr=0.1, eps=1e-3)
    for step in range(3):
        gradient = torch.zeros(6, 3, dtype=torch.float64)
        gradient[[step, 4]] = torch.randn(2, 3, dtype=torch.float64)
        weight.grad = gradient.to_sparse(1)
        optimizer.step()
        sums += gradient.square().sum(dim=1) / 3
        expected -= 0.1 * gradient / (sums.sqrt() + 1e-3)[:, None]
    close(weight.detach(), expected)


def factorized(name: str) -> Tensor:
    """A model that consists of rows alone: the embedding itself counts seeds."""
    with comm_for(name) as comm:
        first = table()
        embedding = NodeEmbedding(
            NODES, CHANNELS, dtype=torch.float64, init=lambda ids: first[ids], comm=comm
        )
        optimizer = embedding.optimizer(torch.optim.SGD, lr=0.1)
        pairs = torch.arange(14).view(7, 2)[comm.rank :: comm.world_size]
        for _ in range(3):
            x, y = embedding(pairs[:, 0]), embedding(pairs[:, 1])
            embedding.backward((x * y).sum(dim=1).mean(), len(pairs))
            optimizer.step()
        with torch.no_grad():
            found = embedding(torch.arange(NODES))
        embedding.close()
    return found


def test_a_factorization_counts_its_own_seeds(ranks):
    rows = nn.Parameter(table())
    pairs = torch.arange(14).view(7, 2)
    for _ in range(3):
        loss = (rows[pairs[:, 0]] * rows[pairs[:, 1]]).sum(dim=1).mean()
        (gradient,) = torch.autograd.grad(loss, rows)
        rows = nn.Parameter(rows.detach() - 0.1 * gradient)
    for found in ranks.run(factorized, "factorized"):
        close(found, rows.detach())


def accumulated_and_joined() -> tuple[Tensor, Tensor]:
    """Two batches for a step, then two steps of which one rank has only the first."""
    run = Run("sgd", "accumulated")
    rank = run.comm.rank
    zeros = torch.zeros(2, dtype=torch.float64)

    def backward(nodes: Tensor) -> None:
        x = run.embedding(nodes)
        loss = (run.model(x).squeeze(1) - zeros[: nodes.numel()]).square().mean()
        run.model.backward(loss, nodes.numel())

    with run.model.no_sync():
        backward(torch.tensor([rank, 2]))
    backward(torch.tensor([2]))
    run.of_rows.step()
    run.of_model.step()
    run.of_model.zero_grad()
    with run.model.join(run.of_rows, run.of_model):
        for number in range(2 - rank):
            backward(torch.tensor([number, 5])[: 2 - rank])
            run.of_rows.step()
            run.of_model.step()
            run.of_model.zero_grad()
    found = run.rows(), run.parameters()["0.weight"]
    run.close()
    return found


def test_accumulation_and_ranks_that_run_out_of_batches(ranks):
    rows, model = nn.Parameter(table()), head()
    of_rows, of_model = torch.optim.SGD([rows], lr=0.5), torch.optim.Adam(model.parameters(), 0.02)
    for batch in ([0, 2, 2, 1, 2, 2], [0, 5, 0], [1, 5]):
        of_rows.zero_grad()
        of_model.zero_grad()
        model(rows[torch.tensor(batch)]).square().mean().backward()
        of_rows.step()
        of_model.step()
    for mine, weight in ranks.run(accumulated_and_joined, world_size=2):
        close(mine, rows.detach())
        close(weight, model.state_dict()["0.weight"])


# First values #################################################################################


def first_values(name: str, folder: str | None) -> Tensor:
    with comm_for(name) as comm:
        graph = NODES if folder is None else pyg_scale.open(folder, comm=comm_for(name + "-graph"))
        embedding = NodeEmbedding(graph, 16, seed=5, comm=comm)
        with torch.no_grad():
            found = embedding(torch.arange(NODES))
        embedding.close()
        if folder is not None:
            graph.close()
    return found


def test_first_values_depend_on_seed_and_node_alone(ranks, tmp_path):
    alone = first_values("alone", None)
    for found in ranks.run(first_values, "ranges", None):
        assert torch.equal(found, alone)
    for found in ranks.run(first_values, "parts", str(cut(tmp_path, 3))):
        assert torch.equal(found, alone)
    assert float(alone.abs().max()) <= 0.25 and alone.unique().numel() > 0.99 * alone.numel()
    big = NodeEmbedding(20_000, 8, seed=1).own_rows().double() * 8**0.5
    # uniform: the mean within five standard errors, and so the variance
    count = big.numel()
    assert abs(float(big.mean())) < 5 * (1 / 3 / count) ** 0.5
    assert abs(float(big.square().mean()) - 1 / 3) < 5 * (4 / 45 / count) ** 0.5
    other = NodeEmbedding(20_000, 8, seed=2).own_rows()
    assert not torch.equal(other.double() * 8**0.5, big)


# Types of nodes ###############################################################################


def movies() -> HeteroData:
    data = HeteroData()
    data["user"].num_nodes = 30
    data["movie"].x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    data["genre"].num_nodes = 5
    generator = torch.Generator().manual_seed(1)
    rates = torch.stack([torch.randint(size, (90,), generator=generator) for size in (30, 12)])
    data["user", "rates", "movie"].edge_index = rates
    data["movie", "rated_by", "user"].edge_index = rates.flip(0)
    data["genre", "of", "movie"].edge_index = torch.stack([torch.arange(12) % 5, torch.arange(12)])
    return data


def by_type() -> list[Any]:
    data = movies()
    with comm_for("types") as comm:
        embedding = NodeEmbedding(data, 3, comm=comm)
        optimizer = embedding.optimizer(torch.optim.SGD, lr=1.0)
        everything = {kind: torch.arange(size) for kind, size in embedding.num_nodes.items()}
        with torch.no_grad():
            before = embedding(everything)
        loader = NeighborLoader(
            data, [4, 4], ("movie", torch.arange(6) + 6 * comm.rank), batch_size=6, seed=0
        )
        (batch,) = loader
        x = embedding(batch.n_id_dict)
        ids = {kind: batch[kind].n_id for kind in x}
        loss = sum(each.sum(dim=1).mean() for each in x.values())
        embedding.backward(loss, 6)
        optimizer.step()
        with torch.no_grad():
            after = embedding(everything)
        embedding.close()
    return [before, after, ids]


def test_one_table_for_each_type_without_features(ranks):
    found = ranks.run(by_type, world_size=2)
    before, after, _ = found[0]
    assert list(before) == ["user", "genre"], "movies have features"
    for kind in before:
        expected = before[kind].clone()
        for _, _, ids in found:
            count = ids[kind].numel()
            expected.index_add_(0, ids[kind], torch.full((count, 3), -1.0 / count / 2))
        assert torch.allclose(after[kind], expected, atol=1e-6), kind
    assert not torch.equal(before["user"][:5], before["genre"])


def test_a_loss_of_no_seeds_may_be_nan():
    with comm_for("none") as comm:
        embedding = NodeEmbedding(4, 3, comm=comm)
        optimizer = embedding.optimizer(torch.optim.SGD, lr=1.0)
        before = embedding.own_rows().clone()
        rows = embedding(torch.arange(3))
        embedding.backward((rows[:2] * 2).sum() / 2, 2)
        embedding.backward(rows.sum() * 0.0 / 0, 0)
        optimizer.step()
        before[:2] -= 1.0
        assert torch.allclose(embedding.own_rows(), before)
        embedding.close()


# Costs ########################################################################################


def traffic_of(name: str, num_nodes: int, touched: int) -> dict[str, int]:
    with Counting(comm_for(name)) as comm:
        embedding = NodeEmbedding(num_nodes, 8, comm=comm)
        optimizer = embedding.optimizer(torch.optim.SparseAdam, lr=0.1)
        comm.barrier()
        before = {k: each.sent + each.received for k, each in comm.traffic().items()}
        ids = torch.arange(touched).repeat(3) * (num_nodes // touched)  # each three times
        embedding.backward(embedding(ids).square().sum(), 1)
        optimizer.step()
        after = {k: each.sent + each.received for k, each in comm.traffic().items()}
        embedding.close()
    return {k: n - before.get(k, 0) for k, n in after.items() if n > before.get(k, 0)}


def test_bytes_are_those_of_touched_rows(ranks):
    found = {
        (size, touched): ranks.run(traffic_of, f"{size}-{touched}", size, touched, world_size=2)
        for size, touched in ((2_000, 40), (200_000, 40), (200_000, 400))
    }
    row = 8 * 4
    for (_, touched), both in found.items():
        for traffic in both:
            # Half of the rows are another rank's: 4 bytes of its id go there and the row comes,
            # then 8 bytes of the id and the gradient go, and those of the other come.
            asked = touched // 2 * (4 + row)
            assert 0 <= traffic["request features"] - asked <= 200
            gradients = 2 * (touched // 2) * (8 + row)
            assert 0 <= traffic["all_to_all"] - gradients <= 200
            assert set(traffic) == {"request features", "all_to_all"}
    assert found[2_000, 40] == found[200_000, 40], "however large the table is"


def larger_than_a_share() -> int:
    """Each rank may take no more memory than seven eighths of the table, threads included."""
    num_nodes, channels = 1_500_000, 64
    size = num_nodes * channels * 4
    with comm_for("large") as comm:
        with open("/proc/self/status") as file:
            now = int(file.read().split("VmData:")[1].split()[0]) << 10
        limits = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (now + size * 7 // 8, limits[1]))
        try:
            with pytest.raises(RuntimeError, match="memory"):
                torch.ones(num_nodes, channels)
            embedding = NodeEmbedding(
                num_nodes, channels, init=lambda ids: torch.ones(len(ids), channels), comm=comm
            )
            optimizer = embedding.optimizer(RowAdagrad, lr=0.1)
            embedding.backward(embedding(torch.arange(0, num_nodes, 1000)).square().sum(), 1)
            optimizer.step()
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, limits)
        embedding.close()
    assert int((embedding.own_rows()[:, 0] != 1).sum()) == num_nodes // 2 // 1000
    return embedding.own_rows().size(0)


@pytest.mark.slow
def test_a_table_larger_than_the_memory_of_one_rank(ranks):
    assert ranks.run(larger_than_a_share, world_size=2) == [750_000, 750_000]


# Checkpoints ##################################################################################


def saved_and_loaded(folder: str, load: bool, steps: range, graph: str | None = None) -> Any:
    size = dist.get_world_size() if dist.is_initialized() else 1
    name = f"{Path(folder).name}-{load}-{size}-{graph is not None}"
    opened = NODES if graph is None else pyg_scale.open(graph, comm=comm_for(f"{name}-graph"))
    run = Run("sparse_adam", name, opened, init=not load)
    with (
        comm_for(f"{name}-checkpoint") as comm,
        Checkpoint(folder, run.state(), comm=comm) as point,
    ):
        if load:
            assert point.load().step == 4
        rows = run.rows()
        run.train(steps)
        if not load:
            point.save(4)
            point.wait()
    moments = {
        key: (run.embedding.own_ids(), value.values)
        for key, value in run.of_rows.state_dict()["state"][0].items()
        if key != "step"
    }
    found = rows, run.rows(), run.parameters(), moments
    run.close()
    if graph is not None:
        opened.close()
    return found


def whole(found: Any, key: str) -> Tensor:
    """The moments of all ranks by id."""
    out = torch.zeros(NODES, CHANNELS, dtype=torch.float64)
    for *_, moments in found:
        ids, values = moments[key]
        out[ids] = values
    return out


@pytest.mark.parametrize("parts", [0, 4])
def test_two_ranks_save_and_others_load_the_same_bits(ranks, tmp_path, parts):
    graph = str(cut(tmp_path, parts)) if parts else None
    folder = str(tmp_path / "run")
    saved = ranks.run(saved_and_loaded, folder, False, range(4), graph, world_size=2)
    (checkpoint,) = Path(folder).iterdir()
    for rank, (*_, moments) in enumerate(saved):
        tensors = json.loads((checkpoint / f"rank-{rank}.json").read_text())["tensors"]
        chunks = [c for n, each in tensors.items() if n[:4] == "embe" for c in each["chunks"]]
        row = 3 * CHANNELS * 8 + (3 * 8 if parts else 0)
        written = sum(chunk["bytes"] for chunk in chunks)
        assert written == moments["exp_avg"][0].numel() * row, "its rows, and no more"
    rows, parameters = dense("sparse_adam", range(7))
    for size, there in ((3, graph), (2, graph), (3, None)):
        found = ranks.run(saved_and_loaded, folder, True, range(4, 7), there, world_size=size)
        for mine in found:
            assert torch.equal(mine[0], saved[0][1]), "to the bit, before another step is made"
            close(mine[1], rows)
            for name, value in parameters.items():
                close(mine[2][name], value)
    untouched = ranks.run(saved_and_loaded, folder, True, range(4, 4), None, world_size=3)
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(whole(untouched, key), whole(saved, key))
    alone = saved_and_loaded(folder, True, range(4, 7))
    close(alone[1], rows)


def test_a_run_goes_on_to_the_bit(ranks, tmp_path):
    folder = str(tmp_path / "run")
    ranks.run(saved_and_loaded, folder, False, range(4), world_size=2)
    again = ranks.run(saved_and_loaded, folder, True, range(4, 7), world_size=2)
    unbroken = ranks.run(trained, "sparse_adam", None, False, world_size=2)
    for mine, theirs in zip(again, unbroken, strict=True):
        assert torch.equal(mine[1], theirs[0])
        assert all(torch.equal(mine[2][name], value) for name, value in theirs[1].items())


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('"embedding.weight.rows", null', '"embedding.weight.rows"', "rows without a name"),
        ('"embedding.weight.rows", null', '"nowhere", null', "has no rows 'nowhere'"),
        ('"embedding.weight.rows", null', '"embedding.weight.rows"' * 2, "cannot be read"),
        ('"embedding.weight.rows", null', '"embedding.weight.rows", "embedding.weight.rows"',
         "are not the ids of"),
        ('"size": [9, 2]', '"size": [10, 2]', "lacks a piece"),
        ('"dtype": "float32"', '"dtype": "float64"', "the place of .*rows cannot be"),
    ],
)  # fmt: skip
def test_files_that_say_something_else(tmp_path, old, new, match):
    """Their checksums are right, so somebody made them like that."""
    state = {"embedding": NodeEmbedding(9, 2)}
    with Checkpoint(tmp_path, state, random_state=False) as checkpoint:
        checkpoint.save(1)
    (folder,) = tmp_path.iterdir()
    path, manifest = folder / "rank-0.json", folder / "manifest.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    said = json.loads(manifest.read_text())
    said["files"]["rank-0.json"] = storage.checksum(path)
    said.pop("checksum")
    check = zlib.crc32(json.dumps(said, sort_keys=True).encode())
    storage.write_json(manifest, {**said, "checksum": check})
    with (
        Checkpoint(tmp_path, state, random_state=False) as checkpoint,
        pytest.raises((CheckpointError, ValueError), match=match),
    ):
        checkpoint.load()


def die_while_writing(folder: str) -> None:
    """Save two checkpoints; rank 1 is killed when half of its part of the second is written."""
    run = Run("sparse_adam", "dies")
    with (
        comm_for("dies-checkpoint") as comm,
        Checkpoint(folder, run.state(), comm=comm, asynchronous=False) as point,
    ):
        run.train(range(4))
        point.save(4)
        run.train(range(4, 6))
        if dist.get_rank() == 1:
            storage.flush = lambda file: os.kill(os.getpid(), signal.SIGKILL)
        point.save(6)


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written_the_last_whole_one_remains(ranks, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(ExceptionGroup) as failed:
        ranks.run(die_while_writing, str(folder), world_size=2)
    assert any("process of rank 1 ended (-9)" in str(each) for each in failed.value.exceptions)
    rows, _ = dense("sparse_adam", range(7))
    for size in (3, 2):
        for mine in ranks.run(
            saved_and_loaded, str(folder), True, range(4, 7), None, world_size=size
        ):
            close(mine[1], rows)


def test_rows_of_a_dense_table_and_within_a_model():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.linear = NodeEmbedding(NODES, CHANNELS), nn.Linear(CHANNELS, 2)

    net = Net()
    assert [name for name, _ in net.named_parameters()] == ["linear.weight", "linear.bias"]
    given = torch.randn(NODES, CHANNELS)
    net.load_state_dict({**net.state_dict(), "rows.weight": given})
    assert torch.equal(net.rows.own_rows(), given)
    other = Net()
    other.load_state_dict(net.state_dict())
    assert torch.equal(other.rows.own_rows(), given)
    with pytest.raises(RuntimeError, match=r"Missing.*rows\.weight"):
        net.load_state_dict(dict(net.linear.state_dict(prefix="linear.")))


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = NodeEmbedding(NODES, CHANNELS, dtype=torch.float64)
        self.linear = nn.Linear(CHANNELS, 2, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.rows(ids))


def pickled(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_has_rows_of_its_own(copied):
    def step(model: Factors) -> Tensor:
        optimizer = model.rows.optimizer(torch.optim.SGD, lr=1.0)
        model(torch.tensor([1, 3])).sum().backward()
        optimizer.step()
        return model.rows.own_rows().clone()

    model = Factors()
    before = model.rows.own_rows().clone()
    model(torch.tensor([2])).sum().backward()  # gradients are not copied, as those of parameters
    other = copied(model)
    assert repr(other) == repr(model) and torch.equal(other.rows.own_rows(), before)
    after = step(other)
    assert torch.equal(model.rows.own_rows(), before), "those of the copy have changed"
    close(before[[1, 3]] - after[[1, 3]], model.linear.weight.detach().sum(0).expand(2, -1))
    assert torch.equal(after[2], before[2])
    model.zero_grad()
    model.rows.forget()
    assert torch.equal(step(model), after)


def test_a_shallow_copy_has_the_same_gradients():
    embedding = NodeEmbedding(NODES, CHANNELS)
    optimizer = embedding.optimizer(torch.optim.SGD, lr=1.0)
    before = embedding.own_rows().clone()
    copy.copy(embedding)(torch.tensor([1])).sum().backward()
    optimizer.step()
    close(embedding.own_rows()[1], before[1] - 1)


def test_averaged_models_keep_the_rows():
    model = Factors()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    ids = torch.arange(NODES)
    assert torch.equal(averaged(ids), model(ids))


def copied_on_ranks() -> None:
    with NodeEmbedding(NODES, CHANNELS) as embedding:
        for copied in (copy.deepcopy, pickled):
            with pytest.raises(TypeError, match=r"of 2 ranks can be neither .* state_dict\(\)"):
                copied(embedding)
    alone = NodeEmbedding(NODES, CHANNELS, comm="local")
    assert torch.equal(copy.deepcopy(alone).own_rows(), alone.own_rows())


def test_shards_are_not_copied(ranks):
    ranks.run(copied_on_ranks, world_size=2)


# Bad input ####################################################################################


def nobody() -> HeteroData:
    data = HeteroData()
    data["user"].name = None
    return data


def zeros(ids: Tensor) -> Tensor:
    return torch.zeros(ids.numel(), 2)


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        (torch.tensor([0, NODES]), IndexError, f"{NODES} does not exist, there are {NODES} rows"),
        (torch.tensor([3, -1]), IndexError, "-1 does not exist"),
        (torch.tensor([0.5]), TypeError, "int64 or int32"),
        ([0, 1], TypeError, "got list"),
        (torch.zeros(2, 2, dtype=torch.int64), ValueError, r"one dimension \(got shape \[2, 2\]"),
        ({"user": torch.tensor([0])}, TypeError, "pass batch.n_id$"),
    ],
)
def test_ids_that_cannot_be(wrong, error, match):
    with pytest.raises(error, match=match):
        NodeEmbedding(NODES, 2)(wrong)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        (("graph", 2), {}, TypeError, "a Data, a HeteroData or a number of nodes"),
        ((True, 2), {}, TypeError, "got bool"),
        ((5, 0), {}, ValueError, "channels"),
        ((-5, 2), {}, ValueError, "-5 nodes"),
        ((5, 2), {"dtype": torch.float16}, TypeError, "float32 or torch.float64"),
        ((5, 2), {"node_types": ["user"]}, ValueError, "for a HeteroData"),
        ((5, 2), {"init": lambda ids: torch.zeros(len(ids), 3)}, ValueError, r"shape \[5, 3\]"),
        ((movies(), 2), {"node_types": ["actor"]}, ValueError, "no 'actor'"),
        ((movies(), 2), {"node_types": "user"}, TypeError, r"a list: pass \['user'\]"),
        ((movies(), 2), {"init": {"usr": zeros}}, ValueError, r"'usr' .*\['user', 'genre'\]"),
        ((5, 2), {"init": {"user": zeros}}, ValueError, r"no table of 'user' .*\[None\]"),
        ((5, "a"), {}, TypeError, r"channels must be an integer \(got 'a'\)"),
        ((5, 2.5), {}, TypeError, r"channels must be an integer \(got 2.5\)"),
        ((5, True), {}, TypeError, r"channels must be an integer \(got True\)"),
        ((5, 2), {"seed": "a"}, TypeError, r"seed must be an integer \(got 'a'\)"),
        (
            (5, 2),
            {"init": torch.zeros(5, 2)},
            TypeError,
            r"init .* function of ids.* \(got Tensor\)",
        ),
        ((5, 2), {"init": "zeros"}, TypeError, r"init .* function of ids.* \(got str\)"),
        ((5, 2), {"init": {None: 0.0}}, TypeError, r"init .* function of ids.* \(got float\)"),
        ((Data(), 2), {}, ValueError, "graph does not say .* set its num_nodes"),
        ((nobody(), 2), {}, ValueError, r"graph\['user'\] does not say .* set its num_nodes"),
    ],
)
def test_tables_that_cannot_be(arguments, options, error, match):
    with pytest.raises(error, match=match):
        NodeEmbedding(*arguments, **options)


def test_first_values_of_a_type_alone():
    with NodeEmbedding(5, 2, init={None: zeros}) as embedding:
        assert not embedding.own_rows().any()
    with NodeEmbedding(movies(), 2, init={"user": zeros}) as embedding:
        assert not embedding.own_rows("user").any()
        assert embedding.own_rows("genre").any()


@pytest.mark.parametrize("node_type", [None, "movie", "actor"])
def test_rows_of_a_type_without_a_table(node_type):
    with NodeEmbedding(movies(), 2) as embedding:
        for method in (embedding.own_ids, embedding.own_rows):
            with pytest.raises(ValueError, match=f"{node_type!r} has no table; .*'user', 'genre'"):
                method(node_type)


@pytest.mark.parametrize(
    ("kind", "options", "error", "match"),
    [
        (torch.optim.Adam, {}, TypeError, "Adam is not an optimizer of sparse.*SparseAdam"),
        ("adam", {}, TypeError, "str is not an optimizer"),
        (torch.optim.SGD, {"momentum": 0.9}, ValueError, "momentum=0.9"),
        (torch.optim.Adagrad, {"weight_decay": 0.1}, ValueError, "weight_decay=0.1"),
        (torch.optim.Adagrad, {"foreach": True}, ValueError, "foreach"),
        (RowAdagrad, {"lr": -1.0}, ValueError, "lr must not be negative"),
    ],
)
def test_optimizers_that_touch_other_rows(kind, options, error, match):
    with pytest.raises(error, match=match):
        NodeEmbedding(NODES, 2).optimizer(kind, **options)


def test_misuse_of_an_optimizer():
    embedding = NodeEmbedding(NODES, 2)
    optimizer = embedding.optimizer(torch.optim.SGD, lr=1.0)
    with pytest.raises(ValueError, match="has an optimizer already"):
        embedding.optimizer(RowAdagrad)
    with pytest.raises(ValueError, match="no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="num_seeds"):
        embedding.backward(embedding(torch.tensor([1])).sum(), -1)
    with pytest.raises(TypeError, match="make it with dtype=torch.float64"):
        nn.Sequential(embedding).double()
    with pytest.raises(TypeError, match=r"stay torch.float32: convert .*\.to\(torch.float16\)"):
        nn.Sequential(embedding).half()
    embedding(torch.tensor([1])).sum().backward()
    embedding.backward(embedding(torch.tensor([1])).sum(), 1)
    with pytest.raises(RuntimeError, match="none and one"):
        optimizer.step()
    before = embedding.own_rows().clone()
    embedding(torch.tensor([1])).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(embedding.own_rows(), before), "forgotten"
    weight = nn.Parameter(torch.zeros(3, 2))
    weight.grad = torch.ones(3, 2)
    with pytest.raises(TypeError, match="sparse gradients"):
        RowAdagrad([weight]).step()


def test_saved_rows_of_another_table(tmp_path):
    def state(nodes: int, channels: int, **options: Any) -> dict[str, Any]:
        return {"embedding": NodeEmbedding(nodes, channels, **options)}

    with Checkpoint(tmp_path, state(9, 2)) as checkpoint:
        checkpoint.save(1)
    for other, match in (
        (state(8, 2), "9 rows were saved, and this table has 8"),
        (state(9, 3), r"shape \[2\] were saved, expected torch.float32 and \[3\]"),
        (state(9, 2, dtype=torch.float64), "torch.float32 .* expected torch.float64"),
    ):
        with Checkpoint(tmp_path, other) as checkpoint, pytest.raises(CheckpointError, match=match):
            checkpoint.load()
    with pytest.raises(CheckpointError, match=r"shape \[3, 2\] was given, expected \[9, 2\]"):
        NodeEmbedding(9, 2).load_state_dict({"weight": torch.zeros(3, 2)})


def disagreeing() -> None:
    rank = dist.get_rank()
    with (
        comm_for("sizes") as comm,
        pytest.raises(
            ValueError, match=r"rank 1 makes an embedding with channels 3, rank 0 with 2"
        ),
    ):
        NodeEmbedding(9, 2 + rank, comm=comm)
    with comm_for("modes") as comm:
        embedding = NodeEmbedding(9, 2, comm=comm)
        optimizer = embedding.optimizer(torch.optim.SGD, lr=1.0)
        embedding(torch.tensor([1])).sum().backward()
        with pytest.raises(RuntimeError, match="rank 0 called loss.backward.*how many seeds"):
            optimizer.step()
        embedding.close()


def test_ranks_that_disagree_are_told(ranks):
    ranks.run(disagreeing, world_size=2)


def local_steps() -> None:
    with comm_for("local-sgd") as comm:
        embedding = NodeEmbedding(9, 2, comm=comm)
        optimizer = embedding.optimizer(torch.optim.SGD, lr=1.0)
        model = parallel.wrap(nn.Linear(2, 1), "local_sgd")
        model.backward(model(embedding(torch.tensor([1]))).mean(), 1)
        with pytest.raises(NotImplementedError, match="no mean over the seeds of all"):
            optimizer.step()
        embedding.close()


def test_ranks_that_step_by_themselves_are_refused(ranks):
    ranks.run(local_steps, world_size=2)


def test_messages_that_are_none():
    tables = NodeEmbedding(9, 2)._tables
    answers, good = ShardAnswers(tables), Gradients(tables, comm_for("messages"))
    with pytest.raises(ValueError, match="begin with a text"):
        answers([torch.zeros(3)])
    for text, ids, error in (
        (b'[[false,null,0,["x"]]]', [1], KeyError),
        (b'[[true,["a","b","c"],0,["embedding"]]]', [1], KeyError),
        (b'[[false,null,1,["embedding"]]]', [1], IndexError),
        (b'[[false,null,0,["embedding"]]]', [9], IndexError),
        (b'[[false,null,0,["embedding"]]]', [-1], IndexError),
    ):
        message = [torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.tensor(ids)]
        with pytest.raises(error):
            answers(message)

    class Says:
        rank, world_size = 0, 1

        def __init__(self, message: Tensor) -> None:
            self.message = message

        def all_to_all(self, tensors: Any) -> list[Tensor]:
            return [self.message]

    def message(*numbers: int, extra: int = 0) -> Tensor:
        head = torch.tensor(numbers).view(torch.uint8)
        return torch.cat([head, torch.zeros(extra, dtype=torch.uint8)])

    for wrong in (
        torch.zeros(3),
        message(1),
        message(9, 0, 1, 0),
        message(1, -1, 1, 0),
        message(1, 0, 1, -1),
        message(1, 0, 1, 1 << 62),
        message(1, 0, 1, 2, extra=31),
        message(1, 0, 1, 1, 9, extra=8),
    ):
        good._comm = Says(wrong)  # type: ignore[assignment]
        with pytest.raises(CommError, match="rank 0 sent"):
            good.exchange()


# Ranks that go ################################################################################


def read_often(embedding: NodeEmbedding) -> None:
    for _ in range(1000):
        embedding(torch.arange(NODES))


def lose_rank_1(where: str) -> None:
    rank = dist.get_rank()
    comm = comm_for(f"lost-{where}")
    embedding = NodeEmbedding(NODES, CHANNELS, comm=comm)
    optimizer = embedding.optimizer(torch.optim.SGD, lr=1.0)
    if rank == 1:
        if where != "late":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2.5)
    elif where == "read":
        with pytest.raises(CommError, match="rank 1"):
            read_often(embedding)
    else:
        comm.timeout = 1.0
        embedding.backward(embedding(torch.tensor([0])).sum(), 1)  # a row of this rank
        with pytest.raises(CommTimeoutError if where == "late" else CommError, match="rank 1"):
            optimizer.step()
    embedding.close(0.0)
    comm.close()


@pytest.mark.parametrize("where", ["late", "read", pytest.param("step", marks=pytest.mark.slow)])
def test_a_rank_that_is_gone_is_named(ranks, where):
    if where == "late":
        ranks.run(lose_rank_1, where, world_size=2)
        return
    with pytest.raises(ExceptionGroup) as failed:
        ranks.run(lose_rank_1, where, world_size=2)
    (error,) = failed.value.exceptions
    assert "process of rank 1 ended (-9)" in str(error), "and the others were told"


def test_a_graph_that_is_trained_end_to_end():
    data = planted_communities(400, 4_000, num_classes=3, num_features=4)
    del data.x
    loader = NeighborLoader(data, [5], data.train_mask, batch_size=64, shuffle=True, seed=0)
    embedding = NodeEmbedding(data, 8)
    optimizer = embedding.optimizer(torch.optim.SparseAdam, lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    torch.manual_seed(0)
    linear = SAGEConv(8, 3)
    losses = []
    for _ in range(6):
        for batch in loader:
            x = embedding(batch.n_id)
            out = linear(x, batch.edge_index)[: batch.batch_size]
            loss = nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        schedule.step()
    assert losses[-1] < 0.8 * losses[0] and optimizer.param_groups[0]["lr"] < 0.05
    assert isinstance(optimizer, torch.optim.SparseAdam) and isinstance(data, Data)
