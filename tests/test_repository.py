"""The repository keeps its own rules."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pyg_scale
from pyg_scale import plugins, testing

ROOT = Path(pyg_scale.__file__).parents[1]
PACKAGE = ROOT / "pyg_scale"
MODULES = sorted(p.relative_to(ROOT).as_posix() for p in PACKAGE.rglob("*.py"))
SOURCES = sorted(
    p.relative_to(ROOT).as_posix()
    for folder, pattern in (
        ("pyg_scale", "*.py"),
        ("csrc", "*.cpp"),
        ("csrc", "*.h"),
        ("csrc", "*.cu"),
        ("csrc", "*.cuh"),
        ("csrc", "*.py"),
        ("plugins", "*.py"),
    )
    for p in (ROOT / folder).rglob(pattern)
)
BUILTIN = [e for e in plugins.Registry().entries() if e.provider == plugins.BUILTIN]

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="needs a checkout, not an installed package"
)


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_no_file_is_longer_than_600_lines():
    assert not [path for path in SOURCES if len(text_of(path).splitlines()) > 600]


def test_every_module_says_what_it_is():
    assert not [path for path in MODULES if not ast.get_docstring(ast.parse(text_of(path)))]


def test_no_module_has_a_name_that_says_nothing():
    empty = {"utils", "util", "helpers", "helper", "common", "core", "impl", "manager", "misc"}
    assert not [
        path for path in SOURCES if Path(path).stem in empty or set(Path(path).parts) & empty
    ]


def test_nothing_is_left_for_later():
    found = {path: re.findall(r"\b(TODO|FIXME|XXX|HACK)\b", text_of(path)) for path in SOURCES}
    assert not {path: words for path, words in found.items() if words}


def test_importing_the_package_imports_neither_torch_nor_pyg_nor_looks_for_plugins():
    code = (
        "import sys, pyg_scale\n"
        "assert 'plugins' in dir(pyg_scale)\n"
        "bad = {'torch', 'torch_geometric', 'numpy', 'pyg_scale.plugins'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize("name", pyg_scale._SUBMODULES)
def test_submodules_are_loaded_on_first_use(name):
    assert inspect.ismodule(getattr(pyg_scale, name))


def test_wrong_attributes_of_the_package_are_errors():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pyg_scale.nothing  # noqa: B018


@pytest.mark.parametrize("entry", BUILTIN, ids=lambda e: f"{e.kind}-{e.name}")
def test_every_builtin_target_can_be_imported_and_is_documented(entry):
    target = entry.load()
    module = importlib.import_module(entry.target.partition(":")[0])
    assert inspect.getdoc(module)
    assert inspect.getdoc(target)


@pytest.mark.parametrize(
    "entry", [e for e in BUILTIN if e.kind in testing.KITS], ids=lambda e: f"{e.kind}-{e.name}"
)
def test_every_builtin_has_a_conformance_test(entry):
    """Some file in ``tests/conformance`` subclasses the kit's class and names the built-in."""
    kit = testing.kit_of(entry.kind, entry.load())
    name = entry.target.rpartition(":")[2]
    for path in (ROOT / "tests" / "conformance").glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if re.search(rf"class \w+\(.*\b{kit}\b.*\)", text) and re.search(
            rf"\b{name}\b|[\"']{entry.name}[\"']", text
        ):
            return
    pytest.fail(f"tests/conformance has no subclass of {kit} for {entry.name!r} ({name})")


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_every_kind_has_an_example_in_the_template(kind):
    template = ROOT / "plugins" / "pyg-scale-template"
    assert (template / "src" / "pyg_scale_template" / f"{kind}.py").is_file()
    assert (template / "tests" / f"test_{kind}.py").is_file()
    text = (template / "src" / "pyg_scale_template" / "__init__.py").read_text(encoding="utf-8")
    assert f"def {plugins.KINDS[kind]}(" in text


@pytest.mark.parametrize("kind", testing.KITS)
def test_every_kit_class_can_be_loaded_and_has_the_fixture_of_its_kind(kind):
    kit = getattr(testing, testing.KITS[kind])
    assert kind in dir(kit)
    assert [name for name in dir(kit) if name.startswith("test_")]


PACKAGES = sorted(
    ".".join(path.parent.relative_to(ROOT).parts)
    for path in (ROOT / "pyg_scale").rglob("__init__.py")
)


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_can_be_loaded(name):
    module = importlib.import_module(name)
    for each in getattr(module, "__all__", ()):
        assert getattr(module, each) is not None


@pytest.mark.parametrize(
    "folder", sorted((ROOT / "plugins").glob("*/pyproject.toml")), ids=lambda p: p.parent.name
)
def test_plugins_of_ours_are_named_as_plugins_are(folder):
    import tomllib

    project = tomllib.loads(folder.read_text(encoding="utf-8"))["project"]
    assert project["name"] == folder.parent.name
    assert project["name"].startswith("pyg-scale-")
    assert project["entry-points"]["pyg_scale"]
    assert any(d.replace("-", "_").startswith("pyg_scale") for d in project["dependencies"])
    assert (folder.parent / "README.md").is_file()
    assert list((folder.parent / "tests").glob("test_*.py"))


def test_plugins_that_errors_recommend_exist():
    from pyg_scale.default_plugins import FIRST_PARTY

    for distribution in FIRST_PARTY.values():
        assert (ROOT / "plugins" / distribution / "pyproject.toml").is_file()


@pytest.mark.parametrize("command", sorted(e.name for e in BUILTIN if e.kind == "command"))
def test_every_command_has_help(command, capsys):
    from pyg_scale.cli import main

    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert not ended.value.code
    assert f"usage: pyg-scale {command}" in capsys.readouterr().out


def test_the_repository_names_no_place_of_ours():
    """No path of a developer's machine in anything that is kept."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    bad = re.compile(r"/(?:root|home)/\w+")
    for path in listed.stdout.splitlines():
        file = ROOT / path
        if (
            file.suffix in {".py", ".md", ".toml", ".h", ".cpp", ".cu", ".cuh", ".txt", ".yml", ""}
            and file.is_file()
        ):
            assert not bad.findall(file.read_text(encoding="utf-8", errors="ignore")), path
