"""What options of ``halo`` trade for exactness, each by its own truth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch import Tensor

import pyg_scale
from pyg_scale import parallel
from pyg_scale.errors import CheckpointError
from pyg_scale.parallel.compression import TopK
from pyg_scale.parallel.halo import HaloParallel
from pyg_scale.parallel.inexact import generator_of, rounded_bf16, rounded_int8, values_of_int8
from pyg_scale.testing.graph_parallel import opened
from pyg_scale.testing.processes import WaitingProcesses
from pyg_scale.train import Checkpoint
from tests.parallel import models
from tests.parallel.models import CHANNELS, CLASSES, HIDDEN


@pytest.fixture(scope="module")
def ranks() -> Iterator[WaitingProcesses]:
    with WaitingProcesses(3, limit=120.0) as started:
        yield started


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.write(tmp_path_factory.mktemp("graph"), "random")


def sent_by(step: Any) -> list[int]:
    """Bytes of every all-to-all of a function, as torch is asked for them."""
    sent: list[int] = []
    plain = dist.all_to_all_single

    def counting(output: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(given.nbytes)
        return plain(output, given, *args, **kwargs)

    dist.all_to_all_single = counting
    try:
        step()
    finally:
        dist.all_to_all_single = plain
    return sent


# A sample of the boundary ######################################################################


def sample(path: str, share: float, draws: int) -> None:
    """The mean over draws of the sum over draws is that of all neighbours."""
    with opened(path) as graph:
        for conv in (pyg.SAGEConv(CHANNELS, CLASSES), pyg.GCNConv(CHANNELS, CLASSES)):
            model = parallel.wrap(conv.double(), "halo", graph=graph, boundary_sample=share)
            x = graph.x[model.own_nodes]
            halo = model.shard.halos[None]
            with torch.no_grad():
                exact = model.eval()(x=x)
                assert torch.allclose(
                    exact, model.module(graph.x, graph.edge_index)[model.own_nodes]
                )
                model.train()
                found = torch.stack([model(x=x) for _ in range(draws)])
            error = (found.mean(0) - exact).abs()
            deviation = found.std(0) / draws**0.5
            # Two layers of at most 40 x 4 numbers: beyond 5 deviations with probability 2e-4.
            assert bool((error <= 5 * deviation + 1e-12).all()), (error / deviation).max()
            assert bool((deviation > 0).any()), "nothing was drawn"
            x.requires_grad_()
            width = CLASSES if isinstance(conv, pyg.GCNConv) else CHANNELS
            sent = sent_by(lambda: model.backward(model(x=x).sum(), 1))  # noqa: B023
            rows = [
                sum(round(share * n) for n in each) for each in (halo.num_sent, halo.num_received)
            ]
            assert sent == [8 * n * width for n in rows]


@pytest.mark.parametrize("share", [0.4, pytest.param(0.7, marks=pytest.mark.slow)])
def test_a_sample_is_right_in_the_mean(ranks: WaitingProcesses, path: str, share: float) -> None:
    ranks.run(sample, path, share, 150)


# The step before ###############################################################################


def stale(path: str, smoothing: float) -> list[dict[int, float]]:
    """Errors of gradients by step without any change, of models of three layers or two."""
    found = []
    data, _, _ = models.graph("random")
    with opened(path) as graph:
        for constant, name in ((False, ""), (True, ""), (True, "point")):
            torch.manual_seed(0)
            net = models.build(name, 0) if name else pyg.GraphSAGE(CHANNELS, HIDDEN, 3, CLASSES)
            net = net.double()
            out = net(data.x, data.edge_index)
            out.square().mean().backward()
            expected = [p.grad.clone() for p in net.parameters()]
            net.zero_grad()
            model = parallel.wrap(net, "halo", graph=graph, stale=True, smoothing=smoothing)
            given = {} if constant else {"x": data.x[model.own_nodes]}
            errors = {}
            for step in range(9 if smoothing == 0 else 60):
                net.zero_grad()
                out = model(**given)
                model.backward(out.square().mean(), len(out))
                pairs = zip(net.parameters(), expected, strict=True)
                errors[step] = max(float((p.grad - e).abs().max()) for p, e in pairs)
            with torch.no_grad():
                whole = net(data.x, data.edge_index)[model.own_nodes]
                assert torch.allclose(model.eval()(**given), whole, rtol=0, atol=1e-12)
            found.append(errors)
    return found


def test_stale_rows_are_exact_after_twice_the_layers(ranks: WaitingProcesses, path: str) -> None:
    for found in ranks.run(stale, path, 0.0):
        for errors, first in zip(found, (5, 4, 4), strict=True):  # 2 L - 1, 2 L - 2, 2 L
            assert all(error > 1e-9 for step, error in errors.items() if step < first)
            assert all(error < 1e-12 for step, error in errors.items() if step >= first)


def test_smoothing_converges_as_its_powers(ranks: WaitingProcesses, path: str) -> None:
    for found in ranks.run(stale, path, 0.5):
        for errors in found:
            assert errors[20] > 1e-12 and errors[59] < 1e-12
            assert errors[30] < errors[20] * 0.5**5  # a polynomial of the step times 0.5 ** step


# Fewer bits ####################################################################################


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rounding_is_within_its_bound_and_right_in_the_mean(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    number, rows = 4000, torch.randn(5, 7, dtype=dtype)
    rows[1] = 3.0  # a row without a difference
    rows[2] = 0.0
    many, draws = rows.repeat(number, 1), torch.rand(number * 5, 7)
    exact = rows.double()
    step = ((exact.amax(1) - exact.amin(1)) / 255).view(-1, 1)
    for found, bound in (
        (rounded_bf16(many, draws).double(), exact.abs() * 2**-7),
        (values_of_int8(rounded_int8(many, draws), torch.float64), step.expand(5, 7)),
    ):
        values = found.view(number, 5, 7)
        assert bool(((values - exact).abs() <= bound + 1e-6).all())
        error = (values.mean(0) - exact).abs()
        assert bool((error <= 5 * bound / (2 * number**0.5) + 1e-6).all())


def quantized(path: str, bits: str) -> None:
    data, _, _ = models.graph("random")
    with opened(path) as graph:
        torch.manual_seed(0)
        net = models.pair(pyg.GATv2Conv).double()
        out = net(data.x, data.edge_index)
        out.square().mean().backward()
        expected = torch.cat([p.grad.flatten() for p in net.parameters()])
        net.zero_grad()
        model = parallel.wrap(net, "halo", graph=graph, quantize=bits)
        halo = model.shard.halos[None]
        out = None

        def step() -> None:
            nonlocal out
            out = model()
            model.backward(out.square().mean(), len(out))

        sent = sent_by(step)
        whole = net(data.x, data.edge_index)[model.own_nodes]
        assert 0 < float((out - whole).norm() / whole.norm()) < 0.03
        found = torch.cat([p.grad.flatten() for p in net.parameters()])
        assert 0 < float((found - expected).norm() / expected.norm()) < 0.03
        rows = sum(halo.num_sent), halo.num_halo
        sizes = [w + 8 if bits == "int8" else 2 * w for w in (HIDDEN, CLASSES)]
        assert sent == [
            rows[0] * sizes[0],
            rows[0] * sizes[1],
            rows[1] * sizes[1],
            rows[1] * sizes[0],
        ]
        with torch.no_grad():
            assert torch.allclose(model.eval()(), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bits", ["int8", "bf16"])
def test_fewer_bits_are_sent_and_errors_are_small(
    ranks: WaitingProcesses, path: str, bits: str
) -> None:
    ranks.run(quantized, path, bits)


def beside(path: str, name: str, options: dict[str, Any]) -> float:
    """The error of an evaluation after steps of training, of the graph's own features beside."""
    data, _, _ = models.graph("random")
    with opened(path) as graph:
        model = parallel.wrap(models.build(name, 0), "halo", graph=graph, **options)
        for _ in range(2):
            out = model()
            model.backward(out.square().mean(), len(out))
            model.zero_grad()
        with torch.no_grad():
            whole = model.module(data.x, data.edge_index)[model.own_nodes]
            return float((model.eval()() - whole).abs().max())


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"stale": True}], ids=str)
def test_what_is_kept_of_training_is_exact(
    ranks: WaitingProcesses, path: str, options: dict[str, Any]
) -> None:
    for name in models.BESIDE:
        assert max(ranks.run(beside, path, name, options)) < 1e-12


# A run that goes on ############################################################################


def begun(graph: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    net = pyg.GraphSAGE(CHANNELS, HIDDEN, 3, CLASSES).double()
    model = parallel.wrap(net, "mesh" if "compress" in options else "halo", graph=graph, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def steps(model: Any, optimizer: Any, number: int) -> Tensor:
    for _ in range(number):
        optimizer.zero_grad()
        out = model.train()()
        model.backward(out.square().mean(), len(out))
        optimizer.step()
        with torch.no_grad():
            model.eval()()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def saved(graph: Any, options: dict[str, Any], folder: str) -> Tensor:
    """The parameters after five steps, of which the first three are saved on the way."""
    model, optimizer = begun(graph, options)
    steps(model, optimizer, 3)
    with Checkpoint(folder, {"model": model, "optimizer": optimizer}) as checkpoint:
        checkpoint.save(3)
    return steps(model, optimizer, 2)


def loaded(graph: Any, options: dict[str, Any], folder: str) -> tuple[Any, Any]:
    model, optimizer = begun(graph, options)
    steps(model, optimizer, 1)  # of which nothing stays
    with Checkpoint(folder, {"model": model, "optimizer": optimizer}) as checkpoint:
        checkpoint.load()
    return model, optimizer


def resume(path: str, options: dict[str, Any], folder: str) -> None:
    with opened(path) as graph:
        whole = steps(*begun(graph, options), 5)
        assert torch.equal(saved(graph, options, folder), whole), "saving changes nothing"
        assert torch.equal(steps(*loaded(graph, options, folder), 2), whole)


@pytest.mark.parametrize(
    "options",
    [
        {"boundary_sample": 0.5},
        {"stale": True},
        {"stale": True, "smoothing": 0.5, "quantize": "int8"},
        {"quantize": "bf16"},
        {"stale": True, "compress": TopK(0.1)},
    ],
    ids=lambda each: "+".join(each),
)
def test_a_run_resumes_to_the_bit(
    ranks: WaitingProcesses, path: str, options: dict[str, Any], tmp_path: Path
) -> None:
    ranks.run(resume, path, options, str(tmp_path), world_size=2)


SAMPLED, STALE = {"boundary_sample": 0.5}, {"stale": True}


def save(path: str, folder: str) -> None:
    with opened(path) as graph:
        for options in (SAMPLED, STALE):
            saved(graph, options, f"{folder}/{next(iter(options))}")


def elsewhere(path: str, folder: str) -> int:
    """What is saved by three ranks is not for two, nor for other parts, unless it is a number."""
    with opened(path) as graph:
        model, _ = loaded(graph, SAMPLED, f"{folder}/boundary_sample")
        model.train()()
        with pytest.raises(CheckpointError, match="saved by 3 ranks, whose 'model-of-rank' differ"):
            loaded(graph, STALE, f"{folder}/stale")
        return int(model.rank_state.state_dict()["step"])


def with_other_parts(path: str, folder: str) -> None:
    with opened(path) as graph:
        with pytest.raises(ValueError, match="rows of other halo nodes"):
            loaded(graph, STALE, f"{folder}/stale")
        with pytest.raises(ValueError, match=r"halo has step, as .* with other options"):
            loaded(graph, STALE, f"{folder}/boundary_sample")
        both, _ = begun(graph, {**STALE, "compress": TopK(0.1)})
        with pytest.raises(ValueError, match="not both gradients and halo"):
            both.rank_state.load_state_dict({"step": 1})
        sampled, _ = begun(graph, SAMPLED)
        for step in (-1, True, "2"):
            with pytest.raises(ValueError, match="must be the number of steps so far"):
                sampled.rank_state.load_state_dict({"step": step})
        stale, _ = begun(graph, STALE)
        stale.train()().sum().backward()
        state = stale.rank_state.state_dict()
        for name in ("rows", "gradients"):
            short = {
                place: {"next": [row[1:] for row in each["next"]], "used": None}
                for place, each in state[name].items()
            }
            with pytest.raises(ValueError, match=f"the {name} of the state are not as many"):
                stale.rank_state.load_state_dict({**state, name: short})
        stale.rank_state.load_state_dict(state)


def test_other_ranks_or_parts_get_no_rows(
    ranks: WaitingProcesses, path: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoints")
    ranks.run(save, path, folder)
    assert ranks.run(elsewhere, path, folder, world_size=2) == [4, 4]
    data, assignment, parts = models.graph("random")
    other = tmp_path / "other"
    pyg_scale.partition(data, parts, path=other, assignment=assignment.roll(1))
    ranks.run(with_other_parts, str(other), folder)


# What is refused ###############################################################################


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"boundary_sample": 0.0}, "boundary_sample must be above 0"),
        ({"smoothing": 1.0, "stale": True}, "smoothing must be at least 0"),
        ({"smoothing": 0.5}, "is for stale=True"),
        ({"quantize": "int4"}, "quantize must be one of int8, bf16"),
        ({"boundary_sample": 0.5, "stale": True}, "goes neither with"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        HaloParallel(**options)


def refuse(path: str) -> None:
    with opened(path) as graph:
        for conv in (pyg.GATConv(CHANNELS, 2), pyg.SAGEConv(CHANNELS, 2, aggr="max")):
            with pytest.raises(ValueError, match="is not right in the mean"):
                parallel.wrap(conv, "halo", graph=graph, boundary_sample=0.5)
        with pytest.raises(ValueError, match="ranks have different options"):
            parallel.wrap(pyg.GCNConv(CHANNELS, 2), "halo", graph=graph, seed=dist.get_rank())


def test_what_is_refused(ranks: WaitingProcesses, path: str) -> None:
    ranks.run(refuse, path, world_size=2)


def test_draws_are_functions_of_their_key() -> None:
    def draw(*key: int) -> Tensor:
        return torch.rand(4, generator=generator_of(*key))

    assert torch.equal(draw(1, 2, 3), draw(1, 2, 3))
    assert not torch.equal(draw(1, 2, 3), draw(1, 3, 2))
