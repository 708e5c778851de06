"""What is shipped: a pure wheel that installs anywhere, and one that needs no compiler."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest

from pyg_scale.ops import build, sources

ROOT = Path(__file__).resolve().parents[1]
PURELIB = sysconfig.get_path("purelib")
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or build.find_compiler() is None, reason="needs a C++ compiler"
)

SAMPLE_WITH_KERNELS = """
import torch
from torch_geometric.data import Data
import pyg_scale
from pyg_scale.loader import NeighborLoader

ring = torch.arange(10)
data = Data(x=ring[:, None].float(), edge_index=torch.stack([ring, (ring + 1) % 10]))
batches = list(NeighborLoader(data, num_neighbors=[1, 1], batch_size=4))
print([batch.n_id.tolist() for batch in batches])
print(pyg_scale.__file__)
print(next(iter(torch.ops.loaded_libraries)))
"""


def run(*command: str | Path, **options) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(*arguments: str | Path, **options) -> str:
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, **options)


def make_wheel(folder: Path, what: Path = ROOT, **environment: str) -> Path:
    """Build without a build environment of its own, and without any index to download from."""
    pip(
        *("wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, what),
        env=os.environ | {"PYG_SCALE_BUILD_KERNELS": "0"} | environment,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def pure(tmp_path_factory):
    return make_wheel(tmp_path_factory.mktemp("pure"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return make_wheel(tmp_path_factory.mktemp("compiled"), PYG_SCALE_BUILD_KERNELS="1")


def test_installing_next_to_torch_downloads_nothing():
    report = pip(
        *("install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--no-index"),
        *("--no-build-isolation", "--report", "-", ROOT),
    )
    assert [item["metadata"]["name"] for item in json.loads(report)["install"]] == ["pyg-scale"]
    report = pip(
        *("install", "--dry-run", "--quiet", "--no-index", "--no-build-isolation"),
        *("--report", "-", ROOT),
    )
    names = {item["metadata"]["name"] for item in json.loads(report)["install"]}
    assert names <= {"pyg-scale"}


def test_building_needs_no_torch_of_its_own():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert not [r for r in project["build-system"]["requires"] if not r.startswith("hatchling")]


def test_the_plain_wheel_is_pure_and_has_the_sources(pure):
    assert pure.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(pure).namelist()
    files = chain.from_iterable(map((ROOT / "csrc").glob, sources.PATTERNS))
    shipped = {f"pyg_scale/{path.relative_to(ROOT).as_posix()}" for path in files}
    assert {name for name in names if "csrc" in name} == shipped
    assert "pyg_scale/csrc/cuda/sum.cu" in shipped
    assert "pyg_scale/py.typed" in names
    assert not [name for name in names if name.endswith((".so", ".o"))]
    assert all(name.startswith(("pyg_scale/", "pyg_scale-")) for name in names)
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "pyg_scale").rglob("*.py")}
    assert modules <= set(names)


def test_the_source_distribution_makes_the_same_wheel(pure, tmp_path):
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=ROOT)
    (sdist,) = tmp_path.glob("*.tar.gz")
    again = make_wheel(tmp_path / "wheel", sdist)
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(pure).namelist())


@pytest.mark.parametrize("switch", ["yes", "2"])
def test_a_switch_that_means_nothing_is_an_error(tmp_path, switch):
    with pytest.raises(AssertionError, match="PYG_SCALE_BUILD_KERNELS must be 0 or 1"):
        make_wheel(tmp_path, PYG_SCALE_BUILD_KERNELS=switch)


@needs_compiler
def test_the_compiled_wheel_is_tagged_for_every_python(compiled):
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert compiled.name.endswith(f"-cp311-abi3-{platform}.whl")
    with zipfile.ZipFile(compiled) as wheel:
        assert [n for n in wheel.namelist() if n.endswith(".so")] == [
            f"pyg_scale/ops/{sources.NAME}"
        ]
        (metadata,) = [n for n in wheel.namelist() if n.endswith("/WHEEL")]
        assert b"Root-Is-Purelib: false" in wheel.read(metadata)


@needs_compiler
@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
def test_the_library_needs_torch_and_the_system_alone(compiled, tmp_path):
    with zipfile.ZipFile(compiled) as wheel:
        library = wheel.extract(f"pyg_scale/ops/{sources.NAME}", tmp_path)
    needed = re.findall(r"NEEDED.*\[(.+?)\.so", run("readelf", "--dynamic", "--wide", library))
    assert {"libtorch", "libtorch_cpu"} <= set(needed)
    assert set(needed) <= {
        *("libtorch", "libtorch_cpu", "libstdc++", "libgcc_s", "libm", "libc", "libpthread"),
        *("ld-linux-x86-64", "ld-linux-aarch64"),
    }
    symbols = run("readelf", "--dyn-syms", "--wide", library)
    undefined = re.findall(r" UND (\S+)", symbols)
    assert undefined
    assert not [s for s in undefined if s.startswith(("Py", "_Py"))]
    unstable = re.compile(r"^_ZN?K?(2at|3c10|5torch)")
    assert not [s for s in undefined if unstable.match(s)]


@pytest.mark.slow
@needs_compiler
def test_the_compiled_wheel_works_where_there_is_no_compiler(compiled, tmp_path):
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    pip("--python", python, "install", "--no-index", "--no-deps", compiled)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(site, "torch_of_another_environment.pth").write_text(PURELIB)
    environment = {
        "PATH": str(venv / "bin"),
        "HOME": str(tmp_path),
        "PYG_SCALE_KERNELS": "require",
        "PYG_SCALE_PLUGINS": "",
    }
    script = tmp_path / "sample.py"
    script.write_text(SAMPLE_WITH_KERNELS)
    n_id, package, library = run(python, script, env=environment, cwd=tmp_path).splitlines()
    assert n_id == "[[0, 1, 2, 3, 9, 8], [4, 5, 6, 7, 3, 2], [8, 9, 7, 6]]"
    assert Path(package).is_relative_to(site)
    assert Path(library).is_relative_to(site)

    done = subprocess.run(
        [python, "-c", "from pyg_scale.cli import main; raise SystemExit(main(['build']))"],
        env=environment,
        cwd=tmp_path,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, "what is there already needs no compiler"


def test_no_compiled_library_is_kept_in_the_repository():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert not [n for n in listed.stdout.splitlines() if n.endswith((".so", ".o", ".whl"))]


def test_constraints_allow_what_the_project_asks_for():
    from packaging.requirements import Requirement

    wanted: list[str] = []
    for file in (ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        wanted += [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pinned[name] = version
    for requirement in map(Requirement, wanted):
        version = pinned.get(requirement.name)
        assert version is None or requirement.specifier.contains(version), requirement
    asked = {Requirement(each).name for each in wanted}
    assert not set(pinned) - asked, "constraints.txt names what nothing asks for"
