import os
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

from pyg_scale.errors import KernelsError
from pyg_scale.ops import build as building
from pyg_scale.ops import library
from pyg_scale.ops.build import build

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or building.find_compiler() is None, reason="needs a C++ compiler"
)


def test_nothing_is_loaded_by_importing():
    code = (
        "import sys, pyg_scale, pyg_scale.ops, pyg_scale.ops.library; "
        "print('torch' in sys.modules, pyg_scale.ops.library._library.loaded)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_not_compiled(checkout, monkeypatch):
    assert library.compiled() is False
    state = library.status()
    assert state == {
        "mode": "auto",
        "path": None,
        "loaded": False,
        "stale": False,
        "reason": "the kernels are not compiled",
        "command": "pyg-scale build",
    }
    with pytest.raises(KernelsError, match="not compiled.*pyg-scale build"):
        library.load()
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")
    with pytest.raises(KernelsError, match="=require, but .*not compiled.*pyg-scale build"):
        library.compiled()
    assert library.status()["mode"] == "require"


def test_unknown_mode(checkout, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", "yes")
    with pytest.raises(ValueError, match="PYG_SCALE_KERNELS must be one of auto, never, require"):
        library.compiled()
    assert "yes" in library.status()["reason"]


@needs_compiler
@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_compiled(checkout, monkeypatch, cuda):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert not library.compiled()
    path = build()  # by another process, say: what runs already finds it
    assert library.compiled()
    library.load()
    state = library.status()
    assert state["loaded"]
    assert state["path"] == str(path)
    assert not (state["reason"] or state["command"] or state["stale"])
    assert str(path) in torch.ops.loaded_libraries
    monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    assert not library.compiled()
    with pytest.raises(KernelsError, match="never forbids"):
        library.load()


@needs_compiler
def test_of_other_sources_is_never_loaded(checkout, monkeypatch):
    path = build()
    (checkout / "csrc" / "number.h").write_text("#define NUMBER 8\n")
    monkeypatch.setattr(torch.ops, "load_library", pytest.fail)
    assert not library.compiled()
    state = library.status()
    assert state["stale"]
    assert state["path"] == str(path)
    assert "compiled from other sources" in state["reason"]
    assert state["command"] == "pyg-scale build"
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")
    with pytest.raises(KernelsError, match=r"compiled from other sources\. Run: pyg-scale build$"):
        library.compiled()


@needs_compiler
def test_a_stale_one_beside_the_package_does_not_hide_a_good_one_in_the_cache(
    checkout, monkeypatch
):
    build()
    (checkout / "csrc" / "number.h").write_text("#define NUMBER 8\n")
    monkeypatch.setattr(building.os, "access", lambda path, mode: mode != os.W_OK)
    path = build()
    assert library.compiled()
    assert library.status()["path"] == str(path)
    assert not library.status()["stale"]


def test_one_that_cannot_be_loaded_says_why_and_what_to_run(checkout):
    digest = library.source_hash(checkout / "csrc")
    path = library.locations()[0]
    path.write_bytes(b"not a library; pyg_scale sources: " + digest.encode())
    assert not library.compiled()
    state = library.status()
    assert not state["stale"]
    assert f"torch {torch.__version__} cannot load {path}" in state["reason"]
    assert state["command"] == "pyg-scale build --force"


def test_one_that_does_not_say_its_sources_is_stale(checkout):
    library.locations()[0].write_bytes(b"something else")
    assert library.status()["stale"]


@needs_compiler
def test_is_loaded_once_by_many_threads(checkout, monkeypatch):
    build()
    loads, found = [], []

    def load_library(path):
        time.sleep(0.05)
        loads.append(path)

    monkeypatch.setattr(torch.ops, "load_library", load_library)
    threads = [threading.Thread(target=lambda: found.append(library.compiled())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 16
    assert len(loads) == 1


def test_a_failure_is_not_looked_at_all_the_time(checkout, monkeypatch):
    monkeypatch.setattr(library, "_AGAIN_SECONDS", 3600.0)
    monkeypatch.setattr(library, "_library", library._Library())
    assert not library.compiled()
    monkeypatch.setattr(library, "source_hash", pytest.fail)
    assert not library.compiled()


def test_the_plain_path_is_announced_once(checkout):
    assert not library.compiled()
    with pytest.warns(RuntimeWarning, match="NeighborLoader takes the plain-torch.*`?pyg-scale b"):
        library.warn_plain_path("NeighborLoader")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        library.warn_plain_path("NeighborLoader")
        library.warn_plain_path("HGTLoader")


def test_the_plain_path_is_not_announced_to_who_chose_it(checkout, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        library.warn_plain_path("NeighborLoader")
