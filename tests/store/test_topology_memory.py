"""Building the topology takes at most half of the extra memory that PyG's takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyg_scale.ops import library

NUM_NODES, NUM_EDGES = 200_000, 8_000_000

CODE = f"""
import sys, warnings
from pathlib import Path
import torch
from torch_geometric.data import Data
from torch_geometric.sampler.utils import to_csc
from pyg_scale.ops import library
from pyg_scale.store import topology_of

warnings.simplefilter("ignore")
torch.set_num_threads(2)
generator = torch.Generator().manual_seed(0)
edges = torch.empty(2, {NUM_EDGES}, dtype=torch.int64)
edges.random_(0, {NUM_NODES}, generator=generator)
small = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)

def pyg(data):
    return to_csc(data, device="cpu")

def ours(data):
    assert library.compiled()
    return topology_of(data)

def memory(which):  # not ru_maxrss, which begins at the peak of whoever started the process
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(which)).split()[1])

build = locals()[sys.argv[1]]
build(small)  # what is loaded on first use does not count
before = memory("VmRSS")
kept = build(Data(edge_index=edges, num_nodes={NUM_NODES}))
print(memory("VmHWM") - before)
"""


@pytest.fixture(autouse=True)
def kernels() -> None:
    """Once only: the processes choose for themselves."""


def extra_peak(which: str) -> int:
    """Kilobytes that a build adds at its peak to a process that holds the edge list."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, which],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYG_SCALE_KERNELS": "auto"},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.skipif(not library.status()["loaded"], reason="the kernels are not compiled")
def test_half_of_pygs_extra_memory() -> None:
    pyg, ours = extra_peak("pyg"), extra_peak("ours")
    assert ours * 1024 >= 8 * NUM_EDGES, "a neighbour and an edge id, four bytes each, are kept"
    assert ours <= pyg / 2, f"{ours} kB, PyG takes {pyg} kB"
