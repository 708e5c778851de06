"""`federated` beside the same rounds in one process, with clients that leave, die and are late."""

from __future__ import annotations

import copy
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor

import pyg_scale
from pyg_scale import comm, parallel
from pyg_scale.errors import CommError
from pyg_scale.parallel.federated import Federated, _average
from pyg_scale.testing.parallel import Batch, Net, batch_of, concatenated
from pyg_scale.testing.processes import WaitingProcesses
from pyg_scale.train import Checkpoint
from tests.parallel import models
from tests.parallel.models import CHANNELS, CLASSES

SIZES = [4, 1, 7]


@pytest.fixture(scope="module")
def ranks() -> Iterator[WaitingProcesses]:
    with WaitingProcesses(3) as started:
        yield started


def part_of(rank: int) -> Batch:
    """The part of a client, with labels for some of its nodes."""
    return batch_of(rank, 0, SIZES[rank])


def loss_of(model: Any, part: Batch) -> Tensor:
    return F.cross_entropy(model(part.x, part.edge_index)[: part.num_seeds], part.y)


def visit(model: Any, epochs: int, lr: float = 0.1) -> None:
    part = part_of(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with model.round(part.num_seeds):
        for _ in range(epochs):
            optimizer.zero_grad()
            model.backward(loss_of(model, part), part.num_seeds)
            optimizer.step()


def emulate(model: Any, clients: Sequence[int], epochs: int, lr: float = 0.1) -> None:
    """A round in one process."""
    total = sum(SIZES[client] for client in clients)
    mean = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    for client in clients:
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=lr)
        for _ in range(epochs):
            optimizer.zero_grad()
            loss_of(own, part_of(client)).backward()
            optimizer.step()
        for name, value in own.state_dict().items():
            mean[name] += value * SIZES[client] / total
    model.load_state_dict(mean)


def assert_same(model: Any, alone: Any) -> None:
    for name, value in alone.state_dict().items():
        assert torch.allclose(model.module.state_dict()[name], value, rtol=0, atol=1e-12), name


def first() -> Net:
    torch.manual_seed(0)
    return Net()


def wrapped(**options: Any) -> Any:
    torch.manual_seed(dist.get_rank())
    return parallel.wrap(Net(), "federated", **options)


def one_step() -> None:
    """A round of one step is a step on the union of the parts, which have no edges between them."""
    model, alone = wrapped(), first()
    assert_same(model, alone)
    visit(model, 1)
    x, edge_index, rows, y = concatenated([part_of(rank) for rank in range(3)])
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    F.cross_entropy(alone(x, edge_index)[rows], y).backward()
    optimizer.step()
    assert_same(model, alone)
    assert model.last_round.ranks == [0, 1, 2]
    model.close()


def test_one_step_is_that_of_the_union(ranks: WaitingProcesses) -> None:
    ranks.run(one_step)


def several_epochs(folder: str) -> None:
    """And what is saved goes on."""
    model, alone = wrapped(), first()
    with Checkpoint(folder, {"model": model}) as checkpoint:
        for number in range(4):
            visit(model, 3)
            emulate(alone, [0, 1, 2], 3)
            assert model.last_round.number == number
            if number == 1:
                checkpoint.save(number)
    assert_same(model, alone)
    model.close()
    again = wrapped()
    with Checkpoint(folder, {"model": again}) as checkpoint:
        assert checkpoint.load().step == 1
    for number in (2, 3):
        visit(again, 3)
        assert again.last_round.number == number
    for one, two in zip(again.parameters(), model.parameters()):
        assert torch.equal(one, two)
    again.close()


def test_several_epochs_in_a_round(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(several_epochs, str(tmp_path))


def killed() -> None:
    rank, model, alone = dist.get_rank(), wrapped(), first()
    visit(model, 1)
    emulate(alone, [0, 1, 2], 1)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            visit(model, 2)
            emulate(alone, [0, 1], 2)
            assert model.last_round.ranks == [0, 1]
    assert_same(model, alone)
    if rank == 0:
        assert list(model.gone) == [2]
        (text,) = {str(each.message) for each in said}
        assert text.startswith("rank 2 has left") and "goes on without it" in text
    model.close()


def test_a_client_that_is_killed(ranks: WaitingProcesses) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        ranks.run(killed)
    (error,) = raised.value.exceptions
    assert str(error) == "the process of rank 2 ended (-9)"


def without_rank_0() -> None:
    model = wrapped()
    visit(model, 1)
    dist.barrier()  # all have the answer of rank 0
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommError, match="rank 0"):
        visit(model, 1)


def test_rank_0_that_is_killed_is_named(ranks: WaitingProcesses) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        ranks.run(without_rank_0)
    (error,) = raised.value.exceptions
    assert str(error) == "the process of rank 0 ended (-9)"


def left_and_late() -> None:
    """Rank 1 is late in the second round and comes back; rank 2 leaves after the third."""
    rank, alone = dist.get_rank(), first()
    store = dist.distributed_c10d._get_default_store()
    model = wrapped(timeout=1.0 if rank == 0 else 30.0)
    visit(model, 1)
    emulate(alone, [0, 1, 2], 1)
    if rank == 1:
        store.wait(["second round"])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        visit(model, 1)
    emulate(alone, [0, 2], 1)
    if rank == 0:
        store.set("second round", "over")
        assert "rank 1 did not end round 1" in str(said[0].message) and not model.gone
    assert model.last_round.number == 1 and model.last_round.ranks == [0, 2]
    assert_same(model, alone)
    dist.barrier()
    visit(model, 1)
    emulate(alone, [0, 1, 2], 1)
    assert model.last_round.number == 2
    assert_same(model, alone)
    if rank == 2:
        model.leave()
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            visit(model, 1)
        emulate(alone, [0, 1], 1)
        assert_same(model, alone)
    if rank == 0:
        assert "it has left" in model.gone[2]
        with pytest.raises(ValueError, match="rank 0 has what all ranks need"):
            model.leave()
    dist.barrier()  # a client that closes at once has ended, and not left
    model.close()


def test_clients_that_leave_or_are_late(ranks: WaitingProcesses) -> None:
    ranks.run(left_and_late)


def counted() -> None:
    """A round sends parameters and a few numbers, and nothing of features, labels or edges."""
    with comm.Counting(comm.connect()) as counting:
        model = parallel.wrap(Net(), Federated(), group=counting)
        before = counting.traffic()
        size = sum(t.nbytes for t in (*model.module.parameters(), *model.module.buffers()))
        visit(model, 2)
        sent = received = 0
        for name, each in counting.traffic().items():
            old = before.get(name, comm.counting.Traffic())
            sent, received = sent + each.sent - old.sent, received + each.received - old.received
        if dist.get_rank() == 0:  # it asks the others for their models
            assert (sent, received) == (2 * 2 * 8, 2 * (size + 8))
        else:  # and they ask it for the mean
            assert (sent, received) == (8, size + 4 * 8)
        model.close()


def test_features_stay_where_they_are(ranks: WaitingProcesses) -> None:
    ranks.run(counted)


def test_a_mean_of_equal_values_is_the_value() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        values = torch.rand(1000, dtype=dtype)
        values[0] = -torch.inf
        models = {r: [torch.tensor([n]).double(), values] for r, n in enumerate((3.0, 7.0, 0.0))}
        assert torch.equal(_average(models)[0], values)


# Sums of neighbours at other clients ###########################################################


def aggregated(path: str) -> None:
    """One layer computes what it would on the whole graph, and so do its gradients; in rounds,
    nothing is sent but parameters."""
    with comm.connect(name="clients") as ranks, pyg_scale.open(path, comm=ranks) as graph:
        edges = graph.edge_index[:]
        for aggregate, conv in (
            ("mean", lambda: pyg.SAGEConv(CHANNELS, CLASSES)),
            ("sum", lambda: pyg.SAGEConv(CHANNELS, CLASSES, aggr="sum", normalize=True)),
            ("sum", lambda: pyg.GINConv(torch.nn.Linear(CHANNELS, CLASSES), eps=0.3)),
            ("sum", lambda: pyg.GraphConv(CHANNELS, CLASSES)),
            ("gcn", lambda: pyg.GCNConv(CHANNELS, CLASSES)),
        ):
            counting = comm.Counting(ranks)
            part = parallel.ClientPart(graph, counting, aggregate)
            data, own = part.data, part.data.n_id
            assert torch.equal(data.y, graph.y[own])
            torch.manual_seed(0)
            net = conv().double()
            model = parallel.wrap(net, Federated(part=part), group=counting)
            expected = net(graph.x[:], edges)[own]
            out = model(data.x, data.edge_index)
            assert torch.allclose(out, expected, rtol=0, atol=1e-12), conv
            lost = net(data.x, data.edge_index)
            # A client has no nodes; the others have neighbours elsewhere.
            assert not len(own) or not torch.allclose(lost, expected, rtol=0, atol=1e-3)
            for value in (out, expected):
                value.square().sum().backward()
            once = [p.grad / 2 for p in net.parameters()]
            net.zero_grad()
            net(graph.x[:], edges)[own].square().sum().backward()
            for p, grad in zip(net.parameters(), once, strict=True):
                assert torch.allclose(grad, p.grad, rtol=0, atol=1e-10)
            net.zero_grad()
            before = counting.traffic()["all_to_all"]
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(2):
                with model.round():
                    model.backward(model(data.x, data.edge_index).square().sum(), len(own))
                    optimizer.step()
                    optimizer.zero_grad()
            traffic = counting.traffic()
            assert traffic["all_to_all"] == before  # once, before training
            assert set(traffic) == {"all_to_all", *(n for n in traffic if n.startswith("request "))}
            size = sum(p.numel() * 8 for p in net.parameters())
            for name, each in traffic.items():
                if name.startswith("request "):
                    assert each.sent <= 64 * each.calls and each.received <= 8 * (size + 64), name
            model.close()


def test_one_layer_is_that_of_the_whole_graph(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(aggregated, clients(tmp_path))


def clients(tmp_path: Path) -> str:
    data, assignment, parts = models.graph("empty")
    pyg_scale.partition(data, parts, path=tmp_path / "parts", assignment=assignment)
    return str(tmp_path / "parts")


def counted_sums(path: str) -> None:
    """For each node and other client a row, and 16 bytes for each edge between them."""
    with comm.connect(name="clients") as ranks, pyg_scale.open(path, comm=ranks) as graph:
        counting = comm.Counting(ranks)
        parallel.ClientPart(graph, counting, "mean")
        book = graph.graph_directory.books[None]
        src, dst = graph.edge_index[:]
        of_src, of_dst, rank = book.part_of(src), book.part_of(dst), ranks.rank
        crosses = of_src != of_dst
        asks, answers = (crosses & (each == rank) for each in (of_dst, of_src))
        nodes = len(torch.stack([dst[answers], of_dst[answers]]).unique(dim=1).T)
        sent = 16 * int(asks.sum()) + 8 * CHANNELS * nodes
        assert counting.traffic()["all_to_all"].sent == sent


def test_sums_of_neighbours_are_sent_once(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(counted_sums, clients(tmp_path))


def refused_parts(path: str) -> None:
    with comm.connect(name="clients") as ranks, pyg_scale.open(path, comm=ranks) as graph:
        with pytest.raises(ValueError, match="aggregate must be one of sum, mean, gcn"):
            parallel.ClientPart(graph, ranks, "max")
        with pytest.raises(TypeError, match="comm must be a Communicator"):
            parallel.ClientPart(graph, None)
        with pytest.raises(TypeError, match="part must be a ClientPart"):
            Federated(part=graph)
        part = parallel.ClientPart(graph, ranks, "mean")
        data = part.data
        for conv, reason in (
            (pyg.GCNConv(CHANNELS, CLASSES), "GCNConv is the first layer, .* aggregate=.gcn"),
            (pyg.GATConv(CHANNELS, CLASSES), "GATConv is the first layer, for which none suits"),
            (pyg.SAGEConv(CHANNELS, CLASSES, project=True), "for which none suits"),
        ):
            with pytest.raises(ValueError, match=reason), part.within(conv):
                conv(data.x, data.edge_index)
        conv = pyg.SAGEConv(CHANNELS, CLASSES).double()
        with pytest.raises(RuntimeError, match="no layer was given"), part.within(conv):
            conv(data.x + 1, data.edge_index)
        with pytest.raises(ValueError, match="and nothing else"), part.within(conv):
            conv(data.x, data.edge_index[:, :2])


def test_parts_that_are_refused(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(refused_parts, clients(tmp_path))


# What is refused ###############################################################################


def refused() -> None:
    for timeout in (0, float("nan")):
        with pytest.raises(ValueError, match="timeout must be above 0"):
            Federated(timeout)
    with pytest.raises(TypeError, match=r"pyg_scale.comm.Communicator, as ranks may leave"):
        parallel.wrap(Net(), "federated", group=dist.group.WORLD)
    model = wrapped()
    with pytest.raises(ValueError, match="num_samples must not be negative"), model.round(-1):
        pass
    model.close()


def test_what_is_refused(ranks: WaitingProcesses) -> None:
    ranks.run(refused, world_size=1)
