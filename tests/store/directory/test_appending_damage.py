"""Appends that were killed, or damaged, or made by others: the old state, or a typed error."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pyg_scale
from pyg_scale.cli import main as command
from pyg_scale.errors import GraphDirectoryError
from pyg_scale.loader import NeighborLoader
from pyg_scale.store import Mmap, MmapGraph, topology_of
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.directory.meta import checksum
from pyg_scale.testing import graphs
from tests import preloaded
from tests.store.directory.appended import between, first, grown, in_order

ROOT = Path(pyg_scale.__file__).parents[1]
STEPS = 4


@pytest.mark.parametrize("what", ["append", "compact"])
@pytest.mark.parametrize("step", [pytest.param(20, marks=pytest.mark.slow), 601])
def test_killed_anywhere(tmp_path: Path, what: str, step: int) -> None:
    program = [preloaded.python(), "-m", "tests.store.directory.kill_appending"]
    done = subprocess.run(
        [*program, str(tmp_path), what, str(step)],
        cwd=ROOT,
        timeout=200,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert after >= 1 and before + after >= (100 if step == 20 else 3)  # the last comes through


WRITER = """
import os, sys, torch, pyg_scale
os.fsync = lambda handle: None
for number in range(1, 31):
    edges = torch.tensor([[number, 0], [99, number]])
    pyg_scale.append(sys.argv[1], {"x": torch.full((1, 1), float(number))}, edges)
    if number % 3 == 0:
        pyg_scale.compact(sys.argv[1])
"""


def test_readers_while_another_process_appends_and_compacts(tmp_path: Path) -> None:
    data = graphs.nothing(100)
    path = pyg_scale.save(data, tmp_path / "graph")
    writer = subprocess.Popen([preloaded.python(), "-c", WRITER, str(path)], cwd=ROOT)
    seen, held = set(), []
    try:
        while writer.poll() is None or 30 not in seen:
            found = pyg_scale.open(path)
            number = found.graph_directory.snapshot
            seen.add(number)
            held = [*held[-5:], found]
            for graph in held:
                number = graph.graph_directory.snapshot
                assert graph.x.view(-1)[100:].tolist() == list(range(1, number + 1))
                batch = next(iter(NeighborLoader(graph, [-1], torch.tensor([99]), batch_size=1)))
                assert sorted(batch.n_id[1:].tolist()) == list(range(1, number + 1))
                ends = [each for n in range(1, number + 1) for each in ((n, 99), (0, n))]
                assert graph.edge_index.t().tolist() == list(map(list, ends))
    finally:
        writer.kill()
        writer.wait(30)
    assert writer.returncode == 0 and seen >= {30}
    del held, found, graph
    gc.collect()
    pyg_scale.append(path, {"x": torch.ones(1, 1)})
    pyg_scale.compact(path)
    assert os.listdir(tmp_path) == ["graph"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of snapshots 0 to 3, to be copied, and damaged in the copy."""
    path = tmp_path_factory.mktemp("saved") / "graph"
    options = {"time_attr": "when", "weight_attr": "weight"}
    grown(in_order(graphs.hostile(), STEPS), path, STEPS, **options)
    return path


@pytest.fixture
def graph(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "graph"))


def use(path: Path, **options: Any) -> None:
    """Everything that one can ask of a snapshot."""
    found = pyg_scale.open(path, **options)
    topology_of(found, time_attr="when", weight_attr="weight")
    found.to_dict()


def change_head(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = path / "delta/HEAD.json"
    found = json.loads(file.read_text())
    del found["checksum"]
    change(found)
    file.write_text(json.dumps({**found, "checksum": checksum(found)}))


def put(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda found: found.update(values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put(format="x"), "does not say that it has"),
        (put(version=2), "reads up to 1"),
        (put(version="1"), "version '1'"),
        (put(base=-1), "base is -1"),
        (put(base=True), "base is True"),
        (put(base=9), "the newest snapshot is 3, the base 9"),
        (put(newest=2**63), "newest is"),
        (put(newest=3.0), "newest is 3.0"),
        (put(newest=5), "the files are not those of the counts: delta/snapshots.rows"),
        (put(newest=0), "the base has appended rows"),
        (put(base_graph=1), "belongs to another META.json"),
        (put(nodes=[1]), "nodes are"),
        (put(nodes=[100, 100]), "nodes are"),
        (put(nodes="x"), "nodes is no list"),
        (put(edges=[10**9]), "the files are not those of the counts"),
        (put(files={}), "the files are not those of the counts"),
        (put(files=[]), "incomplete or wrong"),
        (lambda found: found["files"].update({"../x": {"bytes": 1, "crc32": 0}}), "not those"),
        (lambda found: found.pop("lineage"), "lineage"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_heads(graph: Path, change: Any, words: str) -> None:
    change_head(graph, change)
    for open_it in (use, GraphDirectory, Mmap, MmapGraph, pyg_scale.append, pyg_scale.compact):
        with pytest.raises(GraphDirectoryError, match=f"HEAD.json.*{words}"):
            open_it(graph)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"{}"], ids=len)
def test_heads_that_are_none(graph: Path, text: bytes) -> None:
    (graph / "delta/HEAD.json").write_bytes(text)
    with pytest.raises(GraphDirectoryError, match="HEAD.json"):
        use(graph)


def test_an_altered_head(graph: Path) -> None:
    file = graph / "delta/HEAD.json"
    file.write_text(file.read_text().replace('"newest": 3', '"newest": 2'))
    with pytest.raises(GraphDirectoryError, match="does not match its checksum"):
        use(graph)


FILES = ["edges/src.rows", "edges/attributes/when.rows", "nodes/attributes/x.rows"]


@pytest.mark.parametrize("name", [*FILES, "snapshots.rows"])
def test_files_of_rows(graph: Path, name: str) -> None:
    file = graph / "delta" / name
    rows = file.read_bytes()
    file.write_bytes(rows + b"not counted")
    use(graph, verify=True)
    changed = bytearray(rows)
    changed[-1] ^= 1
    file.write_bytes(changed)
    with pytest.raises(GraphDirectoryError, match=f"{name} does not have its checksum"):
        use(graph, verify=True)
    file.write_bytes(rows[:-1])
    for call in (pyg_scale.append, pyg_scale.compact):
        if name != "snapshots.rows":
            with pytest.raises(GraphDirectoryError, match=f"{name} has .*truncated"):
                call(graph)
    with pytest.raises(GraphDirectoryError, match=f"{name}.*(truncated|checksum)"):
        use(graph, verify=True)
    for damaged in ("missing", "fifo", "link", "folder"):
        file.rmdir() if file.is_dir() else file.unlink()
        if damaged == "fifo":
            os.mkfifo(file)
        elif damaged == "link":
            file.symlink_to("/etc/hostname")
        elif damaged == "folder":
            file.mkdir()
        else:
            file.touch()
            file.unlink()
            with pytest.raises(GraphDirectoryError, match=name):
                use(graph, verify=True)
            file.touch()
        with pytest.raises(GraphDirectoryError, match=name):
            use(graph, verify=True)


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_head_that_is_no_file(graph: Path, kind: str) -> None:
    file = graph / "delta/HEAD.json"
    file.unlink()
    os.mkfifo(file) if kind == "fifo" else file.symlink_to("/etc/hostname")
    with pytest.raises(GraphDirectoryError, match="HEAD.json"):
        use(graph)


def test_a_folder_that_leads_out(graph: Path, tmp_path: Path) -> None:
    shutil.move(graph / "delta", tmp_path / "elsewhere")
    (graph / "delta").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GraphDirectoryError, match="leads out of the directory"):
        use(graph)
    with pytest.raises(GraphDirectoryError, match="leads out of the directory"):
        pyg_scale.append(graph, edges=torch.zeros(2, 1, dtype=torch.int64))


def test_ids_that_do_not_exist(graph: Path) -> None:
    np.memmap(graph / "delta/edges/src.rows", np.int64, "r+")[0] = 10**6
    with pytest.raises(GraphDirectoryError, match="src.rows: appended edge 0 has source 1000000"):
        use(graph)


@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_hostile_list_of_snapshots(graph: Path, column: int) -> None:
    rows = np.memmap(graph / "delta/snapshots.rows", np.int64, "r+").reshape(-1, 3)
    for value in (-1, 2**62, 7):
        rows[0, column] = value
        with pytest.raises(GraphDirectoryError, match="snapshots.rows: snapshot 1"):
            use(graph, snapshot=1)
    use(graph, snapshot=2)
    with pytest.raises(GraphDirectoryError, match="no snapshot -1"):
        use(graph, snapshot=-1)
    with pytest.raises(TypeError):
        use(graph, snapshot="1")


def test_a_writer_that_died_left_rows(graph: Path) -> None:
    """Rows that no head counts are overwritten."""
    states = [first(in_order(graphs.hostile(), STEPS), step, STEPS) for step in range(STEPS)]
    for name in FILES:
        with (graph / "delta" / name).open("ab") as out:
            out.write(bytes(range(200)))
    new = between(states[2], states[3])
    pyg_scale.append(graph, new, new)
    found = pyg_scale.open(graph, verify=True)
    for name, file in found.graph_directory.head.files.items():
        assert (graph / name).stat().st_size == file.bytes
    assert found.x[100:].equal(new.x) and found.edge_index[:, -1].equal(new.edge_index[:, -1])


def test_a_full_disk(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from pyg_scale.store.directory import appending

    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    new = between(*(first(in_order(graphs.hostile(), STEPS), step, STEPS) for step in (2, 3)))
    for name in ("write_rows", "sync", "replace_file"):
        with monkeypatch.context() as patch:
            patch.setattr(appending, name, full)
            with pytest.raises(GraphDirectoryError, match="cannot be written: No space left"):
                pyg_scale.append(graph, new, new)
        assert pyg_scale.open(graph, verify=True).graph_directory.snapshot == 3
    assert pyg_scale.append(graph, new, new) == 4
    pyg_scale.open(graph, verify=True)


def test_commands(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["info", str(graph)]) == 0
    assert "snapshot 3, of 0 to 3: " in capsys.readouterr().out
    assert command(["info", str(graph), "--json", "--snapshot", "1", "--verify"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["snapshot"], found["snapshots"], found["verified"]) == (1, [0, 3], True)
    assert found["nodes"][0]["num_nodes"] == 50
    for timeout in ("nan", "-1"):
        with pytest.raises(SystemExit) as ended:
            command(["compact", str(graph), "--timeout", timeout])
        assert ended.value.code == 2 and "0 or more seconds" in capsys.readouterr().err
        with pytest.raises(ValueError, match="timeout must be 0 or more"):
            pyg_scale.compact(graph, timeout=float(timeout))
    assert command(["compact", str(graph)]) == 0
    assert "snapshot 3 is the base" in capsys.readouterr().out
    assert command(["info", str(graph), "--snapshot", "1"]) == 1
    assert "has no snapshot 1" in capsys.readouterr().err
    assert command(["compact", str(graph / "part-0")]) == 1
    assert "not a graph directory" in capsys.readouterr().err
