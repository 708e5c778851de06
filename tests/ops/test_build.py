import ctypes
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from pyg_scale.cli import main
from pyg_scale.errors import KernelsError
from pyg_scale.ops import build as building
from pyg_scale.ops import library, sources
from pyg_scale.ops.build import build, clean

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or building.find_compiler() is None, reason="needs a C++ compiler"
)

STABLE_OP = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
using torch::stable::Tensor;
Tensor twice(const Tensor& x) {
  Tensor out = torch::stable::new_empty(x, {x.numel()});
  const auto* from = static_cast<const int64_t*>(x.data_ptr());
  auto* to = static_cast<int64_t*>(out.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = 2 * from[i];
  return out;
}
STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale_trial, m) { m.def("twice(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(pyg_scale_trial, CompositeExplicitAutograd, m) {
  m.impl("twice", TORCH_BOX(&twice));
}
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that notes what it is called with and then does it; returns what it noted."""
    real = " ".join(building.find_compiler())
    log = tmp_path / "compiled.txt"
    script = tmp_path / "noting-c++"
    script.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {real} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))

    def compiled() -> list[str]:
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        found = [line.partition(" -c ")[2].split()[0] for line in lines if " -c " in line]
        return sorted(Path(name).name for name in found)

    return compiled


def number(library: Path) -> int:
    copy = library.with_suffix(f".{library.stat().st_mtime_ns}.so")  # dlopen knows a file by name
    shutil.copy(library, copy)
    return ctypes.CDLL(str(copy)).pyg_scale_number()


def test_writes_a_library_beside_the_package(checkout):
    path = build()
    assert list(path.parent.iterdir()) == [path]
    assert path == checkout / "pyg_scale" / "ops" / sources.NAME
    assert number(path) == 7
    assert sources.built_from(path) == sources.source_hash(checkout / "csrc")


@pytest.mark.slow
def test_registers_ops_through_the_stable_abi(checkout):
    (checkout / "csrc" / "twice.cpp").write_text(STABLE_OP)
    path = build()
    code = (
        "import sys, torch; torch.ops.load_library(sys.argv[1]); "
        "print(torch.ops.pyg_scale_trial.twice(torch.arange(4)).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == "[0, 2, 4, 6]", done.stderr


def test_compiles_only_what_changed(checkout, compiler):
    build()
    assert compiler() == ["number.cpp", "other.cpp", "sources.cpp"]
    build()
    assert compiler() == []
    (checkout / "csrc" / "number.h").write_text("#define NUMBER 8\n")
    assert number(build()) == 8
    assert compiler() == ["number.cpp", "sources.cpp"]
    (checkout / "csrc" / "number.h").write_text("#define NUMBER 7\n")  # as it was
    assert number(build()) == 7
    assert compiler() == []
    build(force=True)
    assert compiler() == ["number.cpp", "other.cpp", "sources.cpp"]


def test_environments_with_the_same_torch_share_objects(checkout, compiler, tmp_path, monkeypatch):
    build()
    compiler()
    torch = Path(building.importlib.util.find_spec("torch").submodule_search_locations[0])
    (tmp_path / "another").symlink_to(torch.parent)
    elsewhere = tmp_path / "another" / "torch"
    spec = building.importlib.util.spec_from_file_location(
        "torch", elsewhere / "__init__.py", submodule_search_locations=[str(elsewhere)]
    )
    monkeypatch.setattr(building.importlib.util, "find_spec", lambda name: spec)
    output = tmp_path / "again.so"
    assert number(build(output=output)) == 7
    assert compiler() == []


def test_follows_headers_included_by_headers(checkout, compiler):
    (checkout / "csrc" / "number.h").write_text('#include "deep.h"\n#define NUMBER DEEP\n')
    (checkout / "csrc" / "deep.h").write_text("#pragma once\n#define DEEP 1\n")
    assert number(build()) == 1
    compiler()
    (checkout / "csrc" / "deep.h").write_text("#pragma once\n#define DEEP 2\n")
    assert number(build()) == 2
    assert "number.cpp" in compiler()


def test_reports_progress(checkout):
    seen = []
    build(progress=lambda done, total, name: seen.append((done, total, name)))
    assert [done for done, _, _ in seen] == [0, 1, 2, 3, 4]
    assert {total for _, total, _ in seen} == {4}
    assert {name for _, _, name in seen[1:4]} == {"number.cpp", "other.cpp", "sources.cpp"}


def test_an_error_of_the_compiler_is_shown_and_the_old_library_stays(checkout):
    path = build()
    before = path.read_bytes()
    (checkout / "csrc" / "other.cpp").write_text("int other_number() { return nonsense; }\n")
    with pytest.raises(KernelsError, match=r"(?s)other\.cpp.*nonsense"):
        build()
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("order", ["{edit}; {run}", "{run}; {edit}"])
@pytest.mark.parametrize("edited", ["number.h", "other.cpp"])
def test_refuses_sources_that_change_meanwhile(checkout, tmp_path, monkeypatch, order, edited):
    """The headers of the file that is being compiled, or a file whose turn comes later."""
    path = checkout / "csrc" / edited
    original = path.read_text()
    run = " ".join(building.find_compiler()) + ' "$@" || exit 1'
    edit = f'case "$*" in *number.cpp*) echo "#define NUMBER 9" > {path};; esac'
    script = tmp_path / "editing-c++"
    script.write_text(f"#!/bin/sh\n{order.format(edit=edit, run=run)}\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(KernelsError, match="changed while it was compiled"):
        build(jobs=1)
    assert not sources.locations()[0].exists()
    script.write_text(f"#!/bin/sh\n{run}\n")
    assert number(build()) == (9 if edited == "number.h" else 7)
    path.write_text(original)
    assert number(build()) == 7


def test_without_a_compiler(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(KernelsError, match=r"no C\+\+ compiler.*apt install g\+\+"):
        build()
    monkeypatch.setenv("CXX", "my-c++")
    with pytest.raises(KernelsError, match=r"CXX=my-c\+\+ cannot be found"):
        build()


def test_without_sources(checkout):
    shutil.rmtree(checkout / "csrc")
    with pytest.raises(KernelsError, match="sources are missing"):
        build()
    with pytest.raises(KernelsError, match="nothing to compile"):
        build(source=checkout)


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cu117"])
def test_with_a_torch_that_is_too_old(checkout, tmp_path, monkeypatch, version):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    spec = building.importlib.util.spec_from_file_location(
        "torch", tmp_path / "torch" / "__init__.py", submodule_search_locations=[]
    )
    spec.submodule_search_locations.append(str(tmp_path / "torch"))
    monkeypatch.setattr(building.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(KernelsError, match=r"need torch 2\.11 or later"):
        build()


def test_without_torch(checkout, monkeypatch):
    monkeypatch.setitem(sys.modules, "filelock", None)  # comes with torch
    monkeypatch.setattr(building.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KernelsError, match="torch is not installed.*--no-build-isolation"):
        build()


def test_waits_for_another_build_only_so_long(checkout):
    sources.cache_dir().mkdir(parents=True)
    with (
        FileLock(sources.cache_dir() / "build.lock"),
        pytest.raises(KernelsError, match="another build has held"),
    ):
        build(timeout=0.1)
    build(timeout=0.1)


def test_goes_to_the_cache_where_the_package_cannot_be_written(checkout, monkeypatch):
    monkeypatch.setattr(building.os, "access", lambda path, mode: mode != os.W_OK)
    path = build()
    assert path.is_relative_to(sources.cache_dir())
    assert path in sources.locations()
    assert number(path) == 7


def test_a_good_library_that_cannot_be_written_to_is_left_alone(checkout, monkeypatch):
    path = build()
    monkeypatch.setattr(building.os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr(building, "_build", pytest.fail)
    assert build() == path


def test_two_builds_at_once_are_one(checkout, monkeypatch):
    calls, really = [], building._build
    monkeypatch.setattr(building, "_build", lambda *args: (calls.append(args), really(*args)))
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: build(), range(2)))
    assert paths == [sources.locations()[0]] * 2
    assert len(calls) == 1


def test_sources_inside_the_package_come_first(checkout):
    inside = checkout / "pyg_scale" / "csrc"
    shutil.copytree(checkout / "csrc", inside)
    assert sources.source_dir() == inside


def in_the_cache(monkeypatch):
    monkeypatch.setattr(building.os, "access", lambda path, mode: mode != os.W_OK)
    path = build()
    assert path.is_relative_to(sources.cache_dir())
    return path


def test_the_cache_is_private_whatever_the_umask(checkout, monkeypatch):
    before = os.umask(0)
    try:
        path = in_the_cache(monkeypatch)
    finally:
        os.umask(before)
    for each in [sources.cache_dir(), *sources.cache_dir().rglob("*")]:
        if each.is_dir():
            assert each.stat().st_mode & 0o777 == 0o700
        elif each.suffix in (".o", ".so"):
            assert not each.stat().st_mode & 0o022
    sources.require_own(path)


@pytest.mark.parametrize("which", ["library", "its folder", "cache", "link"])
@pytest.mark.parametrize("why", ["mode", "owner"])
def test_what_others_may_have_written_is_not_loaded(checkout, monkeypatch, which, why):
    path, top = in_the_cache(monkeypatch), sources.cache_dir()
    wrong = {"library": path, "its folder": path.parent, "cache": top}.get(which, path)
    if which == "link":
        moved = path.rename(checkout / "moved.so")
        path.symlink_to(moved)
        wrong = moved
    if why == "mode":
        wrong.chmod(wrong.stat().st_mode | 0o020)
        match = "can be written to by others .*so no compiled code is loaded.*chmod -R go-w"
    else:
        if os.geteuid():
            pytest.skip("only root can give files away")
        os.chown(wrong, 4321, -1)
        match = "belongs to user 4321, not to 0, so no compiled code is loaded"
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")
    with pytest.raises(KernelsError, match=match):
        library.compiled()
    assert not library.status()["loaded"]
    with pytest.raises(KernelsError, match=match):
        build()


def test_objects_that_others_may_have_written_are_not_linked(checkout, monkeypatch):
    build()
    objects = sources.cache_dir() / "objects"
    next(objects.glob("number-*.o")).chmod(0o666)
    (checkout / "csrc" / "other.cpp").write_text("int other_number() { return 2; }\n")
    with pytest.raises(KernelsError, match="number-.* can be written to by others"):
        build()


def test_the_package_s_own_library_may_belong_to_anybody(checkout, monkeypatch):
    """Whoever writes there could change the package itself."""
    path = build()
    path.chmod(0o777)
    path.parent.chmod(0o777)
    sources.cache_dir().chmod(0o777)
    assert build() == path


def test_clean_removes_all_of_it(checkout):
    path = build()
    assert set(clean()) == {path, sources.cache_dir()}
    assert not path.exists()
    assert not sources.cache_dir().exists()
    assert clean() == []


def test_command(checkout, capsys):
    assert main(["build"]) == 0
    assert str(checkout) in capsys.readouterr().out
    assert main(["build", "--json"]) == 0
    assert '"loaded": true' in capsys.readouterr().out
    assert main(["build", "--clean"]) == 0
    assert not any((checkout / "pyg_scale" / "ops").iterdir())


def test_command_fails_in_one_line_without_a_compiler(checkout, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["build"]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("pyg-scale: there is no C++ compiler")
