"""Conformance of parallel wrappers that divide a graph: several ranks against the whole graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch_geometric.data import Data

import pyg_scale
from pyg_scale.comm import connect
from pyg_scale.parallel import GraphParallel, is_parallel_module, wrap
from pyg_scale.testing.parallel import CHANNELS, CLASSES, TOLERANCE, Net
from pyg_scale.testing.processes import WaitingProcesses

NODES, APART, STEPS = 40, 30, 3
LIMIT = 60.0

CUTS = ("random", "empty", "apart", "untrained")
"""Ways in which the kit cuts its graph, into three parts or more."""


class Mesh(NamedTuple):
    """Dimensions of a ``DeviceMesh``: ``shapes[number of ranks]`` are their sizes."""

    names: tuple[str, ...]
    shapes: Mapping[int, tuple[int, ...]]

    def made(self) -> DeviceMesh:
        """The mesh of all ranks."""
        shape = self.shapes[dist.get_world_size()]
        return init_device_mesh("cpu", shape, mesh_dim_names=self.names)


class Found(NamedTuple):
    """The results of a rank."""

    own_nodes: Tensor
    out: Tensor
    gradients: dict[str, Tensor | None]
    final: dict[str, Tensor]


def graph_to_cut() -> Data:
    """A graph with self-loops, parallel edges, isolated nodes, and a component from node 30 on."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(APART - 3, (2, 150), generator=generator)
    second = torch.randint(APART, NODES, (2, 40), generator=generator)
    edge_index = torch.cat([first, first[:, :9], second], dim=1)
    x = torch.randn(NODES, CHANNELS, dtype=torch.float64, generator=generator)
    y = torch.randint(CLASSES, (NODES,), generator=generator)
    train_mask = torch.rand(NODES, generator=generator) < 0.6
    return Data(x=x, edge_index=edge_index, y=y, train_mask=train_mask)


def cut(name: str) -> tuple[Data, Tensor, int]:
    """The graph, the part ``[num_nodes]`` of each node, and the number of parts.

    ``"random"`` has four parts. In the others part 1 is special: ``"empty"`` it has no nodes,
    ``"apart"`` no neighbours in other parts, ``"untrained"`` no training nodes.
    """
    data = graph_to_cut()
    part = torch.randint(4, (NODES,), generator=torch.Generator().manual_seed(1))
    if name == "random":
        return data, part, 4
    part = part % 3
    if name == "empty":
        part[part == 1] = 2
    elif name == "apart":
        part[part == 1] = 0
        part[APART:] = 1
    else:
        data.train_mask &= part != 1
    return data, part, 3


class GraphParallelTests:
    """Tests of a parallel wrapper that divides a graph.

    ``parallel`` is an instance of :class:`~pyg_scale.parallel.GraphParallel`; it is sent to
    processes, so it must be possible to pickle it. The kit cuts a small graph in several ways.

    * ``world_sizes``: Possible numbers of ranks.
    * ``one_part_each``: Whether every rank needs a part of its own.
    * ``mesh``: The sizes of the dimensions of a ``DeviceMesh`` by number of ranks, and their names;
      wrappers of one dimension get none. Every node must be one rank's own.

    Example::

        class TestMine(GraphParallelTests):
            @pytest.fixture
            def parallel(self):
                return MyGraphParallel()
    """

    world_sizes: tuple[int, ...] = (1, 2, 3)
    one_part_each: bool = True
    mesh: Mesh | None = None

    @pytest.fixture
    def parallel(self) -> GraphParallel:
        """The wrapper."""
        raise NotImplementedError("return an instance, such as MyGraphParallel()")

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(cls) -> Iterator[WaitingProcesses]:
        """The processes, started once for the class."""
        with WaitingProcesses(max(cls.world_sizes), LIMIT) as started:
            yield started

    @pytest.mark.parametrize("name", CUTS)
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_ranks_compute_what_one_process_does(
        self, parallel: GraphParallel, ranks: Any, name: str, size: int, tmp_path: Path
    ) -> None:
        if size not in self.world_sizes:
            pytest.skip(f"there cannot be {size} ranks")
        data, assignment, parts = cut(name)
        path = tmp_path / "parts"
        pyg_scale.partition(data, parts, path=path, assignment=assignment)
        found = ranks.run(_train, parallel, str(path), self.mesh, world_size=size)
        owned = torch.cat([each.own_nodes for each in found])
        assert torch.equal(owned.sort().values, torch.arange(NODES)), "a node is no rank's or two's"
        for rank, each in enumerate(found):
            for name, value in each.final.items():
                assert torch.equal(value, found[0].final[name]), f"{name} of rank {rank} at the end"
        if parallel.exact:
            alone = _train_alone(data)
            out = torch.cat([each.out for each in found])
            _assert_close("the output", out, alone.out[owned])
            for name, gradient in alone.gradients.items():
                _assert_close(f"the gradient of {name}", found[0].gradients[name], gradient)
            for name, value in alone.final.items():
                _assert_close(f"{name} at the end", found[0].final[name], value)

    def test_what_is_returned_is_the_module_and_more(
        self, parallel: GraphParallel, ranks: Any, tmp_path: Path
    ) -> None:
        path = _write(tmp_path)
        ranks.run(_inspect, parallel, path, world_size=1)

    def test_bad_input_is_refused(
        self, parallel: GraphParallel, ranks: Any, tmp_path: Path
    ) -> None:
        path = _write(tmp_path)
        ranks.run(_refuse, parallel, path, world_size=1)

    def test_fewer_parts_than_ranks_are_refused_on_every_rank(
        self, parallel: GraphParallel, ranks: Any, tmp_path: Path
    ) -> None:
        if not self.one_part_each:
            pytest.skip("a rank needs no part of its own")
        data, assignment, _ = cut("random")
        size, path = max(self.world_sizes), tmp_path / "parts"
        pyg_scale.partition(data, size - 1, path=path, assignment=assignment % (size - 1))
        ranks.run(_refuse_few, parallel, str(path), world_size=size)


@contextmanager
def opened(path: str) -> Iterator[Any]:
    """The graph at a path, opened by all ranks.

    Ranks of a kit have not all made the same connections, so that this one needs a name.
    """
    with connect(timeout=LIMIT, name="graph") as comm, pyg_scale.open(path, comm=comm) as graph:
        yield graph


def _write(tmp_path: Path) -> str:
    data, assignment, parts = cut("random")
    path = tmp_path / "parts"
    pyg_scale.partition(data, parts, path=path, assignment=assignment)
    return str(path)


def _assert_close(what: str, found: Tensor | None, expected: Tensor | None) -> None:
    assert (found is None) == (expected is None), f"{what}: one is missing"
    if found is None or expected is None or not expected.numel():
        return
    scale = max(1.0, float(expected.abs().max()))
    difference = float((found - expected).abs().max())
    assert difference <= TOLERANCE * scale, f"{what} differs by {difference:g}"


def _net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def _train(parallel: GraphParallel, path: str, mesh: Mesh | None) -> Found:
    """Three steps on one of several ranks; each begins with different parameters."""
    with opened(path) as graph:
        made = None if mesh is None else mesh.made()
        model = wrap(_net(dist.get_rank()), parallel, graph=graph, mesh=made)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        own = model.own_nodes
        trains = graph.train_mask[own]
        for step in range(STEPS):
            optimizer.zero_grad()
            out = model()
            losses = F.cross_entropy(out, graph.y[own], reduction="none")
            loss = (losses * trains).sum() / trains.sum()  # NaN on a rank without training nodes
            model.backward(loss, int(trains.sum()))
            if step == 0:
                first, gradients = out.detach().clone(), _gradients(model.module)
            optimizer.step()
        return Found(own, first, gradients, _state(model.module))


def _train_alone(data: Data) -> Found:
    """Three steps on the whole graph, in one process."""
    with torch.random.fork_rng(devices=[]):
        model = _net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        if step == 0:
            first, gradients = out.detach().clone(), _gradients(model)
        optimizer.step()
    return Found(torch.arange(NODES), first, gradients, _state(model))


def _gradients(model: Net) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def _state(model: Net) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _inspect(parallel: GraphParallel, path: str) -> None:
    model, names = _net(0), list(Net().state_dict())
    with opened(path) as graph:
        wrapped = wrap(model, parallel, graph=graph)
        assert is_parallel_module(wrapped)
        assert wrapped.module is model, "the module must be used, not copied"
        assert list(wrapped.state_dict()) == names, "keys of the state must be those of the module"
        wrapped.load_state_dict(model.state_dict())
        own = wrapped.own_nodes
        assert own.dtype == torch.int64 and own.dim() == 1
        with torch.no_grad():
            out = wrapped()
            assert out.shape == (own.numel(), CLASSES)
            again = wrapped(x=graph.x[own])
            doubled = wrapped(x=2 * graph.x[own])
        if parallel.exact:
            assert torch.equal(again, out) and not torch.equal(doubled, out)
            expected = _net(0)(graph.x, graph.edge_index)
            assert torch.allclose(out, expected[own], rtol=0, atol=TOLERANCE)


def _refuse(parallel: GraphParallel, path: str) -> None:
    with opened(path) as graph:
        with pytest.raises(TypeError, match="graph"):
            wrap(Net(), parallel)
        with pytest.raises(TypeError, match="graph"):
            wrap(Net(), parallel, graph=graph_to_cut())
        with pytest.raises(ValueError, match="colour"):
            wrap(Net(), parallel, graph=graph, inputs=("colour", "edge_index"))
        model = wrap(Net(), parallel, graph=graph)
        loss = model().square().mean()
        with pytest.raises(ValueError, match="num_seeds must not be negative"):
            model.backward(loss, -1)
        with pytest.raises(ValueError, match="does not come from the model"):
            model.backward(torch.tensor(1.0), 3)
        model.backward(loss, 3)
        with pytest.raises(RuntimeError, match="zero_grad"):
            model.backward(model().square().mean(), 3)
        with pytest.raises(ValueError, match=r"x.*rows"):
            model(x=graph.x[model.own_nodes][:-1])
        with pytest.raises(TypeError, match="colour"):
            model(colour=graph.x)


def _refuse_few(parallel: GraphParallel, path: str) -> None:
    with opened(path) as graph, pytest.raises(ValueError, match=r"parts.*ranks"):
        wrap(Net(), parallel, graph=graph)
