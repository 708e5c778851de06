"""Models with node types, and without methods for their layers: recorded, then layer by layer."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import (
    GAT,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    GraphNorm,
    GraphSAGE,
    HeteroConv,
    HGTConv,
    Linear,
    MessagePassing,
    SAGEConv,
    TransformerConv,
    to_hetero,
)

import pyg_scale
from pyg_scale.inference.inputs import Table
from pyg_scale.inference.progress import InferenceProgress

SIZES = {"author": 60, "paper": 90, "venue": 7}
WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")
BY, IN = ("paper", "by", "author"), ("venue", "of", "paper")
AT = ("paper", "at", "venue")
C = 8


def typed() -> HeteroData:
    """Every kind of edges: within a type and between two, and nodes without any."""
    generator = torch.Generator().manual_seed(0)
    data = HeteroData()
    for name, size in SIZES.items():
        data[name].x = torch.randn(size, C, dtype=torch.float64, generator=generator)
    for edge_type, count in ((WRITES, 300), (CITES, 500), (BY, 200), (IN, 60), (AT, 80)):
        src, _, dst = edge_type
        rows = [torch.randint(SIZES[t] - 2, (count,), generator=generator) for t in (src, dst)]
        data[edge_type].edge_index = torch.stack(rows)
    return data


class ByHand(torch.nn.Module):
    """Layers of several kinds, a sum over edge types, and both layers' rows in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = HeteroConv(self.convs(C), aggr="sum")
        self.second = HeteroConv(self.convs(16), aggr="max")
        self.norm, self.lin = torch.nn.BatchNorm1d(16), Linear(32, 3)
        self.venue = Linear(C, 16)

    def convs(self, width: int) -> Any:
        return {
            WRITES: SAGEConv((width, width), 16, aggr="max"),
            CITES: GATConv(width, 8, heads=2),
            BY: GATv2Conv((width, width), 16, add_self_loops=False),
            IN: SAGEConv((width, width), 16),
            AT: SAGEConv((width, width), 16),
        }

    def forward(self, x: Any, edges: Any) -> Tensor:
        first = {name: rows.relu() for name, rows in self.first(x, edges).items()}
        first["paper"] = self.norm(first["paper"])
        first["venue"] = self.venue(x["venue"])
        second = self.second(first, edges)
        return self.lin(torch.cat([first["paper"], second["paper"].tanh()], dim=-1))


class OneType(torch.nn.Module):
    """No types, a layer used twice, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = SAGEConv(C, 12), GINConv(torch.nn.Linear(12, 12))
        self.heads = GATConv(12, 3, heads=4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu_()
        x = x + self.again(x, edge_index)
        return (self.again(x, edge_index) + self.heads(x, edge_index)).log_softmax(dim=-1)


class WithEdges(torch.nn.Module):
    """Attributes of edges, also changed by the model, and weights of the edges of one type."""

    def __init__(self) -> None:
        super().__init__()
        options: Any = {"edge_dim": 6, "add_self_loops": False}
        self.lin = Linear(3, 6)
        self.first = HeteroConv(
            {
                WRITES: GATv2Conv((C, C), 16, **options),
                CITES: TransformerConv((C, C), 8, heads=2, edge_dim=6),
                BY: GATConv((C, C), 16, **options),
            },
            aggr="sum",
        )
        self.second = HeteroConv(
            {CITES: GraphConv((16, 16), 4), BY: SAGEConv((16, 16), 4), WRITES: SAGEConv(16, 4)}
        )

    def forward(
        self, x: Any, edges: Any, edge_attr_dict: Any = None, edge_weight_dict: Any = None
    ) -> Any:
        attrs = {t: self.lin(attr).tanh() for t, attr in edge_attr_dict.items()}
        rows = {t: each.relu() for t, each in self.first(x, edges, edge_attr_dict=attrs).items()}
        return self.second(rows, edges, edge_weight_dict=edge_weight_dict)


def hetero(cls: Any, **options: Any) -> Any:
    return to_hetero(cls(C, 16, 2, 4, **options), typed().metadata())


def with_edges() -> HeteroData:
    generator, data = torch.Generator().manual_seed(1), typed()
    for t in (WRITES, CITES, BY):
        size = data[t].num_edges
        data[t].edge_attr = torch.randn(size, 3, dtype=torch.float64, generator=generator)
    data[CITES].weight = torch.rand(data[CITES].num_edges, dtype=torch.float64, generator=generator)
    return data


MODELS: dict[str, Any] = {
    "to_hetero sage": lambda: hetero(GraphSAGE, norm="batch_norm", jk="cat"),
    "to_hetero gat": lambda: hetero(GAT, add_self_loops=False, heads=2),
    "by hand": ByHand,
}


def made(name: str) -> Any:
    torch.manual_seed(1)
    return MODELS[name]().double().eval()


def infer(model: Any, data: Any, out: Path, **options: Any) -> Any:
    return pyg_scale.layerwise_inference(model, data, out, progress=False, **options)


def far(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape and float(expected.std()) > 1e-4
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.matrix(3)
@pytest.mark.parametrize("memory", [6_000, "1GB"])
@pytest.mark.parametrize("name", MODELS)
def test_is_the_forward_of_the_whole_graph(name: str, memory: Any, tmp_path: Path) -> None:
    model, data = made(name), typed()
    got = infer(model, data, tmp_path, memory=memory)
    with torch.no_grad():
        expected = made(name)(data.x_dict, data.edge_index_dict)
    if isinstance(expected, dict):
        assert set(got) == set(expected)
        for t in got:
            assert far(got[t], expected[t]) < 1e-12
            assert np.array_equal(np.load(tmp_path / f"output-{t}.npy"), got[t].numpy())
    else:
        assert far(got, expected) < 1e-12
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("step")]


def test_from_a_directory_and_in_parts(tmp_path: Path) -> None:
    model, data = made("to_hetero sage"), typed()
    pyg_scale.save(data, tmp_path / "graph")
    with torch.no_grad():
        expected = model(data.x_dict, data.edge_index_dict)
    got = infer(model, tmp_path / "graph", tmp_path / "out", memory=8_000)
    assert all(far(got[t], expected[t]) < 1e-12 for t in expected)


def attr_dict(data: HeteroData, name: str) -> dict[Any, Tensor]:
    return {t: data[t][name] for t in data.edge_types if name in data[t]}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("memory", [6_000, "1GB"])
def test_attributes_of_edges(memory: Any, tmp_path: Path) -> None:
    """From memory and from a directory, whose ids of edges are in another order."""
    torch.manual_seed(1)
    model, data = WithEdges().double().eval(), with_edges()
    attrs = attr_dict(data, "edge_attr"), attr_dict(data, "weight")
    with torch.no_grad():
        expected = model(data.x_dict, data.edge_index_dict, *attrs)
        ones = {CITES: torch.ones_like(data[CITES].weight)}
        other = model(data.x_dict, data.edge_index_dict, attrs[0], ones)
    assert far(other["paper"], expected["paper"]) > 1e-3, "weights count"
    pyg_scale.save(data, tmp_path / "graph")
    for number, given in enumerate((data, tmp_path / "graph")):
        got = infer(
            model,
            given,
            tmp_path / str(number),
            memory=memory,
            edge_attr="edge_attr",
            edge_weight="weight",
        )
        assert set(got) == set(expected)
        assert all(far(got[t], expected[t]) < 1e-12 for t in expected)


def test_attributes_of_edges_of_a_model_by_to_hetero(tmp_path: Path) -> None:
    torch.manual_seed(1)
    data = with_edges()
    for t in (IN, AT):
        data[t].edge_attr = torch.randn(data[t].num_edges, 3, dtype=torch.float64)
    options: Any = {"edge_dim": 3, "add_self_loops": False}
    model = to_hetero(GAT(C, 16, 2, 4, **options), data.metadata()).double().eval()
    with torch.no_grad():
        expected = model(data.x_dict, data.edge_index_dict, edge_attr=attr_dict(data, "edge_attr"))
    got = infer(model, data, tmp_path, memory=8_000, edge_attr="edge_attr")
    assert all(far(got[t], expected[t]) < 1e-12 for t in expected)


class Weighted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GraphConv(C, 8), GCNConv(8, 4, normalize=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        x = self.first(x, edge_index, edge_weight).relu()
        return self.second(x, edge_index, edge_weight=edge_weight.sqrt())


def test_weights_of_edges_without_types(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, typed_data = Weighted().double().eval(), with_edges()
    whole = Data(x=typed_data["paper"].x, edge_index=typed_data[CITES].edge_index)
    whole.weight = typed_data[CITES].weight
    with torch.no_grad():
        expected = model(whole.x, whole.edge_index, whole.weight)
    got = infer(model, whole, tmp_path, memory=4_000, edge_weight="weight")
    assert far(got, expected) < 1e-12


@pytest.mark.parametrize("memory", [4_000, "1GB"])
def test_a_model_without_methods_for_its_layers(memory: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = OneType().double().eval(), typed()
    whole = Data(x=data["paper"].x, edge_index=data[CITES].edge_index)
    with torch.no_grad():
        expected = model(whole.x, whole.edge_index)
    assert far(infer(model, whole, tmp_path, memory=memory), expected) < 1e-12


@pytest.mark.matrix(3)
@pytest.mark.parametrize("stop_at", [1, 4, 9, 14])
def test_a_stopped_run_goes_on(
    stop_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = made("by hand"), typed()
    whole = infer(model, data, tmp_path / "whole", memory=9_000)
    write, calls = InferenceProgress.write, [0]

    def stopping(self: InferenceProgress, *args: Any) -> None:
        if self.path == tmp_path / "stopped":  # not the probe
            calls[0] += 1
            if calls[0] == stop_at:
                raise KeyboardInterrupt
        write(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(InferenceProgress, "write", stopping)
        with pytest.raises(KeyboardInterrupt):
            infer(model, data, tmp_path / "stopped", memory=9_000)
    resumed = infer(model, data, tmp_path / "stopped", memory=9_000)
    assert torch.equal(resumed, whole)
    assert torch.equal(infer(model, data, tmp_path / "stopped", memory=9_000), whole)


_KILLED = """
import sys
import torch
import pyg_scale
from tests.inference.test_recorded import WithEdges, with_edges

torch.manual_seed(1)
model = WithEdges().double().eval()
pyg_scale.layerwise_inference(
    model, with_edges(), sys.argv[1], memory=9_000, progress=False, edge_attr="edge_attr",
    edge_weight="weight",
)
"""


def done(out: Path) -> int:
    """Rows of all steps that the journal says are there."""
    file, rows = out / "PROGRESS.jsonl", {}
    for line in file.read_text().splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError):  # the last one is being written
            note = json.loads(line)
            if "rows" in note:
                rows[note["step"]] = note["rows"]
    return sum(rows.values())


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """SIGKILL in one layer after the other: what was written is not computed again."""
    torch.manual_seed(1)
    model, out = WithEdges().double().eval(), tmp_path / "out"
    options: Any = {"memory": 9_000, "edge_attr": "edge_attr", "edge_weight": "weight"}
    whole = infer(model, with_edges(), tmp_path / "whole", **options)
    total, kills, before = done(tmp_path / "whole"), 0, 0
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", _KILLED, str(out)]) as child:
            deadline = time.monotonic() + 60
            while child.poll() is None and time.monotonic() < deadline:
                if before + total // 8 < done(out) < total:
                    child.kill()
                    break
                time.sleep(0.0005)
            kills += child.wait(60) == -signal.SIGKILL
        assert done(out) >= before, "nothing is lost"
        before = done(out)
    assert kills >= 3
    resumed = infer(model, with_edges(), out, **options)
    assert all(torch.equal(resumed[t], whole[t]) for t in whole)


def test_a_real_graph(data_dir: Path, tmp_path: Path) -> None:
    from pyg_scale.datasets.read import read_npz

    data = read_npz(data_dir / "dblp.npz")
    for t in data.node_types:
        if "x" not in data[t]:
            data[t].x = torch.ones(data[t].num_nodes, 1)
        data[t].x = data[t].x.double()
    torch.manual_seed(0)
    model = to_hetero(GraphSAGE((-1, -1), 8, 2), data.metadata()).double().eval()
    with torch.no_grad():
        expected = model(data.x_dict, data.edge_index_dict)
    got = infer(model, data, tmp_path, memory="4MB")
    assert all(far(got[t], expected[t]) < 1e-12 for t in expected)


class Custom(OneType):
    """Does with the rows of its first layer what a test says."""

    def __init__(self, what: Any, layer: Any = None) -> None:
        super().__init__()
        self.what = what
        if layer is not None:
            self.first = layer

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.what(self.first(x, edge_index))


class Loops(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv: Any = GATConv((C, C), 4)

    def forward(self, x: Any, edges: Any) -> Any:
        return self.conv((x["author"], x["paper"]), edges[WRITES])


class Mixed(Loops):
    def forward(self, x: Any, edges: Any) -> Any:
        return x["author"] @ x["paper"].t()


class OfItsOwn(Weighted):
    """Has a layer that cannot be computed from some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = Whole(aggr="add")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.first(x, edge_index)


class Whole(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        degree = torch.bincount(edge_index[1], minlength=x.size(0)).view(-1, 1)
        return self.propagate(edge_index, x=x * degree)


class HGT(Loops):
    def __init__(self) -> None:
        super().__init__()
        self.conv = HGTConv(C, 8, typed().metadata())

    def forward(self, x: Any, edges: Any) -> Any:
        return self.conv(x, edges)


@pytest.mark.parametrize(
    ("model", "error", "match"),
    [
        (lambda: Custom(lambda x: x - x.mean(0)), NotImplementedError, "other numbers layer by"),
        (lambda: Custom(lambda x: x.mean(0)), NotImplementedError, "returns what is not a row"),
        (lambda: Custom(lambda x: x[: int(x.sum())]), NotImplementedError, "calls __int__|item"),
        (lambda: Custom(lambda x: [x]), TypeError, "returns list"),
        (lambda: Custom(GraphNorm(12)), NotImplementedError, "GraphNorm .* over all nodes"),
        (lambda: Custom(None, GCNConv(C, 4)), NotImplementedError, "degrees of neighbours"),
        (
            lambda: Custom(lambda x: x, SAGEConv(C, 4, aggr="median")),
            NotImplementedError,
            r"SAGEConv \(first\) cannot be computed from some of its edges",
        ),
        (Loops, NotImplementedError, "add_self_loops=False"),
        (OfItsOwn, NotImplementedError, "other numbers layer by layer"),
        (Mixed, NotImplementedError, "only layers of message passing may mix types"),
        (HGT, NotImplementedError, r"HGTConv \(conv\) takes dict"),
    ],
)
def test_what_is_not_a_row_at_a_time_is_refused(
    model: Any, error: type[Exception], match: str, tmp_path: Path
) -> None:
    data: Any = typed()
    given = model().double().eval()
    if isinstance(given, Custom | OfItsOwn):
        data = Data(x=data["paper"].x, edge_index=data[CITES].edge_index)
    with pytest.raises(error, match=match):
        infer(given, data, tmp_path)
    assert not list(tmp_path.glob("*.npy")), "before any work"


class Wide(torch.nn.Module):
    """Two layers of sums and attention over three edge types, of 64 columns each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            HeteroConv(
                {
                    WRITES: SAGEConv((64, 64), 64),
                    CITES: GATConv(64, 64),
                    BY: SAGEConv((64, 64), 64, aggr="max"),
                }
            )
            for _ in range(2)
        )

    def forward(self, x: Any, edges: Any) -> Any:
        for layer in self.layers:
            x = {t: rows.tanh() for t, rows in layer(x, edges).items()}
        return x


def test_rows_are_read_once_or_three_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each end of a layer's edges where memory holds it; thrice at a third of the files.

    The rows of layers that are added up in a step of their own are counted too.
    """
    torch.manual_seed(1)
    model, data = Wide().double().eval(), typed()
    for t in SIZES:
        data[t].x = torch.randn(SIZES[t], 64, dtype=torch.float64)
    with torch.no_grad():
        expected = model(data.x_dict, data.edge_index_dict)
    a, p = SIZES["author"], SIZES["paper"]
    counts: list[int] = []
    read = Table.read

    def counted(self: Table, begin: int, end: int) -> Tensor:
        if self.rows.shape[0] in (a, p):  # not of the probe
            counts.append(end - begin)
        return read(self, begin, end)

    monkeypatch.setattr(Table, "read", counted)
    once = 2 * ((a + p) + p + (p + a))
    got = infer(model, data, tmp_path / "all", memory="1GB")
    assert all(far(got[t], expected[t]) < 1e-12 for t in expected)
    assert sum(counts) == once
    counts.clear()
    files = 2 * 8 * 64 * (a + p) + 8 * sum(data[t].num_edges for t in (WRITES, CITES, BY))
    got = infer(model, data, tmp_path / "third", memory=files // 3)
    assert all(far(got[t], expected[t]) < 1e-12 for t in expected)
    assert once < sum(counts) <= 3 * once


class OneTensor(MessagePassing):
    """Takes no pair of features, as layers of one's own often do; reads both ends of edges."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(aggr="add")
        self.lin, self.root = torch.nn.Linear(width, out), torch.nn.Linear(width, out)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x)) + self.root(x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i * x_j).tanh()


class Viewed(MessagePassing):
    """Changes the weights of edges before ``propagate``, so all of ``forward`` is needed."""

    def forward(self, x: Any, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        x = (x, x) if isinstance(x, Tensor) else x
        return self.propagate(edge_index, x=x, w=edge_weight.view(-1, 1).exp()) + x[1]

    def message(self, x_j: Tensor, w: Tensor) -> Tensor:
        return x_j * w


class Homemade(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = OneTensor(C, 8), Viewed(aggr="mean")

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index, edge_weight)


@pytest.mark.parametrize("memory", [3_000, "1GB"])
def test_layers_of_ones_own(memory: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, typed_data = Homemade().double().eval(), with_edges()
    whole = Data(x=typed_data["paper"].x, edge_index=typed_data[CITES].edge_index)
    whole.weight = typed_data[CITES].weight
    with torch.no_grad():
        expected = model(whole.x, whole.edge_index, whole.weight)
    got = infer(model, whole, tmp_path, memory=memory, edge_weight="weight")
    assert far(got, expected) < 1e-12


class TwoAttributes(Weighted):
    def forward(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, edge_attr: Tensor | None = None
    ) -> Tensor:
        weight = edge_weight if edge_attr is None else edge_weight * edge_attr.sum(-1)
        return self.first(x, edge_index, weight)


class Edges(Weighted):
    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return edge_weight.view(-1, 1)


class LoopsWithEdges(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.first: Any = GATConv(C, 8, edge_dim=1)


@pytest.mark.parametrize(
    ("model", "options", "error", "match"),
    [
        (ByHand, {"edge_weight": "w"}, ValueError, "no attribute 'w' of edges"),
        (
            ByHand,
            {"edge_weight": "weight"},
            ValueError,
            "no argument edge_weight or",
        ),
        (
            TwoAttributes,
            {"edge_weight": "weight", "edge_attr": "edge_attr"},
            NotImplementedError,
            "several attributes of edges",
        ),
        (Edges, {"edge_weight": "weight"}, NotImplementedError, "returns rows of edges"),
        (LoopsWithEdges, {"edge_weight": "weight"}, NotImplementedError, "add_self_loops=False"),
    ],
)
def test_attributes_of_edges_that_do_not_fit(
    model: Any, options: Any, error: type[Exception], match: str, tmp_path: Path
) -> None:
    data: Any = with_edges()
    if model is not ByHand:
        whole = Data(x=data["paper"].x, edge_index=data[CITES].edge_index)
        whole.weight, whole.edge_attr = data[CITES].weight, data[CITES].edge_attr
        data = whole
    with pytest.raises(error, match=match):
        infer(model().double().eval(), data, tmp_path, **options)
    assert not list(tmp_path.glob("*.npy")), "before any work"


def test_a_graph_without_features(tmp_path: Path) -> None:
    data = HeteroData()
    data["a"].num_nodes = 3
    with pytest.raises(ValueError, match="no features x"):
        infer(made("by hand"), data, tmp_path)
