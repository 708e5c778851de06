"""Inference layer by layer on several ranks is that of the whole graph."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn import (
    GAT,
    GCN,
    GATConv,
    GATv2Conv,
    GraphSAGE,
    HeteroConv,
    SAGEConv,
)

from pyg_scale import layerwise_inference
from pyg_scale.datasets import planted_communities
from pyg_scale.errors import CommError
from pyg_scale.inference.progress import InferenceProgress
from tests.distributed.across import in_parts, on_ranks, shares, spread
from tests.distributed.processes import end, start

DATA = planted_communities(90, 700, 3, 6, seed=3, progress=False)
DATA.x = DATA.x.double()

MODELS = {
    "sage": lambda: GraphSAGE(6, 8, 2, 3),
    "gcn with jumps": lambda: GCN(6, 8, 2, 3, jk="cat"),
    "gat": lambda: GAT(6, 8, 2, 3, heads=2),
}


def model_of(name: str, seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().double().eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graph")


@pytest.mark.parametrize(("name", "world_size"), [("sage", 2), ("gcn with jumps", 3), ("gat", 2)])
def test_equals_the_whole_graph(folder: Path, tmp_path: Path, name: str, world_size: int) -> None:
    model = model_of(name)
    paths = spread(in_parts(DATA, folder, 3), shares(world_size, 3))

    def work(data: Any) -> torch.Tensor:
        first = layerwise_inference(model, data, tmp_path / "out", memory=4_000)
        again = layerwise_inference(model, data, tmp_path / "out", memory=4_000)
        assert torch.equal(first, again)
        return first

    with torch.no_grad():
        expected = model(DATA.x, DATA.edge_index)
    for found in on_ranks(paths, work, through="requests"):
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["RANKS.json", "output.npy"]


def test_what_was_interrupted_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("sage")
    paths = spread(in_parts(DATA, folder, 2), shares(2, 2))
    write, left = InferenceProgress.write, [5]

    def fails(self: InferenceProgress, *args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError("no space left on device")
        write(self, *args)

    def work(data: Any) -> torch.Tensor:
        return layerwise_inference(model, data, tmp_path / "out", memory=4_000)

    with monkeypatch.context() as patch:
        patch.setattr(InferenceProgress, "write", fails)
        with pytest.raises(ExceptionGroup) as error:
            on_ranks(paths, work)
    kinds = {type(each) for each in error.value.exceptions}
    assert OSError in kinds and kinds <= {OSError, CommError}
    rows: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            InferenceProgress, "write", lambda s, *a: (rows.append(a[2].size(0)), write(s, *a))[1]
        )
        found = on_ranks(paths, work)[0]
    assert sum(rows) < 2 * 90
    with torch.no_grad():
        expected = model(DATA.x, DATA.edge_index)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("damage", ["gone", "none", "short", "journal"])
@pytest.mark.parametrize("typed", [False, True])
def test_files_of_a_rank_that_are_lost(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    typed: bool,
    damage: str,
) -> None:
    """All ranks begin anew where others have removed what the rank needs, and only there."""
    data, model, expected = recorded()
    if not typed:
        data, model = DATA, GraphSAGE(6, 8, 3, 3).double().eval()
        with torch.no_grad():
            expected = {"": model(DATA.x, DATA.edge_index)}
    paths = spread(in_parts(data, folder / f"{typed}", 2), shares(2, 2))
    write, last = InferenceProgress.write, 4 if typed else 2
    begun: list[int] = []
    removed = threading.Barrier(2)  # both ranks have removed the rows of the first step

    def stops(self: InferenceProgress, step: int, *args: Any) -> None:
        if "rank-" in str(self.path):  # not of a probe
            begun.append(step)
            if step == last and stop:
                removed.wait(60)
                raise OSError("no space left on device")
        write(self, step, *args)

    def work(data: Any) -> Any:
        options: Any = {"edge_attr": "edge_attr"} if typed else {}
        found = layerwise_inference(copy.deepcopy(model), data, tmp_path / "out", **options)
        return found if typed else {"": found}

    monkeypatch.setattr(InferenceProgress, "write", stops)
    stop = True
    with pytest.raises(ExceptionGroup):
        on_ranks(paths, work)
    assert not (tmp_path / "out" / "rank-0-of-2" / "step-0.npy").exists()
    files = tmp_path / "out" / "rank-1-of-2"
    if damage == "gone":
        shutil.rmtree(files)
    elif damage == "short":
        for file in files.glob("step-*.npy"):
            os.truncate(file, 100)
    elif damage == "journal":
        (files / "PROGRESS.jsonl").write_text("{")
    stop = False
    begun.clear()
    for found in on_ranks(paths, work):
        same(found, expected)
    assert begun.count(0) == (0 if damage == "none" else 2)
    assert ("all ranks begin anew" in caplog.text) == (damage != "none")


SIZES = {"author": 40, "paper": 70, "venue": 2}
WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")
BY, AT = ("paper", "by", "author"), ("paper", "at", "venue")


def typed() -> HeteroData:
    """A node type with fewer nodes than ranks, and attributes of the edges of two types."""
    generator, data = torch.Generator().manual_seed(0), HeteroData()
    for name, size in SIZES.items():
        data[name].x = torch.randn(size, 6, dtype=torch.float64, generator=generator)
    for edge_type, count in ((WRITES, 150), (CITES, 250), (BY, 100), (AT, 40)):
        ends = [torch.randint(SIZES[t], (count,), generator=generator) for t in edge_type[::2]]
        data[edge_type].edge_index = torch.stack(ends)
    for edge_type in (WRITES, CITES):
        size = data[edge_type].num_edges
        data[edge_type].edge_attr = torch.randn(size, 3, dtype=torch.float64, generator=generator)
    return data


class Typed(torch.nn.Module):
    """Attention with and without attributes of edges, sums and extremes between types."""

    def __init__(self) -> None:
        super().__init__()
        options: Any = {"edge_dim": 3, "add_self_loops": False}
        self.first = HeteroConv(
            {
                WRITES: GATv2Conv((6, 6), 8, **options),
                CITES: GATConv((6, 6), 4, heads=2, **options),
                BY: SAGEConv((6, 6), 8, aggr="max"),
                AT: SAGEConv((6, 6), 8),
            }
        )
        self.second = HeteroConv({CITES: GATConv(8, 5), BY: SAGEConv((8, 8), 5)})
        self.venue = torch.nn.Linear(8, 5)

    def forward(self, x: Any, edges: Any, edge_attr_dict: Any) -> Any:
        rows = {t: r.relu() for t, r in self.first(x, edges, edge_attr_dict=edge_attr_dict).items()}
        return {**self.second(rows, edges), "venue": self.venue(rows["venue"])}


def recorded() -> tuple[HeteroData, Typed, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    data, model = typed(), Typed().double().eval()
    attrs = {t: data[t].edge_attr for t in (WRITES, CITES)}
    with torch.no_grad():
        return data, model, model(data.x_dict, data.edge_index_dict, attrs)


def same(found: Any, expected: Any) -> None:
    assert set(found) == set(expected)
    for name, rows in expected.items():
        assert torch.allclose(found[name], rows, rtol=1e-12, atol=1e-12), name


@pytest.mark.matrix(3)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("memory", [6_000, "1GB"])
def test_a_model_with_types(folder: Path, tmp_path: Path, world_size: int, memory: Any) -> None:
    data, model, expected = recorded()
    paths = spread(in_parts(data, folder / "typed", 3), shares(world_size, 3))

    def work(data: Any) -> Any:
        options: Any = {"memory": memory, "edge_attr": "edge_attr", "num_workers": 1}
        own = copy.deepcopy(model)  # ranks are threads here, and recording is for one at a time
        first = layerwise_inference(own, data, tmp_path / "out", **options)
        again = layerwise_inference(own, data, tmp_path / "out", **options)
        assert all(torch.equal(first[t], again[t]) for t in expected)
        return first

    for found in on_ranks(paths, work, through="requests"):
        same(found, expected)
    files = {p.name for p in (tmp_path / "out").iterdir() if not p.name.startswith(".")}
    assert files >= {f"output-{t}.npy" for t in expected}
    assert not [name for name in files if name.startswith(("rank", "step"))]


@pytest.mark.parametrize(
    "stop_at", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 15, *range(4, 40, 6)))]
)
def test_a_model_with_types_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    """One of two ranks stops in any layer; the rows that are there are not computed again."""
    data, model, expected = recorded()
    paths = spread(in_parts(data, folder / "typed", 2), shares(2, 2))
    write, left, rows = InferenceProgress.write, [0], [0]

    def counts(self: InferenceProgress, *args: Any) -> None:
        if "rank-1" in str(self.path):
            left[0] -= 1
            if left[0] == 0:
                raise OSError("no space left on device")
        if "rank-" in str(self.path):  # not of a probe
            rows[0] += args[2].size(0)
        write(self, *args)

    monkeypatch.setattr(InferenceProgress, "write", counts)

    def infer(out: Path) -> list[Any]:
        def work(data: Any) -> Any:
            own = copy.deepcopy(model)
            return layerwise_inference(own, data, out, memory=8_000, edge_attr="edge_attr")

        return on_ranks(paths, work)

    infer(tmp_path / "whole")
    whole, rows[0], left[0] = rows[0], 0, stop_at
    with pytest.raises(ExceptionGroup) as error:
        infer(tmp_path / "out")
    other, stopped = error.value.exceptions
    assert isinstance(stopped, OSError) and type(other) is CommError, "the other does not wait"
    assert 0 < rows[0] < whole
    for found in infer(tmp_path / "out"):
        same(found, expected)
    assert rows[0] == whole


_KILLED = """
import os, signal, sys
import pyg_scale
from pyg_scale.inference.progress import InferenceProgress
from tests.distributed.test_layerwise import recorded

rank = int(os.environ["RANK"])
_, model, _ = recorded()
write, left = InferenceProgress.write, [{kill_at} if rank == {who} else 0]

def counted(self, *args):
    if "rank-" not in str(self.path):  # a probe
        return write(self, *args)
    left[0] -= 1
    if left[0] == 0 and not {after}:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, *args)
    with open({rows!r}, "a") as file:
        file.write(f"{{args[2].size(0)}}\\n")
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)

InferenceProgress.write = counted
data = pyg_scale.open({paths!r}[rank], timeout={timeout})
pyg_scale.layerwise_inference(model, data, {out!r}, memory=8_000, edge_attr="edge_attr")
data.comm.barrier()
"""


@pytest.mark.parametrize(
    ("who", "kill_at", "after"),
    [
        (1, 7, False),
        pytest.param(1, 15, True, marks=pytest.mark.slow),
        pytest.param(0, 2, True, marks=pytest.mark.slow),
        pytest.param(0, 11, False, marks=pytest.mark.slow),
    ],
)
def test_a_model_with_types_goes_on_after_sigkill(
    folder: Path, tmp_path: Path, who: int, kill_at: int, after: bool
) -> None:
    """One of two processes is killed; what either has written is not computed again."""
    data, _, expected = recorded()
    paths = [str(p) for p in spread(in_parts(data, folder / "typed", 2), shares(2, 2))]

    def infer(name: str, kill_at: int, timeout: float) -> tuple[list[int], int]:
        """The exit codes, and the number of rows that all runs have written to a directory."""
        values = {"who": who, "kill_at": kill_at, "after": after, "paths": paths}
        values |= {"out": str(tmp_path / name), "rows": str(tmp_path / f"{name}.txt")}
        found = end(start(tmp_path, _KILLED.format(**values, timeout=timeout), 2))
        rows = (tmp_path / f"{name}.txt").read_text().split()
        return [code for code, _ in found], sum(map(int, rows))

    codes, whole = infer("whole", 0, 60.0)
    assert codes == [0, 0]
    codes, rows = infer("out", kill_at, 10.0)
    assert codes[who] == -signal.SIGKILL
    assert codes[1 - who] > 0, "the other rank does not wait for ever"
    assert 0 < rows < whole
    assert infer("out", 0, 60.0) == ([0, 0], whole)
    output = {t: f"output-{t}.npy" for t in expected}
    for name in output.values():
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    same({t: torch.from_numpy(np.load(tmp_path / "out" / n)) for t, n in output.items()}, expected)


def test_more_ranks_than_nodes(tmp_path: Path) -> None:
    small = planted_communities(3, 2, 2, 6, seed=3, progress=False)
    small.x = small.x.double()
    model = model_of("sage")
    paths = spread(in_parts(small, tmp_path / "graph", 2), shares(4, 2))
    found = on_ranks(paths, lambda data: layerwise_inference(model, data, tmp_path / "out"))
    with torch.no_grad():
        expected = model(small.x, small.edge_index)
    for each in found:
        assert torch.allclose(each, expected, rtol=1e-12, atol=1e-12)


def test_one_rank_alone(folder: Path, tmp_path: Path) -> None:
    model = model_of("sage")
    paths = spread(in_parts(DATA, folder, 2), shares(2, 2))

    def work(data: Any) -> None:
        if data.ranks.rank == 1:
            found = layerwise_inference(model, data, tmp_path / "out", comm="local")
            with torch.no_grad():
                assert torch.allclose(found, model(DATA.x, DATA.edge_index), atol=1e-12)

    on_ranks(paths, work)


def test_ranks_that_mean_something_else_are_told(folder: Path, tmp_path: Path) -> None:
    paths = spread(in_parts(DATA, folder, 2), shares(2, 2))

    models = [model_of("sage", seed) for seed in (1, 2)]  # threads share torch's generator

    def other_model(data: Any) -> None:
        layerwise_inference(models[data.ranks.rank], data, tmp_path / "a")

    def other_place(data: Any) -> None:
        layerwise_inference(models[0], data, tmp_path / f"b-{data.ranks.rank}")

    def other_ranks(data: Any) -> None:
        layerwise_inference(models[0], data, tmp_path / "c")

    def messages(work: Any) -> list[str]:
        with pytest.raises(ExceptionGroup) as error:
            on_ranks(paths, work)
        return [str(each) for each in error.value.exceptions]

    for message in messages(other_model):
        assert "rank 1 computes the inference of another model than rank 0" in message
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pyg_scale.inference.ranks._SEEN_WITHIN", 0.3)
        for message in messages(other_place):
            assert "rank 1 does not see in its out= what rank 0 wrote" in message
    on_ranks(spread(in_parts(DATA, folder, 3), shares(3, 3)), other_ranks)
    for message in messages(other_ranks):
        assert "holds an inference of another ranks (3): pass resume=False" in message


@pytest.mark.parametrize("text", ['{"ranks": 2}', "[]", "no JSON"])
def test_a_note_of_something_else(folder: Path, tmp_path: Path, text: str) -> None:
    paths = spread(in_parts(DATA, folder, 2), shares(2, 2))
    (tmp_path / "RANKS.json").write_text(text)
    (tmp_path / "output.npy").write_text("irreplaceable")
    model = model_of("sage")
    with pytest.raises(ExceptionGroup) as error:
        on_ranks(paths, lambda data: layerwise_inference(model, data, tmp_path, resume=False))
    assert all("choose another directory" in str(each) for each in error.value.exceptions)
    assert (tmp_path / "output.npy").read_text() == "irreplaceable"
    assert (tmp_path / "RANKS.json").read_text() == text
