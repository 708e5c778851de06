"""Layers computed from some of their edges at a time, in blocks and chunks of any size."""

from __future__ import annotations

import copy
import json
import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, EdgeCNN, GraphSAGE, TransformerConv
from torch_geometric.nn.models.basic_gnn import BasicGNN

import pyg_scale
from pyg_scale.inference import partial
from pyg_scale.inference.inputs import LayerInputs
from pyg_scale.inference.progress import InferenceProgress

N, E, C, HIDDEN = 120, 900, 16, 16


class Transformer(BasicGNN):
    supports_edge_weight = False
    supports_edge_attr = True
    supports_norm_batch = False

    def init_conv(self, in_channels: int, out_channels: int, **options: Any) -> Any:
        return TransformerConv(in_channels, out_channels // 2, heads=2, **options)


MODELS: dict[str, Any] = {
    "sage": lambda: GraphSAGE(C, HIDDEN, 2),
    "sage max": lambda: GraphSAGE(C, HIDDEN, 2, aggr="max", project=True),
    "gcn": lambda: GCN(C, HIDDEN, 2, 5, improved=True),
    "gcn no loops": lambda: GCN(C, HIDDEN, 2, add_self_loops=False),
    "gin": lambda: GIN(C, HIDDEN, 2, norm="batch_norm"),
    "gat": lambda: GAT(C, HIDDEN, 2, heads=4, jk="cat"),
    "gatv2": lambda: GAT(C, HIDDEN, 2, heads=4, v2=True, residual=True),
    "transformer": lambda: Transformer(C, HIDDEN, 2),
    "edge": lambda: EdgeCNN(C, HIDDEN, 2),
}
WITH_EDGES = {"gcn": "edge_weight", "gcn no loops": "edge_weight", "transformer": "edge_attr"}


def graph(num_edges: int = E) -> Data:
    """A hub, parallel edges, self-loops (one for a node at most), nodes without in-edges."""
    generator = torch.Generator().manual_seed(3)
    edges = torch.randint(0, N - 10, (2, num_edges), generator=generator)
    edges[1, : num_edges // 6] = 7
    edges = edges[:, edges[0] != edges[1]]
    loops = torch.arange(20, 40).expand(2, -1)
    edges = torch.cat(
        [edges[:, : num_edges // 2], loops, edges[:, num_edges // 2 :], edges[:, :9]], 1
    )
    x = torch.randn(N, C, dtype=torch.float64, generator=generator)
    weight = torch.rand(edges.size(1), dtype=torch.float64, generator=generator)
    attr = torch.randn(edges.size(1), 3, dtype=torch.float64, generator=generator)
    return Data(x=x, edge_index=edges, edge_weight=weight, edge_attr=attr)


def model(name: str) -> Any:
    torch.manual_seed(1)
    made = MODELS[name]().double()
    for module in made.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return made.eval()


def infer(made: Any, data: Data, out: Path, **options: Any) -> Tensor:
    return pyg_scale.layerwise_inference(made, data, out, progress=False, **options)


def far(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape and float(expected.std()) > 1e-3
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.matrix(5)
@pytest.mark.parametrize("memory", [3_000, 30_000, "1GB"])
@pytest.mark.parametrize("name", MODELS)
def test_any_cut_gives_the_forward_of_the_whole(
    name: str, memory: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, data = model(name), graph()
    options = {WITH_EDGES[name]: WITH_EDGES[name]} if name in WITH_EDGES else {}
    if name == "transformer":
        torch.manual_seed(1)
        made = Transformer(C, HIDDEN, 2, edge_dim=3).double().eval()
    with caplog.at_level(logging.INFO, "pyg_scale"):
        got = infer(made, data, tmp_path, memory=memory, num_workers=1, **options)
    assert "not streamed" not in caplog.text
    with torch.no_grad():
        given = {key: data[key] for key in options}
        expected = made(data.x, data.edge_index, **given)
    assert far(got, expected) < 1e-12
    assert [p.name for p in tmp_path.iterdir() if "edges" in p.name] == []


def test_weights_of_a_softmax_may_be_far_apart(tmp_path: Path) -> None:
    """Sums of exponentials that are not scaled by the largest overflow."""
    made, data = model("gat"), graph()
    data.x = data.x * 300
    with torch.no_grad():
        expected = made(data.x, data.edge_index)
    assert far(infer(made, data, tmp_path, memory=3_000), expected) < 1e-12


def test_without_the_sums_of_a_softmax_numbers_are_wrong_and_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add = partial.Accumulator.add

    def without(self: Any, index: Tensor, found: Any) -> None:
        add(self, index, found._replace(log=None))

    monkeypatch.setattr(partial.Accumulator, "add", without)
    with caplog.at_level(logging.INFO, "pyg_scale"):
        infer(model("gat"), graph(), tmp_path)
    assert "GATConv) of GAT is not streamed: it gives other numbers" in caplog.text


def rows_read(monkeypatch: pytest.MonkeyPatch, size: int = N) -> list[int]:
    counts: list[int] = []
    read = LayerInputs.read

    def counted(self: LayerInputs, begin: int, end: int) -> Tensor:
        if self.graph.num_nodes == size:  # not of a probe
            counts.append(end - begin)
        return read(self, begin, end)

    monkeypatch.setattr(LayerInputs, "read", counted)
    return counts


WIDE: dict[str, Any] = {
    "sage": lambda: GraphSAGE(64, 64, 2),
    "sage max": lambda: GraphSAGE(64, 64, 2, aggr="max"),
    "gcn": lambda: GCN(64, 64, 2),
    "gin": lambda: GIN(64, 64, 2),
    "gat": lambda: GAT(64, 64, 2, heads=2),
    "gatv2": lambda: GAT(64, 64, 2, heads=2, v2=True),
}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", WIDE)
def test_rows_are_read_once_for_a_block(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once where memory holds a layer, at most three times at a third of the files."""
    torch.manual_seed(1)
    made, data = WIDE[name]().double().eval(), graph()
    data.x = torch.randn(N, 64, dtype=torch.float64)
    counts = rows_read(monkeypatch)
    infer(made, data, tmp_path / "all", memory="1GB")
    assert sum(counts) == 2 * N
    counts.clear()
    rows = 8 * N * (64 + 64)
    infer(made, data, tmp_path / "third", memory=(rows + 8 * data.num_edges) // 3)
    assert 2 * N < sum(counts) <= 2 * 3 * N


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("size", "width", "out", "heads", "degree", "times"),
    [
        (400, 64, 64, 1, 10, 3),
        (400, 64, 64, 1, 5, 3),
        (400, 64, 64, 4, 2, 4),
        (400, 64, 16, 2, 10, 3),
        (400, 16, 16, 1, 15, 2),
        (400, 16, 64, 1, 10, 3),
    ],
)
def test_attention_of_both_ends_reads_as_often_as_the_formula_says(
    size: int,
    width: int,
    out: int,
    heads: int,
    degree: int,
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The formula of docs/stores.md."""
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(size, (2, size * degree), generator=generator)
    data = Data(x=torch.randn(size, width, generator=generator), edge_index=edge_index)
    made = GAT(width, out, 1, heads=heads, v2=True).eval()
    edges = 8 * degree / 4
    assert times == math.ceil((width + out + heads) / (0.32 * (width + out + edges)))
    counts = rows_read(monkeypatch, size)
    files = 4 * size * (width + out) + 8 * data.num_edges
    got = infer(made, data, tmp_path, memory=files // 3)
    # Chunks of few rows may have no edge into a block, and are not read for it.
    assert (times - 1) * size < sum(counts) <= times * size
    with torch.no_grad():
        expected = copy.deepcopy(made).double()(data.x.double(), edge_index)
    assert far(got.double(), expected) < 1e-5


@pytest.mark.parametrize("stop_at", [1, 3, 6, 9])
def test_a_stopped_run_goes_on_in_a_block(
    stop_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, data = model("gcn"), graph()
    whole = infer(made, data, tmp_path / "whole", memory=20_000)
    write, calls = InferenceProgress.write, [0]

    def stopping(self: InferenceProgress, *args: Any) -> None:
        calls[0] += 1
        if calls[0] == stop_at:
            raise KeyboardInterrupt
        write(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(InferenceProgress, "write", stopping)
        with pytest.raises(KeyboardInterrupt):
            infer(made, data, tmp_path / "stopped", memory=20_000)
    resumed = infer(made, data, tmp_path / "stopped", memory=20_000)
    assert torch.equal(resumed, whole)


def test_a_graph_without_edges(tmp_path: Path) -> None:
    for name in ("sage", "gatv2", "gcn no loops"):
        made, data = model(name), graph()
        data.edge_index = data.edge_index[:, :0]
        with torch.no_grad():
            expected = made(data.x, data.edge_index)
        assert torch.allclose(infer(made, data, tmp_path / name, memory=5_000), expected)


@pytest.mark.parametrize("memory", [0, -1, "4 apples", 1.5])
def test_memory_must_be_an_amount(memory: Any, tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError), match="memory must be"):
        infer(model("sage"), graph(), tmp_path, memory=memory)


# Memory ###################################################################################


_MEASURED = """
import json, sys, threading
from pathlib import Path
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GraphSAGE
import pyg_scale

def own():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("RssAnon"))

def watch():
    global most
    while not ended.wait(0.005):
        most = max(most, own())

graph, out, name, memory = sys.argv[1:]
torch.set_num_threads(1)
options = {"v2": True} if name == "gatv2" else {}
model = (GraphSAGE if name == "sage" else GAT)(64, 64, 2, 64, **options).eval()
edges = torch.zeros(2, 1, dtype=torch.int64)
small = Data(x=torch.ones(2, 64), edge_index=edges)
pyg_scale.layerwise_inference(model, small, out + "-small", progress=False)
ended, first = threading.Event(), own()
most = first
threading.Thread(target=watch, daemon=True).start()
pyg_scale.layerwise_inference(
    model, graph, out, memory=int(memory), num_workers=1, progress=False
)
ended.set()
print(json.dumps(most - first))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
@pytest.mark.parametrize("name", ["sage", "gat", "gatv2"])
def test_memory_is_kept(name: str, tmp_path: Path) -> None:
    """Of this process, without pages of files, at a fifth of the bytes of rows."""
    size, memory, beside = 300_000, 60_000_000, 40_000_000
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(size, (2, 6 * size), generator=generator)
    data = Data(x=torch.randn(size, 64, generator=generator), edge_index=edges)
    pyg_scale.save(data, tmp_path / "graph")
    args = [str(tmp_path / "graph"), str(tmp_path / "out"), name, str(memory)]
    found = subprocess.run(
        [sys.executable, "-c", _MEASURED, *args], capture_output=True, timeout=300, check=False
    )
    assert found.returncode == 0, found.stderr.decode()
    used = json.loads(found.stdout)
    assert memory // 2 < used <= memory + beside
