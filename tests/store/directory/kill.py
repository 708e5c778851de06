"""Run as a program: kills a writer at many points, and looks at what is there afterwards.

``python -m tests.store.directory.kill FOLDER replace|new STEP [no-exchange]`` kills at every
``STEP``-th line that a writer runs, or with a negative ``STEP`` of those that put a directory in
its place, and prints how many left the old graph, the new one, or none.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import pyg_scale
from pyg_scale.errors import GraphDirectoryError
from pyg_scale.files import place
from pyg_scale.store import topology_of
from pyg_scale.store.directory import writer
from pyg_scale.testing import graphs

WATCHED = str(Path(writer.__file__).parent)
TAKING_PLACE = {
    *("__init__", "_prepare", "commit", "close", "release", "take_place", "restore", "sync"),
}


def graph(old: bool) -> Any:
    """Two graphs whose files have the same names and lengths."""
    data = graphs.hostile()
    data.x = torch.full((100, 6), 1.0 if old else 2.0)
    data.edge_index = data.edge_index if old else data.edge_index.flip(0)
    return data


def _is_watched(frame: FrameType, everywhere: bool) -> bool:
    code = frame.f_code
    if everywhere:
        return code.co_filename.startswith(WATCHED)
    return code.co_filename in (writer.__file__, place.__file__) and code.co_name in TAKING_PLACE


def killed_at(line: int, path: Path, everywhere: bool) -> bool:
    """Write the new graph in a child that dies at a line of the writer; whether it died."""

    def write() -> None:
        pyg_scale.save(graph(old=False), path, overwrite=True)

    return killed_while(line, write, lambda frame: _is_watched(frame, everywhere))


def killed_while(
    line: int, write: Callable[[], object], is_watched: Callable[[FrameType], bool]
) -> bool:
    """Run something in a child that dies at a line of the functions watched; whether it died."""
    child = os.fork()
    if child == 0:
        seen = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal seen
            if not is_watched(frame):
                return None
            if event == "line":
                seen += 1
                if seen == line:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        threading.settrace(trace)
        sys.settrace(trace)
        try:
            write()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def what_is_at(path: Path) -> str:
    """Which graph is there, all of it."""
    try:
        found = pyg_scale.open(path, verify=True)
    except GraphDirectoryError as error:
        if "is not a graph directory" not in str(error):
            raise
        return "none"
    first = float(found.x[0, 0])
    assert bool((found.x == first).all())
    expected = graph(old=first == 1.0)
    assert torch.equal(found.edge_index, expected.edge_index)
    assert topology_of(found) is not None
    return "old" if first == 1.0 else "new"


def main(folder: Path, replace: bool, step: int, exchange: bool) -> None:
    """Kill until a writer comes through."""
    torch.set_num_threads(1)
    if not exchange:
        place.sys = type("sys", (), {"platform": "other"})  # type: ignore[attr-defined]
    path, line = folder / "graph", 1
    counts = {"old": 0, "new": 0, "none": 0}
    died = True
    while died:
        if replace and what_is_at(path) != "old":
            pyg_scale.save(graph(old=True), path, overwrite=True)
        died = killed_at(line, path, everywhere=step > 0)
        found = what_is_at(path)
        if not exchange and found == "none":  # the next writer brings it back
            assert (folder / ".graph.before").is_dir()
            place.restore(path)
            found = what_is_at(path)
        assert found != "none" or not replace
        counts[found] += 1
        if not replace and found == "new":
            shutil.rmtree(path)
        line += abs(step)
    pyg_scale.save(graph(old=True), path, overwrite=True)
    assert what_is_at(path) == "old"
    assert sorted(os.listdir(folder)) == ["graph"], os.listdir(folder)
    print(counts["old"], counts["new"], counts["none"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "replace", int(sys.argv[3]), len(sys.argv) < 5)
