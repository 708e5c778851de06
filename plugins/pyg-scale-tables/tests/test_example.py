"""The example of a shop runs, and shows what it says."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "relational" / "train.py"


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs the example in this process; what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))

    def main(*arguments):
        runpy.run_path(str(EXAMPLE), run_name="example")["main"](list(arguments))
        return capsys.readouterr().out

    return main


def test_runs_tiny(call):
    printed = call("--tiny")
    assert "4 tables" in printed and printed.count("AUC offline") == 2


@pytest.mark.slow
def test_a_leak_looks_better_offline_and_is_worse_in_the_next_weeks(call):
    printed = call("--customers", "800")
    found = re.findall(r"AUC offline ([\d.]+), in the next weeks ([\d.]+)", printed)
    (leaky_offline, leaky_later), (offline, later) = (map(float, each) for each in found)
    assert leaky_offline > offline + 0.02
    assert leaky_later < later - 0.02
    assert leaky_later < leaky_offline - 0.05 and abs(later - offline) < 0.08
