"""The machine as reports tell of it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from pyg_scale_bench import environment

BURN = "import time\nwhile time.process_time() < 0.3: pass"


@pytest.mark.parametrize(
    ("busy", "own", "share", "quiet"),
    [(8.0, 3.0, 0.5, False), (8.0, 8.0, 0.0, True), (8.0, 8.1, 0.0, True), (8.0, 7.6, 0.04, True)],
)
def test_a_machine_is_quiet_if_others_take_little(
    monkeypatch: pytest.MonkeyPatch, busy: float, own: float, share: float, quiet: bool
) -> None:
    clocks = iter([(100.0, 40.0, 10.0), (110.0, 40.0 + busy, 10.0 + own)])
    monkeypatch.setattr(environment, "_processor_seconds", lambda: next(clocks))
    found = environment.describe()
    environment.complete(found, environment.Others())
    assert found["others"] == pytest.approx(share) and found["quiet"] is quiet
    (said,) = (line for line in environment.lines(found) if "load average" in line)
    assert f"took {100 * share:.1f} %" in said and ("NOT QUIET" in said) is not quiet


def test_children_that_were_waited_for_are_no_others() -> None:
    before = environment._processor_seconds()
    subprocess.run([sys.executable, "-c", BURN], check=True, timeout=60)
    after = environment._processor_seconds()
    if before is None or after is None:
        pytest.skip("the system does not say how busy its processors are")
    whole, busy, own = (b - a for a, b in zip(before, after, strict=True))
    assert own > 0.28 and whole >= busy - 0.05 and busy >= own - 0.05  # ticks of 0.01 s


def test_children_that_still_run_are_no_others() -> None:
    before = environment._processor_seconds()
    code = f"import subprocess, sys\n{BURN}\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        during = environment._processor_seconds()
        child.communicate(b"\n", timeout=60)
    after = environment._processor_seconds()
    if before is None or during is None or after is None:
        pytest.skip("the system does not say how busy its processors are")
    assert during[2] - before[2] > 0.28
    assert -0.02 < after[2] - during[2] < 0.25  # the same seconds count once


def test_where_the_system_says_nothing_no_machine_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_processor_seconds", lambda: None)
    found: dict[str, Any] = environment.describe()
    environment.complete(found, environment.Others())
    assert found["others"] is None and found["quiet"] is False
    assert any("NOT QUIET" in line for line in environment.lines(found))


def test_commands_are_said_without_folders_of_this_machine() -> None:
    argv = ["--dir", "/some/where", "--npz", "/data/one.npz,/data/two.npz", "--rounds", "3"]
    said = environment.command("parallel", argv)
    assert said == "pyg-scale bench parallel --dir DIR --npz one.npz,two.npz --rounds 3"
