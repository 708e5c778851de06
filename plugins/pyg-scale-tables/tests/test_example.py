"""The example of a shop runs, and shows what it says."""

import re
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.filterwarnings("error:.*in the memory of this process:UserWarning")
EXAMPLES = Path(__file__).parents[3] / "examples" / "relational"


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs an example in this process; what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def main(name, *arguments):
        runpy.run_path(str(EXAMPLES / name), run_name="example")["main"](list(arguments))
        return capsys.readouterr().out

    return main


def test_runs_tiny(call):
    printed = call("train.py", "--tiny")
    assert "4 tables" in printed and printed.count("AUC offline") == 2


@pytest.mark.timeout(120)
def test_what_is_served_is_what_was_trained_on_also_after_new_orders(call):
    pytest.importorskip("pyg_scale_http", reason="pip install ./plugins/pyg-scale-http")
    printed = call("serve.py", "--tiny")
    assert "neighbourhoods of 32 customers, training = bulk = served: the same bytes" in printed
    assert "150 predictions, bulk = HTTP: the same bytes" in printed
    assert "ordered 3 times: snapshot 1 of the graph" in printed
    assert "the prediction as of today, before = after: the same bytes" in printed
    before, after = re.search(r"as of tomorrow: ([\d.]+), and then ([\d.]+)", printed).groups()
    assert before != after
    assert "with the new orders, bulk = HTTP: the same bytes" in printed
    assert int(re.search(r"(\d+) requests were answered meanwhile", printed)[1]) >= 1


@pytest.mark.slow
def test_a_leak_looks_better_offline_and_is_worse_in_the_next_weeks(call):
    printed = call("train.py", "--customers", "800")
    found = re.findall(r"AUC offline ([\d.]+), in the next weeks ([\d.]+)", printed)
    (leaky_offline, leaky_later), (offline, later) = (map(float, each) for each in found)
    assert leaky_offline > offline + 0.02
    assert leaky_later < later - 0.02
    assert leaky_later < leaky_offline - 0.05 and abs(later - offline) < 0.08
