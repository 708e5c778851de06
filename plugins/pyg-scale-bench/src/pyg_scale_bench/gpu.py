"""Correctness and speed of fused ops on a GPU, compared with PyG and cuSPARSE.

Loading on a GPU is checked for the same batches, draws and rows as on the CPU.

It needs a CUDA device and kernels compiled for it (``make gpu`` compiles and runs). First every op
is checked on adversarial graphs against its meaning in float64, on another stream and in a CUDA
graph. Then time and peak memory are measured, as medians of steps that take turns, and compared
with gates. ``--nvrtc`` repeats all checks with kernels that NVRTC compiles, ``--sanitize`` some of
them under compute-sanitizer. Nothing is downloaded; it takes some minutes.

Checks and measurements run in processes of their own. One that fails is a row of the report, and
the next one begins in a new process, as an error of a kernel leaves no use of the device to its
process. ``--json`` is written anew after every row, and ``pyg-scale bench report`` makes a report
of it: whatever ends the run, what was found is there.

Exit status: 1 if a check failed, else 0. The report lists checks that could not run and gates that
are missed.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from pyg_scale.ops import fused, library
from pyg_scale_bench import environment, gpu_cases, gpu_check, gpu_loading
from pyg_scale_bench.benchmark import Benchmark, Option
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.child import Child, ChildEnded
from pyg_scale_bench.gpu_cases import GATES, Gate
from pyg_scale_bench.report import GB, Report, Table, save_so_far
from pyg_scale_bench.rounds import OURS
from pyg_scale_bench.steps import Gauge

_COPY_BYTES = 1 << 30
_SANITIZER_SECONDS = 420
_NVRTC_SECONDS = 180
_CHECKS = ("-m", "pyg_scale_bench", "gpu", "--check-only")
_STEP_SECONDS = 120.0
_COPY = "copying memory"
FAMILIES: dict[str, Callable[[torch.device, bool], gpu_check.Checks]] = {
    "ops": lambda device, quick: gpu_check.checks(device, quick),
    "loading": lambda device, quick: gpu_loading.checks(device, quick),
}
ALL = "all"
_RESULTS = {True: "ok", False: "WRONG", None: "not checked"}


def measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Check everything, then measure the values with gates.

    Raises:
        KernelsError: If there are no kernels for the device.
        SystemExit: If there is no such device.
    """
    start, device = time.monotonic(), torch.device(args.device)
    others = environment.Others()
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("pyg-scale bench gpu needs a CUDA device: torch finds none")
    fused.usable(torch.empty(0, device=device))  # raises at once if there are no kernels
    sizes = gpu_cases.QUICK if args.quick else gpu_cases.sizes_for(device)
    found["settings"]["sizes"] = sizes._asdict()
    found |= {"device": _describe(device), "checks": [], "cases": [], "gates": []}

    def note(check: gpu_check.Found) -> None:
        print(f"{_RESULTS[check.ok]:<6} {check.name}: {check.detail}", file=sys.stderr)
        found["checks"].append(check._asdict())
        save_so_far(found, args.json, others)

    given = {"device": args.device, "quick": args.quick}
    for family in FAMILIES if args.family == ALL else [args.family]:
        if args.check_only:  # the whole of it is a process of its own
            for name, run in FAMILIES[family](device, args.quick).items():
                note(gpu_check.attempt(name, run))
            continue
        for name, row in _rows(checked, given | {"family": family}):
            note(gpu_check.Found(**{"name": name, "ok": False, "detail": "", **row}))
    if not args.check_only:
        until = start + args.seconds
        for name, row in _rows(measured, given | {"rounds": args.rounds}, until):
            found |= row.get("of_all", {})
            lost = {"name": name, "side": OURS, "error": row.get("detail", "")}
            found["cases"] += row.get("cases", [lost])
            found["gates"] = gates(found)
            save_so_far(found, args.json, others)
    for check in _checks_again(args):
        note(check)


def _describe(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": str(device)}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "kernels_for": library.cuda(),
        "kernels_by": library.way_on_cuda(10 * properties.major + properties.minor)[0],
        "cuda": torch.version.cuda,
    }


# Processes of their own ###################################################################


def checked(family: str, device: str, quick: bool, skip: int) -> Iterator[Any]:
    """The names of a family's checks, and the result of each one from number ``skip`` on."""
    checks = FAMILIES[family](torch.device(device), quick)
    yield list(checks)
    for name, run in [*checks.items()][skip:]:
        yield gpu_check.attempt(name, run)._asdict()


def measured(device: str, quick: bool, rounds: int, skip: int) -> Iterator[Any]:
    """The names of all groups of cases, and what was measured of each from number ``skip`` on."""
    where = torch.device(device)
    sizes = gpu_cases.QUICK if quick else gpu_cases.sizes_for(where)
    groups, gauge = gpu_cases.groups(sizes, where), Gauge(where)
    yield [_COPY, *groups]
    if skip == 0:
        rate = gauge.copy_bandwidth(1 << 20 if quick else _COPY_BYTES)
        yield {"of_all": {"copy_bytes_per_s": rate}, "cases": []}
    for name, make in [*groups.items()][max(skip - 1, 0) :]:
        print(f"measuring {name}", file=sys.stderr)
        try:
            torch.manual_seed(0)
            cases = make()
            gauge.measure(cases, rounds)
            yield {"cases": [case.to_dict() for case in cases]}
        except Exception as error:
            yield {"ok": False, "detail": f"{type(error).__name__}: {error}".partition("\n")[0]}


def _rows(
    target: Callable[..., Iterator[Any]], given: Mapping[str, Any], until: float = math.inf
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The names and results of the steps of a generator, which runs in a process of its own.

    After a step that failed, or ended its process, another process begins with the next one.

    Args:
        target: Yields the names of all steps, and then a result of each from number ``skip`` on.
        given: Its other arguments.
        until: The moment after which no step begins.
    """
    names: list[str] = [target.__name__]
    at = 0
    while at < len(names):
        with Child(target, {**given, "skip": at}, seconds=_STEP_SECONDS) as child:
            try:
                names = child.next()
                while at < len(names):
                    row: dict[str, Any] = {"ok": None, "detail": "out of time"}
                    row = row if time.monotonic() > until else child.next()
                    yield names[at], row
                    at += 1
                    wrong = [case for case in row.get("cases", ()) if case["error"]]
                    if wrong or row.get("ok") is False:
                        break
            except ChildEnded as error:
                yield names[at], {"ok": False, "detail": str(error)}
                at += 1


def _checks_again(args: argparse.Namespace) -> Iterator[gpu_check.Found]:
    if args.sanitize:
        with ThreadPoolExecutor() as threads:  # each waits for a process
            yield from threads.map(partial(_sanitized, args.device), FAMILIES)
    if args.nvrtc:
        yield _with_nvrtc(args.device)


def _sanitized(device: str, family: str) -> gpu_check.Found:
    """Repeat some checks under compute-sanitizer, which checks memory accesses."""
    tool, name = shutil.which("compute-sanitizer"), f"compute-sanitizer memcheck, {family}"
    if tool is None:
        return gpu_check.Found(name, None, "compute-sanitizer is not on the PATH")
    own = [sys.executable, *_CHECKS, "--quick", f"--family={family}", f"--device={device}"]
    # It knows the bounds of allocations, which are those of tensors if torch keeps no memory. Calls
    # of torch to the driver may fail, which is not an error.
    right, detail = _child(
        [tool, "--error-exitcode=9", "--report-api-errors=no", *own],
        {gpu_check.UNCACHED: "1"},
        _SANITIZER_SECONDS,
    )
    return gpu_check.Found(name, right, detail)


def _with_nvrtc(device: str) -> gpu_check.Found:
    """Repeat the checks with kernels compiled at first use."""
    own = [sys.executable, *_CHECKS, f"--device={device}"]
    right, detail = _child(own, {"PYG_SCALE_CUDA": "nvrtc"}, _NVRTC_SECONDS)
    return gpu_check.Found("kernels that NVRTC compiled", bool(right), detail)


def _child(command: list[str], settings: dict[str, str], seconds: float) -> tuple[bool | None, str]:
    """The outcome of checks in a separate process, and its output; ``None`` if out of time."""
    start = time.monotonic()
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | settings,
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(timeout=seconds)
    except BaseException as error:
        # Including its children, which would use the device during measurements.
        os.killpg(child.pid, signal.SIGKILL)
        said, _ = child.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        sys.stderr.write(said)
        passed = sum(line.startswith("ok ") for line in said.splitlines())
        return None, f"not done after {seconds:g} s, {passed} checks passed"
    lines = said.splitlines()
    own = [line for line in lines if not line.startswith("=========")]
    summary = [line.strip("= ") for line in lines if line.startswith("=========")][-1:]
    if child.returncode == 0:
        return True, "; ".join([f"every check, in {time.monotonic() - start:.0f} s", *summary])
    sys.stderr.write(said)
    wrong = [line for line in own if line.startswith("WRONG")]
    return False, "; ".join([*(wrong or own[-1:]), *summary])


# Report ###################################################################################


def gates(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each gate with its measured value (``None`` if there is none), and True if it is met."""
    cases = {(case["name"], case["side"]): case for case in found["cases"]}
    out = []
    for gate in GATES:
        left, right = cases.get(gate.left, {}), cases.get(gate.right, {})
        value = _value(gate, left, right, found.get("copy_bytes_per_s"))
        most = gate.kind in ("slower", "memory")
        met = None if value is None else (value <= gate.limit if most else value >= gate.limit)
        why = "" if value is not None else left.get("error") or right.get("error") or "no numbers"
        out.append({**gate._asdict(), "value": value, "met": met, "why": why})
    return out


def _value(
    gate: Gate, left: Mapping[str, Any], right: Mapping[str, Any], copy: float | None
) -> float | None:
    if "median_seconds" not in left:
        return None
    if gate.kind == "rate":
        return None if copy is None else float(left["bytes_per_s"] / copy)
    if gate.kind == "memory":
        known = left["peak_bytes"] is not None
        return float(left["peak_bytes"] / left["memory_limit"]) if known else None
    if "median_seconds" not in right:
        return None
    ratio = right["median_seconds"] / left["median_seconds"]
    return float(1 / ratio if gate.kind == "slower" else ratio)


def report(found: Mapping[str, Any]) -> Report:
    """The report of the results. A terminal does not show passed checks."""
    checks, settings = found["checks"], found["settings"]
    passed = sum(check["ok"] is True for check in checks)
    lines = [
        "device: " + ", ".join(f"{key} {value}" for key, value in found["device"].items()),
        f"checks: {passed} of {len(checks)} passed",
    ]
    if "copy_bytes_per_s" in found:
        lines += [
            f"copying the device's memory: {found['copy_bytes_per_s'] / GB:.0f} GB/s, both ways",
            (
                "GB/s of sums: a row of features for every edge, results and indices, over the "
                "median time"
            ),
            f"medians of {settings['rounds']} steps; both: with gradients",
            "sizes: " + ", ".join(f"{k} {v}" for k, v in settings["sizes"].items()),
        ]
    if settings["quick"]:
        lines.append("QUICK: these graphs are too small for numbers")
    for ok in (False, None):
        which = [check for check in checks if check["ok"] is ok]
        lines += [f"{_RESULTS[ok]}: {check['name']}: {check['detail']}" for check in which]
    results = [
        [check["name"], _RESULTS[check["ok"]], check["detail"].replace("|", "/")]
        for check in checks
    ]
    header = ["case", "side", "ms", "lowest", "highest", "GB/s", "peak MB"]
    return Report(
        found,
        lines,
        [
            Table(["gate", "wanted", "measured", ""], [*map(_gate, found["gates"])], align="lrrl"),
            Table(header, [*map(_case, found["cases"])]),
            Table(["check", "", ""], results, "Checks", align="l", detail=True),
        ],
        [[Panel("Steps", _bars(found["cases"]), "milliseconds (median)", log=True)]],
        found["device"]["name"],
        failed=any(check["ok"] is False for check in checks),
    )


def _gate(gate: Mapping[str, Any]) -> list[str]:
    sign = "≤" if gate["kind"] in ("slower", "memory") else "≥"
    value = gate["why"] if gate["value"] is None else f"{gate['value']:.2f}"
    met = {True: "met", False: "MISSED", None: "not measured"}[gate["met"]]
    return [gate["name"], f"{sign} {gate['limit']:g}", value, met]


def _case(case: Mapping[str, Any]) -> list[str]:
    if "median_seconds" not in case:
        return [case["name"], case["side"], case["error"], "", "", "", ""]
    times = (case["median_seconds"], min(case["seconds"]), max(case["seconds"]))
    return [
        case["name"],
        case["side"],
        *(f"{1e3 * seconds:.3f}" for seconds in times),
        f"{case['bytes_per_s'] / GB:.0f}" if case["bytes"] else "",
        "" if case["peak_bytes"] is None else f"{case['peak_bytes'] / 1e6:.0f}",
    ]


def _bars(cases: list[dict[str, Any]]) -> list[Bar]:
    return [
        Bar(case["name"], 1e3 * case["median_seconds"], case["side"])
        for case in cases
        if "median_seconds" in case
    ]


def _complaint(args: argparse.Namespace) -> str | None:
    if args.png and args.check_only:
        return "--png draws what is measured: leave --check-only out"
    return None


BENCHMARK = Benchmark(
    "gpu",
    __doc__,
    {
        "what": {
            "device": Option("cuda", "cuda (default), or cpu to see it run"),
            "check_only": Option(False, "measure nothing"),
            "sanitize": Option(False, "check under compute-sanitizer, too"),
            "nvrtc": Option(False, "check with kernels of NVRTC's, too"),
            "family": Option(ALL, "the checks to run", choices=[ALL, *FAMILIES]),
        },
        "how": {
            "rounds": Option(20, least=1),
            "seconds": Option(240.0, "begin no measurement later than that"),
        },
    },
    measure,
    report,
    {},
    _complaint,
)
