"""Tests of a plugin that is not installed are skipped, with the line that installs it."""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest


class NotInstalled(pytest.File):
    """Stands for a test file of a plugin that is not installed."""

    def collect(self) -> Iterator[pytest.Item]:
        yield Skipped.from_parent(self, name="not installed")


class Skipped(pytest.Item):
    def runtest(self) -> None:
        folder = _folder(self.path)
        pytest.skip(f"{folder.name} is not installed: pip install -e plugins/{folder.name}")


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Collector | None:
    project = _folder(module_path) / "pyproject.toml"
    if not project.is_file():
        return None
    name = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["name"]
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return NotInstalled.from_parent(parent, path=module_path)
    return None


def _folder(path: Path) -> Path:
    """The folder of the plugin to which a file belongs."""
    here = Path(__file__).parent
    return here / path.relative_to(here).parts[0]
