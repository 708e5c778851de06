"""PyG's NodeLoader, kept: its class, names, attributes, and the code that relies on them."""

from __future__ import annotations

import copy
import inspect
import threading
from typing import Any

import pytest
import torch
import torch_geometric.loader as pyg
from torch_geometric.data import Data
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

import pyg_scale.loader
from pyg_scale.loader import NeighborLoader, NodeLoader, resolve
from pyg_scale.sampler.base import NeighborSampler
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same

EXTRAS = {"seed", "worker_type", "feature_store", "split_seeds", "uneven", "split_batches", "comm"}


def test_every_name_of_pygs_loaders_can_be_imported() -> None:
    assert set(pyg_scale.loader.__all__) >= set(pyg.__all__)
    for name in {*pyg.__all__, "RandomNodeSampler"}:
        ours, theirs = getattr(pyg_scale.loader, name), getattr(pyg, name)
        assert ours is theirs or (ours.__name__ == name and issubclass(ours, theirs))


@pytest.mark.parametrize("name", ["NodeLoader", "NeighborLoader"])
def test_pygs_parameters_in_pygs_order_and_with_its_defaults(name: str) -> None:
    ours = inspect.signature(getattr(pyg_scale.loader, name)).parameters
    theirs = inspect.signature(getattr(pyg, name)).parameters
    positional = [p for p in ours.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [p.name for p in positional] == list(theirs)
    assert [p.default for p in positional] == [p.default for p in theirs.values()]
    own = {"redraw", "time_window", "strictly_earlier"}
    extras = EXTRAS | own if name == "NeighborLoader" else EXTRAS
    assert {n for n, p in ours.items() if p.kind is inspect.Parameter.KEYWORD_ONLY} == extras


def test_is_an_instance_of_pygs_classes_and_says_its_name() -> None:
    loader = NeighborLoader(graphs.hostile(), [2])
    assert isinstance(loader, pyg.NeighborLoader) and isinstance(loader, NodeLoader)
    assert isinstance(loader, pyg.NodeLoader) and isinstance(loader, torch.utils.data.DataLoader)
    assert isinstance(loader, pyg.AffinityMixin)
    assert repr(loader) == "NeighborLoader()"
    assert repr(NodeLoader(loader.data, loader.node_sampler)) == "NodeLoader()"
    assert not isinstance(NodeLoader(loader.data, loader.node_sampler), NeighborLoader)


def test_the_attributes_that_other_code_reads() -> None:
    data, nodes = graphs.hostile(), torch.tensor([4, 9])
    time, name = torch.tensor([3, 4]), torch.tensor([40, 90])
    sampler = NeighborLoader(data, [2], time_attr="time").node_sampler
    loader = NodeLoader(data, sampler, nodes, time, copy.copy, copy.copy, False, None, name)
    assert loader.data is data and loader.node_sampler is sampler
    assert loader.input_nodes is nodes and loader.input_time is time and loader.input_id is name
    assert loader.transform is copy.copy and loader.transform_sampler_output is copy.copy
    assert loader.filter_per_worker is False and loader.custom_cls is None
    assert isinstance(loader.input_data, NodeSamplerInput)
    assert loader.input_data.node.tolist() == [4, 9] and loader.input_data.input_type is None
    assert loader.dataset == range(2) and len(loader) == 2
    (batch,) = NodeLoader(data, sampler, nodes, time, input_id=name, batch_size=5)
    assert batch.input_id.tolist() == [40, 90] and batch.seed_time.tolist() == [3, 4]


def test_collate_fn_and_filter_fn_are_the_two_halves() -> None:
    loader = NeighborLoader(graphs.hostile(), [3], seed=1, filter_per_worker=False)
    out = loader.collate_fn([4, 9])
    assert isinstance(out, SamplerOutput)
    assert_same(loader.filter_fn(out), loader([4, 9]))
    loader.filter_per_worker = True  # as PyG's ZipLoader does
    assert_same(loader.collate_fn([4, 9]), loader([4, 9]))
    assert_same(loader.collate_fn(torch.tensor([4, 9])), loader([4, 9]))


@pytest.mark.parametrize(
    "kwargs", [{"num_workers": 2}, {"num_workers": 2, "worker_type": "process"}], ids=str
)
def test_a_subclass_may_override_either_half(kwargs: dict[str, Any]) -> None:
    class Marking(NeighborLoader):
        def filter_fn(self, out: Any) -> Any:
            data = super().filter_fn(out)
            data.transformed_before = data.transformed
            data.mark = 1
            return data

    class Dropping(NeighborLoader):
        def collate_fn(self, index: Any) -> Any:
            batch = super().collate_fn(index)
            batch.size_seen = len(index)
            return batch

    def transform(data: Data) -> Data:
        data.transformed = 1
        return data

    graph = graphs.hostile()
    marked = list(Marking(graph, [3], batch_size=9, transform=transform, seed=1, **kwargs))
    assert all(b.mark == b.transformed_before == 1 for b in marked)
    expected = NeighborLoader(graph, [3], batch_size=9, seed=1)
    for a, b in zip(expected, marked, strict=True):
        assert torch.equal(a.n_id, b.n_id)
    dropped = Dropping(graph, [3], batch_size=9, seed=1, **kwargs)
    assert [b.size_seen for b in dropped] == [9] * 11 + [1]


def test_a_transform_of_the_sampler_output_comes_first() -> None:
    def only_seeds(out: SamplerOutput) -> SamplerOutput:
        seeds = out.metadata[0].numel()
        return SamplerOutput(
            out.node[:seeds], out.row[:0], out.col[:0], out.edge[:0], metadata=out.metadata
        )

    for kwargs in ({}, {"num_workers": 2}, {"num_workers": 1, "worker_type": "process"}):
        loader = NeighborLoader(
            graphs.hostile(), [3], batch_size=9, transform_sampler_output=only_seeds, **kwargs
        )
        for batch in loader:
            assert torch.equal(batch.n_id, batch.input_id)
            assert torch.equal(batch.x, loader.data.x[batch.n_id]) and batch.num_edges == 0


def test_transforms_run_in_order_on_the_consumer() -> None:
    seen = []

    def note(data: Data) -> Data:
        seen.append((threading.current_thread(), int(data.input_id[0])))
        return data

    list(NeighborLoader(graphs.hostile(), [3], batch_size=9, transform=note, num_workers=3))
    assert seen == [(threading.current_thread(), i) for i in range(0, 100, 9)]


def test_data_on_an_accelerator_is_fetched_by_the_consumer() -> None:
    class OnAccelerator(Data):
        @property
        def is_cuda(self) -> bool:
            return True

    data = graphs.hostile()
    assert NeighborLoader(data, [3]).filter_per_worker is True
    moved = NeighborLoader(OnAccelerator(**data.to_dict()), [3], seed=0, num_workers=1)
    assert moved.filter_per_worker is False
    threads = set()

    def noting(out: Any, stats: Any) -> Any:
        threads.add(threading.current_thread())
        return type(moved)._fetch(moved, out, stats)

    moved._fetch = noting  # type: ignore[method-assign]
    for expected, batch in zip(NeighborLoader(data, [3], seed=0), moved, strict=True):
        assert torch.equal(expected.x, batch.x)
    assert threads == {threading.current_thread()}


class Keyless(BaseSampler):
    def sample_from_nodes(self, index: Any, **kwargs: Any) -> SamplerOutput:
        none = torch.empty(0, dtype=torch.int64)
        return SamplerOutput(index.node, none, none, none, metadata=(index.input_id, index.time))

    def sample_from_edges(self, index: Any, **kwargs: Any) -> SamplerOutput:
        raise NotImplementedError


class Keyed(Keyless):
    def sample_from_nodes(self, index: Any, key: int = 0, **kwargs: Any) -> SamplerOutput:
        out = super().sample_from_nodes(index)
        out.node_attrs = {"key": torch.full((len(index.node),), key >> 1)}
        return out


def test_profilers_see_each_step_as_that_of_a_data_loader() -> None:
    loader = NeighborLoader(graphs.hostile(), [2], batch_size=7, seed=3)
    with torch.profiler.profile() as found:
        assert sum(1 for _ in loader) == len(loader)
    name = "enumerate(DataLoader)#NeighborLoader.__next__"
    assert sum(event.name == name for event in found.events()) == len(loader) + 1  # the end, too
    with torch.autograd.profiler.profile() as found:
        next(iter(loader))
    assert sum(event.name == name for event in found.function_events) == 1


def test_samplers_with_and_without_keys() -> None:
    data = graphs.hostile()
    assert NodeLoader(data, Keyless(), num_workers=1).worker_type == "process"
    assert NodeLoader(data, Keyed(), num_workers=1).worker_type == "thread"
    with pytest.raises(ValueError, match="worker_type='thread' is impossible: Keyless draws from"):
        NodeLoader(data, Keyless(), num_workers=1, worker_type="thread")
    keys = {int(b.key[0]) for b in NodeLoader(data, Keyed(), batch_size=10, num_workers=2)}
    assert len(keys) == 10


def test_samplers_by_name_class_and_instance() -> None:
    data = graphs.hostile()

    class Mine(type(NeighborLoader(data, [1]).node_sampler)):  # type: ignore[misc]
        pass

    class Foreign(Keyless):
        def __init__(self, data: Any, num_neighbors: Any, **options: Any) -> None:
            self.data, self.num_neighbors, self.options = data, num_neighbors, options

    for given in (Mine, Mine()):
        made = NeighborLoader(data, [4], replace=True, neighbor_sampler=given).node_sampler
        assert type(made) is Mine and isinstance(made, NeighborSampler)
        assert made.replace and made.num_neighbors.values == [4] and made.is_bound
    foreign_made = NeighborLoader(data, [4], replace=True, neighbor_sampler=Foreign).node_sampler
    assert foreign_made.data is data and foreign_made.num_neighbors == [4]
    assert foreign_made.options["replace"] is True
    with pytest.raises(TypeError, match="takes no arguments"):
        resolve.resolve(Keyless, data, "neighbor_sampler", num_neighbors=[4])
