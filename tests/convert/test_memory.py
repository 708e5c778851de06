"""The memory of a process that converts stays below the limit, all included."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import pyg_scale

ROOT = Path(pyg_scale.__file__).parents[1]
# The libraries of a torch that is built for CUDA take 850 MB before anything is done.
LIMIT = 500_000_000 if torch.version.cuda is None else 1_000_000_000


def peak(folder, *arguments):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pyg_scale.cli", "convert", str(folder / "edges.npy")),
            *(str(folder / "graph"), "--memory", str(LIMIT), "--json", "--overwrite", *arguments),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["peak_memory"]


@pytest.fixture(scope="module")
def edges(tmp_path_factory):
    """40 M edges, 640 MB, a quarter of them to one node."""
    folder = tmp_path_factory.mktemp("edges")
    size, step = 40_000_000, 1_000_000
    generator = np.random.default_rng(0)
    file = np.lib.format.open_memmap(folder / "edges.npy", "w+", np.int64, (2, size))
    for begin in range(0, size, step):
        dst = generator.integers(0, 3_000_000, step)
        dst[::4] = 1_234_567
        file[0, begin : begin + step] = generator.integers(0, 3_000_000, step)
        file[1, begin : begin + step] = dst
    file.flush()
    return folder


@pytest.mark.slow
def test_nodes_that_no_edge_leads_to_take_no_memory(tmp_path):
    np.save(tmp_path / "edges.npy", np.array([[25_000_000, 1, 2], [0, 1, 0]]))
    assert peak(tmp_path) <= 1.1 * LIMIT


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", ["plain", "times, weights and features"])
def test_peak_memory_is_within_the_limit(edges, options):
    arguments = []
    if options != "plain":
        when = np.random.default_rng(1).integers(0, 1000, 40_000_000)
        np.save(edges / "t.npy", when)
        np.save(edges / "w.npy", when.astype(np.float32))
        arguments = ["--edges", f"t={edges / 't.npy'}", "--edges", f"w={edges / 'w.npy'}"]
        arguments += ["--time-attr", "t", "--weight-attr", "w"]
        shape = (3_000_000, 128)
        x = np.lib.format.open_memmap(edges / "x.npy", "w+", np.float32, shape)
        x[::1000] = 1
        x.flush()
        arguments += ["--nodes", f"x={edges / 'x.npy'}", "--feature-dtype", "float16"]
    assert peak(edges, *arguments) <= 1.1 * LIMIT
