"""Ranks and servers on a real Ray, which are killed and come back."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray import cloudpickle

import pyg_scale
from pyg_scale import distributed, parallel
from pyg_scale.datasets import planted_communities
from pyg_scale.errors import GraphDirectoryError
from pyg_scale.loader import NeighborLoader
from pyg_scale.testing.processes import WaitingProcesses
from pyg_scale.train import Checkpoint, NodeEmbedding
from pyg_scale_ray import fit, local, serve
from pyg_scale_ray.cluster import check

STEPS = 12
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    quiet = {"OMP_NUM_THREADS": "1", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120"}
    with local(num_cpus=4, log_to_driver=False, runtime_env={"env_vars": quiet}):
        yield


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("graph")
    data = planted_communities(300, 3_000, 4, 8, progress=False)
    pyg_scale.save(data, folder / "whole")
    pyg_scale.partition(folder / "whole", 2, "hash", folder / "parts")
    return str(folder)


def train(config: dict[str, Any]) -> None:
    """A script as for torchrun; rank 1 is killed by Ray, and then by a signal."""
    torch.manual_seed(0)
    folder = Path(config["folder"])
    with distributed.init() as context, pyg_scale.open(f"{config['graph']}/parts") as data:
        loader = NeighborLoader(
            data, [4, 4], data.train_mask, batch_size=32, shuffle=True, seed=0, split_batches=True
        )
        model = parallel.wrap(torch.nn.Linear(8 + data.num_features, 4), "ddp")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with NodeEmbedding(data, 8) as embedding:
            of_rows = embedding.optimizer(torch.optim.SparseAdam, lr=0.01)
            state = {"model": model, "optimizer": optimizer, "rows": embedding, "of_rows": of_rows,
                     "loader": loader}  # fmt: skip
            with Checkpoint(folder / "run", state, every=1) as checkpoint:
                step = begun = checkpoint.load().step
                (folder / f"begun-{begun}-{context.rank}-of-{context.world_size}").touch()
                while step < STEPS:
                    for batch in loader:
                        # Rows of seeds alone: those are the same for any number of ranks.
                        seeds = slice(batch.batch_size)
                        x = torch.cat([embedding(batch.n_id[seeds]), batch.x[seeds]], dim=1)
                        out = model(x)
                        label = batch.y[: batch.batch_size]
                        loss = torch.nn.functional.cross_entropy(out, label, reduction="sum")
                        loss = loss / max(1, batch.batch_size)
                        model.backward(loss, batch.batch_size)
                        for each in (optimizer, of_rows):
                            each.step()
                            each.zero_grad()
                        step += 1
                        checkpoint.step(step)
                        if step in (4, 8) and begun < 4 * (step // 8) + 1 and context.rank == 1:
                            die(step if config["dies"] else 0)
                        if step == STEPS:
                            break
            with torch.no_grad():
                rows = embedding(torch.arange(300))
            found = {**model.module.state_dict(), "rows": rows}
            torch.save(found, folder / f"found-{context.rank}.pt")


def die(step: int) -> None:
    if step == 4:
        ray.kill(ray.get_runtime_context().current_actor, no_restart=False)
    elif step == 8:
        os.kill(os.getpid(), signal.SIGKILL)


def found_by(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"found-{rank}.pt", weights_only=True)


# No cluster: first, as a cluster that a test begins is there for those that follow.


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"train": "train.py"}, TypeError, "must be a function"),
        ({"num_workers": 0}, ValueError, "num_workers"),
        ({"num_workers": (3, 2)}, ValueError, "num_workers"),
        ({"max_failures": -2}, ValueError, "max_failures"),
        ({"timeout": 0.0}, ValueError, "timeout"),
        ({}, RuntimeError, r"fit\(\) needs a Ray cluster: call ray.init"),
    ],
)
def test_runs_that_cannot_be(tmp_path, arguments, error, match):
    given = {"train": fails, "num_workers": 1, "folder": tmp_path, **arguments}
    with pytest.raises(error, match=match):
        fit(**given)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"num_servers": 0}, ValueError, "num_servers"),
        ({"num_threads": 0}, ValueError, "num_threads"),
        ({"max_restarts": -2}, ValueError, "max_restarts"),
        ({"secret": "short"}, ValueError, "secret"),
        ({}, RuntimeError, r"serve\(\) needs a Ray cluster"),
    ],
)
def test_servers_that_cannot_be(arguments, error, match):
    with pytest.raises(error, match=match):
        serve("nowhere", **{"num_servers": 1, **arguments})


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_and_started_again_the_bits_are_those_of_an_unbroken_run(cluster, graph, tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    for folder in (unbroken, broken):
        folder.mkdir()
    with WaitingProcesses(2) as ranks:  # not on Ray
        ranks.run(train, {"graph": graph, "folder": str(unbroken), "dies": False})
    config = {"graph": graph, "folder": str(broken), "dies": True}
    result = fit(train, config, num_workers=2, folder=tmp_path / "ray", max_failures=2)
    assert result.error is None
    begun = {path.name for path in broken.glob("begun-*")}
    assert {"begun-0-0-of-2", "begun-0-1-of-2"} < begun and len(begun) == 6, begun
    for rank in (0, 1):
        expected = found_by(unbroken, rank)
        for name, value in found_by(broken, rank).items():
            assert torch.equal(value, expected[name]), name


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_rank_goes_on_where_one_of_two_was_killed(cluster, graph, tmp_path):
    from ray.train import TrainingFailedError

    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    for folder in (unbroken, broken):
        folder.mkdir()
    with WaitingProcesses(2) as ranks:  # not on Ray
        ranks.run(train, {"graph": graph, "folder": str(unbroken), "dies": False})
    config = {"graph": graph, "folder": str(broken), "dies": True}
    with pytest.raises(TrainingFailedError):
        fit(train, config, num_workers=2, folder=tmp_path / "two", max_failures=0)
    assert not list(broken.glob("found-*"))
    config["dies"] = False
    fit(train, config, num_workers=1, folder=tmp_path / "one", max_failures=0)
    (begun,) = broken.glob("begun-*-of-1")
    assert begun.name != "begun-0-0-of-1"
    expected = found_by(unbroken, 0)
    for name, value in found_by(broken, 0).items():  # sums of float32 in another order
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def fails(config: dict[str, Any]) -> None:
    with distributed.init() as context:
        assert (context.world_size, context.launcher) == (2, "torch")
        if context.rank == 1:
            raise ValueError("of rank 1, on purpose")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_error_of_a_rank_comes_back(cluster, tmp_path):
    from ray.train import TrainingFailedError

    with pytest.raises(TrainingFailedError, match="on purpose"):
        fit(fails, {}, num_workers=2, folder=tmp_path, max_failures=0)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_server_that_dies_is_started_again_and_no_batch_is_lost(cluster, graph):
    whole = f"{graph}/whole"
    with serve(whole, 2) as servers:
        data = pyg_scale.open(servers.addresses, token=servers.secret, timeout=60)
        options = {"batch_size": 8, "shuffle": True, "seed": 3, "num_workers": 2}
        before = ray.get([actor.process.remote() for actor in servers.actors])
        here = pyg_scale.open(whole)
        expected = list(NeighborLoader(here, [4, 3], here.train_mask, **options))
        found = []
        for number, batch in enumerate(NeighborLoader(data, [4, 3], here.train_mask, **options)):
            if number == 3:
                os.kill(before[0], signal.SIGKILL)
            if number == 9:
                servers.counts()  # waits until it is there again
                os.kill(before[1], signal.SIGKILL)
            found.append(batch)
        assert len(found) == len(expected) > 15
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine.n_id, theirs.n_id) and torch.equal(mine.x, theirs.x)
            assert torch.equal(mine.edge_index, theirs.edge_index)
        servers.counts()
        after = ray.get([actor.process.remote() for actor in servers.actors])
        assert not set(before) & set(after), "other processes"
        assert sum(each["batches"] for each in servers.counts()) > 0


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_what_the_cluster_has_not(cluster, graph, tmp_path):
    with pytest.raises(RuntimeError, match="9 servers need 9 CPUs, and the Ray cluster has 4"):
        serve(f"{graph}/whole", 9)
    with pytest.raises(GraphDirectoryError, match="not a graph directory"):
        serve(tmp_path, 1)
    with pytest.raises(RuntimeError, match="uses Ray already"), local(num_cpus=1):
        pass


def test_a_ray_that_cannot_be():
    with pytest.raises(ValueError, match="num_cpus"), local(num_cpus=0):
        pass
    assert check().ok and ray.__version__ in check().detail
