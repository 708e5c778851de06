"""The scripts of docs/parallel-tutorials.md run on two ranks as they stand there, and learn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pyg_scale import plugins
from tests import preloaded
from tests.test_examples import run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parallel-tutorials.md"
SCRIPTS: list[tuple[str, str]] = re.findall(
    r"<!-- torchrun: (\w+) -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL
)


def test_there_is_one_for_every_wrapper() -> None:
    built_in = [entry for entry in plugins.entries() if entry.provider == plugins.BUILTIN]
    names = {entry.name for entry in built_in if entry.kind == "parallel"}
    assert {name for name, _ in SCRIPTS} == names
    assert len(SCRIPTS) == PAGE.read_text().count("```python")


def _number(name: str, code: str) -> int:
    return [each for each in SCRIPTS if each[0] == name].index((name, code))


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", [pytest.param(code, id=f"{name}-{_number(name, code)}") for name, code in SCRIPTS]
)
def test_it_runs_on_two_ranks(code: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(code)
    printed = run(script, tmp_path, ranks=2, python=preloaded.python())
    found = dict(re.findall(r"rank (\d): test accuracy (\d\.\d+)", printed))
    assert sorted(found) == ["0", "1"], printed
    assert all(float(each) > 0.7 for each in found.values()), printed  # a quarter by chance
