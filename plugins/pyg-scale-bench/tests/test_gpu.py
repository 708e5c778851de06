"""`pyg-scale bench gpu` without a GPU: what it checks, and how its numbers are held to gates."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale_bench import gpu, gpu_cases, gpu_check
from pyg_scale_bench.command import main
from pyg_scale_bench.rounds import OURS, PYG
from pyg_scale_bench.steps import SPARSE
from tests.ops import emulated

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")


def every(checks):
    return [gpu_check.attempt(name, run) for name, run in checks.items()]


def small(device, index=torch.int64):
    degree = torch.tensor([0, 1, 255, 256, 257, 0, 3, 600, 2, 0])
    indptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(50, (int(indptr[-1]),), generator=generator).to(index)
    edge_id = torch.randperm(indices.numel(), generator=generator).to(index)
    return gpu_check.Adjacency(indptr, indices, 50, edge_id)


def test_every_check_passes_in_the_emulator(monkeypatch):
    monkeypatch.setattr(gpu_check, "hostile", small)
    monkeypatch.setattr(gpu_check, "WIDTHS", ((1, 17), (2, 8)))
    with emulated.instead_of():
        found = every(gpu_check.checks(CPU))
    assert [check.name for check in found if not check.ok] == [], found
    assert len(found) == 7 * 3 + len(gpu_check.LAYERS) + len(gpu_check.STEPPED) + 3


def test_quick_checks_are_fewer(monkeypatch):
    monkeypatch.setattr(gpu_check, "hostile", small)
    found = every(gpu_check.checks(CPU, quick=True))
    assert [check.name for check in found if not check.ok] == [], found
    assert len(found) == 7 * 2 + len(gpu_check.LAYERS) + len(gpu_check.STEPPED) + 3


def test_what_is_wrong_is_found(monkeypatch):
    right = gpu_check.run
    monkeypatch.setattr(gpu_check, "hostile", small)
    monkeypatch.setattr(gpu_check, "WIDTHS", ((2, 4),))
    monkeypatch.setattr(gpu_check, "run", lambda op, *args, **o: right(op, *args, **o) * 1.1)
    found = every(gpu_check.checks(CPU))
    assert [check.ok for check in found] == [False] * 21 + [True] * 12
    assert "the result differs by 1.0e-01 with 2 heads of 4 channels" in found[0].detail


@pytest.mark.slow  # all checks and measurements, small
def test_command(tmp_path, capsys):
    files = tmp_path / "gpu.json", tmp_path / "gpu.md"
    arguments = ["--device=cpu", "--quick", "--rounds=1"]
    output = [f"--json={files[0]}", f"--report={files[1]}"]
    assert main(["gpu", *arguments, *output]) == 0
    found = json.loads(files[0].read_text())
    assert len(found["gates"]) == len(gpu_cases.GATES)
    names = {(case["name"], case["side"]) for case in found["cases"]}
    for gate in gpu_cases.GATES:
        assert {gate.left, gate.right} - {("", "")} <= names
    assert "## Checks" in files[1].read_text()
    assert "QUICK" in capsys.readouterr().out


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Puts a shell script in the place of Python, and of compute-sanitizer on the PATH."""

    def write(script):
        for name in ("python", "compute-sanitizer"):
            path = tmp_path / name
            path.write_text(f"#!/bin/sh\necho $0 $@ >{tmp_path}/{name}.asked\n{script}\n")
            path.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo ok sum; test $PYG_SCALE_CUDA = nvrtc", (True, "every check, in 0 s")),
        (
            "echo ok sum; echo 'WRONG  max: it differs' >&2; exit 1",
            (False, "WRONG  max: it differs"),
        ),
        ("echo Traceback; echo KernelsError: no NVRTC; exit 1", (False, "KernelsError: no NVRTC")),
    ],
    ids=["right", "wrong", "broken"],
)
def test_the_checks_once_more_with_nvrtc(child, script, expected):
    asked = child(script) / "python.asked"
    found = gpu._with_nvrtc("cuda")
    assert (found.ok, found.detail) == expected
    assert asked.read_text().endswith("pyg_scale_bench gpu --check-only --device=cuda\n")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            f"echo ========= ERROR SUMMARY: 0 errors; test ${gpu_check.UNCACHED} = 1",
            (True, "every check, in 0 s; ERROR SUMMARY: 0 errors"),
        ),
        (
            "echo ========= Invalid read; echo 'WRONG  max: no'; echo ========= 3 errors; exit 9",
            (False, "WRONG  max: no; 3 errors"),
        ),
        ("echo out of memory; echo ========= 0 errors; exit 1", (False, "out of memory; 0 errors")),
    ],
    ids=["right", "wrong", "broken"],
)
def test_some_checks_once_more_under_compute_sanitizer(child, script, expected):
    folder = child(script)
    found = gpu._sanitized("cuda", "ops")
    assert (found.ok, found.detail) == expected
    asked = (folder / "compute-sanitizer.asked").read_text()
    assert f"--report-api-errors=no {folder / 'python'} -m pyg_scale_bench gpu" in asked
    assert asked.endswith("--check-only --quick --family=ops --device=cuda\n")


def test_what_is_not_done_in_time_ends_with_all_that_it_started(child, monkeypatch):
    """That no process is left is seen by a fixture of all tests."""
    child("echo WRONG  max: no; sleep 100 & sleep 100; wait")
    monkeypatch.setattr(gpu, "_SANITIZER_SECONDS", 0.5)
    monkeypatch.setattr(gpu, "_NVRTC_SECONDS", 0.5)
    assert gpu._sanitized("cuda", "ops")[1:] == (None, "not done after 0.5 s, 0 checks passed")
    assert gpu._with_nvrtc("cuda")[1:] == (False, "not done after 0.5 s, 0 checks passed")


@pytest.mark.parametrize(("ok", "code", "said"), [(None, 0, "not checked"), (False, 1, "WRONG")])
def test_only_what_is_wrong_is_a_failure(monkeypatch, capsys, ok, code, said):
    monkeypatch.setattr(gpu_check, "checks", lambda *_: {"sum": lambda: ""})
    monkeypatch.setattr(gpu.gpu_loading, "checks", lambda *_: {})
    again = lambda _, family: gpu_check.Found(f"memcheck, {family}", ok, "no tool")  # noqa: E731
    monkeypatch.setattr(gpu, "_sanitized", again)
    assert main(["gpu", "--device=cpu", "--check-only", "--sanitize"]) == code
    found = capsys.readouterr().out
    assert f"\n{said}: memcheck, ops: no tool\n{said}: memcheck, loading: no tool\n" in found
    assert "checks: 1 of 3 passed" in found


def test_without_compute_sanitizer_nothing_is_wrong(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert gpu._sanitized("cuda", "ops")[1:] == (None, "compute-sanitizer is not on the PATH")


def test_graphs_are_smaller_where_memory_is_short(monkeypatch):
    memory = SimpleNamespace(total_memory=78 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    short = gpu_cases.sizes_for(torch.device("cuda"))
    memory.total_memory = 139 << 30
    roomy = gpu_cases.sizes_for(torch.device("cuda"))
    assert short.middle[1] < roomy.middle[1]
    assert short._replace(middle=roomy.middle) == roomy == gpu_cases.sizes_for(CPU)


@pytest.fixture
def failing(monkeypatch):
    """The module of steps that fail, where processes find it."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("gpu_steps")


@pytest.mark.matrix(2)
@pytest.mark.parametrize("deadly", ["ends", "waits"])
def test_a_step_that_fails_costs_itself_alone(failing, monkeypatch, deadly):
    if deadly == "waits":
        monkeypatch.setattr(gpu, "_STEP_SECONDS", 30.0)  # more than the start of a process takes
    found = [*gpu._rows(failing.steps, {"deadly": deadly})]
    assert [name for name, _ in found] == ["right", "wrong", "deadly", "last"]
    assert [row["ok"] for _, row in found] == [True, False, False, True]
    assert "it was killed" in found[2][1]["detail"] or "ended with -6" in found[2][1]["detail"]
    assert found[0][1]["process"] == found[1][1]["process"] != found[3][1]["process"]
    late = [*gpu._rows(failing.steps, {"deadly": deadly}, time.monotonic() - 1)]
    assert [row["detail"] for _, row in late] == ["out of time"] * 4


def test_a_process_that_cannot_begin_is_one_row(failing):
    ((name, row),) = gpu._rows(failing.broken, {})
    assert (name, row["ok"]) == ("broken", False)


def test_a_run_that_is_ended_is_no_failed_step(monkeypatch):
    """SIGTERM comes as ``SystemExit`` while a child is waited for."""

    class Ended(contextlib.nullcontext):
        def next(self):
            raise SystemExit(143)

    monkeypatch.setattr(gpu, "Child", lambda target, given, seconds: Ended(Ended()))
    with pytest.raises(SystemExit, match="143"):
        list(gpu._rows(gpu.measured, {"device": "cpu", "quick": True, "rounds": 1}))


def test_what_was_found_is_written_after_every_row(tmp_path, monkeypatch):
    """Whatever ends the run."""
    path = tmp_path / "new" / "gpu.json"

    def rows(target, given, until=0.0):
        if target is gpu.measured:
            case = {"name": "sum float32", "side": OURS, "error": "trap"}
            yield "sum", {"cases": [case]}
            raise KeyboardInterrupt
        yield "sum", {"ok": True, "detail": "equal"}

    monkeypatch.setattr(gpu, "_rows", rows)
    with pytest.raises(KeyboardInterrupt):
        main(["gpu", "--device=cpu", f"--json={path}"])
    assert [each.name for each in path.parent.iterdir()] == ["gpu.json"]
    found = json.loads(path.read_text())
    assert [check["name"] for check in found["checks"]] == ["sum", "sum"]
    assert main(["report", str(path), f"--report={tmp_path / 'gpu.md'}"]) == 0
    page = (tmp_path / "gpu.md").read_text()
    assert "trap" in page and "checks: 2 of 2 passed" in page


def test_without_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        main(["gpu"])


def test_gates():
    def case(name, side, seconds, **more):
        return {"name": name, "side": side, "median_seconds": seconds, "error": "", **more}

    cases = [
        case("sum float32", OURS, 0.5, bytes_per_s=80.0),
        case("sum float32", SPARSE, 0.4),
        case("gat, both", OURS, 1.0, peak_bytes=3, memory_limit=2),
        {"name": "gat, both", "side": PYG, "error": "out of memory"},
        case("sum with hubs", OURS, 1.2),
        case("sum with hubs", gpu_cases.CONTROL, 1.0),
    ]
    found = gpu.gates({"cases": cases, "copy_bytes_per_s": 100.0})
    by_name = {gate["name"]: (gate["value"], gate["met"], gate["why"]) for gate in found}
    assert by_name["sum of float32 at 70 % of the copy bandwidth"] == (0.8, True, "")
    assert by_name["sum not slower than cuSPARSE"] == (0.8, False, "")
    assert by_name["GAT without a tensor of edges by channels"] == (1.5, False, "")
    assert by_name["sum with hubs"] == (1.2, True, "")
    assert by_name["GAT 5 times PyG"] == (None, None, "out of memory")
    assert by_name["max 3 times PyG"] == (None, None, "no numbers")
