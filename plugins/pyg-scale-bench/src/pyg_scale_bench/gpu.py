"""Correctness and speed of fused ops on a GPU, compared with PyG and cuSPARSE.

Loading on a GPU is checked for the same batches, draws and rows as on the CPU.

It needs a CUDA device and kernels compiled for it (``make gpu`` compiles and runs). First every op
is checked on adversarial graphs against its meaning in float64, on another stream and in a CUDA
graph. ``--sanitize`` repeats some checks under compute-sanitizer, ``--nvrtc`` all checks with
kernels that NVRTC compiles. Then time and peak memory are measured, as medians of steps that take
turns, and compared with gates. Nothing is downloaded; it takes some minutes.

Exit status: 1 if a check failed, else 0. The report lists checks that could not run and gates that
are missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from pyg_scale.ops import fused, library
from pyg_scale_bench import gpu_cases, gpu_check, gpu_loading
from pyg_scale_bench.benchmark import Benchmark, Option
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.gpu_cases import GATES, Gate
from pyg_scale_bench.report import GB, Report, Table
from pyg_scale_bench.rounds import OURS
from pyg_scale_bench.steps import Gauge

_COPY_BYTES = 1 << 30
_SANITIZER_SECONDS = 240
_NVRTC_SECONDS = 120
_CHECKS = ("-m", "pyg_scale_bench", "gpu", "--check-only")
_RESULTS = {True: "ok", False: "WRONG", None: "not checked"}


def measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Check everything, then measure the values with gates.

    Raises:
        KernelsError: If there are no kernels for the device.
        SystemExit: If there is no such device.
    """
    start, device = time.monotonic(), torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("pyg-scale bench gpu needs a CUDA device: torch finds none")
    fused.usable(torch.empty(0, device=device))  # raises at once if there are no kernels
    sizes = gpu_cases.QUICK if args.quick else gpu_cases.sizes_for(device)
    found["settings"]["sizes"] = sizes._asdict()
    found |= {"device": _describe(device), "checks": [], "cases": [], "gates": []}
    own = gpu_check.check(device, args.quick), gpu_loading.check(device)
    for check in chain(*own, _checks_again(args)):
        print(f"{_RESULTS[check.ok]:<6} {check.name}: {check.detail}", file=sys.stderr)
        found["checks"].append(check._asdict())
    if args.check_only:
        return
    gauge = Gauge(device)
    found["copy_bytes_per_s"] = gauge.copy_bandwidth(1 << 20 if args.quick else _COPY_BYTES)
    for cases in gpu_cases.groups(sizes, device):
        about = cases[0].about
        if time.monotonic() > start + args.seconds:
            found["cases"].append({**about, "side": OURS, "error": "out of time"})
            continue
        print(f"measuring {about['name']} on the {about['graph']} graph", file=sys.stderr)
        gauge.measure(cases, args.rounds)
        found["cases"] += [case.to_dict() for case in cases]
    found["gates"] = gates(found)


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


# Checks in processes of their own #########################################################


def _checks_again(args: argparse.Namespace) -> Iterator[gpu_check.Found]:
    if args.sanitize:
        yield _sanitized(args.device)
    if args.nvrtc:
        yield _with_nvrtc(args.device)


def _sanitized(device: str) -> gpu_check.Found:
    """Repeat some checks under compute-sanitizer, which checks memory accesses."""
    tool, name = shutil.which("compute-sanitizer"), "compute-sanitizer memcheck"
    if tool is None:
        return gpu_check.Found(name, None, "compute-sanitizer is not on the PATH")
    own = [sys.executable, *_CHECKS, "--quick", f"--device={device}"]
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
        return None, f"not done after {seconds:g} s"
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
        value = _value(gate, left, right, found["copy_bytes_per_s"])
        most = gate.kind in ("slower", "memory")
        met = None if value is None else (value <= gate.limit if most else value >= gate.limit)
        why = "" if value is not None else left.get("error") or right.get("error") or "no numbers"
        out.append({**gate._asdict(), "value": value, "met": met, "why": why})
    return out


def _value(
    gate: Gate, left: Mapping[str, Any], right: Mapping[str, Any], copy: float
) -> float | None:
    if "median_seconds" not in left:
        return None
    if gate.kind == "rate":
        return float(left["bytes_per_s"] / copy)
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
        },
        "how": {
            "rounds": Option(20, least=1),
            "seconds": Option(240.0, "begin no group later than that"),
        },
    },
    measure,
    report,
    {},
    _complaint,
)
