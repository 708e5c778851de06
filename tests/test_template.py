"""From the template to a plugin that is made, installed, checked and used by name."""

import os
import shlex
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import pyg_scale
from pyg_scale import plugins
from pyg_scale.cli import main
from pyg_scale.cli.plugins import only_hooks, renamed, template
from tests import preloaded

ROOT = Path(pyg_scale.__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
OFFLINE = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]


def run(*command, cwd, path=(), **env):
    """A process that sees the package, ``path`` and, of plugins, only ``pyg-scale-mine``."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))),
            "PYG_SCALE_PLUGINS": "pyg-scale-mine",
            **env,
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The project of a new plugin that adds one of everything, and where it is installed."""
    folder = tmp_path_factory.mktemp("made")
    project, site = folder / "pyg-scale-mine", folder / "site"
    kinds = [word for kind in plugins.KINDS for word in ("--kind", kind)]
    assert main(["plugins", "new", "mine", "--path", str(project), *kinds]) == 0
    run(*PIP, "install", *OFFLINE, "--target", site, project, cwd=folder)
    return project, site


# Made ##########################################################################################


def files(folder):
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_everything_is_renamed(made):
    project, _ = made
    text = "".join((project / name).read_text() for name in files(project))
    assert "template" not in text.lower()
    assert not [name for name in files(project) if "template" in name]
    for expected in ("pyg-scale-mine", "pyg_scale_mine", "MineSampler", '"mine"'):
        assert expected in text
    wanted = {renamed(name, "mine") for name in files(template()) if "__pycache__" not in name}
    assert files(project) == wanted


def test_only_the_kinds_that_were_asked_for_are_made(tmp_path, capsys):
    folder = tmp_path / "new"
    assert (
        main(
            [
                "plugins",
                "new",
                "pyg-scale-two-words",
                "--path",
                str(folder),
                "--kind",
                "check",
                "--kind",
                "graph_store",
            ]
        )
        == 0
    )
    source = "src/pyg_scale_two_words/"
    assert files(folder) == {
        "pyproject.toml",
        "README.md",
        source + "__init__.py",
        source + "check.py",
        source + "graph_store.py",
        "tests/test_plugin.py",
        "tests/test_check.py",
        "tests/test_graph_store.py",
    }
    text = (folder / source / "__init__.py").read_text()
    assert text.count("@hookimpl") == 2
    assert '{"two-words": "pyg_scale_two_words.graph_store:TwoWordsGraphStore"}' in text
    assert "pip install --editable" in capsys.readouterr().out


def test_commands_that_are_printed_can_be_pasted(tmp_path, capsys):
    folder = tmp_path / "my plugins"
    assert main(["plugins", "new", "mine", "--path", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert shlex.split(lines[2]) == ["pip", "install", "--editable", str(folder)]
    assert shlex.split(lines[4]) == ["pytest", str(folder)]


def test_a_sampler_is_made_in_the_current_folder_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "mine"]) == 0
    assert (tmp_path / "pyg-scale-mine/src/pyg_scale_mine/sampler.py").is_file()
    assert not (tmp_path / "pyg-scale-mine/src/pyg_scale_mine/check.py").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("native", "already provided by builtin"),
        ("My Sampler", "lower-case"),
        ("", "lower-case"),
        ("-x", "lower-case"),
        ("../x", "lower-case"),
        ("1x", "lower-case"),
    ],
)
def test_names_that_cannot_be_used_are_refused(name, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "--", name]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("precious")
    assert main(["plugins", "new", "mine", "--path", str(tmp_path)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert files(tmp_path) == {"mine.txt"}


def test_a_path_that_cannot_be_made_is_said_in_a_line(tmp_path, capsys):
    (tmp_path / "file").write_text("precious")
    assert main(["plugins", "new", "mine", "--path", str(tmp_path / "file/mine")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pyg-scale plugins new: ") and "file" in line


def test_only_hooks_keeps_everything_else():
    source = (template() / "src/pyg_scale_template/__init__.py").read_text()
    assert only_hooks(source, list(plugins.KINDS)) == source
    assert "def " not in only_hooks(source, [])
    assert only_hooks(source, []).startswith('"""')


# Installed, checked, used ######################################################################


def test_it_is_found(made):
    _, site = made
    out = run(sys.executable, "-m", "pyg_scale.cli", "plugins", cwd=site, path=[site])
    lines = [line.split() for line in out.splitlines()]
    for kind in plugins.KINDS:
        assert [kind, "mine", "pyg-scale-mine", "0.1.0"] in [line[:4] for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_it_conforms(made):
    _, site = made
    out = run(
        preloaded.python(),
        "-c",
        preloaded.CLI,
        preloaded.python(),
        "plugins",
        "check",
        "pyg-scale-mine",
        "--",
        "-vv",
        cwd=site,
        path=[site],
    )
    for test in ("TestPlugin", "TestSamplerMine", "TestFeatureStoreMine", "TestGraphStoreMine"):
        assert f"{test}::" in out
    assert "failed" not in out


@pytest.mark.slow
def test_its_own_tests_pass(made):
    project, site = made
    out = run(
        preloaded.python(),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        project,
        project / "tests",
        "-k",  # the rest of the kit has run just now
        "TestPlugin or test_check or test_command or test_is_a or capabilities",
        cwd=project,
        path=[site],
    )
    assert "passed" in out


def test_it_is_used_by_name(made):
    """The batches of the loader come from it, and are the same for any number of workers."""
    _, site = made
    script = textwrap.dedent("""
        import torch
        from torch_geometric.data import Data
        from pyg_scale.loader import NeighborLoader

        generator = torch.Generator().manual_seed(1)
        data = Data(x=torch.arange(300.).view(-1, 1),
                    edge_index=torch.randint(300, (2, 6000), generator=generator))

        def batches(name, num_workers):
            loader = NeighborLoader(data, [4, 3], neighbor_sampler=name, batch_size=32,
                                    num_workers=num_workers, seed=7)
            return list(loader)

        mine, again, native = batches("mine", 0), batches("mine", 2), batches("native", 0)
        assert len(mine) == len(again) == 10
        for a, b in zip(mine, again):
            assert torch.equal(a.n_id, b.n_id) and torch.equal(a.edge_index, b.edge_index)
            assert torch.equal(a.x[:, 0].long(), a.n_id)
            assert torch.equal(data.edge_index[:, a.e_id], a.n_id[a.edge_index])
        assert not all(torch.equal(a.e_id, b.e_id) for a, b in zip(mine, native))
        print(type(NeighborLoader(data, [1], neighbor_sampler="mine").node_sampler).__name__)
    """)
    out = run(preloaded.python(), "-c", script, cwd=site, path=[site])
    assert out.split() == ["MineSampler"]


def test_its_command_and_its_check_run(made, tmp_path):
    import numpy as np

    _, site = made
    np.save(tmp_path / "edges.npy", np.array([[0, 1], [1, 1]]))
    command = [preloaded.python(), "-m", "pyg_scale.cli"]
    out = run(*command, "mine", tmp_path / "edges.npy", cwd=site, path=[site])
    assert out == "2 nodes, 1.0 in-edges on average, 2 at most\n"
    assert "can be written" in run(
        *command,
        "doctor",
        cwd=site,
        path=[site],
        PYG_SCALE_KERNELS="never",  # compiled from other sources, they would be broken
    )


# From a wheel, and where a plugin is not installed #############################################


def test_an_installed_wheel_has_the_template(tmp_path):
    """What ``plugins new`` makes without a checkout is what it makes with one."""
    run(
        *PIP,
        "wheel",
        *OFFLINE,
        "--wheel-dir",
        tmp_path,
        ROOT,
        cwd=tmp_path,
        PYG_SCALE_BUILD_KERNELS="0",
    )
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    made = [tmp_path / "from-wheel", tmp_path / "from-checkout"]
    for path, folder in zip((site, ROOT), made, strict=True):
        run(
            sys.executable,
            "-m",
            "pyg_scale.cli",
            "plugins",
            "new",
            "mine",
            "--path",
            folder,
            cwd=tmp_path,
            path=[path],
        )
    assert files(made[0]) == files(made[1])
    for name in files(made[0]):
        assert (made[0] / name).read_text() == (made[1] / name).read_text()


@pytest.mark.slow
def test_a_plugin_that_is_not_installed_is_skipped_with_the_line_that_installs_it(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    (tmp_path / "conftest.py").write_text((ROOT / "plugins" / "conftest.py").read_text())
    tests = tmp_path / "pyg-scale-absent" / "tests"
    tests.mkdir(parents=True)
    (tests.parent / "pyproject.toml").write_text('[project]\nname = "pyg-scale-absent"\n')
    (tests / "test_absent.py").write_text("import pyg_scale_absent")
    for argument in (tmp_path, tests.parent, tests, tests / "test_absent.py"):
        out = run(
            sys.executable,
            "-m",
            "pytest",
            "-rs",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            tmp_path,
            argument,
            cwd=tmp_path,
        )
        assert "1 skipped" in out
        assert "pip install -e plugins/pyg-scale-absent" in out
