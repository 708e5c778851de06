"""Rows of features requested by one process from another: our service beside ZeroMQ, UCX and gloo.

Two ranks of this machine: one has a table of random rows, the other requests rows of it, several
requests at a time, and puts each row at its place in a batch. All ways transfer the same rows in
every round, one way after the other, over the loopback and, with ``--link``, over networks of given
speeds. Beside rows per second, the report has the processor time of both sides. Libraries that are
not installed (``pyzmq``, ``ucxx``) are left out, and the report says so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from pyg_scale.comm import Communicator, connect
from pyg_scale_bench import dist_network
from pyg_scale_bench.benchmark import Benchmark, Option, names_of
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.child import Child
from pyg_scale_bench.report import GB, Report, Table
from pyg_scale_bench.rounds import in_one_line
from pyg_scale_bench.transport_ways import MODULES, UCX_ENVIRON, WAYS, Request, Way

LABELS = {
    "ours": "pyg_scale",
    "ours-copied": "pyg_scale, rows copied",
    "zmq": "ZeroMQ",
    "zmq-curve": "ZeroMQ, CURVE",
    "zmq-service": "backend zmq",
    "ucx": "UCX (TCP)",
    "gloo": "gloo",
}
"""The names of the ways in a report."""

ABOUT = (
    "*pyg_scale* sends rows from the table and receives them at their places, without a copy in "
    "between; *rows copied* is the same service with a message that has to be gathered and "
    "scattered, as those of all libraries have. The libraries are used directly, without the "
    "checks, threads and time limits of a service; *backend zmq*, that of servers, has them too. "
    "ZeroMQ with CURVE and *backend zmq* encrypt, the others do not."
)
_LOOPBACK = "loopback"
_SECONDS = 1800.0
_ALIKE = 0.9


# Measuring ################################################################################


def measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Start both ranks, and run their measurements."""
    settings = found["settings"]
    with contextlib.ExitStack() as stack:
        prefix = stack.enter_context(dist_network.namespace()) if args.link else []
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environ |= UCX_ENVIRON | {"OMP_NUM_THREADS": str(args.threads)}
        ranks = [
            stack.enter_context(
                Child(
                    measured,
                    {"settings": settings},
                    prefix=prefix,
                    environ=environ | {"RANK": str(rank)},
                    seconds=_SECONDS,
                )
            )
            for rank in range(2)
        ]
        for each in ranks:
            each.ask()
        try:
            found["ranks"] = [each.answer() for each in ranks]
        except SystemExit:
            for each in ranks:
                each.kill()  # the other one waits for it
            raise


def measured(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The measurements of this rank, once.

    Args:
        settings: The options of ``pyg-scale bench transport``.
    """
    torch.set_num_threads(settings["threads"])
    with connect("gloo", timeout=settings["timeout"]) as comm:
        yield Rank(comm, settings).measure()


class Rank:
    """One of the two ranks: rank 0 has the table, rank 1 requests rows.

    Args:
        comm: The communicator; both ranks make an instance.
        settings: The options of ``pyg-scale bench transport``.
    """

    def __init__(self, comm: Communicator, settings: dict[str, Any]) -> None:
        self.comm, self.settings = comm, settings
        self.row_bytes = settings["features"] * 4
        table = torch.empty(0, settings["features"])
        if comm.rank == 0:  # a row has its own id, which rank 1 checks
            ids = torch.arange(settings["nodes"], dtype=torch.float32)
            table = ids.view(-1, 1).expand(-1, settings["features"]).contiguous()
        self.table = table.view(torch.uint8)

    def measure(self) -> dict[str, Any]:
        """Run all measurements; returns plain values."""
        settings = self.settings
        missing, versions = _missing(settings["ways"])
        names = [name for name in settings["ways"] if name not in missing]
        found: dict[str, Any] = {"rank": self.comm.rank, "missing": missing, "versions": versions}
        found["places"] = {}
        with contextlib.ExitStack() as stack:
            ways = {}
            for name in names:
                ways[name] = WAYS[name](self.comm, self.table, settings["in_flight"])
                stack.callback(self._close, ways[name])
            found["places"][_LOOPBACK] = self._rounds(ways)
            for link in settings["link"]:
                with dist_network.limited(self.comm, link):
                    found["places"][link] = self._rounds(ways)
        return found

    def _close(self, way: Way) -> None:
        self.comm.barrier()
        way.close()

    def _rounds(self, ways: Mapping[str, Way]) -> dict[str, Any]:
        """Seconds and processor seconds by rows of a request, then by way, one for each round."""
        sizes = self.settings["rows"]
        found: dict[str, Any] = {
            str(size): {name: {"seconds": [], "cpu": []} for name in ways} for size in sizes
        }
        for turn in range(1 + self.settings["rounds"]):  # the first one warms up
            for size in sizes:
                requests = self._requests(size, turn)
                for name, way in ways.items():
                    seconds, cpu = self._timed(way, size, requests)
                    if self.comm.rank == 1:
                        _check(name, requests)
                    if turn:
                        found[str(size)][name]["seconds"].append(seconds)
                        found[str(size)][name]["cpu"].append(cpu)
        return found

    def _timed(self, way: Way, size: int, requests: Sequence[Request]) -> tuple[float, float]:
        """Seconds until all requests were answered, and processor seconds of this rank."""
        self.comm.barrier()
        start, before = time.perf_counter(), time.process_time()
        if self.comm.rank == 0:
            way.answer(self._count(size), size)
        else:
            way.ask(requests)
        seconds = time.perf_counter() - start
        self.comm.barrier()
        return seconds, time.process_time() - before

    def _count(self, size: int) -> int:
        return max(1, self.settings["rows_in_all"] // size)

    def _requests(self, size: int, turn: int) -> list[Request]:
        """The requests of a turn; their batches share the memory of those under way at a time."""
        if self.comm.rank == 0:
            return []
        generator = torch.Generator().manual_seed(turn)
        shared = [
            torch.zeros(size, self.row_bytes, dtype=torch.uint8)
            for _ in range(self.settings["in_flight"])
        ]
        return [
            Request(
                torch.randint(self.settings["nodes"], (size,), generator=generator),
                torch.randperm(size, generator=generator),
                shared[number % len(shared)],
            )
            for number in range(self._count(size))
        ]


def _check(name: str, requests: Sequence[Request]) -> None:
    """Check the batches that are still in memory, and clear them.

    Raises:
        RuntimeError: If a row is not at its place.
    """
    for request in {id(request.out): request for request in requests}.values():
        rows = request.out.view(torch.float32)[request.position]
        if not torch.equal(rows, request.ids.float().view(-1, 1).expand_as(rows)):
            raise RuntimeError(f"{name} wrote rows to wrong places")
        request.out.zero_()


def _missing(ways: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The reasons why ways cannot run here, and the versions of the libraries of the others."""
    missing, versions = {}, {}
    for name in ways:
        if name not in MODULES:
            continue
        try:
            module: Any = importlib.import_module(MODULES[name])
        except ImportError as error:
            missing[name] = in_one_line(error)
            continue
        if name == "zmq":
            versions["ZeroMQ"] = f"pyzmq {module.__version__} with libzmq {module.zmq_version()}"
        if name == "ucx":
            ucx = ".".join(map(str, module.get_ucx_version()))
            versions["UCX"] = f"ucxx {module.__version__} with UCX {ucx}"
    return missing, versions


# Numbers ##################################################################################


def seconds_of(found: Mapping[str, Any], place: str, size: int, way: str) -> list[float]:
    """Seconds of the rank that requests, by round."""
    seconds: list[float] = found["ranks"][1]["places"][place][str(size)][way]["seconds"]
    return seconds


def cpu_of(found: Mapping[str, Any], place: str, size: int, way: str) -> list[float]:
    """Processor seconds of both ranks together, by round."""
    ranks = [rank["places"][place][str(size)][way]["cpu"] for rank in found["ranks"]]
    return [sum(each) for each in zip(*ranks, strict=True)]


def speed_of(found: Mapping[str, Any], place: str, size: int, way: str) -> list[float]:
    """Rows per second, by round."""
    rows = max(1, found["settings"]["rows_in_all"] // size) * size
    return [rows / seconds for seconds in seconds_of(found, place, size, way)]


def work_of(found: Mapping[str, Any], place: str, size: int, way: str) -> list[float]:
    """Processor seconds of both ranks per GB of rows, by round."""
    settings = found["settings"]
    rows = max(1, settings["rows_in_all"] // size) * size
    gigabytes = rows * settings["features"] * 4 / GB
    return [cpu / gigabytes for cpu in cpu_of(found, place, size, way)]


_Numbers = Callable[[Mapping[str, Any], str, int, str], list[float]]


def of_ours(found: Mapping[str, Any], numbers: _Numbers, place: str, size: int, way: str) -> float:
    """The median over rounds of a number as a multiple of that of our service."""
    ours = numbers(found, place, size, "ours")
    return median(
        each / one for each, one in zip(numbers(found, place, size, way), ours, strict=True)
    )


# Report ###################################################################################


def report(found: Mapping[str, Any]) -> Report:
    """The report of the results."""
    settings, rank = found["settings"], found["ranks"][1]
    places = list(rank["places"])
    ways = [name for name in settings["ways"] if name not in rank["missing"]]
    cases = [(place, size) for place in places for size in settings["rows"]]
    at_most = "at most " if any(settings["rows_in_all"] % size for size in settings["rows"]) else ""
    lines = [
        *(_compared(found, way, cases) for way in ways if way != "ours" and "ours" in ways),
        (
            f"one process requests random rows of {settings['features']} fp32 columns of "
            f"{settings['nodes']:,} from another one, {settings['in_flight']} requests at a time, "
            f"{at_most}{settings['rows_in_all']:,} rows a round; {settings['threads']} thread of "
            "torch each"
        ),
        f"{settings['rounds']} rounds after one to warm up, ways in turn; medians",
        *(f"{name}: {version}" for name, version in rank["versions"].items()),
        *(f"{LABELS[name]}: not measured: {why}" for name, why in rank["missing"].items()),
    ]
    header = ["over", "rows of a request", *(LABELS[way] for way in ways)]

    def table(numbers: _Numbers, title: str, unit: float, form: str, note: str = "") -> Table:
        rows = [
            [
                _over(place),
                f"{size:,}",
                *(format(median(numbers(found, place, size, way)) / unit, form) for way in ways),
            ]
            for place, size in cases
        ]
        return Table(header, rows, title, note, align="lr")

    each = [
        [_over(place), f"{size:,}", LABELS[way], *_cells(found, place, size, way)]
        for place, size in cases
        for way in ways
    ]
    columns = ["over", "rows of a request", "way", "GB/s", "low–high"]
    columns += ["seconds of a processor per GB", "low–high"]
    shown = settings["rows"][len(settings["rows"]) // 2]
    panels = [
        [
            _panel(found, speed_of, ways, place, shown, "M rows/s", 1e6),
            _panel(found, work_of, ways, place, shown, "seconds of a processor per GB", 1.0),
        ]
        for place in places
    ]
    return Report(
        found,
        lines,
        [
            table(speed_of, "Millions of rows per second", 1e6, ".2f", ABOUT),
            table(work_of, "Seconds of a processor per GB, both sides together", 1.0, ".2f"),
            Table(columns, each, "Every case", align="lrlr", detail=True),
        ],
        panels,
        f"Requests of {shown:,} rows of {settings['features'] * 4} bytes, "
        f"{settings['in_flight']} at a time",
    )


def _compared(found: Mapping[str, Any], way: str, cases: Sequence[tuple[str, int]]) -> str:
    """One way beside ours, over all cases."""
    speed = [of_ours(found, speed_of, *case, way) for case in cases]
    work = [of_ours(found, work_of, *case, way) for case in cases]
    within = sum(s >= _ALIKE and w <= 1 / _ALIKE for s, w in zip(speed, work, strict=True))
    return (
        f"{LABELS[way]}: {min(speed):.2f} to {max(speed):.2f} of the rows per second of pyg_scale, "
        f"at {min(work):.2f} to {max(work):.2f} times its processor time; within a tenth in both "
        f"in {within} of {len(cases)} cases"
    )


def _cells(found: Mapping[str, Any], place: str, size: int, way: str) -> list[str]:
    row_gigabytes = found["settings"]["features"] * 4 / GB
    speed = [rows * row_gigabytes for rows in speed_of(found, place, size, way)]
    work = work_of(found, place, size, way)
    return [
        text
        for values in (speed, work)
        for text in (f"{median(values):.2f}", f"{min(values):.2f}–{max(values):.2f}")
    ]


def _panel(
    found: Mapping[str, Any],
    numbers: _Numbers,
    ways: Sequence[str],
    place: str,
    size: int,
    unit: str,
    divisor: float,
) -> Panel:
    bars = []
    for way in ways:
        values = [value / divisor for value in numbers(found, place, size, way)]
        side = "pyg_scale" if way.startswith("ours") else "others"
        bars.append(Bar(LABELS[way], median(values), side, spread=(min(values), max(values))))
    return Panel(_over(place).capitalize(), bars, unit)


def _over(place: str) -> str:
    return place if place == _LOOPBACK else f"link of {place}"


def _complaint(args: argparse.Namespace) -> str | None:
    try:
        for link in args.link:
            dist_network.rate(link)
    except ValueError as error:
        return f"--link: {error}"
    if args.rows_in_all < max(args.rows):
        return "--rows-in-all must be at least those of a request, --rows"
    return None


BENCHMARK = Benchmark(
    "transport",
    __doc__,
    {
        "what is requested": {
            "nodes": Option(1_000_000, "rows of the table", least=1),
            "features": Option(100, "columns of fp32", least=1),
            "rows": Option([1_000, 10_000, 100_000], "of a request, as 1000,10000", least=1),
            "rows_in_all": Option(800_000, "of all requests of a round", least=1),
            "in_flight": Option(4, "requests", least=1),
        },
        "how": {
            "ways": Option(
                list(WAYS), f"comma-separated, of: {', '.join(WAYS)}", names_of(tuple(WAYS))
            ),
            "link": Option(
                [],
                "also on networks of these speeds, such as 10gbit,1gbit (needs root and iproute2)",
                lambda text: text.split(","),
            ),
            "threads": Option(1, "of torch, of each side", least=1),
            "rounds": Option(7, least=1),
            "timeout": Option(120.0, "seconds, of a message"),
        },
    },
    measure,
    report,
    {
        "nodes": 5_000, "features": 16, "rows": [50, 500], "rows_in_all": 2_000, "rounds": 1,
    },
    _complaint,
)  # fmt: skip
