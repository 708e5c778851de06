"""Recordings: what is written, what is read, what is made of it, and that a training never ends."""

from __future__ import annotations

import json
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

from pyg_scale import parallel
from pyg_scale.cli import main
from pyg_scale.comm import connect
from pyg_scale.comm.gloo import Gloo
from pyg_scale.datasets import planted_communities
from pyg_scale.errors import RecordingError
from pyg_scale.loader import NeighborLoader, stats
from pyg_scale.parallel import seed_weights
from pyg_scale.testing.processes import WaitingProcesses
from pyg_scale.testing.ranks import run_ranks
from pyg_scale.train import Accumulation, LoadMonitor, Prometheus, Recorder, TensorBoard, read_run
from pyg_scale.train.recording import recorder as recorders
from pyg_scale.train.recording.charts import binned, short, thin, ticks
from pyg_scale.train.recording.findings import findings, load, milliseconds
from pyg_scale.train.recording.page import page
from pyg_scale.train.recording.trace import trace_events, write_trace

HOSTILE = "<script>alert(1)</script><img src=http://example.org/x onerror=alert(1)>'\"&"


class Clock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    perf_counter = __call__

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Model:
    """What a wrapped model says of its waiting."""

    seconds_waited = 0.0


def recorded(path, body=0.25, waits=0.05, steps=3, **options):
    """A run of so many steps on a clock: 10 ms to load, then the body, which waits a while."""
    clock, model = Clock(), Model()

    def batches():
        for number in range(steps):
            clock.sleep(0.01)
            yield number

    with Recorder(path, model=model, clock=clock, **options) as recorder:
        for number in recorder(batches()):
            clock.sleep(body)
            model.seconds_waited += waits
            recorder.log(loss=1 / (1 + number))
        with recorder.span("validation"):
            clock.sleep(0.5)
    return read_run(path)


# What is written ###########################################################################


def test_steps_are_what_the_clock_says(tmp_path):
    run = recorded(tmp_path / "run")
    (rank,) = run.ranks
    assert (run.session, run.world_size, rank.pid, rank.waiting) == (1, 1, os.getpid(), True)
    assert [step.number for step in rank.steps] == [0, 1, 2]
    for number, step in enumerate(rank.steps):
        assert step.begin == pytest.approx(0.26 * number, abs=2e-6)
        assert (step.load, step.body, step.exchange) == pytest.approx((0.01, 0.25, 0.05), abs=2e-6)
        assert (step.compute, step.busy) == pytest.approx((0.2, 0.21), abs=2e-6)
        assert step.values == {"loss": pytest.approx(1 / (1 + number), abs=1e-6)}
    (span,) = rank.spans
    assert (span.name, span.seconds) == ("validation", pytest.approx(0.5))
    assert rank.memory[0].process > 1 << 20


def test_another_start_is_another_session(tmp_path):
    for steps in (2, 4):
        recorded(tmp_path, steps=steps)
    assert [len(read_run(tmp_path, n).ranks[0].steps) for n in (1, 2, None)] == [2, 4, 4]
    with pytest.raises(RecordingError, match="has no session 3; it has 1, 2"):
        read_run(tmp_path, 3)


def test_values_of_any_kind(tmp_path):
    with Recorder(tmp_path) as recorder:
        for number in recorder(range(3)):
            loss = torch.tensor(2.0, requires_grad=True) if number else torch.tensor([math.nan])
            recorder.log(loss=loss, rate=math.inf, count=3)
            with pytest.raises(TypeError, match="loss must be a number"):
                recorder.log(loss=torch.ones(2))
            with pytest.raises(TypeError, match="name must be a number"):
                recorder.log(name="sage")
            with pytest.raises(TypeError, match="loss must be a number.*complex64"):
                recorder.log(loss=torch.ones(1, dtype=torch.complex64))
            with pytest.raises(TypeError, match="loss must be a number.*on meta"):
                recorder.log(loss=torch.ones(1, device="meta"))
    values = [step.values for step in read_run(tmp_path).ranks[0].steps]
    assert math.isnan(values[0]["loss"]) and values[1] == {"loss": 2, "rate": math.inf, "count": 3}


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (True, 1),
        (np.bool_(False), 0),
        (torch.tensor(True), 1),
        (1e30, 1e30),
        (torch.tensor(-1e20), float(torch.tensor(-1e20))),
        (torch.tensor(2**62), 2.0**62),
        (10**30, 1e30),
        (-(10**400), -math.inf),
        (np.float32(0.5), 0.5),
    ],
)
def test_values_of_any_size_can_be_reported(tmp_path, value, read):
    with Recorder(tmp_path) as recorder:
        for _ in recorder(range(2)):
            recorder.log(value=value)
    assert [step.values["value"] for step in read_run(tmp_path).ranks[0].steps] == [read, read]
    assert main(["report", str(tmp_path)]) == 0


@pytest.mark.parametrize("sign", [1, -1])
def test_a_file_may_have_values_beyond_every_float(tmp_path, sign):
    with Recorder(tmp_path) as recorder:
        for _ in recorder(range(1)):
            recorder.log(value=77)
    file = tmp_path / "session-1" / "rank-0.jsonl"
    text = file.read_text()
    assert text.count('"value": 77') == 1
    file.write_text(text.replace('"value": 77', f'"value": {sign * 10**400}'))
    (step,) = read_run(tmp_path).ranks[0].steps
    assert step.values == {"value": sign * math.inf}


def test_values_near_the_largest_float_are_no_part_of_a_line(tmp_path):
    with Recorder(tmp_path) as recorder:
        for number in recorder(range(20)):
            recorder.log(loss=[1.7e308, -1.7e308, 2.0, 3.0][number % 4])
    found = page(read_run(tmp_path))
    assert "loss (not finite in some steps)" in found
    assert not re.search('(y[12]?|points)="[^"]*nan', found)


def test_a_value_that_cannot_be_read_loses_its_line_alone(tmp_path):
    recorder = Recorder(tmp_path)
    for number in recorder(range(3)):
        recorder.log(number=number)
        if number == 1:
            recorder._values["number"] = torch.ones(1, device="meta")
    with pytest.warns(RuntimeWarning, match="a line of the recording is left out"):
        recorder.close()
    steps = read_run(tmp_path).ranks[0].steps
    assert [step.values["number"] for step in steps] == [0, 2]


def loader_of(**options):
    data = planted_communities(300, 2_000, 4, 8)
    return NeighborLoader(data, [4, 3], torch.arange(100), batch_size=32, seed=1, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_stages_and_counts_are_those_of_the_loader(tmp_path, workers):
    loader = loader_of(num_workers=workers)
    next(iter(loader))  # what was before does not count
    before = loader.stats()["total"]
    with Recorder(tmp_path) as recorder:
        for _ in range(2):
            seeds = [batch.batch_size for batch in recorder(loader)]
    steps = read_run(tmp_path).ranks[0].steps
    assert [step.seeds for step in steps] == 2 * seeds == 2 * [32, 32, 32, 4]
    assert [step.epoch for step in steps] == 4 * [0] + 4 * [1]
    total = loader.stats()["total"]
    for name, (stage, column) in {"edges": ("sample", "rows"), "bytes": ("fetch", "bytes")}.items():
        found = sum(step.counts[name] for step in steps)
        assert found == total[stage][column] - before[stage][column] > 0
    for stage in ("sample", "fetch", "wait"):
        expected = total[stage]["seconds"] - before[stage]["seconds"]
        assert sum(s.stages[stage] for s in steps) == pytest.approx(expected, abs=1e-5)


def test_stage_timers_are_within_a_tenth_of_what_was_injected(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stats, "time", clock)

    class Slow(NeighborLoader):
        def _sample(self, batch):
            clock.sleep(0.2)
            return super()._sample(batch)

        def _fetch(self, out, stats):
            clock.sleep(0.1)
            return super()._fetch(out, stats)

    data = planted_communities(200, 1_000, 4, 8)
    loader = Slow(data, [2], batch_size=50, transform=lambda b: (clock.sleep(0.05), b)[1])
    with Recorder(tmp_path, clock=clock) as recorder:
        for _ in recorder(loader):
            clock.sleep(0.3)
    for step in read_run(tmp_path).ranks[0].steps:
        assert step.stages["sample"] == pytest.approx(0.2, rel=0.1)
        assert step.stages["fetch"] == pytest.approx(0.1, rel=0.1)
        assert step.stages["transform"] == pytest.approx(0.05, rel=0.1)
        assert (step.load, step.body) == pytest.approx((0.35, 0.3), rel=0.1)


def test_it_goes_around_a_loader_and_inside_of_an_accumulation(tmp_path):
    loader = loader_of()
    accumulation = Accumulation(GraphSAGE(8, 8, 1, 2), 3)
    with Recorder(tmp_path) as recorder, LoadMonitor() as monitor:
        assert len(recorder(loader)) == len(loader)
        due = []
        for _ in accumulation(monitor(recorder(loader))):
            due.append(accumulation.due)
            assert loader.state_dict()["delivered"] == len(due)
        assert due == [False, False, True, True]
    assert len(read_run(tmp_path).ranks[0].steps) == 4


# A training goes on ########################################################################


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RecordingError, match="cannot be recorded in .*file"):
        Recorder(tmp_path / "file")
    (tmp_path / "run" / "session-1").mkdir(parents=True)
    (tmp_path / "run" / "session-1" / "rank-1.jsonl").touch()
    (tmp_path / "run" / "session-1").rename(tmp_path / "session-1")

    def work(group):
        with Gloo.join(group) as ranks:
            path = tmp_path / f"other-{group.rank}"
            if group.rank == 1:
                (path / "session-1").mkdir(parents=True)
                (path / "session-1" / "rank-1.jsonl").touch()
            with pytest.raises(RecordingError) as error:
                Recorder(path, comm=ranks)
            return str(error.value)

    first, second = run_ranks(2, work)
    assert "rank 1 cannot write there" in first and "File exists" in second


def count(recorder, steps=30):
    made = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with recorder:
            for _ in recorder(range(steps)):
                recorder.log(loss=1.0)
                with recorder.span("validation"):
                    made += 1
    return made, [str(each.message) for each in caught if each.category is RuntimeWarning]


def test_a_folder_that_is_removed_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(recorders, "FLUSH", 0.0)
    recorder = Recorder(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    made, said = count(recorder)
    assert made == 30 and len(said) == 1 and "no longer recorded" in said[0]
    assert "was removed" in said[0]


def test_a_full_disk_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(recorders, "FLUSH", 0.0)
    recorder = Recorder(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "session-1" / "rank-0.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 700, before[1]))  # as far as it goes
    try:
        made, said = count(recorder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert made == 30 and "no longer recorded" in said[0] and len(said) <= 2
    assert read_run(tmp_path).ranks[0].steps  # what was written before


def test_a_sink_that_fails_is_left_out(tmp_path):
    class Fails:
        calls = 0

        def write(self, step):
            self.calls += 1
            raise RuntimeError("no dashboard")

    sink = Fails()
    made, said = count(Recorder(tmp_path, sinks=[sink]))
    assert (made, sink.calls) == (30, 1) and said == ["Fails cannot go on: no dashboard"]
    assert len(read_run(tmp_path).ranks[0].steps) == 30


# TensorBoard and Prometheus ################################################################


def test_packages_that_are_absent_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install 'pyg-scale\[monitor\]'"):
        Prometheus(0)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'pyg-scale\[monitor\]'"):
        TensorBoard(tmp_path)


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="pip install 'pyg-scale[monitor]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorded(tmp_path / "run", steps=4, sinks=[TensorBoard(tmp_path / "board", every=2)])
    read = EventAccumulator(str(tmp_path / "board" / "rank-0")).Reload()
    assert [event.step for event in read.Scalars("values/loss")] == [1, 3]
    assert read.Scalars("values/loss")[0].value == pytest.approx((1 + 1 / 2) / 2)
    assert read.Scalars("seconds/compute")[0].value == pytest.approx(0.2)


def test_prometheus(tmp_path):
    pytest.importorskip("prometheus_client", reason="pip install 'pyg-scale[monitor]'")
    from urllib.request import urlopen

    sink, read = Prometheus(0), []

    class Reads:
        def write(self, step):
            with urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
                read.append(answer.read().decode())

    recorded(tmp_path, sinks=[sink, Reads()])
    lines = dict(line.rsplit(" ", 1) for line in read[-1].splitlines() if line[:1] != "#")
    assert float(lines['pyg_scale_steps_total{rank="0"}']) == 3
    seconds = {p: float(lines[f'pyg_scale_seconds_total{{part="{p}",rank="0"}}'])
               for p in ("load", "compute", "exchange")}  # fmt: skip
    assert seconds == pytest.approx({"load": 0.03, "compute": 0.6, "exchange": 0.15})
    with pytest.raises(OSError, match="refused"):
        urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=5)


# Ranks #####################################################################################


@pytest.fixture(scope="module")
def ranks() -> Iterator[WaitingProcesses]:
    with WaitingProcesses(2) as started:
        yield started


def slowed(path: str, stage: str) -> int:
    """A real training of two ranks on a clock that rank 1 moves on faster in one stage."""
    clock, rank = Clock(), dist.get_rank()
    real, stats.time = stats.time, clock
    seed_weights.time = clock  # nobody waits on this clock
    seconds = {"compute": 0.2, "transform": 0.02}
    if rank == 1:
        seconds[stage] *= 10

    def transform(batch: Any) -> Any:
        clock.sleep(seconds["transform"])
        return batch

    try:
        torch.manual_seed(0)
        model = parallel.wrap(GraphSAGE(8, 8, 2, 4), "ddp")
        loader = loader_of(transform=transform, split_seeds="global", split_batches=True)
        with (
            connect("gloo", name=path, timeout=30) as comm,
            Recorder(path, model=model, comm=comm, clock=clock) as recorder,
        ):
            for _ in range(2):
                for batch in recorder(loader):
                    loss = F.cross_entropy(
                        model(batch.x, batch.edge_index)[: batch.batch_size],
                        batch.y[: batch.batch_size],
                    )
                    model.zero_grad()
                    model.backward(loss, batch.batch_size)
                    clock.sleep(seconds["compute"])
                    recorder.log(loss=loss)
        return recorder.session
    finally:
        stats.time = seed_weights.time = real


@pytest.mark.parametrize("stage", ["compute", "transform"])
def test_the_slow_rank_and_its_stage_are_named(ranks, tmp_path, capsys, stage):
    assert ranks.run(slowed, str(tmp_path), stage) == [1, 1]
    run = read_run(tmp_path)
    assert [len(rank.steps) for rank in run.ranks] == [8, 8]
    found = [each for each in findings(run) if each.kind == "slow rank"]
    assert [(each.ranks, each.stage) for each in found] == [((1,), stage)]
    busy = load(run).busy
    assert load(run).imbalance == pytest.approx(2 * busy[1] / sum(busy))
    assert main(["report", str(tmp_path)]) == 0
    assert "Rank 1 is busy" in capsys.readouterr().out
    text = (tmp_path / "report.html").read_text()
    assert "Rank 1 is busy" in text and f"&#x27;{stage}&#x27;" in text and "rank 0" in text
    assert milliseconds(busy[1] / 8) in text and "e+" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.0204, "2,020"), (0.9996, "1,000"), (0.9994, "999"), (0.02012, "20.1"), (4e-5, "0.04")],
)
def test_milliseconds_are_plain_numbers(seconds, text):
    assert milliseconds(seconds) == text


def test_a_device_that_is_used_little_and_why(tmp_path):
    (low,) = findings(recorded(tmp_path / "a", body=0.25, waits=0.2))
    assert (low.kind, low.ranks, low.stage) == ("low use", (0,), "exchange")
    assert "computes in 19% of the time; 77% go into 'exchange'" in low.text
    (low,) = findings(recorded(tmp_path / "b", body=0.002, waits=0.0))
    assert (low.stage, "num_workers" in low.remedy) == ("load", True)
    assert findings(recorded(tmp_path / "c", body=0.25, waits=0.1)) == []


# What is read ##############################################################################


@pytest.fixture
def one(tmp_path):
    recorded(tmp_path / "run")
    return tmp_path / "run", tmp_path / "run" / "session-1" / "rank-0.jsonl"


@pytest.mark.parametrize(
    ("line", "change", "match"),
    [
        (1, {"recording": 2}, "line 1 has format 2, and this is format 1"),
        (1, {"recording": None}, "line 1 is not the first line of a recording"),
        (1, {"rank": 3}, "line 1 is of rank 3"),
        (1, {"world_size": 0}, "line 1 is of rank 0 of 0"),
        (1, {"host": 5}, "line 1 has no text 'host'"),
        (3, {"load": -1.0}, "line 3 has a negative 'load'"),
        (3, {"load": "1"}, "line 3 has no number 'load'"),
        (3, {"body": math.inf}, "line 3 has 'body' out of range"),
        (3, {"step": 1.5}, "line 3 has no whole number 'step'"),
        (3, {"stages": [1]}, "line 3 has no object 'stages'"),
        (3, {"values": {"loss": []}}, "line 3 has no number 'loss'"),
        (3, {"seeds": 10**30}, "line 3 has no whole number 'seeds'"),
    ],
)
def test_a_wrong_line_is_named(one, line, change, match):
    path, file = one
    lines = file.read_text().splitlines()
    lines[line - 1] = json.dumps(json.loads(lines[line - 1]) | change)
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordingError, match=f"rank-0.jsonl: {match}"):
        read_run(path)


def test_files_that_are_no_recording(one, tmp_path, capsys):
    path, file = one
    whole = file.read_text()
    for text, match in (
        ("", "line 1 is missing"),
        ("[" * 100_000 + "\n", "line 1 is not JSON"),
        ("[]\n", "line 1 is no object"),
        (whole + "x" * (1 << 20), "is too long"),
    ):
        file.write_text(text)
        with pytest.raises(RecordingError, match=match):
            read_run(path)
    file.write_text(whole[:-20])  # the process was killed
    assert read_run(path).ranks[0].torn and "killed while writing" in page(read_run(path))
    file.rename(file.with_name("rank-1.jsonl"))
    with pytest.raises(RecordingError, match="line 1 is of rank 0"):
        read_run(path)
    file.with_name("rank-1.jsonl").unlink()
    os.mkfifo(file)
    with pytest.raises(RecordingError, match="cannot be read"):
        read_run(path)
    assert main(["report", str(tmp_path / "nowhere")]) == 1
    assert main(["report", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "No such file" in said and "is not the folder of a recorded run" in said


def test_files_of_different_runs_are_refused(one):
    path, file = one
    header, *others = file.read_text().splitlines(keepends=True)
    other = json.dumps(json.loads(header) | {"rank": 1, "world_size": 2}) + "\n"
    file.with_name("rank-1.jsonl").write_text("".join([other, *others]))
    with pytest.raises(RecordingError, match="rank 1 has world_size 2, rank 0 has 1"):
        read_run(path)


def test_damaged_bytes_are_read_or_refused(one):
    path, file = one
    whole, draw = file.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 3])):
            data[draw.randrange(len(data))] = draw.randrange(256)
        file.write_bytes(data)
        try:
            page(read_run(path))
        except RecordingError:
            refused += 1
    assert 0 < refused < 150


# The page ##################################################################################


class Page(HTMLParser):
    """What elements, attributes and text a page has; unclosed elements are errors."""

    EMPTY = ("meta", "line", "rect", "polygon", "polyline", "circle")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def hostile(path: Path):
    run = recorded(path / f"{HOSTILE.replace('/', '|')}", steps=12)
    file = next(run.path.rglob("rank-0.jsonl"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[0] |= {"host": HOSTILE, "version": HOSTILE, "device": HOSTILE}
    for line in lines[1:]:
        if "span" in line:
            line["span"] = HOSTILE
        if "values" in line:
            line["values"] = {HOSTILE: 1.0, "loss": "nan"}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(run.path)


def test_hostile_text_is_text(tmp_path):
    text = page(hostile(tmp_path))
    found = Page(text)
    assert not found.open
    assert not {"script", "img", "iframe", "link", "object", "a", "form"} & set(found.tags)
    names = {name for name, _ in found.attributes}
    assert not {name for name in names if name.startswith("on")} | ({"src", "href"} & names)
    assert not [value for _, value in found.attributes if value and "://" in value]
    assert HOSTILE in found.words
    assert "default-src 'none'" in text


def test_a_page_of_nothing_and_of_many_ranks(tmp_path):
    with Recorder(tmp_path / "empty"):
        pass
    text = page(read_run(tmp_path / "empty"))
    assert "No step was recorded" in text and not Page(text).open
    recorded(tmp_path / "run", steps=5)
    file = tmp_path / "run" / "session-1" / "rank-0.jsonl"
    header, *others = file.read_text().splitlines(keepends=True)
    for rank in range(70):
        lines = [json.dumps(json.loads(header) | {"rank": rank, "world_size": 80}) + "\n", *others]
        file.with_name(f"rank-{rank}.jsonl").write_text("".join(lines))
    text = page(read_run(tmp_path / "run"))
    assert "files of 10 of 80 ranks are missing" in text and "the busiest 64 of 70 ranks" in text


def test_charts_are_exact():
    assert binned([(0.0, 1.0), (1.5, 2.5)], 4.0, 4) == pytest.approx([1, 0.5, 0.5, 0])
    assert binned([(3.9, 9.0), (-1, 0.1)], 4.0, 4) == pytest.approx([0.1, 0, 0, 0.1])
    assert sum(binned([(i / 97, (i + 0.5) / 97) for i in range(97)], 1.0, 13)) == pytest.approx(6.5)
    points = [(i / 1000, float(i % 2)) for i in range(1000)]
    thinned = thin(points, 1.0)
    assert len(thinned) == 240 and all(0.3 <= y <= 0.7 for _, y in thinned)
    assert ticks(0, 0.93, 4) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])
    assert ticks(1, 1, 4) == [1, 2] and ticks(-3, 7, 4) == pytest.approx([-5, -2.5, 0, 2.5, 5, 7.5])
    assert [short(x) for x in (0.05, 12_500, 3_210_000, 0)] == ["0.05", "12.5k", "3.21M", "0"]


# The trace #################################################################################


def check_trace(content: dict[str, Any]) -> None:
    """The rules of the Trace Event Format, and those of Perfetto's importer about nesting."""
    assert content["displayTimeUnit"] in ("ms", "ns")
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named: set[tuple[str, int, int]] = set()
    for event in content["traceEvents"]:
        assert isinstance(event["name"], str) and event["ph"] in ("X", "C", "M")
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0
        if event["ph"] == "C":
            assert event["args"]
            assert all(
                isinstance(v, int | float) and math.isfinite(v) for v in event["args"].values()
            )
        else:
            assert event["dur"] >= 0
            assert ("thread_name", event["pid"], event["tid"]) in named
            assert ("process_name", event["pid"], 0) in named
            begin = round(1000 * event["ts"])
            end = begin + round(1000 * event["dur"])
            slices.setdefault((event["pid"], event["tid"]), []).append((begin, end))
    for found in slices.values():
        under_way: list[float] = []
        for begin, end in sorted(found, key=lambda pair: (pair[0], -pair[1])):
            while under_way and under_way[-1] <= begin:
                under_way.pop()
            assert not under_way or end <= under_way[-1], "slices overlap without nesting"
            under_way.append(end)


def test_a_trace_has_the_form_that_perfetto_reads(ranks, tmp_path):
    ranks.run(slowed, str(tmp_path / "run"), "compute")
    assert main(["report", str(tmp_path / "run"), "--trace", str(tmp_path / "trace.json")]) == 0
    content = json.loads((tmp_path / "trace.json").read_text())
    check_trace(content)
    steps = [each for each in content["traceEvents"] if each["name"] == "step 3"]
    assert [each["pid"] for each in steps] == [0, 1]
    assert steps[0]["args"]["edges"] > 0 and steps[0]["args"]["transform in ms"] == 20
    assert {each["name"] for each in content["traceEvents"] if each["ph"] == "C"} >= {
        "loss", "memory in bytes"
    }  # fmt: skip


def test_a_trace_of_odd_times_nests(tmp_path):
    run = hostile(tmp_path)
    file = next(run.path.rglob("rank-0.jsonl"))
    lines, draw, at = file.read_text().splitlines(), random.Random(1), 0.0
    for number in range(200):
        load, body = draw.random() / 3, draw.random() / 7
        step = {"step": number, "epoch": 0, "begin": at, "load": load, "body": body,
                "exchange": draw.random() * 0.2, "seeds": 1}  # fmt: skip
        at += load + body
        lines.append(json.dumps(step))
    file.write_text("\n".join(lines[:1] + lines[-200:]) + "\n")
    check_trace({"traceEvents": list(trace_events(read_run(run.path))), "displayTimeUnit": "ms"})
    write_trace(read_run(run.path), tmp_path / "trace.json")
    json.loads((tmp_path / "trace.json").read_text(), parse_constant=lambda word: 1 / 0)


# PyTorch Lightning #########################################################################


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_on_a_recorded_loader(tmp_path):
    environment = dict(os.environ)  # Lightning leaves settings behind
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = GraphSAGE(8, 8, 2, 4)

        def training_step(self, batch, number):
            out = self.model(batch.x, batch.edge_index)[: batch.batch_size]
            return F.cross_entropy(out, batch.y[: batch.batch_size])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    try:
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", **quiet)
        with Recorder(tmp_path) as recorder:
            trainer.fit(Module(), recorder(loader_of()))
    finally:
        os.environ.clear()
        os.environ.update(environment)
    assert [s.seeds for s in read_run(tmp_path).ranks[0].steps] == 2 * [32, 32, 32]


# A browser #################################################################################


@pytest.mark.slow
def test_a_browser_shows_the_page_without_a_network(ranks, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no chromium: apt-get install chromium")
    ranks.run(slowed, str(tmp_path / "run"), "compute")
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "run"), "--out", str(out)]) == 0
    hostile_page = tmp_path / "hostile.html"
    hostile_page.write_text(page(hostile(tmp_path)))
    for number, file in enumerate((out, hostile_page)):
        log, picture = tmp_path / f"net-{number}.json", tmp_path / f"{number}.png"
        shown = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-extensions",
             "--disable-background-networking", "--window-size=1240,1600",
             f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}",
             f"--screenshot={picture}", "--dump-dom", file.as_uri()],
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert shown.returncode == 0, shown.stderr
        assert "<svg" in shown.stdout and "<script" not in shown.stdout
        assert "Content Security Policy" not in shown.stderr  # nothing even tried
        if picture.exists():
            assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        requested = [line for line in log.read_text().splitlines() if "example.org" in line]
        assert not requested
    assert "Rank 1 is busy" in (tmp_path / "report.html").read_text()
