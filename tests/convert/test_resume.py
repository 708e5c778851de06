"""A conversion that is killed at any point goes on where it was."""

import json
import shutil
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pytest

import pyg_scale
from pyg_scale.convert.npy import NpyReader
from pyg_scale.convert.options import Options
from pyg_scale.convert.run import run
from pyg_scale.convert.tables import Tables
from pyg_scale.store.directory import DirectoryWriter, GraphDirectory
from tests import preloaded
from tests.convert.graphs import Rows, raw

ROOT = Path(pyg_scale.__file__).parents[1]
MEMORY = 1 << 14

# Converts in processes that are killed at the 1st, 2nd, ... call of what changes files, each one
# going on with what the one before left. Forked, because importing torch takes long.
DRIVER = """
    import json, os, signal, sys
    from pyg_scale.convert import attributes, bucket_files, edges, group, journal, run
    from pyg_scale.convert.npy import NpyReader
    from pyg_scale.convert.options import Options

    folder, kill_every, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    attributes._CHECKPOINT = group._CHECKPOINT = 1000
    bucket_files._CHECKPOINT = edges._CHECKPOINT = 50
    os.fsync = os.fdatasync = lambda _: None
    calls = 0

    def deadly(function):
        def call(*args, **kwargs):
            global calls
            calls += 1
            if calls == kill_every:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call

    def convert():
        reader = NpyReader(
            f"{folder}/edges.npy",
            nodes={"x": f"{folder}/x.npy"},
            edge_attributes={"w": f"{folder}/w.npy", "t": f"{folder}/t.npy"},
        )
        _, steps = run.run(reader, run.Path(f"{folder}/graph"), Options(**options), MEMORY,
                           overwrite=False, quiet=True)
        return steps.skipped

    def child():
        for name in ("pwrite", "unlink", "posix_fallocate", "rename", "replace", "truncate"):
            setattr(os, name, deadly(getattr(os, name)))
        finish = journal.Journal.finish

        def noted(self, name, result=None):
            with open(f"{folder}/finished.txt", "a") as out:
                out.write(name + "\\n")
            finish(self, name, result)

        journal.Journal.write = deadly(journal.Journal.write)
        journal.Journal.finish = noted
        convert()

    killed = 0
    while True:
        pid = os.fork()
        if pid == 0:
            try:
                child()
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            killed += 1
            assert killed < 1000
            kill_every += 1 + killed // 4
            continue
        assert os.WEXITSTATUS(status) == 0
        break
    print(killed)
"""


@pytest.fixture
def inputs(tmp_path):
    generator = np.random.default_rng(0)
    edges = generator.integers(0, 40, (2, 5000))
    edges[1, ::2] = 7
    np.save(tmp_path / "edges.npy", edges)
    np.save(tmp_path / "x.npy", generator.random((40, 4), dtype=np.float32))
    np.save(tmp_path / "w.npy", generator.random(5000))
    np.save(tmp_path / "t.npy", generator.integers(0, 9, 5000))
    return tmp_path


def reader(folder):
    return NpyReader(
        folder / "edges.npy",
        nodes={"x": folder / "x.npy"},
        edge_attributes={"w": folder / "w.npy", "t": folder / "t.npy"},
    )


@pytest.mark.parametrize(
    ("options", "first"),
    [
        pytest.param({}, 1, id="plain", marks=pytest.mark.slow),
        pytest.param({"time_attr": "t", "weight_attr": "w"}, 3, id="time"),
        pytest.param({"undirected": True}, 2, id="undirected"),
    ],
)
def test_killed_again_and_again(inputs, options, first):
    wanted = inputs / "wanted"
    run(reader(inputs), wanted, Options(**options), 1 << 26, overwrite=False, quiet=True)
    code = textwrap.dedent(DRIVER).replace("MEMORY", str(MEMORY))
    done = subprocess.run(
        [preloaded.python(), "-c", code, str(inputs), str(first), json.dumps(options)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 8
    assert raw(inputs / "graph") == raw(wanted)
    assert not list(inputs.glob(".*"))


def interrupt(monkeypatch, name, number):
    """Let the conversion end in an error of the system at a call."""
    from pyg_scale.convert import journal

    original = journal.Journal.finish

    def finish(self, step, result=None):
        original(self, step, result)
        if step.startswith(name):
            raise OSError(5, f"broken after {step}")

    monkeypatch.setattr(journal.Journal, "finish", finish)


def test_finished_steps_are_not_done_again(inputs, monkeypatch):
    with monkeypatch.context() as patched:
        interrupt(patched, "group", 1)
        with pytest.raises(OSError, match="broken after group"):
            run(reader(inputs), inputs / "graph", Options(), MEMORY, overwrite=False, quiet=True)
    state = json.loads((inputs / ".graph.steps.json").read_text())
    source = reader(inputs)
    monkeypatch.setattr(source, "edges", lambda *_: pytest.fail("edges were read again"))
    _, journal = run(source, inputs / "graph", Options(), MEMORY, overwrite=False, quiet=True)
    assert journal.skipped == list(state["done"])
    assert {"scan edges-0", "plan edges-0", "distribute edges-0", "group edges-0"} <= {
        *journal.skipped
    }


def test_an_end_that_was_interrupted_is_made_up_for(tmp_path, monkeypatch):
    """Checksums are made when temporary files are gone, by which ids and times were mapped."""
    generator = np.random.default_rng(0)
    ends = generator.integers(0, 30, (2, 200)) * 7 + 5
    edges = Rows(tmp_path / "e", a=ends[0], b=ends[1])
    nodes = Rows(tmp_path / "n", id=np.arange(30) * 7 + 5, time=np.arange(30) % 4)

    def go(name):
        source = Tables(edges, nodes)
        options = Options(time_attr="time")
        _, steps = run(source, tmp_path / name, options, 1 << 26, overwrite=False, quiet=True)
        return steps

    go("wanted")
    for name, deleted in (("graph", False), ("again", True)):
        with monkeypatch.context() as patched:
            patched.setattr(DirectoryWriter, "commit", lambda *_: pytest.fail("killed"))
            with pytest.raises(pytest.fail.Exception):
                go(name)
        state = json.loads((tmp_path / f".{name}.steps.json").read_text())
        if deleted:  # by a user, who leaves the journal
            shutil.rmtree(tmp_path / f".{name}.partial")
        assert go(name).skipped == ([] if deleted else list(state["done"]))
        assert raw(tmp_path / name) == raw(tmp_path / "wanted")
        assert not list(tmp_path.glob(".*"))


def test_another_input_or_option_begins_anew(inputs, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        interrupt(patched, "group", 1)
        with pytest.raises(OSError, match="broken"):
            run(reader(inputs), inputs / "graph", Options(), MEMORY, overwrite=False, quiet=True)
    np.save(inputs / "edges.npy", np.zeros((2, 5000), "i8"))
    _, journal = run(
        reader(inputs), inputs / "graph", Options(), MEMORY, overwrite=False, quiet=False
    )
    assert not journal.skipped
    assert "beginning anew" in capsys.readouterr().err
    assert GraphDirectory(inputs / "graph").part(0).csc(None).indices.tolist() == [0] * 5000


def test_what_is_wrong_leaves_nothing(inputs):
    np.save(inputs / "x.npy", np.zeros((3, 4)))
    with pytest.raises(IndexError, match=r"edges\.npy.*there are 3 "):
        run(reader(inputs), inputs / "graph", Options(), MEMORY, overwrite=False, quiet=True)
    assert not list(inputs.glob(".*")) and not (inputs / "graph").exists()


def test_a_journal_that_is_damaged_begins_anew(inputs, monkeypatch):
    with monkeypatch.context() as patched:
        interrupt(patched, "distribute", 1)
        with pytest.raises(OSError, match="broken"):
            run(reader(inputs), inputs / "graph", Options(), MEMORY, overwrite=False, quiet=True)
    (inputs / ".graph.steps.json").write_text("{")
    _, journal = run(
        reader(inputs), inputs / "graph", Options(), MEMORY, overwrite=False, quiet=True
    )
    assert not journal.skipped


def test_ctrl_c_leaves_what_can_be_gone_on_with(inputs):
    code = (
        "import sys, os, signal\n"
        "from pyg_scale.convert import journal\n"
        "write = journal.Journal.write\n"
        "def interrupted(self):\n"
        "    write(self)\n"
        "    if 'distribute edges-0' in self._done:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "journal.Journal.write = interrupted\n"
        "from pyg_scale.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.exit(main(['convert', '{inputs}/edges.npy', '{inputs}/graph', '--quiet',"
        " '--memory', '2GB']))"
    )
    done = subprocess.run(
        [preloaded.python(), "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert (inputs / ".graph.steps.json").exists()
