"""A package of its own to build and load, with small sources, away from the real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyg_scale.ops import library, sources

ADD = """
#include "number.h"
extern "C" __attribute__((visibility("default"))) int pyg_scale_number() { return NUMBER; }
// Called where torch is built for CUDA.
#define VISIBLE extern "C" __attribute__((visibility("default")))
VISIBLE void pyg_scale_cuda_answer(void*, const void*, unsigned long) {}
VISIBLE void pyg_scale_cuda_compile_with(void*) {}
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with two C++ files and one header, and a user's cache, both empty otherwise."""
    root = tmp_path / "checkout"
    (root / "pyg_scale" / "ops").mkdir(parents=True)
    (root / "csrc").mkdir()
    (root / "csrc" / "number.cpp").write_text(ADD)
    (root / "csrc" / "number.h").write_text("#define NUMBER 7\n")
    (root / "csrc" / "other.cpp").write_text("int other_number() { return 1; }\n")
    monkeypatch.setattr(sources, "_PACKAGE", root / "pyg_scale")
    monkeypatch.setattr(library, "_library", library._Library())
    monkeypatch.setattr(library, "_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(library, "_said", type(library._said)())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYG_SCALE_KERNELS", raising=False)
    for name in ("CXX", "CUDACXX", "PYG_SCALE_CUDA", "PYG_SCALE_CUDA_ARCH"):
        monkeypatch.delenv(name, raising=False)
    return root
