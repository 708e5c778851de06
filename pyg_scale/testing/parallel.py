"""Conformance of parallel wrappers: several ranks against one process, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch_geometric.nn import SAGEConv

from pyg_scale.parallel import Parallel, is_parallel_module, wrap
from pyg_scale.testing.processes import WaitingProcesses

CHANNELS, CLASSES = 5, 4
TOLERANCE = 1e-12

Seeds = Sequence[Sequence[int]]
"""Number of seeds of each rank in each step: ``seeds[rank][step]``."""


class Net(nn.Module):
    """GraphSAGE of two layers, with buffers and optional parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = SAGEConv(CHANNELS, 8)
        self.other = SAGEConv(CHANNELS, 8)
        self.last = SAGEConv(8, CLASSES)
        self.register_buffer("scale", torch.rand(8))
        self.double()

    def forward(self, x: Tensor, edge_index: Tensor, with_other: bool = True) -> Tensor:
        hidden = self.first(x, edge_index)
        if with_other:
            hidden = hidden + self.other(x, edge_index)
        return self.last(hidden.tanh() * self.scale, edge_index)


class Batch(NamedTuple):
    """A sampled batch: the first ``num_seeds`` nodes are seeds."""

    x: Tensor
    edge_index: Tensor
    y: Tensor
    num_seeds: int


class Found(NamedTuple):
    """The results of a rank; at the end also the state of the optimizer."""

    initial: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    final: dict[str, Tensor | None]


def batch_of(rank: int, step: int, num_seeds: int) -> Batch:
    """The batch of a rank and step, always the same one."""
    generator = torch.Generator().manual_seed(1_000 * rank + step)
    nodes = num_seeds + 7 if num_seeds else 0
    x = torch.randn(nodes, CHANNELS, dtype=torch.float64, generator=generator)
    edges = torch.randint(max(nodes, 1), (2, 4 * nodes), generator=generator)
    return Batch(x, edges, torch.randint(CLASSES, (num_seeds,), generator=generator), num_seeds)


def concatenated(batches: Sequence[Batch]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Several batches as one: features, edges, rows of seeds, labels."""
    starts = torch.tensor([0, *(batch.x.size(0) for batch in batches)]).cumsum(0).tolist()
    rows = [torch.arange(batch.num_seeds) + s for batch, s in zip(batches, starts)]
    edges = [batch.edge_index + start for batch, start in zip(batches, starts)]
    return (
        torch.cat([batch.x for batch in batches]),
        torch.cat(edges, dim=1),
        torch.cat(rows),
        torch.cat([batch.y for batch in batches]),
    )


class ParallelTests:
    """Tests of a parallel wrapper.

    ``parallel`` is an instance of :class:`~pyg_scale.parallel.Parallel`; it is sent to processes,
    so it must be possible to pickle it. Parameters may be ``DTensor``: wholes are compared. If its
    constructor has torch's ``find_unused_parameters``,
    it is set in tests with unused parameters.

    * ``world_sizes``: Possible numbers of ranks.
    * ``momentum``: That of the optimizer; 0 where each rank has moments of its own.

    Example::

        class TestMine(ParallelTests):
            @pytest.fixture
            def parallel(self):
                return MyParallel()
    """

    world_sizes: tuple[int, ...] = (1, 2, 3)
    momentum: float = 0.9

    @pytest.fixture
    def parallel(self) -> Parallel:
        """The wrapper."""
        raise NotImplementedError("return an instance, such as MyParallel()")

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(cls) -> Iterator[WaitingProcesses]:
        """The processes, started once for the class."""
        with WaitingProcesses(max(cls.world_sizes)) as started:
            yield started

    def on_ranks(
        self, ranks: WaitingProcesses, parallel: Parallel, seeds: Seeds, **how: Any
    ) -> None:
        """Train on the ranks of ``seeds`` and in one process, and compare."""
        if len(seeds) not in self.world_sizes:
            pytest.skip(f"there cannot be {len(seeds)} ranks")
        how["momentum"] = self.momentum
        found = ranks.run(_train, parallel, seeds, how, world_size=len(seeds))
        for rank, other in enumerate(found):
            for name, value in other.initial.items():
                assert torch.equal(value, found[0].initial[name]), f"{name} of rank {rank} at first"
            for name, last in other.final.items():
                first = found[0].final[name]
                assert (last is None) == (first is None), f"{name} of rank {rank} at the end"
                assert last is None or torch.equal(last, first), f"{name} of rank {rank} at the end"
        alone = _train_alone(seeds, **how)
        _assert_close(found[0].initial, alone.initial, 0.0, "at first")
        if parallel.exact:
            trained = next(each for each, steps in zip(found, seeds) if steps)
            _assert_close(trained.gradients, alone.gradients, TOLERANCE, "gradient")
            _assert_close(found[0].final, alone.final, TOLERANCE, "at the end")

    # Exact results #########################################################################

    @pytest.mark.parametrize("size", [1, 3])
    def test_equal_numbers_of_seeds(self, parallel: Parallel, ranks: Any, size: int) -> None:
        self.on_ranks(ranks, parallel, [[4, 4, 4]] * size)

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_the_mean_is_over_seeds_and_not_over_ranks(
        self, parallel: Parallel, ranks: Any, size: int
    ) -> None:
        self.on_ranks(ranks, parallel, [[9, 1, 2], [1, 8, 3], [2, 2, 5]][:size])

    @pytest.mark.parametrize("size", [3])
    def test_ranks_with_an_empty_batch(self, parallel: Parallel, ranks: Any, size: int) -> None:
        self.on_ranks(ranks, parallel, [[3, 0, 4], [0, 5, 1], [0, 2, 0]][:size])

    @pytest.mark.parametrize("size", [2, 3])
    def test_ranks_with_fewer_batches(self, parallel: Parallel, ranks: Any, size: int) -> None:
        """Train two epochs, as the optimizer's state after the first counts in the second."""
        self.on_ranks(ranks, parallel, [[3], [2, 5, 1, 4], [1, 6]][:size], epochs=2)

    @pytest.mark.parametrize("size", [3])
    def test_ranks_without_any_batch(self, parallel: Parallel, ranks: Any, size: int) -> None:
        self.on_ranks(ranks, parallel, [[], [2, 5], []][:size], epochs=2)

    @pytest.mark.parametrize("size", [1, 3])
    def test_gradients_that_are_added_up_first(
        self, parallel: Parallel, ranks: Any, size: int
    ) -> None:
        self.on_ranks(ranks, parallel, [[3, 1, 2, 2], [5, 5, 1, 3], [4, 0, 0, 7]][:size], every=2)

    @pytest.mark.parametrize("size", [2])
    def test_a_loss_of_no_seeds_may_be_nan(self, parallel: Parallel, ranks: Any, size: int) -> None:
        """As the mean over the labelled nodes of a batch that has none."""
        if size not in self.world_sizes:
            pytest.skip(f"there cannot be {size} ranks")
        for rank, gradients in enumerate(ranks.run(_without_labels, parallel, world_size=size)):
            for name, gradient in gradients.items():
                assert gradient is not None, f"{name} of rank {rank} has no gradient"
                assert gradient.isfinite().all(), f"the gradient of {name} of rank {rank}"
            if parallel.exact:
                _assert_close(gradients, _with_labels(), TOLERANCE, "gradient")

    @pytest.mark.parametrize("size", [2])
    def test_parameters_that_some_or_all_ranks_do_not_use(
        self, parallel: Parallel, ranks: Any, size: int
    ) -> None:
        """As in heterogeneous models, a parameter without gradients on any rank must not change."""
        seeds = [[3], [2, 5, 4, 2], [1, 6]][:size]
        use = [[True], [False, True, False, False], [False, True]][:size]
        self.on_ranks(ranks, _for_unused(parallel), seeds, epochs=2, use=use)

    # Contract ##############################################################################

    def test_what_is_returned_is_the_module_and_more(self, parallel: Parallel, ranks: Any) -> None:
        ranks.run(_inspect, parallel, world_size=1)

    def test_bad_input_is_refused(self, parallel: Parallel, ranks: Any) -> None:
        ranks.run(_refuse, parallel, world_size=1)


def _assert_close(
    found: dict[str, Any], expected: dict[str, Any], tolerance: float, when: str
) -> None:
    """Compare within a tolerance of the largest value, as a gradient may be 0 up to rounding."""
    assert found.keys() == expected.keys()
    present = [value for value in expected.values() if value is not None and value.numel()]
    scale = max([1.0, *(float(value.abs().max()) for value in present)])
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), f"{name}: {when}, one is missing"
        if value is not None:
            difference = float((found[name] - value).abs().max())
            assert difference <= tolerance * scale, f"{name} differs by {difference:g} {when}"


def _for_unused(parallel: Parallel) -> Parallel:
    try:
        return type(parallel)(find_unused_parameters=True)  # type: ignore[call-arg]
    except TypeError:
        return parallel


def _train(parallel: Parallel, seeds: Seeds, how: dict[str, Any]) -> Found:
    """Train on one of several ranks; each begins with different parameters."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = wrap(Net(), parallel)
    initial = _copy(model.module)
    optimizer = _optimizer(model.module, how["momentum"])
    every, use = how.get("every", 1), how.get("use")
    gradients: dict[str, Tensor | None] = {}

    def note() -> None:  # also by ranks without batches: shards are gathered
        if not gradients:
            gradients.update(_gradients(model.module))

    for epoch in range(how.get("epochs", 1)):
        with model.join(note, optimizer):
            for step, count in enumerate(seeds[rank]):
                if step % every == 0:
                    optimizer.zero_grad()
                batch = batch_of(rank, 100 * epoch + step, count)
                last = (step + 1) % every == 0
                if last:
                    _forward(model, batch, use, rank, step)
                else:
                    with model.no_sync():
                        _forward(model, batch, use, rank, step)
                if last:
                    note()
                    optimizer.step()
    return Found(initial, gradients, _final(model.module, optimizer))


def _without_labels(parallel: Parallel) -> dict[str, Tensor | None]:
    """The gradients of two batches, of which only the first one of rank 0 has labels."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = wrap(Net(), parallel)
    with model.no_sync():
        model.backward(*_masked(model, rank, 0, with_labels=rank == 0))
    model.backward(*_masked(model, rank, 1, with_labels=False))
    return _gradients(model.module)


def _with_labels() -> dict[str, Tensor | None]:
    """The same in one process, of the batch that has labels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net()
    loss, _ = _masked(model, 0, 0, with_labels=True)
    loss.backward()
    return _gradients(model)


def _masked(model: Any, rank: int, step: int, with_labels: bool) -> tuple[Tensor, int]:
    """The mean loss over labelled seeds, and how many those are."""
    batch = batch_of(rank, step, 4)
    mask = torch.full((4,), float(with_labels), dtype=torch.float64)
    losses = F.cross_entropy(model(batch.x, batch.edge_index)[:4], batch.y, reduction="none")
    return (losses * mask).sum() / mask.sum(), int(mask.sum())


def _forward(model: Any, batch: Batch, use: Any, rank: int, step: int) -> None:
    with_other = use is None or use[rank][step]
    out = model(batch.x, batch.edge_index, with_other)[: batch.num_seeds]
    model.backward(F.cross_entropy(out, batch.y), batch.num_seeds)


def _train_alone(
    seeds: Seeds,
    momentum: float,
    epochs: int = 1,
    every: int = 1,
    use: Sequence[Sequence[bool]] | None = None,
) -> Found:
    """Train in one process, on the batches of all ranks joined."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net()
    initial, optimizer = _copy(model), _optimizer(model, momentum)
    gradients: dict[str, Tensor | None] = {}
    steps = max(len(each) for each in seeds)
    for epoch in range(epochs):
        for first in range(0, steps, every):
            groups: dict[bool, list[Batch]] = {}
            for rank, each in enumerate(seeds):
                for step in range(first, min(first + every, len(each))):
                    key = use is None or use[rank][step]
                    batch = batch_of(rank, 100 * epoch + step, each[step])
                    groups.setdefault(key, []).append(batch)
            total = sum(batch.num_seeds for group in groups.values() for batch in group)
            optimizer.zero_grad()
            for with_other, group in groups.items():
                x, edge_index, rows, y = concatenated(group)
                out = model(x, edge_index, with_other)[rows]
                (F.cross_entropy(out, y, reduction="sum") / total).backward()
            gradients = gradients or _gradients(model)
            optimizer.step()
    return Found(initial, gradients, _final(model, optimizer))


def _optimizer(model: nn.Module, momentum: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=0.01)


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: _whole(value.detach()) for name, value in model.state_dict().items()}


def _whole(value: Tensor) -> Tensor:
    """A copy of a tensor, of a sharded one the whole of it."""
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


def _final(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor | None]:
    moments = {
        f"momentum of {name}": optimizer.state.get(parameter, {}).get("momentum_buffer")
        for name, parameter in model.named_parameters()
    }
    whole = {name: None if each is None else _whole(each) for name, each in moments.items()}
    return {**_copy(model), **whole}


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else _whole(p.grad) for name, p in model.named_parameters()
    }


def _inspect(parallel: Parallel) -> None:
    model = Net()
    wrapped = wrap(model, parallel)
    assert is_parallel_module(wrapped)
    assert wrapped.module is model, "the module must be used, not copied"
    batch = batch_of(0, 0, 3)
    with torch.no_grad():
        assert torch.equal(wrapped(batch.x, batch.edge_index), model(batch.x, batch.edge_index))


def _refuse(parallel: Parallel) -> None:
    model = wrap(Net(), parallel)
    batch = batch_of(0, 0, 3)
    loss = F.cross_entropy(model(batch.x, batch.edge_index)[:3], batch.y)
    with pytest.raises(ValueError, match="num_seeds must not be negative"):
        model.backward(loss, -1)
    with pytest.raises(ValueError, match="does not come from the model"):
        model.backward(torch.tensor(1.0), 3)
    model.backward(loss, 3)
    loss = F.cross_entropy(model(batch.x, batch.edge_index)[:3], batch.y)
    with pytest.raises(RuntimeError, match="zero_grad"):
        model.backward(loss, 3)
    with pytest.raises(TypeError, match="join"), model.join():
        pass
    with pytest.raises(TypeError, match="join"), model.join("optimizer"):
        pass
