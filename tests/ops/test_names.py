"""A C++ source is found by the name of the Python module that calls it."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = {path.stem for path in (ROOT / "pyg_scale" / "ops").glob("*.py")}
SOURCES = sorted((ROOT / "csrc").glob("*.cpp"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_sources_are_named_as_their_module(source: Path) -> None:
    words = source.stem.split("_")
    names = {"_".join(words[: n + 1]) for n in range(len(words))}
    assert names & MODULES, (
        f"csrc/{source.name} has no module in pyg_scale/ops: name it as the module that calls its "
        "op, or that name, an underscore and more"
    )
