"""The machine code of ``csrc/cuda/`` for some devices: loads in flight, and no lanes searched."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from pyg_scale.ops import build as building
from pyg_scale.ops import nvcc, sources
from tests.registers import most_spilled

DEVICES = ("80", "90", "100")
FILES = (
    *("sum", "extreme", "weight_grad", "attention", "attention_grad", "adjacency"),
    *("candidates", "draw_neighbors", "first_places"),
)
IN_FLIGHT = {  # wide loads that nothing waits for in between; the compiler may delay the last one
    "sum_float_16": 4,
    "sum_several_float_16": 4,
    "sum_weighted_float_16": 4,
    "extreme_float_16": 3,
    "weight_grad_float_16": 3,
    "attention_gat_float_16": 4,
    "attention_gatv2_float_16": 4,
    "attention_dot_float_16": 8,  # of keys and values
    "gat_grad_float_16": 4,
    "gatv2_grad_float_16": 4,
    "dot_grad_float_16": 8,
    "source_grad_float_16": 8,  # of queries and gradients
}
MOST_REGISTERS = {"attention_grad": 255}
"""Of a thread; 168 in other files."""
ADDED_UP = {"group"}
"""Kernels without loops over lanes. The compiler adds up what a warp counts, by votes."""
WAITS = re.compile(r"(FADD|FFMA|FMUL|FSETP|FSEL|FMNMX|MUFU|SHFL|BRA|STG|EXIT|WARPSYNC)")


def disassembler() -> str:
    """The disassembler of a toolkit, or of the package ``nvidia-cuda-nvdisasm``."""
    places = sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin/nvdisasm"))
    found = shutil.which("nvdisasm") or next(map(str, places), None)
    if found is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    return found


def operations(code: str) -> dict[str, list[str]]:
    """The operations of each kernel, in their order."""
    kernels: dict[str, list[str]] = {}
    here: list[str] = []
    for line in code.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.(\w+)", line):
            here = kernels.setdefault(section[1], [])
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line):
            here.append(found[1])
    return kernels


def in_flight(operations: list[str], bits: int) -> int:
    """The most loads of a width that come one after the other before anything needs numbers."""
    most = now = 0
    for name in operations:
        if name.startswith("LDG") and name.endswith(f".{bits}"):
            now += 1
            most = max(most, now)
        elif WAITS.match(name):
            now = 0
    return most


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("file", FILES)
def test_rows_are_under_way_together_and_no_lanes_are_searched(file, device, tmp_path):
    compiler, found = building.find_compiler(), nvcc.find_nvcc()
    if compiler is None or found is None:
        pytest.skip("needs nvcc")
    tool, module = disassembler(), tmp_path / "module.cubin"
    command = [found, "-ccbin", compiler[0], "-std=c++17", "-O3", "-DNDEBUG", "-Xptxas=-v"]
    command += ["-DPYG_SCALE_TYPE=float", "-cubin", f"-arch=sm_{device}", "-o", str(module)]
    source = sources.source_dir() / "cuda" / f"{file}.cu"
    made = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=250)
    assert made.returncode == 0, made.stderr
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", made.stdout + made.stderr)]
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", made.stdout + made.stderr)]
    assert registers and max(registers) <= MOST_REGISTERS.get(file, 168)
    assert max(spilled) <= most_spilled(f"{file}.cu")
    code = subprocess.run([tool, "-c", module], capture_output=True, text=True, timeout=100)
    assert code.returncode == 0, code.stderr
    kernels = operations(code.stdout)
    assert len(kernels) == len(registers)
    for name, done in kernels.items():
        if name in ADDED_UP:
            continue
        assert not [each for each in done if each.startswith(("MATCH", "REDUX", "VOTEU"))], name
    for name, least in IN_FLIGHT.items():
        if name in kernels:
            assert in_flight(kernels[name], 128) >= least, name
