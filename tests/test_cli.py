"""The command line: what it prints, what it returns, and what it does not import."""

import errno
import json
import os
import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path

import pytest

import pyg_scale
from pyg_scale import plugins
from pyg_scale.cli import main
from pyg_scale.cli.check import module_source
from pyg_scale.cli.doctor import checks
from pyg_scale.errors import KernelsError
from pyg_scale.hookspecs import Check
from tests import preloaded

ROOT = Path(pyg_scale.__file__).parents[1]


def run(*args, code=None, python=sys.executable, **env):
    """``pyg-scale`` in a process of its own, with built-ins only."""
    command = ["-c", code, *args] if code else ["-m", "pyg_scale.cli", *args]
    return subprocess.run(
        [python, *command],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYG_SCALE_PLUGINS": "", **env},
    )


@pytest.fixture
def adds():
    """Register hooks for one test: ``adds(pyg_scale_commands={...})``."""
    names = []

    def add(**hooks):
        def returning(targets):
            return pyg_scale.hookimpl(lambda: targets)

        plugin = types.SimpleNamespace(**{k: returning(v) for k, v in hooks.items()})
        names.append(plugins.register(plugin, f"test-{len(names)}"))
        return names[-1]

    yield add
    for name in names:
        plugins.unregister(name)


# The command itself ############################################################################


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_said_in_a_line(unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pyg_scale.cli", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 1
    assert done.stderr == "pyg-scale: the output cannot be written: No space left on device\n"


def test_an_error_of_the_system_that_is_not_of_the_output_is_not_called_so(adds):
    def fails(argv):
        raise OSError(errno.ENOSPC, "No space left on device")

    adds(pyg_scale_commands={"fails": fails})
    with pytest.raises(OSError, match="No space left"):
        main(["fails"])


def test_usage_lists_every_command_with_a_line_each(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in plugins.names("command"):
        (line,) = (line for line in out.splitlines() if line.startswith(f"  {name} "))
        assert len(line.split(None, 1)[1]) > 10
        assert " is missing)" not in line
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert pyg_scale.__version__ in capsys.readouterr().out


def test_unknown_commands_say_what_was_meant(capsys):
    assert main(["docter"]) == 2
    assert "did you mean 'doctor'?" in capsys.readouterr().err


def test_commands_of_plugins_get_their_arguments_and_give_the_status(adds, capsys):
    def command(args):
        """Says hello."""
        print("got", args)
        return 7

    adds(pyg_scale_commands={"hello": command})
    assert main(["hello", "--x", "y"]) == 7
    assert "got ['--x', 'y']" in capsys.readouterr().out
    main(["--help"])
    assert "Says hello." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KernelsError("not compiled"), 1, "pyg-scale: not compiled"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_meant_for_users_have_no_traceback(adds, capsys, error, status, message):
    def command(args):
        raise error

    adds(pyg_scale_commands={"fails": command})
    assert main(["fails"]) == status
    assert message in capsys.readouterr().err


def test_other_errors_keep_their_traceback(adds):
    adds(pyg_scale_commands={"fails": lambda args: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        main(["fails"])


def test_a_command_that_cannot_be_imported_is_named(adds, capsys):
    adds(pyg_scale_commands={"gone": "nowhere:main"})
    assert main(["gone"]) == 1
    assert "No module named 'nowhere'" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "nowhere:main is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    "args",
    [["--help"], ["plugins"], ["plugins", "list", "--json"], ["plugins", "--help"], ["nonsense"]],
)
def test_listing_and_help_import_neither_torch_nor_pyg(args):
    code = (
        "import sys; from pyg_scale.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'torch_geometric', 'numpy'} & set(sys.modules)"
    )
    done = run(*args, code=code)
    assert done.returncode == 0, done.stderr


# plugins #######################################################################################


def test_list_shows_every_entry(capsys):
    assert main(["plugins", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["KIND", "NAME", "PROVIDER", "VERSION", "TARGET"]
    assert len(lines) == 1 + len(plugins.entries())
    assert [
        "sampler",
        "native",
        "builtin",
        pyg_scale.__version__,
        "pyg_scale.sampler.native:NativeSampler",
    ] in [line.split() for line in lines]


def test_list_as_json_of_one_kind(capsys):
    assert main(["plugins", "--kind", "sampler", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plugins"]
    assert {row["kind"] for row in found} == {"sampler"}
    assert {"native", "reference"} <= {row["name"] for row in found}


def test_list_check_says_what_does_not_load(adds, capsys):
    adds(pyg_scale_graph_stores={"gone": "nowhere:Store"})
    assert main(["plugins", "list", "--check", "--kind", "graph_store", "--json"]) == 1
    status = {r["name"]: r["status"] for r in json.loads(capsys.readouterr().out)["plugins"]}
    assert status["memory"] == "ok"
    assert "No module named 'nowhere'" in status["gone"]


def test_list_prints_skipped_plugins_to_stderr(tmp_path):
    info = tmp_path / "broken-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text("[pyg_scale]\nx = broken\n")
    (tmp_path / "broken.py").write_text("import nowhere")
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    env = {"PYTHONPATH": path, "PYG_SCALE_PLUGINS": "broken", "python": preloaded.python()}
    done = run("plugins", **env)
    assert done.returncode == 0
    assert done.stderr.count("nowhere") == 1
    assert "broken 0.3 was skipped" in done.stderr
    assert run("plugins", "--check", **env).returncode == 1


def test_show_prints_options_abilities_and_documentation(adds, capsys):
    class Mine:
        """Samples what I like."""

        supports = frozenset({"hetero"})

        def __init__(self, temperature: float = 0.5):
            pass

    adds(pyg_scale_samplers={"mine": Mine})
    assert main(["plugins", "show", "mine"]) == 0
    out = capsys.readouterr().out
    for text in ("sampler mine", "temperature=0.5", "supports hetero", "Samples what I like."):
        assert text in out
    assert main(["plugins", "show", "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["options"] == ["temperature=0.5"]


def test_show_finds_a_name_of_several_kinds(capsys):
    assert main(["plugins", "show", "memory"]) == 0
    out = capsys.readouterr().out
    assert "feature_store memory" in out
    assert "graph_store memory" in out
    assert main(["plugins", "show", "memory", "--kind", "graph_store"]) == 0
    assert "feature_store" not in capsys.readouterr().out.split("\n")[0]


def test_show_says_why_something_does_not_load(adds, capsys):
    adds(pyg_scale_samplers={"gone": "nowhere:S"})
    assert main(["plugins", "show", "gone"]) == 1
    assert "No module named 'nowhere'" in capsys.readouterr().out
    assert main(["plugins", "show", "gont"]) == 2
    assert "did you mean 'gone'?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as error:
        main(["plugins", "show"])
    assert error.value.code == 2


@pytest.mark.slow
def test_check_runs_the_conformance_tests():
    good = run("plugins", "check", "memory", "--kind", "graph_store", "--json")
    assert good.returncode == 0, good.stdout + good.stderr
    report = json.loads(good.stdout)
    assert report["ok"]
    assert report["checked"] == ["graph_store builtin:memory"]
    assert report["passed"] > 3
    assert report["failed"] == 0


def test_check_fails_for_what_does_not_conform(tmp_path):
    info = tmp_path / "pyg_scale_bad-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pyg-scale-bad\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[pyg_scale]\nx = bad\n")
    (tmp_path / "bad.py").write_text(
        "import collections, torch\n"
        "from pyg_scale import hookimpl\n"
        "class Store: pass\n"
        "@hookimpl\n"
        "def pyg_scale_graph_stores(): return {'bad': 'bad:Store', 'lost': 'bad:Lost'}\n"
    )
    env = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
        "PYG_SCALE_PLUGINS": "pyg-scale-bad",
    }
    python = preloaded.python()

    def check(*args):
        command = (python, "plugins", "check", *args)
        return run(*command, code=preloaded.CLI, python=python, **env)

    done = check("pyg-scale-bad", "--", "-k", "TestPlugin")
    assert done.returncode == 1
    for test in (
        "test_listing_imports_nothing_heavy",
        "test_every_target_can_be_loaded",
        "test_every_target_fulfils_its_contract",
    ):
        assert f"FAILED test_conformance.py::TestPlugin::{test}" in done.stdout
    assert "3 failed" in done.stdout
    assert check("bad", "--", "-x").returncode == 1


def test_check_without_a_kit_loads(adds, capsys):
    adds(pyg_scale_checks={"fine": lambda: Check(True, "fine"), "gone": "nowhere:check"})
    assert main(["plugins", "check", "fine"]) == 0
    assert "no conformance tests for check" in capsys.readouterr().err
    assert main(["plugins", "check", "gone"]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_check_loads_a_sampler_that_takes_no_key(adds, capsys):
    adds(pyg_scale_samplers={"foreign": "torch_geometric.sampler:NeighborSampler"})
    assert main(["plugins", "check", "foreign"]) == 0
    assert "no conformance tests for sampler 'foreign'" in capsys.readouterr().err


def test_the_module_that_check_writes_is_valid(adds):
    provider = adds(pyg_scale_samplers={"my-own_1": object})
    (entry,) = (e for e in plugins.entries("sampler") if e.provider == provider)
    space = {}
    exec(compile(module_source([entry], provider), "test", "exec"), space)
    assert {"TestSamplerMyOwn1", "TestPlugin"} <= set(space)


# doctor ########################################################################################


def test_doctor_prints_a_block_to_paste():
    env = {"PYG_SCALE_TRACE_PLUGINS": "0", "PYG_SCALE_KERNELS": "never"}
    done = run("doctor", python=preloaded.python(), **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("```\n")
    assert done.stdout.endswith("```\n")
    for text in (
        "pyg_scale ",
        "python ",
        "torch ",
        "torch_geometric ",
        "numpy ",
        "pluggy ",
        "CPUs ",
        "PYG_SCALE_TRACE_PLUGINS=0",
        "kernels",
        "loaders take the",
        "pyg-lib",
        "torch-sparse",
    ):
        assert text in done.stdout, text


def test_doctor_as_json(capsys, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", "never")

    status = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [v["detail"] for v in found["checks"].values() if v["ok"] is False] == []
    assert found["ok"] is True
    assert status == 0
    assert found["versions"]["torch"] == version("torch")
    assert set(found["checks"]) == set(plugins.names("check"))
    for check in found["checks"].values():
        assert check["ok"] is True or check["fix"] or "forbids" in check["detail"]


@pytest.mark.parametrize("mode", ["never", "require"])
def test_doctor_says_which_path_loaders_take(mode):
    env = {"PYG_SCALE_KERNELS": mode}
    done = run("doctor", "--json", python=preloaded.python(), **env)
    kernels = json.loads(done.stdout)["checks"]["kernels"]
    from pyg_scale.ops import library

    if mode == "never":
        assert kernels["ok"] is None
        assert "plain torch path" in kernels["detail"]
    elif library.status()["loaded"]:
        assert kernels["ok"] is True
        assert "native path, linear maps" in kernels["detail"]
    else:
        assert kernels["ok"] is False
        assert "pyg-scale build" in kernels["fix"]


def test_doctor_says_that_a_setting_is_wrong():
    found = run("doctor", "--json", python=preloaded.python(), PYG_SCALE_KERNELS="off")
    checks = json.loads(found.stdout)["checks"]
    for name, who in (("kernels", "loaders"), ("convs", "layers")):
        assert checks[name]["ok"] is False
        assert checks[name]["detail"].startswith(f"{who} raise: PYG_SCALE_KERNELS must be one of")
        assert checks[name]["fix"] == "unset PYG_SCALE_KERNELS"


@pytest.mark.parametrize("how", ["broken", "missing"])
def test_doctor_prints_without_torch_and_pyg(how, tmp_path):
    if how == "broken":
        for name in ("torch", "torch_geometric"):
            (tmp_path / f"{name}.py").write_text(f"raise OSError('lib{name}.so: undefined symbol')")
        done = run("doctor", "--json", PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    else:
        code = (
            "import sys; sys.modules['torch'] = sys.modules['torch_geometric'] = None\n"
            "from pyg_scale.cli import main; sys.exit(main(['doctor', '--json']))"
        )
        done = run(code=code)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    for name in ("torch", "torch_geometric"):
        check = found["checks"][name]
        assert check["ok"] is False
        assert "pip install" in check["fix"]
        assert ("undefined symbol" if how == "broken" else "not installed") in check["detail"]


@pytest.mark.parametrize(
    ("held", "there", "devices", "switch", "ok", "said", "fix"),
    [
        ("80;90", True, [(9, 0), (8, 0)], "auto", True, "nvcc compiled them for 80;90 and", ""),
        ("90", False, [(9, 0)], "auto", None, "gather rows, which is slower: there", "pip install"),
        ("90", True, [(9, 0)], "1", None, "PYG_SCALE_CUDA=1 requires those of nvcc", "Unset it"),
        ("", True, [(9, 0)], "auto", True, "NVRTC 13.0 compiles them at first use (/lib/lib", ""),
        ("90", True, [(9, 0), (8, 0)], "auto", True, "(/lib/libnvrtc.so); nvcc compiled", ""),
        ("", False, [(9, 0)], "auto", None, "cuda:0 take the plain torch path", "pip install nvid"),
        (
            "",
            True,
            [(7, 0)],
            "auto",
            None,
            "compiles for compute capability 75 and",
            "Set PYG_SCALE_NVRTC to an older",
        ),
        ("80", True, [(9, 0)], "0", None, "PYG_SCALE_CUDA=0 forbids", "Unset it"),
        ("80", True, [(9, 0)], "yes", False, "must be one of auto", "unset PYG_SCALE_NVRTC and"),
        ("", True, [], "auto", True, "NVRTC 13.0 compiles them at first use", ""),
        (
            "",
            False,
            [],
            "auto",
            None,
            "of compute capability 9.0 take the plain torch path",
            "pip in",
        ),
        ("", False, None, "auto", None, "this torch is for the CPU and needs none", ""),
    ],
)
def test_doctor_says_which_way_kernels_for_cuda_come_about(
    held, there, devices, switch, ok, said, fix, monkeypatch
):
    import torch

    from pyg_scale.ops import cuda_modules, library, nvrtc

    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    compiler = object.__new__(nvrtc.Compiler)
    compiler.path, compiler.version = "/lib/libnvrtc.so", (13, 0)
    compiler.architectures = (75, 80, 90)
    monkeypatch.setenv("PYG_SCALE_CUDA", switch)
    monkeypatch.setattr(nvrtc, "find", lambda: compiler if there else None)
    for module in (library, cuda_modules):
        monkeypatch.setattr(module, "built_for", lambda path: held)
    monkeypatch.setattr(torch.version, "cuda", None if devices is None else "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: devices[device])
    found = checks.cuda_kernels()
    assert found.ok is ok
    assert said in found.detail
    assert fix in found.fix and bool(found.fix) == bool(fix)


def test_doctor_runs_the_checks_of_plugins_and_survives_them(adds, capsys):
    def fails():
        raise RuntimeError("the check is wrong\nat length")

    adds(
        pyg_scale_checks={
            "good": lambda: Check(True, "all is well"),
            "missing": lambda: Check(None, "not there", "pip install it"),
            "raises": fails,
            "wrong": lambda: "fine",
            "gone": "nowhere:check",
        }
    )
    assert main(["doctor"]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "ok good all is well" in lines
    assert "absent missing not there" in lines
    assert "fix: pip install it" in lines
    assert "BROKEN raises the check itself failed: RuntimeError: the check is wrong" in lines
    assert any(line.startswith("BROKEN wrong the check returned 'fine'") for line in lines)
    assert any("nowhere" in line for line in lines if line.startswith("BROKEN gone"))


def test_compiler_check_says_how_to_get_one(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    found = checks.compiler()
    assert found.ok is None
    assert "g++" in found.detail
    assert "install" in found.fix


def test_a_command_of_a_plugin_that_is_not_installed_names_the_line_to_run(monkeypatch, capsys):
    monkeypatch.setenv("PYG_SCALE_PLUGINS", "")
    monkeypatch.setattr("pyg_scale.cli.registry.get", plugins.Registry().get)
    assert main(["bench", "loader"]) == 2
    assert "pip install pyg-scale-bench" in capsys.readouterr().err
