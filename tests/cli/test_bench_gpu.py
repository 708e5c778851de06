"""`pyg-scale bench gpu` without a GPU: what it checks, and how its numbers are held to gates."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch

from pyg_scale.cli import main
from pyg_scale.cli.bench import gpu, gpu_cases, gpu_check, gpu_report
from pyg_scale.ops import library
from tests.ops import emulated

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")


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
        found = list(gpu_check.check(CPU))
    assert [check.name for check in found if not check.ok] == [], found
    assert len(found) == 7 * 3 + len(gpu_check.LAYERS) + 1


def test_what_is_wrong_is_found(monkeypatch):
    right = gpu_check.run
    monkeypatch.setattr(gpu_check, "hostile", small)
    monkeypatch.setattr(gpu_check, "WIDTHS", ((2, 4),))
    monkeypatch.setattr(gpu_check, "run", lambda op, *args, **o: right(op, *args, **o) * 1.1)
    found = list(gpu_check.check(CPU))
    assert [check.ok for check in found] == [False] * 21 + [True] * 5
    assert "the result differs by 1.0e-01 with 2 heads of 4 channels" in found[0].detail


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "hostile", small)
    monkeypatch.setattr(gpu_check, "WIDTHS", ((2, 4),))
    files = tmp_path / "gpu.json", tmp_path / "gpu.md"
    arguments = ["--device=cpu", "--quick", "--rounds=1"]
    output = [f"--json={files[0]}", f"--report={files[1]}"]
    assert main(["bench", "gpu", *arguments, *output]) == 0
    found = json.loads(files[0].read_text())
    assert len(found["gates"]) == len(gpu_cases.GATES)
    names = {(case["name"], case["side"]) for case in found["cases"]}
    for gate in gpu_cases.GATES:
        assert {gate.left, gate.right} - {("", "")} <= names
    assert "## Checks" in files[1].read_text()
    assert "QUICK" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (0, "ok sum", (True, "every check, in 0 s")),
        (1, "ok sum\nWRONG  max: it differs\n", (False, "WRONG  max: it differs")),
        (
            1,
            "Traceback\nKernelsError: there is no NVRTC",
            (False, "KernelsError: there is no NVRTC"),
        ),
        (None, "", (False, "not done after 120 s")),
    ],
)
def test_the_checks_once_more_with_nvrtc(monkeypatch, code, said, expected):
    def run(command, *, timeout, env, **options):
        assert command[-2:] == ["--check-only", "--device=cuda"]
        assert env["PYG_SCALE_CUDA"] == "nvrtc"
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, code, "", said)

    monkeypatch.setattr(gpu.subprocess, "run", run)
    found = gpu._with_nvrtc("cuda")
    assert (found.ok, found.detail) == expected


def test_without_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        gpu.main([])


def test_gates():
    def case(name, side, seconds, **more):
        return {"name": name, "side": side, "median_seconds": seconds, "error": "", **more}

    ours = gpu_cases.OURS
    cases = [
        case("sum float32", ours, 0.5, bytes_per_s=80.0),
        case("sum float32", gpu_cases.SPARSE, 0.4),
        case("gat, both", ours, 1.0, peak_bytes=3, memory_limit=2),
        {"name": "gat, both", "side": gpu_cases.PYG, "error": "out of memory"},
        case("sum with hubs", ours, 1.2),
        case("sum with hubs", gpu_cases.CONTROL, 1.0),
    ]
    found = gpu_report.gates({"cases": cases, "copy_bytes_per_s": 100.0})
    by_name = {gate["name"]: (gate["value"], gate["met"], gate["why"]) for gate in found}
    assert by_name["sum of float32 at 70 % of the copy bandwidth"] == (0.8, True, "")
    assert by_name["sum not slower than cuSPARSE"] == (0.8, False, "")
    assert by_name["GAT without a tensor of edges by channels"] == (1.5, False, "")
    assert by_name["sum with hubs"] == (1.2, True, "")
    assert by_name["GAT 5 times PyG"] == (None, None, "out of memory")
    assert by_name["max 3 times PyG"] == (None, None, "no numbers")
