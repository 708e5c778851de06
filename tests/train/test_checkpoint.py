"""A run is saved and loaded as a whole, in one process and on ranks that are threads."""

from __future__ import annotations

import json
import os
import random
import threading
import time
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from pyg_scale.comm.gloo import Gloo
from pyg_scale.datasets import planted_communities
from pyg_scale.errors import CheckpointError
from pyg_scale.loader import NeighborLoader
from pyg_scale.testing.ranks import run_ranks
from pyg_scale.train import Checkpoint, Resumed
from pyg_scale.train import folders as checkpoint_folders
from pyg_scale.train.storage import Reader


class Counter:
    """Something of the user's own."""

    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def folders(path):
    return sorted(each.name for each in Path(path).iterdir())


def parts(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def train(state, steps):
    """Steps that depend on everything: parameters, moments, rates and random numbers."""
    for _ in range(steps):
        x = torch.randn(5, 4) + float(np.random.rand()) + random.random()
        state["optimizer"].zero_grad()
        state["model"](x).square().sum().backward()
        state["optimizer"].step()
        state["schedule"].step()


def assert_equal(found, expected):
    for a, b in zip(found.state_dict().values(), expected.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_resumed_goes_on_as_if_it_had_not_stopped(tmp_path, asynchronous):
    whole = parts()
    with Checkpoint(tmp_path, whole, asynchronous=asynchronous) as checkpoint:
        assert checkpoint.load() == Resumed(0, {}, None)
        train(whole, 4)
        checkpoint.save(4, best=0.25, curve=[torch.tensor([1.0, 2.0])])
        train(whole, 6)  # while the first four are written
    resumed = parts(seed=1)
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    with Checkpoint(tmp_path, resumed) as checkpoint:
        found = checkpoint.load()
        assert (found.step, found.values["best"]) == (4, 0.25)
        assert found.path == tmp_path / "000001-step-4"
        assert found.values["curve"][0].tolist() == [1.0, 2.0]
        train(resumed, 6)
    assert_equal(resumed["model"], whole["model"])
    assert str(resumed["optimizer"].state_dict()) == str(whole["optimizer"].state_dict())
    assert resumed["schedule"].get_last_lr() == whole["schedule"].get_last_lr()


def test_a_loader_goes_on_in_the_middle_of_an_epoch(tmp_path):
    data = planted_communities(300, 3_000, 4, 8)

    def loader():
        return NeighborLoader(data, [3, 2], batch_size=32, shuffle=True, seed=3, num_workers=1)

    first = loader()
    expected = [batch.n_id for _ in range(2) for batch in first]
    first, found = loader(), []
    with Checkpoint(tmp_path, {"loader": first}, every=3, random_state=False) as checkpoint:
        for step, batch in enumerate(first, 1):
            found.append(batch.n_id)
            checkpoint.step(step)
            if step == 7:
                break
    del found[6:]  # the last checkpoint is that of step 6
    second = loader()
    with Checkpoint(tmp_path, {"loader": second}, random_state=False) as checkpoint:
        assert checkpoint.load().step == 6
        while second.epoch < 2:
            found += [batch.n_id for batch in second]
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_the_last_ones_are_kept_and_what_is_left_half_written_goes(tmp_path):
    counter = Counter()
    (tmp_path / ".writing-000009-step-9").mkdir()
    with Checkpoint(tmp_path, {"counter": counter}, every=2, keep_last=2) as checkpoint:
        for step in range(1, 10):
            counter.count = step
            checkpoint.step(step)
    assert folders(tmp_path) == ["000003-step-6", "000004-step-8"]


def test_after_going_back_what_follows_is_the_newest(tmp_path):
    with Checkpoint(tmp_path, {"counter": Counter(1)}, keep_last=3) as checkpoint:
        checkpoint.save(10)
        checkpoint.save(20)
    (tmp_path / "000002-step-20" / "rank-0.json").write_text("{")
    counter = Counter()
    with Checkpoint(tmp_path, {"counter": counter}, keep_last=3) as checkpoint:
        with pytest.warns(RuntimeWarning, match="000002-step-20 is damaged"):
            assert checkpoint.load().step == 10
        counter.count = 2
        checkpoint.save(11)
        assert checkpoint.load().step == 11 and counter.count == 2


# Damage ########################################################################################


def save_two(path, **options):
    state = {"model": nn.Linear(8, 8), "counter": Counter(1)}
    with Checkpoint(path, state, **options) as checkpoint:
        checkpoint.save(1)
        state["counter"].count = 2
        checkpoint.save(2)
    return state


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_damaged_one_does_not_count_among_those_that_are_kept(tmp_path, world_size):
    def save(checkpoint, counter, model):
        for step in range(1, 6):
            checkpoint.save(step)

    on_ranks(world_size, tmp_path, save)
    flip(tmp_path / "000005-step-5" / "rank-0.bin")
    kept = []

    def go_on(checkpoint, counter, model):
        assert checkpoint.load().step == 4
        for step in (5, 6):
            checkpoint.save(step)
            checkpoint.load()
            if checkpoint._ranks.rank == 0:
                kept.append([name[:6] for name in folders(tmp_path)])
            checkpoint._ranks.barrier()

    with pytest.warns(RuntimeWarning, match="000005-step-5 is damaged"):
        on_ranks(world_size, tmp_path, go_on)
    assert kept == [["000004", "000005", "000006"], ["000006", "000007"]]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_last_whole_one_is_not_removed_for_one_that_is_damaged(tmp_path, world_size):
    """A run that never loads finds out as well, before an older checkpoint goes."""
    kept = []

    def save(checkpoint, counter, model):
        own = checkpoint._ranks.rank
        for step in (1, 2, 3):
            checkpoint.save(step)
        checkpoint.wait()
        if own == 0:
            flip(tmp_path / "000003-step-3" / f"rank-{world_size - 1}.json")
        checkpoint._ranks.barrier()
        for step in (4, 5, 6):
            checkpoint.save(step)
            checkpoint.wait()
            if own == 0:
                kept.append([int(name[:6]) for name in folders(tmp_path)])
            checkpoint._ranks.barrier()

    with pytest.warns(RuntimeWarning, match=r"damaged and no longer count.*000003-step-3"):
        on_ranks(world_size, tmp_path, save)
    assert kept == [[2, 3, 4], [4, 5], [5, 6]]


def test_what_was_just_written_is_read_before_the_last_one_goes(tmp_path, monkeypatch):
    save_two(tmp_path, keep_last=1)
    compare = checkpoint_folders.compare

    def disk_that_lies(path, files):
        if path.name.startswith(".writing"):
            flip(path / "rank-0.bin")
        compare(path, files)

    monkeypatch.setattr(checkpoint_folders, "compare", disk_that_lies)
    checkpoint = Checkpoint(tmp_path, {"counter": Counter(1)}, keep_last=1, asynchronous=False)
    with checkpoint, pytest.raises(CheckpointError, match=r"rank-0\.bin is damaged"):
        checkpoint.save(3)
    assert folders(tmp_path) == ["000002-step-2"]


@pytest.mark.parametrize("name", ["rank-0.bin", "rank-0.json", "manifest.json"])
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink], ids=["cut", "flip", "remove"])
def test_a_damaged_one_is_passed_over_with_a_warning_that_names_it(tmp_path, name, damage):
    state = save_two(tmp_path)
    damage(tmp_path / "000002-step-2" / name)
    with Checkpoint(tmp_path, state) as checkpoint:
        with pytest.warns(RuntimeWarning, match=f"000002-step-2 is damaged.*{name}"):
            assert checkpoint.load().step == 1
        assert state["counter"].count == 1


def test_if_none_is_whole_it_does_not_begin_again_silently(tmp_path):
    state = save_two(tmp_path)
    for path in tmp_path.iterdir():
        cut(path / "rank-0.bin")
    with (
        Checkpoint(tmp_path, state) as checkpoint,
        pytest.warns(RuntimeWarning, match="damaged"),
        pytest.raises(CheckpointError, match=r"none of the 2 checkpoints.*rank-0\.bin is damaged"),
    ):
        checkpoint.load()


def test_another_format_is_refused(tmp_path):
    state = save_two(tmp_path, keep_last=1)
    file = tmp_path / "000002-step-2" / "manifest.json"
    content = json.loads(file.read_text())
    del content["checksum"]
    content["format"] = 2
    check = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    file.write_text(json.dumps({**content, "checksum": check}))
    with (
        Checkpoint(tmp_path, state) as checkpoint,
        pytest.warns(RuntimeWarning, match="format 2, this is format 1"),
        pytest.raises(CheckpointError),
    ):
        checkpoint.load()


def test_no_file_is_a_pickle(tmp_path):
    save_two(tmp_path)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".json", ".bin"}
    for file in files:
        if file.suffix == ".json":
            json.loads(file.read_text())
    model = nn.Linear(8, 8)
    size = sum(p.numel() * 4 for p in model.parameters())
    random_states = 5056 + 624 * 4  # torch's and NumPy's
    assert (tmp_path / "000002-step-2" / "rank-0.bin").stat().st_size == size + random_states


def test_a_piece_that_is_nowhere_is_not_memory_that_nobody_wrote(tmp_path):
    save_two(tmp_path, keep_last=1)
    file = tmp_path / "000002-step-2" / "rank-0.json"
    content = json.loads(file.read_text())
    (weight,) = (name for name in content["tensors"] if name.endswith("weight"))
    (chunk,) = content["tensors"][weight]["chunks"]
    for shape, offsets in (([7, 8], [0, 0]), ([7, 8], [1, 0]), ([8, 8], [1, 0])):
        wrong = {**chunk, "shape": shape, "offsets": offsets, "bytes": 4 * shape[0] * shape[1]}
        content["tensors"][weight]["chunks"] = [wrong]
        file.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=f"lacks a piece of '{weight}'"):
            Reader(file.parent).read_metadata()


@pytest.mark.parametrize("name", ["rank-0.bin", "rank-0.json"])
def test_a_fifo_is_no_file_of_a_checkpoint(tmp_path, name):
    state = save_two(tmp_path)
    file = tmp_path / "000002-step-2" / name
    file.unlink()
    os.mkfifo(file)
    warned = pytest.warns(RuntimeWarning, match=f"{name} is not a regular file")
    with Checkpoint(tmp_path, state) as checkpoint, warned:
        assert checkpoint.load().step == 1


def test_torch_reads_it_too(tmp_path):
    state = save_two(tmp_path)
    into = {f"model.{name}": torch.zeros_like(p) for name, p in state["model"].named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no other ranks
        dcp.load(into, storage_reader=Reader(tmp_path / "000002-step-2"), no_dist=True)
    for name, parameter in state["model"].named_parameters():
        assert torch.equal(into[f"model.{name}"], parameter)


# What goes wrong ###############################################################################


def for_long(checkpoint):
    end, step = time.monotonic() + 60, 0
    while time.monotonic() < end:  # steps are faster than the thread that writes may begin
        checkpoint.step(step)
        step += 1


def test_an_error_while_writing_is_raised_by_the_next_call(tmp_path, monkeypatch):
    state = {"counter": Counter()}
    checkpoint = Checkpoint(tmp_path, state)
    checkpoint.save(1)
    checkpoint.wait()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    checkpoint.save(2)
    with pytest.raises(CheckpointError, match=rf"to {tmp_path}: rank 0: .*No space left"):
        checkpoint.wait()
    assert os.listdir(tmp_path) == ["000001-step-1"]  # what is half written takes no room
    checkpoint.save(3)
    with pytest.raises(CheckpointError, match="No space left"):
        for_long(checkpoint)
    monkeypatch.undo()
    assert checkpoint.load().step == 1
    checkpoint.save(4)
    checkpoint.close()
    checkpoint.close()
    assert folders(tmp_path) == ["000001-step-1", "000002-step-4"]


def test_an_error_in_the_loop_is_not_hidden_by_one_of_writing(tmp_path, monkeypatch):
    monkeypatch.setattr("os.rename", lambda *_: 1 / 0)

    def loop():
        with Checkpoint(tmp_path, {"counter": Counter()}) as checkpoint:
            checkpoint.save(1)
            raise KeyError("mine")

    with (
        pytest.warns(RuntimeWarning, match="could not be written"),
        pytest.raises(KeyError, match="mine"),
    ):
        loop()


def test_another_run_is_not_loaded(tmp_path):
    save_two(tmp_path)
    for state, match in (
        ({"model": nn.Linear(8, 8)}, "also has 'counter'"),
        ({"model": nn.Linear(8, 8), "counter": Counter(), "x": Counter()}, "has no 'x'"),
    ):
        with Checkpoint(tmp_path, state) as checkpoint:
            with pytest.raises(CheckpointError, match=match):
                checkpoint.load()
            with pytest.raises(ValueError, match="this run has no 'y'"):
                checkpoint.load(only=["y"])
    model = nn.Linear(8, 8)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with Checkpoint(tmp_path, {"model": model, "x": Counter(7)}) as checkpoint:
        assert checkpoint.load(only=["model"]).step == 2
    assert torch.equal(torch.get_rng_state(), before), "random generators were not asked for"
    other = {"model": nn.Linear(8, 9), "counter": Counter()}
    with Checkpoint(tmp_path, other) as checkpoint, pytest.raises(RuntimeError, match="mismatch"):
        checkpoint.load()


def test_without_random_generators(tmp_path):
    with Checkpoint(tmp_path / "with", {}) as checkpoint:
        checkpoint.save(1)
    with Checkpoint(tmp_path / "without", {}, random_state=False) as checkpoint:
        checkpoint.save(1)
    with Checkpoint(tmp_path / "with", {}, random_state=False) as checkpoint:
        before = torch.get_rng_state()
        torch.rand(1)
        after = torch.get_rng_state()
        assert checkpoint.load().step == 1
        assert torch.equal(torch.get_rng_state(), after) and not torch.equal(before, after)
    with Checkpoint(tmp_path / "without", {}) as checkpoint:
        with pytest.raises(CheckpointError, match="no 'random'.*random_state=False"):
            checkpoint.load()
        assert checkpoint.load(only=[]).step == 1


def test_bad_input_is_refused(tmp_path):
    good = {"counter": Counter()}
    for state, options, error, match in (
        (nn.Linear(1, 1), {}, TypeError, "must be a dictionary"),
        ({"a": 3}, {}, TypeError, r"'a', a int, has no state_dict\(\)"),
        ({"a/b": Counter()}, {}, ValueError, "'a/b' cannot be a name"),
        ({"random": Counter()}, {}, ValueError, "'random' cannot be a name"),
        (good, {"every": 0}, ValueError, "every must be 1 or more"),
        (good, {"keep_last": 0}, ValueError, "keep_last must be 1 or more"),
        (good, {"stop_on": "SIGTERM"}, ValueError, r"list of signals, such as \['SIGTERM'\]"),
        (good, {"stop_on": ["TERM"]}, ValueError, "no signal 'TERM'"),
        (good, {"stop_on": ["SIGKILL"]}, ValueError, "cannot be noticed"),
        (good, {"timeout": 0}, ValueError, "timeout must be above 0"),
    ):
        with pytest.raises(error, match=match):
            Checkpoint(tmp_path, state, **options)
    with Checkpoint(tmp_path, good) as checkpoint:
        with pytest.raises(ValueError, match="step must not be negative"):
            checkpoint.save(-1)
        with pytest.raises(TypeError, match=r"values\.x is a object"):
            checkpoint.save(1, x=object())
    assert not list(tmp_path.iterdir())


def test_signals_are_for_the_main_thread(tmp_path):
    raised = []

    def work():
        try:
            Checkpoint(tmp_path, {}, stop_on=["SIGTERM"])
        except ValueError as error:
            raised.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert "main thread" in raised[0]


# Ranks #########################################################################################


def on_ranks(world_size, path, work):
    """`work(checkpoint, counter, model)` on ranks whose counters differ."""

    def rank_of(group):
        counter, model = Counter(10 + group.rank), nn.Linear(2, 2)
        nn.init.constant_(model.weight, 1.0)
        nn.init.constant_(model.bias, 2.0)
        with Gloo.join(group) as ranks:
            state = {"counter": counter, "model": model}
            made = Checkpoint(path, state, random_state=False, comm=ranks)
            with made as checkpoint:
                found = work(checkpoint, counter, model)
        return found

    return run_ranks(world_size, rank_of)


def test_each_rank_has_its_part_and_modules_are_those_of_rank_0(tmp_path):
    on_ranks(3, tmp_path, lambda checkpoint, counter, model: checkpoint.save(5, note="x"))

    def load(checkpoint, counter, model):
        number, counter.count = counter.count, -1
        nn.init.constant_(model.weight, 9.0)
        found = checkpoint.load()
        assert (found.step, found.values) == (5, {"note": "x"})
        assert counter.count == number
        return float(model.weight.detach().sum())

    assert on_ranks(3, tmp_path, load) == [4.0] * 3


@pytest.mark.parametrize("world_size", [1, 2])
def test_another_number_of_ranks_loads_what_is_the_same_on_all(tmp_path, world_size):
    def save(checkpoint, counter, model):
        checkpoint.save(1)
        checkpoint.wait()
        counter.count = 7
        checkpoint.save(2)

    on_ranks(3, tmp_path, save)

    def load(checkpoint, counter, model):
        checkpoint.load()
        return counter.count

    assert on_ranks(world_size, tmp_path, load) == [7] * world_size
    flip(tmp_path / "000002-step-2" / "manifest.json")
    with pytest.warns(RuntimeWarning, match="damaged"), pytest.raises(ExceptionGroup) as raised:
        on_ranks(world_size, tmp_path, load)
    text = str(raised.value.exceptions[0])
    assert "saved by 3 ranks, whose 'counter' differ" in text and "split_seeds='global'" in text


def test_replicas_that_are_not_one_are_not_saved(tmp_path):
    """Such as those of ranks of which one has made a step more."""

    def work(checkpoint, counter, model):
        if counter.count == 11:
            with torch.no_grad():
                model.bias += 1e-6
        checkpoint.save(1)
        with pytest.raises(CheckpointError, match="'model' on rank 1 are not those of rank 0"):
            checkpoint.wait()

    on_ranks(3, tmp_path, work)
    assert not [name for name in folders(tmp_path) if not name.startswith(".writing")]


def test_ranks_at_different_steps_are_told(tmp_path):
    def work(checkpoint, counter, model):
        checkpoint.save(counter.count)
        with pytest.raises(CheckpointError, match=r"different steps: \[10, 11\]"):
            checkpoint.wait()

    on_ranks(2, tmp_path, work)
    assert not [name for name in folders(tmp_path) if not name.startswith(".writing")]


def test_a_rank_that_cannot_write_is_named_on_all(tmp_path, monkeypatch):
    from pyg_scale.train import writing

    real = writing._write_part

    def write_part(folder, staged, rank):
        if rank == 1:
            raise PermissionError(13, "Permission denied")
        return real(folder, staged, rank)

    monkeypatch.setattr(writing, "_write_part", write_part)

    def work(checkpoint, counter, model):
        checkpoint.save(1)
        with pytest.raises(CheckpointError, match="rank 1: .*Permission denied"):
            checkpoint.wait()
        monkeypatch.undo()
        checkpoint.save(2)

    on_ranks(3, tmp_path, work)
    assert folders(tmp_path) == ["000001-step-2"]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("why", ["raises", "holds a set"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_copy_its_state_is_named_on_all(tmp_path, rank, why, asynchronous):
    """Without waiting for it, which would break the communicator, too."""

    def work(checkpoint, counter, model):
        checkpoint.asynchronous = asynchronous
        mine = counter.state_dict
        if counter.count == 10 + rank:
            counter.state_dict = (lambda: {}["it"]) if why == "raises" else lambda: {"it": {1}}
        with pytest.raises(CheckpointError, match=f"rank {rank}: .*it"):  # noqa: PT012
            checkpoint.save(1)
            assert asynchronous
            checkpoint.wait()
        counter.state_dict = mine
        checkpoint.save(2)

    on_ranks(3, tmp_path, work)
    assert folders(tmp_path) == ["000001-step-2"]


def test_a_folder_that_not_all_ranks_see_is_refused(tmp_path):
    def rank_of(group):
        with Gloo.join(group) as ranks:
            path = tmp_path / str(group.rank)
            checkpoint = Checkpoint(path, {}, random_state=False, comm=ranks)
            checkpoint.save(1)
            with pytest.raises(CheckpointError, match="rank 1: .*one that all ranks see"):
                checkpoint.close()

    run_ranks(2, rank_of)
