"""What ``fsdp`` computes and keeps, besides what the kit tests."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch_geometric.nn.models.tgn import IdentityMessage, LastAggregator, TGNMemory

from pyg_scale import parallel
from pyg_scale.parallel.fsdp import FSDP
from pyg_scale.testing.parallel import batch_of, concatenated
from pyg_scale.testing.processes import WaitingProcesses
from pyg_scale.train import Checkpoint
from tests.parallel import models

CHANNELS, CLASSES = 5, 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[WaitingProcesses]:
    with WaitingProcesses(3, limit=120.0) as started:
        yield started


def build(seed: int) -> Any:
    torch.manual_seed(seed)
    return pyg.GraphSAGE(CHANNELS, 64, 3, CLASSES, act="tanh").double()


def train(dtype: torch.dtype, folder: str, shards: int | None) -> None:
    """Adam, three steps; every rank has a share of parameters and moments; a checkpoint."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = parallel.wrap(build(rank).to(dtype), "fsdp", reshard_after_forward=True, shards=shards)
    plain = build(0).to(dtype)
    total = sum(p.numel() for p in plain.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    other = torch.optim.Adam(plain.parameters(), lr=0.01)
    for step in range(3):
        batch = batch_of(rank, step, 3 + 4 * rank)
        optimizer.zero_grad()
        out = model(batch.x.to(dtype), batch.edge_index)[: batch.num_seeds]
        model.backward(F.cross_entropy(out, batch.y), batch.num_seeds)
        optimizer.step()
        x, edge_index, rows, y = concatenated([batch_of(r, step, 3 + 4 * r) for r in range(size)])
        other.zero_grad()
        F.cross_entropy(plain(x.to(dtype), edge_index)[rows], y).backward()
        other.step()
    near = 1e-9 if dtype == torch.float64 else 1e-3  # Adam divides by small numbers
    for (name, p), q in zip(model.module.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(p, DTensor), name
        assert float((p.full_tensor() - q).abs().max()) <= near, name
    local = sum(p.to_local().numel() for p in model.module.parameters())
    moments = sum(s["exp_avg"].to_local().numel() for s in optimizer.state.values())
    assert local == moments <= 1.1 * total / (shards or size)
    checkpoint = Checkpoint(folder, {"model": model, "optimizer": optimizer})
    checkpoint.save(step=3)
    before = [p.full_tensor() for p in model.module.parameters()]
    with torch.no_grad():
        for p in model.module.parameters():
            p.zero_()
    assert checkpoint.load().step == 3
    assert all(torch.equal(a, p.full_tensor()) for a, p in zip(before, model.module.parameters()))


@pytest.mark.parametrize(
    ("dtype", "size", "shards"),
    [
        (torch.float64, 2, None),
        (torch.float64, 4, 2),
        pytest.param(torch.float64, 2, 1, marks=pytest.mark.slow),
        pytest.param(torch.float32, 2, None, marks=pytest.mark.slow),
    ],
)
def test_a_rank_has_its_share_of_everything(
    dtype: torch.dtype, size: int, shards: int | None, tmp_path: Path
) -> None:
    with WaitingProcesses(size, limit=120.0) as ranks:  # all have met in no other group
        ranks.run(train, dtype, str(tmp_path / "checkpoints"), shards)


class Normed(torch.nn.Module):
    """Has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = pyg.GCNConv(CHANNELS, 8), torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, CLASSES)

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.last(self.norm(self.conv(x, edge_index)))


class Variadic(Normed):
    """Takes any number of arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def shadow(kind: type[Normed], by_name: bool) -> tuple[torch.Tensor, int]:
    """Rank 0 has one batch, and others more: its statistics are of what it had."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = parallel.wrap(kind().double(), "fsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(optimizer):
        for step in range(1 + rank):
            batch = batch_of(rank, step, 4)
            optimizer.zero_grad()
            edges = {"edge_index": batch.edge_index}
            out = model(batch.x, **edges) if by_name else model(batch.x, batch.edge_index)
            model.backward(F.cross_entropy(out[:4], batch.y), 4)
            optimizer.step()
        if rank == 1:
            with torch.no_grad():  # an evaluation takes part, too
                model(batch.x, batch.edge_index)
    return model.module.last.weight.full_tensor(), int(model.module.norm.num_batches_tracked)


@pytest.mark.parametrize(
    ("kind", "by_name"), [(Normed, False), (Variadic, False), (Variadic, True)]
)
def test_a_rank_without_batches_takes_part(
    ranks: WaitingProcesses, kind: type[Normed], by_name: bool
) -> None:
    (first, tracked), (second, _) = ranks.run(shadow, kind, by_name, world_size=2)
    assert torch.equal(first, second)
    assert tracked == 1


def refuse() -> None:
    with pytest.raises(TypeError, match=r"fully_shard has no option mesh .*mp_policy"):
        FSDP(mesh=None)
    model = parallel.wrap(build(0), "fsdp")
    with pytest.raises(ValueError, match="sharded already"):
        parallel.wrap(model.module, "fsdp")
    with pytest.raises(ValueError, match="no shape yet"):
        parallel.wrap(pyg.SAGEConv(-1, 4), "fsdp")
    batch = batch_of(0, 0, 4)
    x, step = batch.x, torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"x must be a tensor.*\(got list\)"), model.join(step):
        model([x], batch.edge_index)


def refuse_shards() -> None:
    with pytest.raises(ValueError, match="shards=2 does not divide 3 ranks"):
        parallel.wrap(build(0), "fsdp", shards=2)
    with pytest.raises(ValueError, match="ranks have different shards="):
        parallel.wrap(build(0), "fsdp", shards=3 if dist.get_rank() else 1)
    with pytest.raises(ValueError, match="shards must be at least 1"):
        FSDP(shards=0)


def test_what_is_refused(ranks: WaitingProcesses) -> None:
    ranks.run(refuse, world_size=1)
    ranks.run(refuse_shards, world_size=3)


def typed() -> None:
    """Nodes of several types; rank 1 has a batch less."""
    data, _ = models.typed_graph()
    rank, count = dist.get_rank(), 4
    model, plain = (models.build_typed("sage", data, seed) for seed in (rank, 0))
    model = parallel.wrap(model, "fsdp", find_unused_parameters=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]

    def loss(net: Any, of: int, step: int) -> torch.Tensor:
        rows = slice(count * (2 * step + of), count * (2 * step + of + 1))
        out = net(data.x_dict, data.edge_index_dict)["paper"]
        return F.cross_entropy(out[rows], data["paper"].y[rows])

    with model.join(optimizers[0]):
        for step in range(2 - rank):
            optimizers[0].zero_grad()
            model.backward(loss(model, rank, step), count)
            optimizers[0].step()
    for step in range(2):
        optimizers[1].zero_grad()
        losses = [loss(plain, of, step) for of in range(2 - step)]
        torch.stack(losses).mean().backward()
        optimizers[1].step()
    for p, q in zip(model.module.parameters(), plain.parameters(), strict=True):
        assert float((p.full_tensor() - q).abs().max()) <= 1e-12


def test_typed_nodes_and_a_rank_without_batches(ranks: WaitingProcesses) -> None:
    ranks.run(typed, world_size=2)


class Narrow(torch.nn.Module):
    """Rank 1 has no number of its last layer; one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = pyg.GCNConv(CHANNELS, 8), torch.nn.Linear(8, 1)
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.last(self.conv(x, edge_index))


class Alone(torch.nn.Module):
    """Rank 1 has no numbers at all."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(CHANNELS, 1)

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.last(x)


def squares(model: Any, step: int, factor: float = 1.0) -> torch.Tensor:
    batch, dtype = batch_of(0, step, 4), next(model.parameters()).dtype
    return (factor * model(batch.x.to(dtype), batch.edge_index)).square().mean()


def assert_gradients(model: Any, expected: Any, near: float = 1e-12) -> None:
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, name
        else:
            assert float((p.grad.full_tensor() - q.grad).abs().max()) <= near, name


def forget(kind: type[torch.nn.Module], options: dict[str, Any], dtype: torch.dtype) -> None:
    """Gradients that `zero_grad` clears after `no_sync` are gone, and so are their seeds."""
    torch.manual_seed(0)
    plain, near = kind().to(dtype), 1e-12 if dtype == torch.float64 else 1e-6
    model = parallel.wrap(copy.deepcopy(plain), "fsdp", **options)
    parameters = list(model.parameters())
    by_one, at_once = (torch.optim.SGD(parameters, lr=0.1, foreach=f) for f in (False, True))
    clears = [
        by_one.zero_grad,
        lambda: by_one.zero_grad(set_to_none=False),
        model.zero_grad,
        lambda: model.zero_grad(set_to_none=False),
        model.module.zero_grad,
    ]
    if kind is not Alone:
        clears.append(lambda: at_once.zero_grad(set_to_none=False))
    for step, clear in enumerate(clears):
        with model.no_sync():
            model.backward(squares(model, step, 7.0), 3)
            model.backward(squares(model, step, 7.0), 2)
        clear()
        with model.no_sync():
            model.backward(squares(model, step + 1), 4)
        # In between nothing is there to clip, nor for a step, and neither is taken for a clearing.
        assert float(torch.nn.utils.clip_grad_norm_(parameters, 0.5)) < 1e-20
        by_one.step()
        model.backward(squares(model, step + 2), 1)
        plain.zero_grad()
        (0.8 * squares(plain, step + 1) + 0.2 * squares(plain, step + 2)).backward()
        assert_gradients(model.module, plain, near)
        clear()  # what was exchanged


def forget_some() -> None:
    """Two optimizers, of which one clears: the other's gradients stay, and all seeds."""
    torch.manual_seed(0)
    plain = Narrow().double()
    model = parallel.wrap(copy.deepcopy(plain), "fsdp")
    first = torch.optim.SGD(model.module.conv.parameters(), lr=0.1)
    with model.no_sync():
        model.backward(squares(model, 0), 3)
    first.zero_grad()
    model.backward(squares(model, 1), 1)
    (0.75 * squares(plain, 0)).backward()
    plain.conv.zero_grad()
    (0.25 * squares(plain, 1)).backward()
    assert_gradients(model.module, plain)


def forget_within_join() -> None:
    """Rank 0 runs out with a gradient that all throw away."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = Narrow().double()
    model = parallel.wrap(copy.deepcopy(plain), "fsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(optimizer):
        with model.no_sync():
            model.backward(squares(model, 0, 7.0), 3)
        if rank == 1:
            optimizer.zero_grad()
            with model.no_sync():
                model.backward(squares(model, 1), 4)
            model.backward(squares(model, 2), 1)
            optimizer.step()
    (0.8 * squares(plain, 1) + 0.2 * squares(plain, 2)).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        expected = q if q.grad is None else q - 0.1 * q.grad
        assert float((p.full_tensor() - expected).abs().max()) <= 1e-12


def test_gradients_that_zero_grad_clears_are_gone(ranks: WaitingProcesses) -> None:
    ranks.run(forget, Narrow, {}, torch.float64, world_size=2)
    ranks.run(forget, Narrow, {"find_unused_parameters": True}, torch.float64, world_size=2)
    ranks.run(forget, Alone, {}, torch.float64, world_size=2)
    mixed = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    ranks.run(forget, Narrow, {"mp_policy": mixed}, torch.float32, world_size=2)
    ranks.run(forget_some, world_size=2)
    ranks.run(forget_within_join, world_size=2)


class Weighted(Normed):
    """Takes numbers of edges."""

    def forward(self, x: Any, edge_index: Any, edge_weight: Any = None) -> Any:
        return self.last(self.norm(self.conv(x, edge_index, edge_weight)))


class ByType(torch.nn.Module):
    """Takes dictionaries, with rows of edges."""

    def __init__(self) -> None:
        super().__init__()
        of_edges = pyg.GINEConv(torch.nn.Linear(CHANNELS, 4), edge_dim=2)
        self.conv = pyg.HeteroConv({("a", "to", "b"): of_edges})
        self.last = torch.nn.Linear(4, 2)

    def forward(self, x_dict: Any, edge_index_dict: Any, edge_attr_dict: Any) -> Any:
        out = self.conv(x_dict, edge_index_dict, edge_attr_dict=edge_attr_dict)
        return {"b": self.last(out["b"])}


class Several(Normed):
    """Returns more than one tensor, of several dtypes, and may divide by 0."""

    def forward(self, x: Any, edge_index: Any) -> Any:
        x = self.conv(x, edge_index) / x.norm(dim=1, keepdim=True)
        return self.last(x), {"nested": [x.float(), edge_index]}, "text", None


def arguments_of(kind: str, batch: Any) -> Any:
    """The arguments of a model of this kind, also made of the batch."""
    x, edge_index = batch.x, batch.edge_index
    weight = x.new_ones(edge_index.size(1)) / 2
    if kind == "adjacency":
        adj_t = torch.sparse_coo_tensor(edge_index.flip(0), weight, (len(x), len(x)))
        return x, adj_t.coalesce().to_sparse_csr()
    if kind == "types":
        key = ("a", "to", "b")
        edges = {key: torch.stack([edge_index[0], edge_index[1] % 4])}
        return {"a": x, "b": x[:4]}, edges, {key: torch.stack([weight, weight], dim=1)}
    return (x, edge_index, weight) if kind == "weights" else (x, edge_index)


KINDS: dict[str, type[torch.nn.Module]] = {
    "weights": Weighted,
    "adjacency": Normed,
    "types": ByType,
    "frozen": Normed,
    "several": Several,
}


def sum_of(out: Any) -> torch.Tensor:
    found = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
    rows = [each.double().square().mean() for each in found if each.requires_grad]
    return torch.stack(rows).sum()


def run_out(kind: str) -> None:
    """Rank 0 has one batch, and rank 1 two: those of one process, with no trace of a third."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = KINDS[kind]().double()
    model = parallel.wrap(copy.deepcopy(plain), "fsdp")
    if kind == "frozen":  # statistics that stay
        model.module.norm.eval(), plain.norm.eval()
    modes = [each.training for each in model.module.modules()]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    with model.join(optimizers[0]):
        for step in range(1 + rank):
            optimizers[0].zero_grad()
            out = model(*arguments_of(kind, batch_of(rank, step, 4)))
            model.backward(sum_of(out), 4)
            optimizers[0].step()
    assert modes == [each.training for each in model.module.modules()]
    for step in range(2):
        optimizers[1].zero_grad()
        losses = [sum_of(plain(*arguments_of(kind, batch_of(r, step, 4)))) for r in range(step, 2)]
        torch.stack(losses).mean().backward()
        optimizers[1].step()
    for (name, p), q in zip(model.module.named_parameters(), plain.parameters(), strict=True):
        assert float((p.full_tensor() - q).abs().max()) <= 1e-12, name


@pytest.mark.parametrize("kind", KINDS)
def test_any_model_may_run_out_of_batches(ranks: WaitingProcesses, kind: str) -> None:
    ranks.run(run_out, kind, world_size=2)


class Outer(pyg.MessagePassing):
    """A layer in a layer."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.lin = torch.nn.Linear(CHANNELS, CHANNELS)
        self.inner = pyg.GCNConv(CHANNELS, CHANNELS)

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.propagate(edge_index, x=self.lin(self.inner(x, edge_index)))


class Tied(torch.nn.Module):
    """Layers of which some share a parameter, with each other or with what is outside or within."""

    def __init__(self, tie: str) -> None:
        super().__init__()
        self.emb = torch.nn.Linear(CHANNELS, CHANNELS)
        self.convs = torch.nn.ModuleList(pyg.SAGEConv(CHANNELS, CHANNELS) for _ in range(3))
        self.last = torch.nn.Linear(CHANNELS, 1)
        first, second, _ = self.convs
        if tie == "layers":
            second.lin_l.weight = first.lin_l.weight
        elif tie == "outside":
            self.emb.weight = first.lin_r.weight
        elif tie == "module":
            second.lin_r = first.lin_r
        else:
            self.convs[0] = Outer()
            if tie == "within":
                self.convs[0].lin.weight = self.convs[0].inner.lin.weight

    def forward(self, x: Any, edge_index: Any) -> Any:
        x = self.emb(x)
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return self.last(x)


def tied(tie: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = Tied(tie).double()
    model = parallel.wrap(copy.deepcopy(plain), "fsdp", **options)
    keys = list(plain.state_dict())
    assert isinstance(model.module.convs[2], FSDPModule), "shares nothing"
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(2):
        optimizers[0].zero_grad()
        model.backward(squares(model, step + rank), 1 + rank)
        optimizers[1].zero_grad()
        total = sum(range(1, size + 1))
        for other in range(size):
            ((1 + other) / total * squares(plain, step + other)).backward()
        assert_gradients(model.module, plain)
        for each in optimizers:
            each.step()
    assert list(model.state_dict()) == list(model.module.state_dict()) == keys


@pytest.mark.parametrize("tie", ["layers", "outside", "module", "none", "within"])
def test_layers_may_share_parameters(ranks: WaitingProcesses, tie: str) -> None:
    for options in ({}, {"reshard_after_forward": True}):
        ranks.run(tied, tie, options, world_size=2)


def test_layers_that_share_parameters_are_sharded_and_copied() -> None:
    with WaitingProcesses(2, limit=120.0) as ranks:  # all have met in no other group
        ranks.run(tied, "layers", {"shards": 1})


class Remembering(torch.nn.Module):
    """Has a memory, as in PyG's example of TGN."""

    def __init__(self) -> None:
        super().__init__()
        message = IdentityMessage(3, 4, 4)
        self.memory = TGNMemory(10, 3, 4, 4, message, LastAggregator())
        self.conv, self.last = pyg.TransformerConv(4, 4), torch.nn.Linear(4, 1)

    def forward(self, n_id: Any, edge_index: Any) -> Any:
        return self.last(self.conv(self.memory(n_id)[0], edge_index))


def events(method: str, options: dict[str, Any], late: bool) -> Any:
    """Train, evaluate and train again; the same events on all ranks, with other seeds.

    Args:
        method: ``"fsdp"`` or ``"ddp"``.
        options: Of the method.
        late: Update the memory after the step, and not before the backward pass.
    """
    torch.manual_seed(0)
    plain = Remembering().double()
    plain.memory.reset_state()  # its messages have the dtype, too
    model = parallel.wrap(plain, method, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory, out = model.module.memory, []
    n_id = torch.arange(10)
    model.eval()  # also before the first forward
    for mode in (True, False, True):
        model.train(mode)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + mode)
            src, dst = torch.randint(10, (2, 6), generator=generator)
            t = torch.arange(6) + 6 * step
            msg = torch.rand(6, 3, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            with torch.set_grad_enabled(mode):
                found = model(n_id, torch.stack([src, dst]))
                out.append(found.detach())
                if not (late and mode):
                    memory.update_state(src, dst, t, msg)
            if mode:
                seeds = 1 + dist.get_rank()
                model.backward(found[:seeds].square().mean(), seeds)
                optimizer.step()
            if late and mode:
                memory.update_state(src, dst, t, msg)
            memory.detach()
    with torch.no_grad():
        memory.eval()  # on its own
    parameters = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return [each.detach() for each in [*out, *parameters, memory.memory]]


@pytest.mark.parametrize(
    ("options", "late"),
    [({}, False), ({"reshard_after_forward": True}, False), ({}, True)],
    ids=["usual", "reshards", "late"],
)
def test_a_memory_is_that_of_ddp(
    ranks: WaitingProcesses, options: dict[str, Any], late: bool
) -> None:
    (found, _), (expected, _) = (
        ranks.run(events, method, given, late, world_size=2)
        for method, given in (("fsdp", options), ("ddp", {}))
    )
    for each, other in zip(found, expected, strict=True):
        assert float((each - other).abs().max()) <= 1e-12
