"""Files that attack their reader are refused by name: nothing runs, nothing is written or lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import preloaded
from tests.files import hostile_pickles

HERE = Path(__file__).parent


def asan() -> str:
    """The library of the address sanitizer; skips where there is none."""
    found = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if not os.path.isabs(found):
        pytest.skip("gcc has no libasan.so here")
    return found


@pytest.fixture(autouse=True)
def kernels():
    """No kernel has a part in it: once is enough."""


def read(folder: Path, **environ: str) -> dict[str, str]:
    done = subprocess.run(
        [
            sys.executable if environ else preloaded.python(),
            str(HERE / "hostile_pickles.py"),
            str(folder),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(params=["plain", pytest.param("sanitized", marks=pytest.mark.slow)])
def environ(request):
    if request.param == "plain":
        return {}
    return {
        "LD_PRELOAD": asan(),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "PYTHONMALLOC": "malloc",
    }


def test_every_hostile_file_is_refused(tmp_path, environ):
    hostile_pickles.write(tmp_path / "files", tmp_path / "made")
    before = sorted(tmp_path.rglob("*"))
    found = read(tmp_path / "files", **environ)
    assert len(found) > 900
    assert {file: what for file, what in found.items() if what != "refused"} == {}
    assert sorted(tmp_path.rglob("*")) == before, "a file was made"


def test_damaged_files_end_nothing(tmp_path, environ):
    hostile_pickles.write_mutants(tmp_path / "files", 4000 if environ else 400)
    found = read(tmp_path / "files", **environ)
    assert set(found.values()) == {"refused", "read"}
    assert sum(what == "refused" for what in found.values()) > len(found) // 2
