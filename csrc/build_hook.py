"""Hatch's hook for wheels: adds the C++ sources, the template of plugins and, if asked, kernels.

``PYG_SCALE_BUILD_KERNELS=1`` makes a wheel with the compiled library, which installs where there
is no compiler; it needs torch, hence ``--no-build-isolation``. Without it, the wheel is pure
Python and installs anywhere.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsBuildHook(BuildHookInterface):
    """Found by hatchling as the one hook of this file."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is made; an editable one reads the sources where they are."""
        root = Path(self.root)
        compiled = os.environ.get("PYG_SCALE_BUILD_KERNELS", "0")
        if compiled not in ("0", "1"):
            raise ValueError(f"PYG_SCALE_BUILD_KERNELS must be 0 or 1 (got {compiled!r})")
        if version == "editable":
            if compiled == "1":
                self._build(None)
            return
        csrc = root / "csrc"
        patterns = ("*.cpp", "*.h", "cuda/*.cpp", "cuda/*.cu", "cuda/*.cuh", "cuda/*.h")
        for path in sorted(path for pattern in patterns for path in csrc.glob(pattern)):
            inner = path.relative_to(root).as_posix()
            build_data["force_include"][str(path)] = f"pyg_scale/{inner}"
        template = root / "plugins" / "pyg-scale-template"  # what `pyg-scale plugins new` copies
        for path in sorted(template.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                inner = path.relative_to(template).as_posix()
                build_data["force_include"][str(path)] = f"pyg_scale/_template/{inner}"
        if compiled == "1":
            self._scratch = tempfile.TemporaryDirectory()
            library = self._build(Path(self._scratch.name))
            build_data["force_include"][str(library)] = f"pyg_scale/ops/{library.name}"
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"cp311-abi3-{platform}"
            build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called after the wheel is made."""
        if hasattr(self, "_scratch"):
            self._scratch.cleanup()

    def _build(self, directory: Path | None) -> Path:
        sys.path.insert(0, self.root)
        try:
            from pyg_scale.ops.build import build
            from pyg_scale.ops.sources import NAME
        finally:
            sys.path.remove(self.root)
        return build(source=Path(self.root, "csrc"), output=directory / NAME if directory else None)
