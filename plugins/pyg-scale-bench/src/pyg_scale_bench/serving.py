"""Latencies of online predictions under open-loop load: in memory, from disk, over HTTP.

Requests for one node each come at random moments of a given rate, whether earlier ones are answered
or not. The latency of a request counts from the moment at which it was due, so that a slow answer
is not hidden by the requests that it delays. First every way answers as many requests as it can,
which is its capacity; then it gets a share of that. The machine has pauses of its own: the report
says how late a process wakes that only sleeps until those moments. The served model is accelerated
(pyg_scale.nn.accelerate) unless --stock says otherwise. Beside them, a plain loop calls a loader
and PyG's model for one node at a time. Over HTTP needs pyg-scale-http, else it is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch_geometric.nn import GraphSAGE

import pyg_scale
from pyg_scale.loader import NeighborLoader
from pyg_scale.nn import accelerate
from pyg_scale.serving import Predictor
from pyg_scale.store import Disk
from pyg_scale.store.cache.cached import POLICIES
from pyg_scale_bench import graphs
from pyg_scale_bench.benchmark import FOLDER, Benchmark, Option, names_of
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.report import Report, Table
from pyg_scale_bench.rounds import threads_of_torch

WAYS = ("memory", "disk", "http")
LABELS = {
    "memory": "in this process, from memory",
    "disk": "in this process, features from disk",
    "http": "over HTTP, one more process",
    "loop": "a loader and PyG's model, one node at a time",
    "wake": "nothing but waking at these moments",
}
_CLASSES = 47
_SEED = 0
_START_SECONDS = 120.0
_CONNECTIONS = 256
_MODEL = """
import torch
from torch_geometric.nn import GraphSAGE

def make():
    torch.manual_seed(0)
    torch.set_num_threads({threads})
    model = GraphSAGE({features}, {hidden}, num_layers={layers}, out_channels={classes})
    {accelerate}
    return model
"""


class Way(Protocol):
    """A way to get predictions: sends a request, and notes when its answer came."""

    def run(self, ids: Sequence[int], due: Sequence[float]) -> list[float]:
        """The latency in seconds of each request, which is due so many seconds from now."""
        ...

    def cpu_seconds(self) -> float:
        """The CPU time of the process that answers."""
        ...


class InProcess:
    """A predictor in this process.

    Args:
        predictor: It.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor

    def run(self, ids: Sequence[int], due: Sequence[float]) -> list[float]:
        """See :class:`Way`."""
        done = [0.0] * len(ids)
        errors: list[BaseException] = []
        answers = threading.Semaphore(0)

        def note(number: int, when: float) -> Any:
            def noted(future: Future[Any]) -> None:
                done[number] = time.perf_counter() - when
                if (error := future.exception()) is not None:
                    errors.append(error)
                answers.release()

            return noted

        # No answer is kept: the collector of garbage would look at thousands of them, for longer
        # than a request takes.
        for number, when in _moments(due):
            self.predictor.submit([ids[number]]).add_done_callback(note(number, when))
        for _ in ids:
            answers.acquire()
        if errors:
            raise errors[0]
        return done

    def cpu_seconds(self) -> float:
        """See :class:`Way`; that of sending requests is in it."""
        return time.process_time()


class OverHttp:
    """A server of ``pyg-scale predict``, and connections that are kept.

    Args:
        port: The port of the server.
        process: The id of its process.
    """

    def __init__(self, port: int, process: int) -> None:
        self.port, self.process = port, process

    def cpu_seconds(self) -> float:
        """See :class:`Way`; the client is not in it."""
        clock = ctypes.c_int()  # ticks of /proc are longer than some requests
        if error := ctypes.CDLL(None).clock_getcpuclockid(self.process, ctypes.byref(clock)):
            raise OSError(error, os.strerror(error))
        return time.clock_gettime(clock.value)

    def run(self, ids: Sequence[int], due: Sequence[float]) -> list[float]:
        """See :class:`Way`."""
        return asyncio.run(self._run(ids, due))

    async def _run(self, ids: Sequence[int], due: Sequence[float]) -> list[float]:
        idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        every: list[asyncio.StreamWriter] = []
        free = asyncio.Semaphore(_CONNECTIONS)

        async def ask(node: int, when: float) -> float:
            async with free:
                return await answered(node, when)

        async def answered(node: int, when: float) -> float:
            if idle:
                reader, writer = idle.pop()
            else:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                every.append(writer)
            body = json.dumps({"ids": [node]}).encode()
            head = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            content = await reader.readexactly(length)
            if b" 200 " not in answer.split(b"\r\n")[0]:
                raise RuntimeError(content.decode())
            idle.append((reader, writer))
            return time.perf_counter() - when

        begin, tasks = time.perf_counter(), []
        for node, offset in zip(ids, due):
            left = begin + offset - time.perf_counter()
            if left > 0:
                await asyncio.sleep(left)
            tasks.append(asyncio.ensure_future(ask(node, begin + offset)))
        found = await asyncio.gather(*tasks)
        for writer in every:
            writer.close()
        return list(found)


def _moments(due: Sequence[float]) -> Iterator[tuple[int, float]]:
    """Yield the number of each request, and the moment of it, when that has come."""
    begin = time.perf_counter()
    for number, offset in enumerate(due):
        left = begin + offset - time.perf_counter()
        if left > 0:
            time.sleep(left)
        yield number, begin + offset


# Measuring ################################################################################


def measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Make the graph, and load every way in turns."""
    with threads_of_torch(args.threads):
        _measure(args, found)


def _measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    folder = Path(args.dir).absolute()
    graph = folder / "graph"
    data = graphs.cached(None, args.nodes, args.edges, args.features)
    pyg_scale.save(data, graph)
    found["missing"] = []
    parts = {"httptools": "h11", "uvloop": "asyncio"}
    found["http"] = " and ".join(
        fast if importlib.util.find_spec(fast) else slow for fast, slow in parts.items()
    )
    with contextlib.ExitStack() as stack:
        ways: dict[str, Way] = {}
        for name in args.ways:
            if name == "http" and importlib.util.find_spec("pyg_scale_http") is None:
                found["missing"].append("http")
                continue
            ways[name] = _way(name, args, data, graph, stack)
        found["rounds"] = {name: [] for name in [*ways, "loop", "wake"]}
        loop = _Loop(args, data)
        # A full collection looks at all that was imported, and takes as long as a hundred requests.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        for turn in range(args.rounds + 1):  # the first one warms up
            for name, way in ways.items():
                print(f"round {turn}: {LABELS[name]}", file=sys.stderr)
                result = _loaded(way, args, turn)
                if turn:
                    found["rounds"][name].append(result)
            begin = time.process_time()
            seconds = loop.run(_ids(args, turn, args.requests))
            used = time.process_time() - begin
            if turn:
                rates = {"capacity": args.requests / sum(seconds), "per_core": args.requests / used}
                found["rounds"]["loop"].append(_quantiles(seconds) | rates)
                rate = max((found["rounds"][name][-1]["rate"] for name in ways), default=1e3)
                found["rounds"]["wake"].append(_late(args, turn, rate))


def _way(
    name: str, args: argparse.Namespace, data: Any, graph: Path, stack: contextlib.ExitStack
) -> Way:
    if name == "http":
        return OverHttp(*stack.enter_context(_server(args, graph)))
    options: dict[str, Any] = {"workers": 1}
    if name == "disk":
        size = args.nodes * args.features * 4
        cache = max(1 << 20, int(args.cache * size))
        # Nobody announces requests, so that the rows to keep are those that neighbours are often.
        hot = "degree" if args.policy == "placed" else None
        options["feature_store"] = Disk(graph, cache, args.policy, hot)
        options["workers"] = args.disk_workers
        data = pyg_scale.open(graph)
    model = _model(args)
    if not args.stock:
        accelerate(model)
    predictor = Predictor(
        model,
        data,
        args.num_neighbors,
        seed=_SEED,
        attributes=["x"],
        max_batch=args.disk_batch if name == "disk" else args.max_batch,
        max_waiting=1 << 20,
        **options,
    )
    stack.enter_context(predictor).warm_up()
    return InProcess(predictor)


@contextlib.contextmanager
def _server(args: argparse.Namespace, graph: Path) -> Iterator[tuple[int, int]]:
    """The port of a server, and the id of its process."""
    file = graph.parent / "model.py"
    values = {name: getattr(args, name) for name in ("threads", "features", "hidden")}
    layers = len(args.num_neighbors)
    change = "" if args.stock else "from pyg_scale.nn import accelerate; accelerate(model)"
    file.write_text(_MODEL.format(**values, layers=layers, classes=_CLASSES, accelerate=change))
    hops = ",".join(map(str, args.num_neighbors))
    command = [sys.executable, "-m", "pyg_scale.cli", "predict", f"{file}:make", str(graph)]
    command += ["--http", "127.0.0.1:0", "--num-neighbors", hops, "--attributes", "x"]
    command += ["--max-waiting", str(1 << 20), "--max-connections", "20000"]
    command += ["--max-batch", str(args.max_batch)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"the server ended with status {process.wait(_START_SECONDS)}")
            yield int(line.rstrip().rstrip("/").rpartition(":")[2]), process.pid
        finally:
            process.terminate()
            process.wait(_START_SECONDS)


class _Loop:
    """A loader and a model that are called for one node at a time."""

    def __init__(self, args: argparse.Namespace, data: Any) -> None:
        self._model = _model(args).eval()
        self._loader = NeighborLoader(data, args.num_neighbors, batch_size=1, seed=_SEED)

    @torch.no_grad()
    def run(self, ids: Sequence[int]) -> list[float]:
        """The seconds for each node."""
        seconds = []
        for node in ids:
            begin = time.perf_counter()
            batch = self._loader([node])
            self._model(batch.x, batch.edge_index)[:1].tolist()
            seconds.append(time.perf_counter() - begin)
        return seconds


def _model(args: argparse.Namespace) -> GraphSAGE:
    torch.manual_seed(0)
    layers = len(args.num_neighbors)
    return GraphSAGE(args.features, args.hidden, num_layers=layers, out_channels=_CLASSES)


def _ids(args: argparse.Namespace, turn: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(turn)
    found: list[int] = torch.randint(args.nodes, (count,), generator=generator).tolist()
    return found


def _loaded(way: Way, args: argparse.Namespace, turn: int) -> dict[str, float]:
    """The capacity of a way, and its latencies at a share of it."""
    ids = _ids(args, turn, args.requests)
    burst = min(len(ids), 2_000)
    used, begin = way.cpu_seconds(), time.perf_counter()
    way.run(ids[:burst], [0.0] * burst)
    capacity = burst / (time.perf_counter() - begin)
    per_core = burst / (way.cpu_seconds() - used)
    rate = args.load * capacity
    rates = {"capacity": capacity, "rate": rate, "per_core": per_core}
    return _quantiles(way.run(ids, _due(args, turn, rate))) | rates


def _due(args: argparse.Namespace, turn: int, rate: float) -> list[float]:
    """Random moments, so many of them in a second."""
    generator = torch.Generator().manual_seed(turn)
    pauses = torch.empty(args.requests, dtype=torch.float64).exponential_(generator=generator)
    found: list[float] = (pauses / rate).cumsum(0).tolist()
    return found


def _late(args: argparse.Namespace, turn: int, rate: float) -> dict[str, float]:
    """The seconds by which this process wakes late, if it does nothing else."""
    moments = _moments(_due(args, turn, rate))
    return _quantiles([time.perf_counter() - when for _, when in moments]) | {"rate": rate}


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered, last = sorted(seconds), len(seconds) - 1
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: ordered[round(share * last)] for name, share in shares.items()}


# Report ###################################################################################


def report(found: Mapping[str, Any]) -> Report:
    """The report of a run."""
    settings = found["settings"]
    rows, bars = [], []
    for name, rounds in found["rounds"].items():
        middle = {key: median(each[key] for each in rounds) for key in rounds[0]}
        rate = f"{middle['rate']:,.0f}" if "rate" in middle else "one at a time"
        cells = [f"{middle[key] * 1e3:.2f}" for key in ("p50", "p90", "p99", "max")]
        most = [f"{middle[key]:,.0f}" if key in middle else "" for key in ("capacity", "per_core")]
        rows.append([LABELS[name], *most, rate, *cells])
        slowest = [each["p99"] * 1e3 for each in rounds]
        if name == "wake":
            continue
        side = "peers" if name == "loop" else "pyg_scale"
        spread = (min(slowest), max(slowest))
        bars.append(Bar(LABELS[name], middle["p99"] * 1e3, side, spread=spread))
    size = ", ".join(f"{settings[name]:,} {name}" for name in ("nodes", "edges", "features"))
    model = f"neighbours {settings['num_neighbors']}, GraphSAGE with {settings['hidden']} channels"
    model += "" if settings["stock"] else ", accelerated where it is served"
    load = f"{settings['requests']:,} requests for one node each, at random moments, at "
    load += f"{settings['load']:.0%} of the capacity of each way"
    how = f"{settings['threads']} thread(s) of torch; medians of {settings['rounds']} rounds"
    how += f"; at most {settings['max_batch']} nodes of a batch"
    if "disk" in found["rounds"] and "disk_batch" in settings:  # earlier runs do not say
        how += f", {settings['disk_batch']} from disk"
    lines = [f"{size}, {model}", f"{load}; {how}"]
    if "disk" in found["rounds"] and "policy" in settings:  # earlier runs do not say
        lines.append(
            f"from disk: {settings['cache']:.0%} of the rows of features in memory "
            f"(policy={settings['policy']!r})"
        )
    if "http" in found["rounds"]:
        lines.append("over HTTP: uvicorn with " + found["http"])
    if found["missing"]:
        lines.append("not installed, so left out: pyg-scale-http")
    header = ["way", "capacity, requests/s", "per core and second", "requests/s"]
    header += ["p50 ms", "p90 ms", "p99 ms", "max ms"]
    return Report(
        found,
        lines,
        [Table(header, rows, "Latencies", align="lr")],
        [[Panel("p99 of a request for one node", bars, "ms")]],
        "Predictions online",
    )


BENCHMARK = Benchmark(
    "serving",
    __doc__,
    {
        "graph": {
            "nodes": Option(400_000),
            "edges": Option(10_000_000, "directed"),
            "features": Option(128, "columns"),
        },
        "how": {
            **FOLDER,
            "ways": Option(list(WAYS), f"some of {','.join(WAYS)}", type=names_of(WAYS)),
            "num_neighbors": Option([15, 10], "of each hop, as 15,10"),
            "hidden": Option(64, "channels of the model"),
            "threads": Option(1, "of torch", least=1),
            "requests": Option(5_000, "of a round", least=10),
            "max_batch": Option(4, "nodes of a batch at most", least=1),
            "disk_batch": Option(2, "the same, from disk", least=1),
            "disk_workers": Option(1, "threads that make batches from disk", least=1),
            "stock": Option(False, "serve PyG's model as it is"),
            "load": Option(0.5, "share of the capacity"),
            "cache": Option(0.1, "share of the features in memory, for disk"),
            "policy": Option("placed", "the choice of these rows", choices=POLICIES),
            "rounds": Option(5, least=1),
        },
    },
    measure,
    report,
    {"nodes": 5_000, "edges": 60_000, "features": 16, "requests": 200, "rounds": 1, "hidden": 8},
    lambda args: None if 0 < args.load < 1 else "--load must be a share, above 0 and below 1",
)
