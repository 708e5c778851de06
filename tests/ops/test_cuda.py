"""What only a CUDA device shows: `pyg-scale bench gpu` checks the same without a test runner."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pyg_scale.nn import GATConv, SAGEConv
from pyg_scale.ops import build as building
from pyg_scale.ops import fused, library, nvcc, sources
from pyg_scale.ops.aggregate import REDUCTIONS
from tests import compiling
from tests.registers import most_spilled

gpu_check = pytest.importorskip(
    "pyg_scale_bench.gpu_check",
    reason="needs pyg-scale-bench: pip install ./plugins/pyg-scale-bench",
)
device = torch.device("cuda", 0)


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")
    assert fused.usable(torch.empty(0, device=device))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("kernels")
class TestOnCuda:
    def test_every_check_of_the_benchmark(self):
        checks = gpu_check.checks(device, quick=True)
        found = [gpu_check.attempt(name, run) for name, run in checks.items()]
        assert [check for check in found if not check.ok] == []

    @pytest.mark.parametrize("op", [*REDUCTIONS, "gat", "gatv2", "transformer"])
    def test_is_what_the_cpu_computes(self, op):
        graph = gpu_check.hostile(torch.device("cpu"))
        given = gpu_check.inputs(op, graph, 2, 24, torch.float64, torch.device("cpu"))
        wanted = gpu_check.run(op, graph, given)
        gradients = torch.autograd.grad(wanted, given, torch.ones_like(wanted))
        there = gpu_check.hostile(device)
        moved = [tensor.detach().to(device).requires_grad_() for tensor in given]
        found = gpu_check.run(op, there, moved)
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-11, atol=1e-12)
        ours = torch.autograd.grad(found, moved, torch.ones_like(found))
        for a, b in zip(ours, gradients):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize("layer", [SAGEConv, GATConv])
    def test_layers_compile_as_a_whole_and_take_autocast(self, layer):
        torch.manual_seed(0)
        conv = layer(16, 8).to(device)
        x = torch.randn(100, 16, device=device)
        edge_index = torch.randint(100, (2, 900), device=device)
        wanted = conv(x, edge_index)
        with compiling.in_this_process():
            found = torch.compile(conv, fullgraph=True)(x, edge_index)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        with torch.autocast("cuda", torch.bfloat16):
            short = conv(x, edge_index)
        assert (short.float() - wanted).norm() / wanted.norm() < 2e-2

    def test_offsets_beyond_two_to_the_31(self):
        if torch.cuda.get_device_properties(device).total_memory < 60 << 30:
            pytest.skip("needs 60 GB on the device")
        rows, width = 2_200_000, 1024
        x = torch.ones(rows, width, device=device, dtype=torch.bfloat16)
        x[-1] = 3
        indptr = torch.arange(rows + 1, device=device)
        indices = torch.arange(rows - 1, -1, -1, device=device)
        graph = gpu_check.Adjacency(indptr, indices, rows)
        found = gpu_check.run("sum", graph, [x])
        assert float(found[0, 0]) == 3 and float(found[-1, -1]) == 1
        assert float(found.float().mean()) == pytest.approx(1, rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_of_it_compiles_for_every_device_and_spills_few_registers():
    """What the compiler cannot keep in registers goes through memory that loads should have."""
    if nvcc.find_nvcc() is None or building.find_compiler() is None:
        pytest.skip("needs nvcc")
    source = sources.source_dir()
    notes = building.compiler_notes(source)
    assert set(notes) == {path.name for path in source.glob("cuda/*.cu")}
    for name, said in notes.items():
        for device in nvcc.architectures().split(";"):
            assert f"for 'sm_{device}'" in said, (name, said)
        spilled = [int(size) for size in re.findall(r"(\d+) bytes spill", said)]
        assert spilled, (name, said)
        assert max(spilled) <= most_spilled(name), name


def test_the_library_holds_them_where_nvcc_is():
    if not library.compiled() or nvcc.wanted(sources.source_dir()) in (None, ""):
        pytest.skip("needs nvcc")
    assert library.cuda() == sources.built_for(Path(library.status()["path"])) != ""
