"""Reports: the same table everywhere, and pages that say what their JSON says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pyg_scale_bench import command
from pyg_scale_bench.chart import Bar, Curves, Panel
from pyg_scale_bench.report import Report, Table, as_json

PAGES = Path(__file__).parents[3] / "docs" / "benchmarks"


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.json")), ids=lambda path: path.stem)
def test_a_page_says_what_was_found(path: Path, tmp_path: Path) -> None:
    again = tmp_path / path.with_suffix(".md").name
    assert command.main(["report", str(path), f"--report={again}"]) == 0
    page, made = (each.read_text().splitlines() for each in (path.with_suffix(".md"), again))
    drawn = path.with_suffix(".png")
    picture = [f"![Chart]({drawn.name})", ""] if drawn.exists() else []  # checks have none
    assert page == [*made[:6], *picture, *made[6:]]  # title and command come first


def found() -> dict[str, Any]:
    environment = {
        "cpu": "a", "cpus": 2, "threads": 2, "memory_bytes": 2**30, "system": "s", "quiet": True,
        "load_average_before": 0.1, "load_average_after": 0.2, "versions": {"torch": "2"},
        "commit": None, "date": "d", "kernels": {"path": "k.so", "reason": ""},
    }  # fmt: skip
    return {"benchmark": "b", "command": "pyg-scale bench b", "environment": environment}


def test_a_table_is_told_everywhere(tmp_path: Path) -> None:
    table = Table(["", "what", "s"], [["ours", "x", "1.5"], ["theirs", "y", "10.0"]], "Times", "n")
    empty, long = Table(["a"], [], "Empty"), Table(["b"], [["c"]], "Long", detail=True)
    report = Report(found(), ["it was so"], [table, empty, long])
    assert report.terminal().startswith("it was so\nmachine: a, 2 CPUs")
    assert "\n\nTimes\nn\n        what     s\nours    x      1.5\n" in report.terminal()
    text = report.markdown()
    assert "\n\n## Times\n\nn\n\n|  | what | s |\n|---|---|--:|\n| ours | x | 1.5 |\n" in text
    assert "Empty" not in text and "Long" not in report.terminal() and "## Long" in text
    report.write(*(str(tmp_path / "deep" / f"r.{end}") for end in ("json", "png", "md")))
    assert json.loads((tmp_path / "deep" / "r.json").read_text()) == report.found
    assert "![Chart](r.png)" in (tmp_path / "deep" / "r.md").read_text()


def test_json_has_null_for_what_is_not_finite(tmp_path: Path) -> None:
    values = {"a": [1.5, math.nan, (math.inf, "NaN")], 2: {"b": -math.inf, "c": None, "d": True}}
    finite = {"a": [1.5, None, [None, "NaN"]], "2": {"b": None, "c": None, "d": True}}
    assert json.loads(as_json(values)) == finite
    Report({**found(), **values}, []).write(str(tmp_path / "r.json"), None, None)
    assert "NaN," not in (tmp_path / "r.json").read_text()
    assert json.loads((tmp_path / "r.json").read_text())["a"] == finite["a"]


def test_panels_are_drawn(tmp_path: Path) -> None:
    bars = [Bar("a", 1.0), Bar("a", 2.0, "PyG", spread=(1.5, 2.5)), Bar("b", 3.0, note="2×")]
    stages = [Bar("rank 0", 1.0, "sample"), Bar("rank 0", 2.0, "train", begin=1.0)]
    panels = [
        [
            Panel("logarithmic", bars, "ms", log=True),
            Panel("marked", bars, "s", mark=(4.0, "most"), large=True),
        ],
        [Panel("stacked", stages, "s", form="", stacked=True), Panel("empty", [], "s")],
        [Curves("curves", {"a": [1.0, 0.5], "b": [1.0, 0.7, 0.6]}, "loss"), Curves("", {}, "s")],
    ]
    Report(found(), [], panels=panels, caption="c").draw(str(tmp_path / "r.png"))
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
