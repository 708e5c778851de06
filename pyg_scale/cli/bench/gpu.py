"""The fused ops on a GPU: whether they are right, then how fast, beside PyG and cuSPARSE.

Of loading on a GPU: whether batches, draws and rows are those of the CPU.

Needs a CUDA device and kernels compiled for it (``make gpu`` does both). First every op is checked
on hostile graphs against its meaning in float64, on another stream and in a CUDA graph; with
``--sanitize`` some of it once more under compute-sanitizer, with ``--nvrtc`` all of it with kernels
that NVRTC compiles. Then time and peak memory, medians of steps that
take turns, each held against its gate. Nothing is downloaded; it takes some minutes.

Exit status: 1 if a check found something wrong, else 0. What could not be checked and gates that
are missed are in the report.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pyg_scale.cli.bench import environment, gpu_cases, gpu_check, gpu_loading, gpu_report
from pyg_scale.cli.bench.gpu_cases import OURS, Case
from pyg_scale.cli.bench.measure import in_one_line
from pyg_scale.ops import fused, library

_COPY_BYTES = 1 << 30
_SANITIZER_SECONDS = 240
_NVRTC_SECONDS = 120
_CHECKS = ("-m", "pyg_scale.cli", "bench", "gpu", "--check-only")
_RESULTS = {True: "ok", False: "WRONG", None: "not checked"}


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale bench gpu``.

    Raises:
        KernelsError: If there are no kernels for the device.
    """
    args, start = _arguments(argv), time.monotonic()
    os.environ.setdefault("PYG_SCALE_KERNELS", "require")
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("pyg-scale bench gpu needs a CUDA device: torch sees none here")
    fused.usable(torch.empty(0, device=device))  # raises at once if there are no kernels
    sizes = gpu_cases.QUICK if args.quick else gpu_cases.sizes_for(device)
    found: dict[str, Any] = {
        "benchmark": "gpu",
        "command": shlex.join(["pyg-scale", "bench", "gpu", *argv]),
        "environment": environment.describe(),
        "device": _describe(device),
        "settings": {"rounds": args.rounds, "quick": args.quick, "sizes": sizes._asdict()},
        "checks": [],
        "cases": [],
        "gates": [],
    }
    own = gpu_check.check(device, args.quick), gpu_loading.check(device)
    for check in chain(*own, _checks_again(args)):
        print(f"{_RESULTS[check.ok]:<6} {check.name}: {check.detail}", file=sys.stderr)
        found["checks"].append(check._asdict())
    wrong = any(check["ok"] is False for check in found["checks"])
    if not args.check_only:
        found["copy_bytes_per_s"] = copy_bandwidth(device, args.quick)
        _measure_all(found, sizes, args, device, start + args.seconds)
        found["gates"] = gpu_report.gates(found)
    print(gpu_report.terminal(found))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")
    if args.report:
        Path(args.report).write_text(gpu_report.markdown(found))
    return 1 if wrong else 0


def copy_bandwidth(device: torch.device, quick: bool = False) -> float:
    """Bytes per second that torch reads and writes when it copies a large tensor there."""
    source = torch.ones((1 << 20 if quick else _COPY_BYTES) // 4, device=device)
    target = torch.empty_like(source)
    seconds = [_seconds(lambda: target.copy_(source), device) for _ in range(12)]
    return 2 * source.numel() * 4 / median(seconds[2:])


def _seconds(step: Any, device: torch.device) -> float:
    """Of one step: between events on the device, by the clock on the CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _measure_all(
    found: dict[str, Any],
    sizes: gpu_cases.Sizes,
    args: argparse.Namespace,
    device: torch.device,
    end: float,
) -> None:
    for graph, cases in gpu_cases.groups(sizes, device):
        if time.monotonic() > end:
            left_out = {"graph": graph, "name": cases[0].name, "side": OURS, "error": "out of time"}
            found["cases"].append(left_out)
            continue
        print(f"measuring {cases[0].name} on the {graph} graph", file=sys.stderr)
        found["cases"] += [{"graph": graph, **case} for case in _measure(cases, args, device)]


def _measure(
    cases: list[Case], args: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for case in cases:
        entry: dict[str, Any] = {"name": case.name, "side": case.side, "error": "", "seconds": []}
        entry |= {"bytes": case.bytes, "memory_limit": case.inputs, "peak_bytes": None}
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        try:
            case.step()
            case.step()
        except Exception as error:  # PyG's tensors of edges by channels may not fit
            if case.side == OURS:
                raise
            entry["error"] = in_one_line(error)
        if device.type == "cuda":
            entry["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
        out.append(entry)
    for _ in range(args.rounds):
        for case, entry in zip(cases, out):
            if not entry["error"]:
                entry["seconds"].append(_seconds(case.step, device))
    for entry in out:
        if entry["seconds"]:
            entry["median_seconds"] = median(entry["seconds"])
            entry["bytes_per_s"] = entry["bytes"] / entry["median_seconds"]
    return out


def _checks_again(args: argparse.Namespace) -> Iterator[gpu_check.Found]:
    if args.sanitize:
        yield _sanitized(args.device)
    if args.nvrtc:
        yield _with_nvrtc(args.device)


def _sanitized(device: str) -> gpu_check.Found:
    """Some of the checks once more under compute-sanitizer, where memory accesses are looked at."""
    tool, name = shutil.which("compute-sanitizer"), "compute-sanitizer memcheck"
    if tool is None:
        return gpu_check.Found(name, None, "compute-sanitizer is not on the PATH")
    own = [sys.executable, *_CHECKS, "--quick", f"--device={device}"]
    # It knows the bounds of allocations, which are those of tensors if torch keeps no memory. What
    # torch asks of the driver may well fail: that is no error.
    right, detail = _child(
        [tool, "--error-exitcode=9", "--report-api-errors=no", *own],
        {gpu_check.UNCACHED: "1"},
        _SANITIZER_SECONDS,
    )
    return gpu_check.Found(name, right, detail)


def _with_nvrtc(device: str) -> gpu_check.Found:
    """The checks once more with kernels compiled at first use."""
    own = [sys.executable, *_CHECKS, f"--device={device}"]
    right, detail = _child(own, {"PYG_SCALE_CUDA": "nvrtc"}, _NVRTC_SECONDS)
    return gpu_check.Found("kernels that NVRTC compiled", bool(right), detail)


def _child(command: list[str], settings: dict[str, str], seconds: float) -> tuple[bool | None, str]:
    """Whether checks in a process of their own pass, and what it says; ``None``: not in time."""
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
        # With what it has started: that would use the device while others are timed.
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


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pyg-scale bench gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", help="cuda (default), or cpu to see it run")
    parser.add_argument("--check-only", action="store_true", help="measure nothing")
    parser.add_argument(
        "--sanitize", action="store_true", help="check under compute-sanitizer, too"
    )
    parser.add_argument("--nvrtc", action="store_true", help="check with kernels of NVRTC's, too")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=240, help="begin no group later than that")
    parser.add_argument("--quick", action="store_true", help="small graphs, fewer checks")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--report", metavar="FILE.md")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    return args
