"""Every argument of torch's DataLoader has its meaning, with threads as with processes."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import os
import pickle
import signal
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, get_worker_info
from torch_geometric.data import Data

from pyg_scale.loader import NeighborLoader
from pyg_scale.ops import colptr
from pyg_scale.testing import graphs
from tests import preloaded
from tests.cases import shown
from tests.loader.batches import assert_same_batches


def loader(**kwargs: Any) -> NeighborLoader:
    kwargs = {"num_neighbors": [4, 3], "batch_size": 9, "seed": 5} | kwargs
    return NeighborLoader(graphs.hostile(), **kwargs)


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("pyg_scale-loader")]


def nothing_special(worker_id: int) -> None:
    pass


def where_am_i(data: Data) -> Data:
    info = get_worker_info()
    data.worker = None if info is None else info.id
    data.process = os.getpid()
    return data


def kill_myself(data: Data) -> Data:
    if data.input_id[0] == 27:
        os.kill(os.getpid(), signal.SIGKILL)
    return data


def test_every_argument_of_the_installed_torch_is_taken() -> None:
    defaults = {
        name: p.default
        for name, p in inspect.signature(DataLoader.__init__).parameters.items()
        if p.default is not inspect.Parameter.empty and name != "collate_fn"
    }
    assert_same_batches(loader(), loader(**{**defaults, "batch_size": 9}))


def test_dataset_and_collate_fn_are_ignored_for_those_who_build_loaders_again() -> None:
    assert_same_batches(loader(), loader(dataset=range(3), collate_fn=print))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batch_size_and_drop_last(num_workers: int) -> None:
    whole, cut = loader(num_workers=num_workers), loader(drop_last=True, num_workers=num_workers)
    assert (len(whole), len(cut)) == (12, 11)
    assert [b.batch_size for b in whole] == [9] * 11 + [1]
    assert [b.batch_size for b in cut] == [9] * 11
    assert len(iter(whole)) == 12


def test_without_batches_every_seed_is_one() -> None:
    single = loader(batch_size=None)
    assert len(single) == 100
    assert [b.input_id.tolist() for b in single] == [[i] for i in range(100)]
    lists = loader(batch_size=None, sampler=[[3, 4], [5]])
    assert [b.input_id.tolist() for b in lists] == [[3, 4], [5]]


def test_shuffle_shows_in_the_sampler_as_lightning_looks_for_it() -> None:
    assert isinstance(loader(shuffle=True).sampler, RandomSampler)
    assert isinstance(loader().sampler, SequentialSampler)
    shuffled = loader(shuffle=True)
    assert sorted(shuffled.sampler) == list(range(100))
    assert len(shuffled.sampler) == 100
    seen = [i for batch in shuffled.batch_sampler for i in batch]
    assert sorted(seen) == list(range(100)) and seen != sorted(seen)


def test_sampler_and_shuffle_exclude_each_other_as_in_torch() -> None:
    with pytest.raises(ValueError, match="mutually exclusive"):
        loader(sampler=[1], shuffle=True)
    with pytest.raises(ValueError, match="mutually exclusive"):
        loader(batch_sampler=[[1]])


def test_worker_info_is_none_in_threads_and_torchs_in_processes() -> None:
    seen = list(loader(transform=where_am_i, num_workers=2))
    assert {(b.worker if "worker" in b else None, b.process) for b in seen} == {(None, os.getpid())}
    inside = list(loader(transform=where_am_i, num_workers=2, worker_type="process"))
    assert {b.worker for b in inside} == {0, 1}
    assert os.getpid() not in {b.process for b in inside}


def test_worker_init_fn_and_multiprocessing_context_mean_processes() -> None:
    assert loader(num_workers=2).worker_type == "thread"
    assert loader(num_workers=2, worker_init_fn=nothing_special).worker_type == "process"
    assert loader(num_workers=2, multiprocessing_context="fork").worker_type == "process"
    for name, value in (("worker_init_fn", nothing_special), ("multiprocessing_context", "fork")):
        with pytest.raises(ValueError, match=f"{name} is about worker processes"):
            loader(num_workers=2, worker_type="thread", **{name: value})


def test_worker_init_fn_runs_in_every_worker_process(tmp_path: Any) -> None:
    def note(worker_id: int) -> None:
        (tmp_path / str(worker_id)).write_text(str(os.getpid()))

    assert_same_batches(loader(), loader(num_workers=2, worker_init_fn=note))
    found = {p.name: int(p.read_text()) for p in tmp_path.iterdir()}
    assert found.keys() == {"0", "1"}
    assert len({*found.values(), os.getpid()}) == 3


@pytest.mark.slow
def test_spawned_processes() -> None:
    spawned = loader(num_workers=1, multiprocessing_context="spawn", shuffle=True)
    with preloaded.spawning():
        assert_same_batches(loader(shuffle=True), spawned)


def test_prefetch_factor_bounds_what_is_ahead() -> None:
    taken: list[int] = []

    class Noting(list):
        def __iter__(self) -> Any:
            for entry in super().__iter__():
                taken.append(entry)
                yield entry

    for workers, factor, ahead in ((1, None, 2), (2, 3, 6), (1, 1, 1)):
        taken.clear()
        sampler = Noting(range(50))
        iterator = iter(
            loader(batch_size=1, sampler=sampler, num_workers=workers, prefetch_factor=factor)
        )
        assert len(taken) == ahead
        next(iterator)
        assert len(taken) == ahead + 1


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_persistent_workers_stay_between_epochs(worker_type: str) -> None:
    kept = loader(num_workers=2, persistent_workers=True, worker_type=worker_type)
    epochs = loader()

    def workers() -> Any:
        if worker_type == "thread":
            return kept._threads.native_ids
        return [w.pid for w in kept._processes._iterator._workers]

    assert_same_batches(epochs, kept)
    first = workers()
    next(iter(kept))  # an epoch that is given up
    next(iter(epochs))
    assert_same_batches(epochs, kept)
    assert workers() == first and len(first) == 2
    if worker_type == "thread":
        del kept
        assert not threads()


def test_with_persistent_processes_an_older_iterator_ends() -> None:
    kept = loader(num_workers=1, persistent_workers=True, worker_type="process")
    old = iter(kept)
    next(old)
    new = iter(kept)
    with pytest.raises(RuntimeError, match="ended when another one"):
        next(old)
    assert len(list(new)) == 12


def test_timeout_names_the_batch_and_the_stage() -> None:
    release = threading.Event()

    class Slow(NeighborLoader):
        def _fetch(self, out: Any, stats: Any) -> Any:
            if out.metadata[0][0] == 18:
                release.wait(20)
            return super()._fetch(out, stats)

    stuck = iter(Slow(graphs.hostile(), [2], batch_size=9, num_workers=1, timeout=1.0))
    next(stuck), next(stuck)
    with pytest.raises(RuntimeError, match="batch 2 of epoch 0 was not ready .* stage 'fetch'"):
        next(stuck)
    release.set()
    assert len(list(stuck)) == 10


def test_timeout_with_processes_is_torchs() -> None:
    def sleep(data: Data) -> Data:
        time.sleep(3)
        return data

    slow = loader(num_workers=1, timeout=0.3, worker_type="process", transform=sleep)
    with pytest.raises(RuntimeError, match=r"timed out after 0\.3 seconds"):
        next(iter(slow))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="is about machines without one")
@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}], ids=str)
def test_pin_memory_without_an_accelerator_warns_as_torch_does(workers: dict[str, int]) -> None:
    with pytest.warns(UserWarning, match="no accelerator is found"):
        pinned = list(loader(pin_memory=True, **workers))
    assert_same_batches(loader(), pinned)
    assert not pinned[0].x.is_pinned()


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "transform": where_am_i},
        {"num_workers": 2, "filter_per_worker": False},
    ],
    ids=shown,
)
def test_pinning_comes_last_and_keeps_destination_pointers(
    kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a copy in place of torch's pinned copy, which needs an accelerator."""
    pinned_in = []

    def copy_instead(batch: Data) -> Data:
        pinned_in.append(threading.current_thread())
        batch = batch.clone()
        batch.pinned_with = sorted(name for name, _ in batch)
        return batch

    monkeypatch.setattr("pyg_scale.loader.batch.placement.pins", lambda loader: loader.pin_memory)
    monkeypatch.setattr("pyg_scale.loader.batch.pin.pin_memory", copy_instead)
    pinned = loader(pin_memory=True, **kwargs)
    for batch in pinned:
        assert colptr.recall(batch.edge_index) is not None
        assert ("process" in batch.pinned_with) == ("transform" in kwargs)
        assert {"x", "batch_size", "input_id"} <= set(batch.pinned_with)
    stats = pinned.stats()["epoch"]["pin"]
    assert stats["rows"] == 12 and stats["bytes"] > 0 and stats["seconds"] > 0
    in_consumer = kwargs.get("num_workers", 0) == 0 or len(kwargs) > 1
    assert ({threading.current_thread()} == set(pinned_in)) == in_consumer


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "transform": copy.copy},
        {"num_workers": 2, "filter_per_worker": False},
        {"num_workers": 2, "worker_type": "process"},
        {"num_workers": 2, "worker_type": "process", "filter_per_worker": False},
    ],
    ids=shown,
)
def test_pin_memory(kwargs: dict[str, Any]) -> None:
    pinned = list(loader(pin_memory=True, **kwargs))
    assert_same_batches(loader(), pinned)
    for batch in pinned:
        tensors = [batch[name] for name in ("x", "edge_index", "n_id", "e_id")]
        assert all(tensor.is_pinned() for tensor in tensors if tensor.numel())
    if "worker_type" not in kwargs:
        assert all(colptr.recall(batch.edge_index) is not None for batch in pinned)


def test_in_order_false_gives_every_batch() -> None:
    found = list(loader(num_workers=2, in_order=False))
    assert sorted(int(b.input_id[0]) for b in found) == list(range(0, 100, 9))


@pytest.mark.parametrize("persistent", [False, True])
def test_processes_end_as_soon_as_nobody_holds_them(persistent: bool) -> None:
    gc.disable()
    try:
        used = loader(num_workers=2, worker_type="process", persistent_workers=persistent)
        iterator = iter(used)
        next(iterator)
        workers = iterator._source._processes._iterator._workers
        del iterator, used
        assert [w.exitcode for w in workers] == [0, 0]  # and were not killed
    finally:
        gc.enable()


def test_processes_end_after_an_error() -> None:
    def fail(batch: Any) -> Any:
        raise LookupError("from a worker")

    gc.disable()
    try:
        iterator = iter(loader(num_workers=1, worker_type="process", transform=fail))
        workers = iterator._source._processes._iterator._workers
        with contextlib.suppress(LookupError):
            next(iterator)
        del iterator
        assert [w.exitcode for w in workers] == [0]
    finally:
        gc.enable()


def test_early_exit_leaves_no_thread() -> None:
    for _ in loader(num_workers=2):
        break
    assert not threads()
    with contextlib.suppress(LookupError):
        for _ in loader(num_workers=2):
            raise LookupError
    assert not threads()
    iterator = iter(loader(num_workers=2))
    next(iterator)
    assert len(threads()) == 2
    iterator.close()
    assert not threads()


def test_a_loader_that_nobody_holds_is_gone_without_the_cycle_collector() -> None:
    gc.disable()
    try:
        threaded = {"num_workers": 2}
        forked = {"num_workers": 1, "worker_type": "process"}
        kept = {"persistent_workers": True}
        for workers in ({}, threaded, threaded | kept, forked, forked | kept):
            used = loader(**workers)
            for _ in used:
                pass
            gone, data = weakref.ref(used), weakref.ref(used.data)
            del used
            assert gone() is None and data() is None
    finally:
        gc.enable()


def test_batches_are_held_by_nobody_else() -> None:
    for workers in ({}, {"num_workers": 2}):
        iterator = iter(loader(**workers))
        for _ in range(3):
            alive = weakref.ref(next(iterator))
            deadline = time.monotonic() + 30
            while alive() is not None and time.monotonic() < deadline:
                time.sleep(0.01)  # a worker may be between two statements
            assert alive() is None


def test_a_killed_worker_process_is_an_error() -> None:
    kept = loader(
        num_workers=1, worker_type="process", transform=kill_myself, persistent_workers=True
    )
    with pytest.raises(RuntimeError, match="exited unexpectedly|killed by signal"):
        list(kept)
    kept.transform = None  # and the next epoch starts new processes
    assert len(list(kept)) == 12


def test_a_pickled_loader_goes_on_where_it_was() -> None:
    original = loader(num_workers=2, persistent_workers=True, shuffle=True)
    list(original)
    again = pickle.loads(pickle.dumps(original))
    assert again.epoch == 1
    assert_same_batches(original, again)
    assert_same_batches(copy.copy(original), again)


def test_stats_count_every_stage() -> None:
    def identity(data: Data) -> Data:
        return data

    for workers in ({}, {"num_workers": 2}, {"num_workers": 1, "worker_type": "process"}):
        counted = loader(transform=identity, **workers)
        assert counted.stats()["total"]["batches"] == 0
        iterator = iter(counted)
        seen = [next(iterator) for _ in range(3)]
        stats = counted.stats()
        assert stats["epoch"] == stats["total"]
        epoch = stats["epoch"]
        assert epoch["batches"] == 3
        assert epoch["sample"]["rows"] == sum(b.edge_index.size(1) for b in seen)
        nodes, edges = sum(b.num_nodes for b in seen), sum(b.num_edges for b in seen)
        # x, y and time of nodes; when, weight and edge_attr of edges
        assert epoch["fetch"]["rows"] == 3 * nodes + 3 * edges
        assert epoch["fetch"]["bytes"] == nodes * (6 * 4 + 8 + 8) + edges * (8 + 4 + 8)
        assert epoch["transform"]["rows"] == 3
        assert epoch["pin"] == {"seconds": 0, "bytes": 0, "rows": 0}
        assert all(epoch[stage]["seconds"] > 0 for stage in ("sample", "fetch", "transform"))
        assert (epoch["wait"]["seconds"] > 0) == bool(workers)
        list(counted)
        assert counted.stats()["epoch"]["batches"] == 12
        assert counted.stats()["total"]["batches"] == 15
        del iterator
