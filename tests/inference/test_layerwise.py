"""Layer-wise inference: the full-batch forward, whoever is killed, or a typed error."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import (
    GAT,
    GCN,
    GIN,
    PNA,
    EdgeCNN,
    GCNConv,
    GraphSAGE,
    SAGEConv,
    SGConv,
)

import pyg_scale
from pyg_scale.inference import layers, layerwise
from pyg_scale.store import MemoryFeatureStore, MemoryGraphStore, Mmap, MmapGraph

pytestmark = pytest.mark.matrix(3)

N, E, C = 200, 1500, 40
TOLERANCE = 1e-12


def graph(seed: int = 0) -> Data:
    """Self-loops, parallel edges, a hub, and nodes without edges or without in-edges."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, N - 20, (2, E), generator=generator)
    edges[1, :150] = 3
    edges[0, 150:190] = edges[1, 150:190]
    edges[:, 200:230] = edges[:, 230:260]
    edges[1][edges[1] == 5] = 6
    x = torch.randn(N, C, dtype=torch.float64, generator=generator)
    return Data(x=x, edge_index=edges, num_nodes=N)


def model(cls: Any = GraphSAGE, width: int = 33, num_layers: int = 3, **options: Any) -> Any:
    torch.manual_seed(1)
    made = cls(C, width, num_layers, **options).double()
    for module in made.modules():  # running statistics that do something
        if isinstance(module, torch.nn.BatchNorm1d) and module.track_running_stats:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return made.eval()


def full(made: Any, data: Data, **options: Any) -> Tensor:
    with torch.no_grad():
        return made(data.x, data.edge_index, **options)


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert float(expected.std()) > 1e-3, "nothing is compared"
    far = float((got - expected).abs().max())
    assert far <= TOLERANCE * max(1.0, float(expected.abs().max())), far


PNA_OPTIONS = {
    "aggregators": ["mean", "max", "std"],
    "scalers": ["identity", "amplification"],
    "deg": torch.bincount(torch.bincount(graph().edge_index[1], minlength=N)),
}
MODELS: dict[str, Any] = {
    "sage": (GraphSAGE, {}),
    "sage max": (GraphSAGE, {"aggr": "max", "out_channels": 5}),
    "gcn": (GCN, {}),
    "gcn improved": (GCN, {"improved": True, "out_channels": 5}),
    "gcn no loops": (GCN, {"add_self_loops": False}),
    "gcn cached": (GCN, {"cached": True}),
    "gcn not normalised": (GCN, {"normalize": False, "add_self_loops": False}),
    "gin": (GIN, {"norm": "batch_norm"}),
    "gat": (GAT, {"width": 32, "heads": 4}),
    "gatv2": (GAT, {"width": 32, "heads": 4, "v2": True, "out_channels": 4}),
    "pna": (PNA, PNA_OPTIONS),
    "edge": (EdgeCNN, {}),
}
FORMS: dict[str, Any] = {
    "last": {"jk": "last"},
    "cat": {"jk": "cat", "out_channels": 7, "norm": "batch_norm"},
    "max": {"jk": "max", "act": "elu", "act_first": True, "norm": "batch_norm"},
    "lstm": {"jk": "lstm"},
    "norm": {"norm": "batch_norm", "dropout": 0.5, "out_channels": 4},
    "node norm": {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}},
    "no act": {"act": None},
    "one layer": {"num_layers": 1, "out_channels": 6},
}


@pytest.mark.parametrize("name", MODELS)
def test_is_the_full_batch_forward(name: str, tmp_path: Path) -> None:
    cls, options = MODELS[name]
    made, data = model(cls, **options), graph()
    got = pyg_scale.layerwise_inference(made, data, tmp_path, batch_size=32)
    expected = full(model(cls, **options), data)  # a model of its own: nothing was cached
    assert_close(got, expected)
    assert_close(torch.from_numpy(np.load(tmp_path / "output.npy")), expected)
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix == ".npy") == ["output.npy"]


@pytest.mark.parametrize("cls", [GraphSAGE, GCN])
@pytest.mark.parametrize("form", FORMS)
def test_jumping_knowledge_norms_and_activations(cls: Any, form: str, tmp_path: Path) -> None:
    made, data = model(cls, **FORMS[form]), graph()
    got = pyg_scale.layerwise_inference(made, data, tmp_path, batch_size=64, num_workers=2)
    assert_close(got, full(made, data))


def test_a_real_graph(data_dir: Path, tmp_path: Path) -> None:
    from pyg_scale.datasets.read import read_npz

    data = read_npz(data_dir / "cora.npz")
    data.x = data.x.double()
    for cls in (GCN, GAT):
        torch.manual_seed(0)
        made = cls(data.num_features, 16, 2, out_channels=7).double().eval()
        got = pyg_scale.layerwise_inference(made, data, tmp_path / cls.__name__, batch_size=500)
        assert_close(got, full(made, data))


@pytest.mark.parametrize("cls", [GCN, GAT])
def test_attributes_of_edges(cls: Any, tmp_path: Path) -> None:
    """Weights of parallel edges and of self-loops too, from the graph and from stores."""
    name, value = ("edge_weight", torch.rand(E)) if cls is GCN else ("edge_attr", torch.randn(E, 3))
    data = graph()
    loops = data.edge_index[0] == data.edge_index[1]
    # of several self-loops of a node PyG takes any one's weight
    seen: set[int] = set()
    keep = torch.ones(E, dtype=torch.bool)
    for e in loops.nonzero().view(-1).tolist():
        node = int(data.edge_index[0, e])
        keep[e] = node not in seen
        seen.add(node)
    data.edge_index, value = data.edge_index[:, keep], value[keep].double()
    made = model(cls, width=32, **({} if cls is GCN else {"edge_dim": 3}))
    expected = full(made, data, **{name: value})
    assert not torch.allclose(expected, full(made, data)), "they must count"
    data[name] = value
    features, edges = MemoryFeatureStore(), MemoryGraphStore()
    features[None, "x", None] = data.x
    features[(None, None), name, None] = value
    edges.put_edge_index(
        (data.edge_index[0], data.edge_index[1]), edge_type=None, layout="coo", size=(N, N)
    )
    for number, given in enumerate((data, (features, edges))):
        out = tmp_path / str(number)
        got = pyg_scale.layerwise_inference(made, given, out, batch_size=50, **{name: name})
        assert_close(got, expected)


@pytest.mark.parametrize("kind", ["directory", "path", "mmap", "memory"])
def test_graphs(kind: str, tmp_path: Path) -> None:
    data, made = graph(), model(GCN)
    given: Any
    if kind in ("directory", "path"):
        pyg_scale.save(data, tmp_path / "graph")
        given = tmp_path / "graph"
        given = pyg_scale.open(given) if kind == "directory" else given
    else:
        given = (Mmap(tmp_path / "f"), MmapGraph(tmp_path / "g"))
        if kind == "memory":
            given = (MemoryFeatureStore(), MemoryGraphStore())
        given[0][None, "x", None] = data.x
        given[1].put_edge_index(
            (data.edge_index[0], data.edge_index[1]), edge_type=None, layout="coo", size=(N, N)
        )
    got = pyg_scale.layerwise_inference(made, given, tmp_path / "out", batch_size=64)
    assert_close(got, full(made, data))


class Own(torch.nn.Module):
    """A model that says itself what its layers are."""

    num_layers = 2

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(C, 8), SAGEConv(8, 4, aggr="max")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).tanh(), edge_index)

    def inference_per_layer(
        self, layer: int, x: Tensor, edge_index: Tensor, batch_size: int
    ) -> Tensor:
        if layer == 0:
            return self.first(x, edge_index)[:batch_size].tanh()
        return self.second(x, edge_index)[:batch_size]


def test_a_model_with_layers_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made, data = Own().double().eval(), graph()
    got = pyg_scale.layerwise_inference(made, data, tmp_path, batch_size=30)
    assert_close(got, full(made, data))


# What cannot be exact #####################################################################


class Batchwise(Own):
    """Normalises over whatever is in the batch."""

    def inference_per_layer(self, layer: int, x: Tensor, *args: Any) -> Tensor:
        rows = super().inference_per_layer(layer, x, *args)
        return rows - rows.mean(0)


class Degrees(Own):
    """Reads the degrees of neighbours, by hand."""

    def inference_per_layer(
        self, layer: int, x: Tensor, edge_index: Tensor, batch_size: int
    ) -> Tensor:
        degree = torch.bincount(edge_index[1], minlength=x.size(0)).to(x.dtype)
        return super().inference_per_layer(layer, x * degree[:, None], edge_index, batch_size)


class Random(Own):
    """Drops out in evaluation too."""

    def inference_per_layer(self, layer: int, x: Tensor, *args: Any) -> Tensor:
        return super().inference_per_layer(layer, torch.dropout(x, 0.5, True), *args)


@pytest.mark.parametrize("cls", [Batchwise, Degrees, Random])
def test_what_depends_on_the_block_is_found(cls: Any, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=f"layer 0 of {cls.__name__} gives other numbers"):
        pyg_scale.layerwise_inference(cls().double().eval(), graph(), tmp_path)
    assert not list(tmp_path.glob("*.npy")), "before any work"


def test_without_the_degrees_of_the_graph_gcn_is_wrong_and_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the exact way is for: a block alone gives other numbers, and the probe sees it."""
    monkeypatch.setattr(layers, "_normalises", lambda conv: False)
    data, made = graph(), model(GCN)
    with pytest.raises(NotImplementedError, match="GCNConv.* gives other numbers"):
        pyg_scale.layerwise_inference(made, data, tmp_path / "probed")
    monkeypatch.setattr(layerwise, "check_one_hop", lambda *args: None)
    got = pyg_scale.layerwise_inference(made, data, tmp_path / "blind", batch_size=32)
    assert float((got - full(made, data)).abs().max()) > 1e-2


class WithGCN(Own):
    def __init__(self) -> None:
        super().__init__()
        self.first = GCNConv(C, 8)


class WithSG(Own):
    def __init__(self) -> None:
        super().__init__()
        self.second = SGConv(8, 4, K=2)


class Backward(Own):
    def __init__(self) -> None:
        super().__init__()
        self.first = SAGEConv(C, 8, flow="target_to_source")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (WithGCN, r"GCNConv \(first\) normalises by the degrees"),
        (WithSG, r"SGConv \(second\) needs more"),
        (Backward, r"SAGEConv \(first\) has flow"),
        (lambda: model(norm="graph_norm"), r"GraphNorm \(norms.0\) normalises over all nodes"),
        (lambda: model(norm="pair_norm"), "PairNorm"),
        (lambda: model(norm="layer_norm"), r"LayerNorm .*norm_kwargs=\{"),
        (lambda: model(norm="instance_norm"), "InstanceNorm .* nodes of a batch"),
        (
            lambda: model(GIN, norm="batch_norm", norm_kwargs={"track_running_stats": False}),
            "BatchNorm1d .* track_running_stats=True",
        ),
    ],
)
def test_what_is_known_not_to_be_exact_is_named(make: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=match):
        pyg_scale.layerwise_inference(make().double().eval(), graph(), tmp_path)
    assert not list(tmp_path.glob("*.npy"))


def test_stores_with_types_are_refused(tmp_path: Path) -> None:
    edges = MemoryGraphStore()
    pair = torch.tensor([0]), torch.tensor([1])
    edges.put_edge_index(pair, edge_type=("a", "to", "a"), layout="coo", size=(2, 2))
    with pytest.raises(NotImplementedError, match="node and edge types"):
        pyg_scale.layerwise_inference(model(), (MemoryFeatureStore(), edges), tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"model": 3}, TypeError, "model must be"),
        ({"model": torch.nn.Linear(2, 2).eval()}, TypeError, "inference_per_layer"),
        ({"model": model().train()}, ValueError, r"model.eval\(\)"),
        ({"model": GraphSAGE(-1, 4, 2).eval()}, ValueError, "not initialised"),
        ({"graph": 3}, TypeError, "graph must be"),
        ({"graph": Data(edge_index=graph().edge_index)}, ValueError, "no features x"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"num_workers": -1}, ValueError, "num_workers"),
        ({"dtype": torch.int64}, ValueError, "floating point"),
        ({"edge_weight": "w"}, ValueError, "'w'"),
    ],
)
def test_wrong_arguments(change: Any, error: type[Exception], match: str, tmp_path: Path) -> None:
    arguments = {"model": model(), "graph": graph(), "out": tmp_path} | change
    with pytest.raises(error, match=match):
        pyg_scale.layerwise_inference(**arguments)


@pytest.mark.parametrize("size", [0, 1])
def test_hardly_a_graph(size: int, tmp_path: Path) -> None:
    data = Data(
        x=torch.ones(size, C).double(),
        edge_index=torch.empty(2, 0, dtype=torch.int64),
        num_nodes=size,
    )
    for number, made in enumerate((model(), model(GCN), model(jk="cat", out_channels=3))):
        got = pyg_scale.layerwise_inference(made, data, tmp_path / str(number))
        assert got.shape == full(made, graph())[:size].shape
        if size:
            assert torch.allclose(got, full(made, data), rtol=0, atol=TOLERANCE)


def test_shorter_hidden_states(tmp_path: Path) -> None:
    made, data = model(GCN), graph()
    got = pyg_scale.layerwise_inference(made, data, tmp_path, dtype=torch.bfloat16)
    expected = full(made, data)
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.double(), expected, atol=0.03 * float(expected.abs().max()))
    assert not torch.allclose(got.double(), expected, rtol=0, atol=1e-6)


# Resuming #################################################################################


class Counts(Own):
    """Counts the batches of each layer, and stops at one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.stop_at = -1

    def inference_per_layer(self, layer: int, *args: Any) -> Tensor:
        if len(self.seen) == self.stop_at:
            raise KeyboardInterrupt
        self.seen.append(layer)
        return super().inference_per_layer(layer, *args)


def counting() -> Counts:
    torch.manual_seed(0)
    return Counts().double().eval()


BATCHES = 10  # of 20 nodes, in each of two layers


@pytest.mark.parametrize("stop_at", range(2, 24, 3))
def test_finished_batches_are_not_redone(stop_at: int, tmp_path: Path) -> None:
    data, made = graph(), counting()
    expected = full(made, data)
    made.stop_at = stop_at
    with pytest.raises(KeyboardInterrupt):
        pyg_scale.layerwise_inference(made, data, tmp_path, batch_size=20)
    first = len(made.seen) - 2 * (1 + (len(made.seen) > BATCHES + 2))  # without the probes
    made.seen, made.stop_at = [], -1
    got = pyg_scale.layerwise_inference(made, data, tmp_path, batch_size=20)
    assert torch.equal(got, expected) or torch.allclose(got, expected, rtol=0, atol=TOLERANCE)
    probed = 2 * sum(count == BATCHES + 2 for count in (made.seen.count(0), made.seen.count(1)))
    assert len(made.seen) - probed == 2 * BATCHES - first
    made.seen = []
    again = pyg_scale.layerwise_inference(made, data, tmp_path, batch_size=20)
    assert made.seen == [] and torch.equal(again, got), "what is complete is returned at once"


class Slow(Own):
    """Waits for the test after a number of batches."""

    def inference_per_layer(self, layer: int, *args: Any) -> Tensor:
        rows = super().inference_per_layer(layer, *args)
        if layer == 1:
            self.count = getattr(self, "count", 0) + 1
            if self.count == self.wait_at:
                self.ready.set()
                self.go.wait(60)
        return rows


def _infer(out: str, wait_at: int, ready: Any, go: Any) -> None:
    torch.set_num_threads(1)  # the threads of the parent are not here
    torch.manual_seed(0)
    made = Slow().double().eval()
    made.wait_at, made.ready, made.go = wait_at, ready, go
    pyg_scale.layerwise_inference(made, graph(), out, batch_size=20)


@pytest.mark.parametrize("wait_at", [3, 7])
def test_a_killed_run_goes_on(wait_at: int, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, go = context.Event(), context.Event()
    process = context.Process(target=_infer, args=(str(tmp_path), wait_at, ready, go), daemon=True)
    process.start()
    try:
        assert ready.wait(60)
        with pytest.raises(RuntimeError, match="another process writes"):
            pyg_scale.layerwise_inference(counting(), graph(), tmp_path, batch_size=20)
    finally:
        os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.join(20)
    torch.manual_seed(0)
    made = Slow().double().eval()  # the same class: the journal knows the model
    made.wait_at, seen = -1, []
    whole = full(made, graph())
    before = made.inference_per_layer

    def count(layer: int, *args: Any) -> Tensor:
        seen.append(layer)
        return before(layer, *args)

    made.__dict__["inference_per_layer"] = count
    got = pyg_scale.layerwise_inference(made, graph(), tmp_path, batch_size=20)
    assert torch.allclose(got, whole, rtol=0, atol=TOLERANCE)
    assert 0 not in seen, "the first layer was complete"
    # Two calls before were probes; the batch that was under way is done again.
    assert len(seen) == {3: BATCHES + 2, 7: BATCHES - 4}[wait_at]


@pytest.mark.parametrize("change", ["model", "graph", "batch_size", "dtype"])
def test_another_inference_is_not_gone_on_with(change: str, tmp_path: Path) -> None:
    arguments: Any = {"model": model(), "graph": graph(), "batch_size": 50, "dtype": None}
    pyg_scale.layerwise_inference(out=tmp_path, **arguments)
    torch.manual_seed(5)
    arguments[change] = {
        "model": GraphSAGE(C, 33, 3).double().eval(),
        "graph": graph(1),
        "batch_size": 51,
        "dtype": torch.float32,
    }[change]
    with pytest.raises(ValueError, match=f"another {change}: pass resume=False"):
        pyg_scale.layerwise_inference(out=tmp_path, **arguments)
    got = pyg_scale.layerwise_inference(out=tmp_path, resume=False, **arguments)
    expected = full(arguments["model"], arguments["graph"])
    assert torch.allclose(got.double(), expected, atol=1e-5 if change == "dtype" else TOLERANCE)


@pytest.mark.parametrize("damage", ["journal cut", "result gone", "step gone", "another boot"])
def test_damage(damage: str, tmp_path: Path) -> None:
    data, made = graph(), counting()
    made.stop_at = 2 + BATCHES + 2 + 4
    if damage != "result gone":
        with pytest.raises(KeyboardInterrupt):
            pyg_scale.layerwise_inference(made, data, tmp_path, batch_size=20)
    else:
        made.stop_at = -1
        pyg_scale.layerwise_inference(made, data, tmp_path, batch_size=20)
        (tmp_path / "output.npy").unlink()
    journal = tmp_path / "PROGRESS.jsonl"
    lines = journal.read_text().splitlines()
    if damage == "journal cut":
        journal.write_text("\n".join(lines)[:-4])
    elif damage == "step gone":
        (tmp_path / "step-0.npy").unlink()
    elif damage == "another boot":
        head = json.loads(lines[0]) | {"boot": "before"}
        journal.write_text("\n".join([json.dumps(head), *lines[1:]]) + "\n")
    made.stop_at, made.seen = -1, []
    got = pyg_scale.layerwise_inference(made, data, tmp_path, batch_size=20)
    assert torch.allclose(got, full(made, data), rtol=0, atol=TOLERANCE)
    again = {"journal cut": 7, "another boot": 12, "result gone": 24, "step gone": 24}[damage]
    assert len(made.seen) == again, "as much as was lost, probes included"


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("text", ['{"run": 1}\n', "no JSON\n", "", "[1]\n"])
def test_a_journal_of_something_else(tmp_path: Path, text: str, resume: bool) -> None:
    (tmp_path / "PROGRESS.jsonl").write_text(text)
    (tmp_path / "output.npy").write_text("irreplaceable")
    with pytest.raises(ValueError, match="choose an(other| empty) directory"):
        pyg_scale.layerwise_inference(model(), graph(), tmp_path, resume=resume)
    assert (tmp_path / "output.npy").read_text() == "irreplaceable"
    assert (tmp_path / "PROGRESS.jsonl").read_text() == text


@pytest.mark.parametrize("text", ["", '{"format": "pyg_s', '{"format": "pyg_scale layerwise infer'])
def test_a_journal_that_a_crash_cut_in_its_first_line(tmp_path: Path, text: str) -> None:
    made, data = model(), graph()
    (tmp_path / "PROGRESS.jsonl").write_text(text)
    (tmp_path / "step-0.npy").write_text("")
    got = pyg_scale.layerwise_inference(made, data, tmp_path)
    assert torch.allclose(got, full(made, data), rtol=0, atol=TOLERANCE)


def test_a_directory_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match=r"holds thesis.tex"):
        pyg_scale.layerwise_inference(model(), graph(), tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        pyg_scale.layerwise_inference(model(), graph(), tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").exists()


def test_a_full_disk_is_said_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system names none: which of two disks is full would have to be guessed."""

    def full_disk(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    data = graph()
    for name, match in (("posix_fallocate", "step-0.npy"), ("pwrite", "step-0.npy")):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, full_disk)
            with pytest.raises(OSError, match=match) as raised:
                pyg_scale.layerwise_inference(model(GCN), data, tmp_path / name)
        assert raised.value.errno == errno.ENOSPC
        assert raised.value.filename == str(tmp_path / name / match)
