"""Finding plugins and looking names up, against real distributions written into a folder."""

import subprocess
import sys
import textwrap
import types
import warnings

import pytest

import pyg_scale
from pyg_scale import default_plugins, hookspecs, plugins
from pyg_scale.errors import (
    AmbiguousPluginError,
    PluginError,
    PluginLoadError,
    UnknownPluginError,
)
from pyg_scale.plugins import KINDS, Registry

pytestmark = pytest.mark.filterwarnings("error:pyg_scale plugin:RuntimeWarning")

SAMPLERS = """
from pyg_scale import hookimpl

@hookimpl
def pyg_scale_samplers():
    return {targets!r}
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Write a distribution: its metadata and one module per entry point."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("PYG_SCALE_PLUGINS", raising=False)
    written = []

    def write(name, source, version="1.2", points=None):
        module = name.replace("-", "_")
        written.append(module)
        info = tmp_path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{point} = {target}" for point, target in (points or {"x": module}).items()]
        (info / "entry_points.txt").write_text("[pyg_scale]\n" + "\n".join(lines) + "\n")
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))

    yield write
    for module in written:
        sys.modules.pop(module, None)


def samplers(**targets):
    return SAMPLERS.format(targets=targets)


# Built-ins #####################################################################################


def test_every_hook_collects_one_kind_and_has_a_complete_example():
    specified = {
        name for name in vars(hookspecs) if hasattr(getattr(hookspecs, name), "pyg_scale_spec")
    }
    assert specified == set(KINDS.values())
    for name in specified:
        doc = getattr(hookspecs, name).__doc__
        example = textwrap.dedent(doc.partition("Example::\n")[2])
        space = {}
        exec(example, space)  # the example is a plugin
        module = types.SimpleNamespace(**{name: space[name]})
        registry = Registry()
        registry.register(module, name="example")
        kind = next(kind for kind, hook in KINDS.items() if hook == name)
        assert registry.entry(kind, "mine").provider == "example"


def test_every_builtin_can_be_loaded():
    for entry in Registry().entries():
        if entry.provider == plugins.BUILTIN:
            assert entry.load() is not None
            assert entry.version == pyg_scale.__version__


def test_builtins_are_found_without_looking_at_what_is_installed(monkeypatch):
    def fail(**kwargs):
        raise AssertionError("scanned")

    monkeypatch.setattr(plugins, "entry_points", fail)
    registry = Registry()
    assert registry.entry("sampler", "native").provider == "builtin"
    assert registry.entry("sampler", "builtin:native").name == "native"
    with pytest.raises(AssertionError, match="scanned"):
        registry.names("sampler")


def test_listing_imports_neither_torch_nor_pyg():
    code = (
        "import sys, pyg_scale; from pyg_scale import plugins, testing\n"
        "import pyg_scale.cli.plugins, pyg_scale.cli.doctor.command\n"
        "import pyg_scale.testing.pytest_plugin\n"
        "plugins.entries(); plugins.names('sampler')\n"
        "try: plugins.get('sampler', 'nativ')\n"
        "except LookupError: pass\n"
        "assert not {'torch', 'torch_geometric', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Third parties #################################################################################


def test_a_plugin_is_found_by_its_entry_point(install):
    install("pyg-scale-Mine", samplers(mine="collections:OrderedDict"))
    registry = Registry()
    assert "mine" in registry.names("sampler")
    assert registry.get("sampler", "mine").__name__ == "OrderedDict"
    entry = registry.entry("sampler", "pyg-scale-mine:mine")
    assert (entry.provider, entry.version) == ("pyg-scale-mine", "1.2")
    assert registry.failures() == []


def test_builtin_names_are_reserved(install):
    install("third", samplers(native="collections:OrderedDict"))
    registry = Registry()
    assert registry.entry("sampler", "native").provider == "builtin"
    assert registry.get("sampler", "third:native").__name__ == "OrderedDict"
    assert {"native", "third:native"} <= set(registry.names("sampler"))


def test_two_plugins_with_one_name_are_an_error_only_when_it_is_asked_for(install):
    install("third", samplers(spin="collections:OrderedDict", other="collections:deque"))
    install("fourth", samplers(spin="collections:Counter"))
    registry = Registry()
    assert registry.get("sampler", "other").__name__ == "deque"
    with pytest.raises(AmbiguousPluginError, match="'fourth:spin', 'third:spin'"):
        registry.get("sampler", "spin")
    assert registry.get("sampler", "third:spin").__name__ == "OrderedDict"
    assert {"third:spin", "fourth:spin"} <= set(registry.names("sampler"))
    assert "spin" not in registry.names("sampler")


def test_a_distribution_with_two_entry_points_is_two_providers(install):
    source = """
    from pyg_scale import hookimpl
    class A:
        @hookimpl
        def pyg_scale_samplers(self): return {"same": "collections:OrderedDict"}
    class B:
        @hookimpl
        def pyg_scale_samplers(self): return {"same": "collections:Counter"}
    a, b = A(), B()
    """
    install("both", source, points={"a": "both:a", "b": "both:b"})
    registry = Registry()
    assert registry.get("sampler", "both/a:same").__name__ == "OrderedDict"
    assert registry.get("sampler", "both/b:same").__name__ == "Counter"


def test_entry_points_are_reached_by_any_spelling(install):
    source = samplers(same="collections:deque")
    install("pyg-scale-two", source, points={"my_part": "pyg_scale_two", "Other": "two_b"})
    sys.modules["two_b"] = other = types.ModuleType("two_b")
    exec(samplers(same="collections:Counter"), vars(other))
    try:
        registry = Registry()
        for name in registry.names("sampler"):
            assert registry.entry("sampler", name)
        for part in ("my_part", "my-part", "My.Part"):
            assert registry.get("sampler", f"pyg_scale_two/{part}:same").__name__ == "deque"
        assert registry.get("sampler", "pyg-scale-two/Other:same").__name__ == "Counter"
    finally:
        del sys.modules["two_b"]


@pytest.mark.parametrize("metadata", [None, "Metadata-Version: 2.1\n"])
def test_a_distribution_with_damaged_metadata_harms_nobody(install, tmp_path, metadata):
    install("half-gone", samplers(half="collections:deque"), points={"half": "half_gone"})
    install("zz-good", samplers(good="collections:deque"))
    file = tmp_path / "half_gone-1.2.dist-info" / "METADATA"
    file.unlink() if metadata is None else file.write_text(metadata)
    registry = Registry()
    assert registry.get("sampler", "good").__name__ == "deque"
    entry = registry.entry("sampler", "half:half")
    assert (entry.provider, entry.version) == ("half", "")


BROKEN = {
    "does not import": ("import nowhere", "No module named 'nowhere'"),
    "exits": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "has no hook": ("x = 1", "implements no hook"),
    "misspells a hook": (
        "from pyg_scale import hookimpl\n@hookimpl\ndef pyg_scale_sampler(): return {}",
        "unknown hook 'pyg_scale_sampler'; did you mean 'pyg_scale_samplers'",
    ),
    "takes an argument": (
        "from pyg_scale import hookimpl\n@hookimpl\ndef pyg_scale_samplers(data): return {}",
        "data",
    ),
    "raises in a hook": (
        "from pyg_scale import hookimpl\n@hookimpl\ndef pyg_scale_samplers(): return 1 / 0",
        "ZeroDivisionError",
    ),
    "returns a list": (
        "from pyg_scale import hookimpl\n@hookimpl\ndef pyg_scale_samplers(): return ['a']",
        "must return",
    ),
    "gives a bad name": (samplers(**{"My Sampler": "a:b"}), "'My Sampler'"),
    "gives a bad target": (samplers(mine="a.b.C"), "'a.b.C'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_reported_once_and_harms_nobody(install, case):
    source, message = BROKEN[case]
    install("broken", source, version="0.9")
    install("zz-good", samplers(good="collections:deque"))
    registry = Registry()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert registry.get("sampler", "good").__name__ == "deque"
        assert registry.entry("sampler", "native")
        registry.entries()
    assert [w.category for w in caught] == [RuntimeWarning]
    assert "broken 0.9" in str(caught[0].message)
    (failure,) = registry.failures()
    assert failure.provider == "broken"
    assert message in str(failure)
    with pytest.raises(UnknownPluginError) as error:  # a usual reason why a name is missing
        registry.get("sampler", "bad")
    assert message in str(error.value)


def test_a_hook_that_fails_does_not_cost_the_others(install):
    install(
        "half",
        samplers(good="collections:deque")
        + textwrap.dedent("""
    @hookimpl
    def pyg_scale_checks(): raise RuntimeError("no checks today")
    """),
    )
    registry = Registry()
    with pytest.warns(RuntimeWarning, match="no checks today"):
        assert "torch" in registry.names("check")
    assert registry.get("sampler", "good").__name__ == "deque"


def test_a_target_that_cannot_be_imported_names_its_distribution(install, tmp_path):
    install("mine", samplers(a="nowhere.at_all:X", b="collections:Nothing", c="exits_here:X"))
    (tmp_path / "exits_here.py").write_text("import sys; sys.exit(3)")
    registry = Registry()
    assert {"a", "b", "c"} <= set(registry.names("sampler"))
    reasons = {"a": "No module named 'nowhere'", "b": "Nothing", "c": "SystemExit: 3"}
    for name, reason in reasons.items():
        with pytest.raises(PluginLoadError, match=r"from mine 1\.2") as error:
            registry.get("sampler", name)
        assert reason in str(error.value)
        assert isinstance(error.value, ImportError)


# Messages ######################################################################################


def test_unknown_names_say_what_was_meant_and_what_there_is():
    with pytest.raises(UnknownPluginError) as error:
        Registry().get("sampler", "refrence")
    assert isinstance(error.value, LookupError)
    assert "did you mean 'reference'?" in str(error.value)
    available = str(error.value).partition("available: ")[2].partition("\n")[0].split(", ")
    assert {"native", "reference"} <= set(available)


def test_names_of_our_own_plugins_say_what_to_install(monkeypatch):
    monkeypatch.setenv("PYG_SCALE_PLUGINS", "")
    for (kind, name), distribution in default_plugins.FIRST_PARTY.items():
        with pytest.raises(UnknownPluginError, match=f"pip install {distribution}"):
            Registry().get(kind, name)


def test_unknown_kinds_list_the_kinds():
    for ask in (Registry().names, Registry().entries, lambda kind: Registry().get(kind, "x")):
        with pytest.raises(ValueError, match="unknown kind 'samplers'; the kinds are sampler"):
            ask("samplers")


# Environment ###################################################################################


def test_allow_list(install, monkeypatch):
    install("one", samplers(one="collections:deque"))
    install("two", "raise RuntimeError('imported')")
    monkeypatch.setenv("PYG_SCALE_PLUGINS", "ONE")
    assert "one" in Registry().names("sampler")
    monkeypatch.setenv("PYG_SCALE_PLUGINS", "")
    builtin = ["cuda", "fastgcn", "labor", "ladies", "native", "reference"]
    assert Registry().names("sampler") == builtin
    monkeypatch.setenv("PYG_SCALE_PLUGINS", "one, absent_plugin")
    with pytest.warns(RuntimeWarning, match="pip install absent-plugin"):
        assert "one" in Registry().names("sampler")


def test_trace(install, monkeypatch, capsys):
    install("one", samplers(one="collections:deque"))
    Registry().get("sampler", "one")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("PYG_SCALE_TRACE_PLUGINS", "1")
    Registry().get("sampler", "one")
    err = capsys.readouterr().err
    assert "loaded one 1.2 (one)" in err
    assert "sampler 'one' is collections:deque of one" in err


# By hand #######################################################################################


class Plugin:
    """Adds one sampler, given as an object."""

    def __init__(self, target):
        self.target = target

    @pyg_scale.hookimpl
    def pyg_scale_samplers(self):
        return {"mine": self.target}


def test_register_replaces_and_unregister_takes_away():
    registry = Registry()
    for target in (dict, list):
        assert registry.register(Plugin(target)) == "plugin"
        assert registry.get("sampler", "mine") is target
        assert registry.get("sampler", "plugin:mine") is target
    registry.register(Plugin(set), name="other")
    with pytest.raises(AmbiguousPluginError, match="'other:mine', 'plugin:mine'"):
        registry.get("sampler", "mine")
    registry.unregister("plugin")
    assert registry.get("sampler", "mine") is set
    with pytest.raises(PluginError, match="added: other"):
        registry.unregister("plugin")
    with pytest.raises(PluginError, match="builtin"):
        registry.unregister("builtin")


def test_register_takes_a_module():
    module = types.ModuleType("notebook")
    exec(samplers(mine="collections:deque"), vars(module))
    registry = Registry()
    assert registry.register(module) == "notebook"
    assert registry.get("sampler", "mine").__name__ == "deque"


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (types.SimpleNamespace(), "implements no hook"),
        (Plugin("no colon"), "module:attribute"),
    ],
)
def test_register_is_all_or_nothing(plugin, message):
    registry = Registry()
    before = registry.entries()
    with pytest.raises(PluginError, match=message):
        registry.register(plugin, name="bad")
    assert registry.entries() == before
    registry.register(Plugin(dict), name="bad")


def test_register_says_which_hook_failed_and_how():
    class Unmade:
        @pyg_scale.hookimpl
        def pyg_scale_samplers(self):
            return {"mine": dict}

    class Fails:
        @pyg_scale.hookimpl
        def pyg_scale_checks():
            raise KeyError("home")

    registry = Registry()
    with pytest.raises(PluginError, match=r"pyg_scale_samplers\(\) failed.*leave out self"):
        registry.register(Unmade)
    with pytest.raises(PluginError, match=r"pyg_scale_checks\(\) failed: KeyError: 'home'"):
        registry.register(Fails)
    assert "mine" not in registry.names("sampler")
    assert registry.register(Unmade()) == "unmade"


def test_register_refuses_the_name_of_an_installed_plugin(install):
    install("pyg-scale-mine", samplers(mine="collections:deque"))
    registry = Registry()
    with pytest.raises(PluginError, match="name="):
        registry.register(Plugin(dict), name="pyg_scale_mine")
    plugin = Plugin(dict)
    registry.register(plugin, name="a")
    with pytest.raises(PluginError, match="already registered, as 'a'"):
        registry.register(plugin, name="b")


def test_the_functions_of_the_module_share_one_registry():
    name = plugins.register(Plugin(dict), name="shared-test")
    try:
        assert plugins.get("sampler", "shared-test:mine") is dict
        assert any(entry.provider == name for entry in plugins.entries("sampler"))
    finally:
        plugins.unregister(name)


def test_lookup_from_many_threads_discovers_once(install, tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    install(
        "slow",
        f"""
    import time; time.sleep(0.05)
    with open({str(tmp_path / "count")!r}, "a") as file: file.write("x")
    """
        + textwrap.indent(samplers(slow="collections:deque"), "    "),
    )
    registry = Registry()
    with warnings.catch_warnings(), ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: registry.get("sampler", "slow").__name__, range(32)))
    assert found == ["deque"] * 32
    assert (tmp_path / "count").read_text() == "x"
