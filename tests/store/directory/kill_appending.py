"""Run as a program: kills appends and compactions at many points, and looks at what is there.

``python -m tests.store.directory.kill_appending FOLDER append|compact STEP`` kills at every
``STEP``-th line that runs in the modules that write, and prints how many left the graph before,
and how many that after.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import sys
from pathlib import Path
from types import FrameType

import torch

import pyg_scale
from pyg_scale.files import place
from pyg_scale.loader import NeighborLoader
from pyg_scale.store.directory import appending, compacting, saving, snapshots, writer
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same_batches
from tests.store.directory.appended import Graph, between, first, in_order
from tests.store.directory.kill import killed_while

WATCHED = {module.__file__ for module in (appending, compacting, place, saving, snapshots, writer)}


def is_watched(frame: FrameType) -> bool:
    return frame.f_code.co_filename in WATCHED


def batches(graph: Graph) -> NeighborLoader:
    return NeighborLoader(graph, [3, 2], torch.arange(0, 33, 7), batch_size=4, seed=1)


def snapshot_of(path: Path, states: list[Graph]) -> int:
    """The number of the snapshot at a path, which is all there, as are those before."""
    found = pyg_scale.open(path, verify=True)
    newest: int = found.graph_directory.snapshot
    for number in range(found.graph_directory.head.base, newest + 1):
        graph = pyg_scale.open(path, snapshot=number)
        assert torch.equal(graph.edge_index, states[number].edge_index)
        assert torch.equal(graph.x, states[number].x)
        assert_same_batches(batches(states[number]), batches(graph))
    return newest


def main(folder: Path, what: str, step: int) -> None:
    """Kill until a writer comes through."""
    torch.set_num_threads(1)
    os.fsync = lambda handle: None  # what was written survives the process, and disks are slow
    data = in_order(graphs.hostile(), 3)
    states = [first(data, number, 3) for number in range(3)]
    new = [between(states[n], states[n + 1]) for n in range(2)]
    prepared, path, whole = (folder / name for name in ("prepared", "graph", "whole"))
    pyg_scale.save(states[0], prepared)
    pyg_scale.append(prepared, new[0], new[0])
    if what == "compact":
        pyg_scale.append(prepared, new[1], new[1])
        pyg_scale.save(data, whole)

    def write() -> None:
        if what == "compact":
            pyg_scale.compact(path)
        else:
            pyg_scale.append(path, new[1], new[1])

    counts, line, died = {"before": 0, "after": 0}, 1, True
    while died:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(prepared, path)
        died = killed_while(line, write, is_watched)
        newest = snapshot_of(path, states)
        base = pyg_scale.open(path).graph_directory.head.base
        after = base == 2 if what == "compact" else newest == 2
        assert died or after
        counts["after" if after else "before"] += 1
        if what == "compact":
            assert newest == 2
        if not after:  # the next writer is not held up by what the dead one left
            write()
            assert snapshot_of(path, states) == 2
        if what == "compact":
            names = [name for name in os.listdir(whole) if name != "delta"]
            assert sorted(os.listdir(path)) == sorted([*names, "delta"])
            files = [p.relative_to(whole).as_posix() for p in whole.rglob("*") if p.is_file()]
            assert filecmp.cmpfiles(path, whole, files, shallow=False)[1:] == ([], [])
        line += step
    pyg_scale.append(path, edges=between(states[1], states[2]))
    pyg_scale.compact(path)
    left = {name for name in os.listdir(folder) if name not in ("graph", "prepared", "whole")}
    assert not left, left
    print(counts["before"], counts["after"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
