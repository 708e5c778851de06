"""Names of plugins on the command line, and what it prints of plugins that are wrong."""

import json
import types

import numpy as np
import pytest
import torch

import pyg_scale
from pyg_scale import plugins
from pyg_scale.cli import main
from pyg_scale.cli.check import module_source
from pyg_scale.hookspecs import Check
from pyg_scale.testing import PluginTests
from pyg_scale.testing.run import failures


@pytest.fixture
def adds():
    """Register hooks for one test: ``adds("provider", pyg_scale_commands={...})``."""
    names = []

    def add(provider, **hooks):
        def returning(targets):
            return pyg_scale.hookimpl(lambda: targets)

        plugin = types.SimpleNamespace(**{k: returning(v) for k, v in hooks.items()})
        names.append(plugins.register(plugin, provider))

    yield add
    for name in names:
        plugins.unregister(name)


# Names #########################################################################################


def test_show_takes_the_name_with_its_provider(adds, capsys):
    adds("one", pyg_scale_samplers={"spin": "collections:deque"})
    for name in ("one:spin", "builtin:native"):
        assert main(["plugins", "show", name]) == 0
        assert f"sampler {name.partition(':')[2]}" in capsys.readouterr().out


def test_show_says_which_plugins_have_a_name(adds, capsys):
    adds("one", pyg_scale_samplers={"spin": "collections:deque"})
    adds("two", pyg_scale_samplers={"spin": "collections:Counter"})
    assert main(["plugins", "show", "spin"]) == 1
    assert "'one:spin', 'two:spin'" in capsys.readouterr().err


def test_show_of_a_sampler_that_declares_no_abilities(adds, capsys):
    adds("one", pyg_scale_samplers={"spin": type("Spin", (), {"supports": None})})
    assert main(["plugins", "show", "spin"]) == 0
    assert "sampler spin" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["pyg-scale-two", "pyg_scale_two", "PyG.Scale.Two"])
def test_check_tests_all_entry_points_of_a_distribution(adds, monkeypatch, name):
    for part in ("a", "b"):
        adds(f"pyg-scale-two/{part}", pyg_scale_graph_stores={"same": "collections:deque"})
    asked = []
    monkeypatch.setattr("pyg_scale.cli.check.check", lambda *args, **how: asked.append(args) or 0)
    assert main(["plugins", "check", name]) == 0
    ((found, provider),) = asked
    assert [entry.provider for entry in found] == ["pyg-scale-two/a", "pyg-scale-two/b"]
    assert provider == "pyg-scale-two"
    source = module_source(found, provider)
    assert "class TestGraphStoreSame(" in source and "class TestGraphStoreSameOf2(" in source


def test_check_fails_for_a_sampler_that_is_none(adds, monkeypatch):
    adds("one", pyg_scale_samplers={"spin": dict})
    asked = []
    run = "pyg_scale.cli.check.subprocess.run"
    monkeypatch.setattr(run, lambda *a, **k: asked.append(a) or types.SimpleNamespace(returncode=1))
    assert main(["plugins", "check", "spin"]) == 1
    assert asked, "no test was run"


def test_check_goes_on_after_a_name_that_does_not_load(adds, monkeypatch, capsys):
    targets = {"gone": "nowhere:Gone", "spin": "pyg_scale.sampler:NativeSampler"}
    adds("one", pyg_scale_samplers=targets, pyg_scale_checks={"lost": "nowhere:check"})
    asked = []
    run = "pyg_scale.cli.check.subprocess.run"
    monkeypatch.setattr(run, lambda *a, **k: asked.append(a) or types.SimpleNamespace(returncode=0))
    assert main(["plugins", "check", "one", "--json"]) == 1
    out, said = capsys.readouterr()
    assert "FAILED sampler 'gone'" in said and "FAILED check 'lost'" in said
    found = json.loads(out)
    assert found["checked"] == ["sampler one:spin"] and not found["ok"]
    assert sorted(found["not_loaded"]) == ["check one:lost", "sampler one:gone"]
    assert len(asked) == 1, "the names that load were not tested"


# What is wrong #################################################################################


@pytest.mark.parametrize("error", ["RuntimeError('no licence')", "SystemExit(3)"])
def test_usage_survives_a_package_that_does_not_import(adds, capsys, tmp_path, monkeypatch, error):
    (tmp_path / "no_licence").mkdir()
    (tmp_path / "no_licence" / "__init__.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(str(tmp_path))
    adds("one", pyg_scale_commands={"locked": "no_licence.command:main"})
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "no_licence.command:main cannot be read" in out and "doctor" in out
    assert main(["locked"]) == 1
    assert "from one" in capsys.readouterr().err


WRONG = {
    "a word": Check("yes", "all is well"),
    "a number": Check(0, "broken"),
    "of NumPy": Check(np.bool_(False), "broken"),
    "a tensor": Check(torch.tensor(True), "all is well"),
    "no detail": Check(False, None),
    "an error": Check(False, ValueError("x")),
    "a list": Check(False, "broken", ["a", "b"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_doctor_and_the_kit_refuse_a_check_that_cannot_be_printed(adds, capsys, case):
    adds("one", pyg_scale_checks={"odd": lambda: WRONG[case]})
    assert main(["doctor"]) == 1
    assert "BROKEN  odd" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and "instead of" in found["checks"]["odd"]["detail"]
    test = "test_every_target_fulfils_its_contract"
    entries = [entry for entry in plugins.entries() if entry.provider == "one"]
    assert "check 'odd'" in str(next(failures(PluginTests, test, provided=entries))[1])


@pytest.mark.parametrize("kind", ["partitioner", "reader", "comm", "conv", "sampler", "parallel"])
def test_the_kit_wants_a_subclass_of_the_contract(adds, kind):
    adds("one", **{plugins.KINDS[kind]: {"odd": lambda: None}})
    entries = [entry for entry in plugins.entries() if entry.provider == "one"]
    test = "test_every_target_fulfils_its_contract"
    assert "must be a subclass of" in str(next(failures(PluginTests, test, provided=entries))[1])
