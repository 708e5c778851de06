"""Scripts that end in the middle of an epoch: exit codes are right, and nothing else is said."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pyg_scale.errors import is_failure
from tests.distributed.across import in_parts, spread
from tests.distributed.ends import SCENARIOS, SEVERAL
from tests.distributed.processes import ROOT, end, start
from tests.distributed.served import graph

WAYS = ("exit", "error")


@pytest.mark.parametrize(
    "cases",
    [
        ["in_memory-exit", "ranks-error", "meeting-error"],
        pytest.param(
            [f"{name}-{way}" for name in SCENARIOS for way in WAYS if name != "meeting"]
            + ["services-error", "meeting-error", "meeting-error"],
            marks=[pytest.mark.slow, pytest.mark.timeout(400)],
        ),
    ],
    ids=["few", "many"],
)
def test_scripts_that_end_in_the_middle(tmp_path: Path, cases: list[str]) -> None:
    data = graph(num_nodes=4000, num_edges=40_000)
    parts = in_parts(data, tmp_path, 2)
    parts.rename(tmp_path / "parts")
    spread(tmp_path / "parts", [[0], [1]])
    cases = [case for case in cases if not case.startswith("servers") or _has_zmq()]
    expected = {
        f"{number}-{case}-{rank}": int(case.endswith("error"))
        for number, case in enumerate(cases)
        for rank in range(2 if case.partition("-")[0] in SEVERAL else 1)
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.ends", str(tmp_path), *cases],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=350,
    )
    assert done.returncode == 0, done.stderr
    found = dict(line.split() for line in done.stdout.splitlines())
    said = {label: (tmp_path / f"{label}.err").read_text() for label in found}
    assert {label: int(code) for label, code in found.items()} == expected, said
    wrong = {label: text for label, text in said.items() if not _is_right(text, expected[label])}
    assert not wrong, "".join(f"\n{label}:\n{text}" for label, text in wrong.items())


def _is_right(text: str, code: int) -> bool:
    if not code:
        return not text
    right = text.startswith("Traceback") and text.rstrip().endswith("Ended: as it should")
    return right and text.count("Traceback") == 1


def _has_zmq() -> bool:
    return importlib.util.find_spec("pyg_scale_zmq") is not None


def test_a_script_that_leaves_by_a_status_takes_the_others_with_it(tmp_path: Path) -> None:
    """``sys.exit(3)``, of which Python tells nobody, within the context of ``init()``."""
    data = graph(num_nodes=400, num_edges=4000)
    paths = [str(path) for path in spread(in_parts(data, tmp_path, 2), [[0], [1]])]
    code = f"""
        import sys, time, pyg_scale
        from pyg_scale.loader import NeighborLoader

        with pyg_scale.distributed.init() as context:
            data = pyg_scale.open({paths!r}[context.rank], timeout=60)
            data.comm.barrier()
            if context.rank == 1:
                sys.exit(3)
            started = time.monotonic()
            try:
                while time.monotonic() < started + 60:
                    list(NeighborLoader(data, [5], batch_size=50, split_seeds=False))
            except pyg_scale.errors.CommError as error:
                assert "rank 1" in str(error), error
                print("told after", time.monotonic() - started)
                raise SystemExit(0)
    """
    (first, said), (second, _) = end(start(tmp_path, code, 2))
    assert (first, second) == (0, 3), said
    assert float(said.split("told after ")[1].split()[0]) < 30


@pytest.mark.parametrize("dropped", ["by the failure", "before it"])
def test_a_script_that_fails_stops_at_once_without_the_graph(tmp_path: Path, dropped: str) -> None:
    """One that is in a local variable is gone before the threads of the end come to it."""
    data = graph(num_nodes=400, num_edges=4000)
    paths = [str(path) for path in spread(in_parts(data, tmp_path, 2), [[0], [1]])]
    code = f"""
        import gc, sys, time, pyg_scale
        from pyg_scale.comm import connect

        def main(context, comm):
            data = pyg_scale.open({paths!r}[context.rank], timeout=60)
            comm.barrier()
            if {dropped!r} == "before it":
                del data
                gc.collect()
                time.sleep(0.2)
            sys.exit(3)

        def wait(context, comm):
            data = pyg_scale.open({paths!r}[context.rank], timeout=60)
            comm.barrier()
            started = time.monotonic()
            try:
                comm.barrier()
            except pyg_scale.errors.CommError as error:
                print("told after", time.monotonic() - started, error)

        with pyg_scale.distributed.init() as context:
            comm = connect("gloo", timeout=60)
            (main if context.rank else wait)(context, comm)
    """
    (first, said), (second, _) = end(start(tmp_path, code, 2))
    assert (first, second) == (0, 3), said
    assert "is lost" in said and float(said.split("told after ")[1].split()[0]) < 30, said


@pytest.mark.slow
def test_a_rank_that_is_killed_after_its_last_batch_is_named_by_all(tmp_path: Path) -> None:
    """Long before rank 0 would go without it, and with an exit status that says so."""
    code = """
        import os, signal, torch, pyg_scale
        import torch.distributed as dist

        with pyg_scale.distributed.init(start_timeout=60) as context:
            dist.all_reduce(torch.ones(1))
            if context.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
    """
    (first, said), (second, also), (third, _) = end(start(tmp_path, code, 3))
    assert (first, second, third) == (1, 1, -signal.SIGKILL), said + also
    for each in (said, also):
        assert "CommError: rank 2 ended without distributed.shutdown()" in each, each


@pytest.mark.slow
def test_without_init_a_rank_that_is_killed_is_named_by_all_that_close(tmp_path: Path) -> None:
    data = graph(num_nodes=400, num_edges=4000)
    paths = [str(path) for path in spread(in_parts(data, tmp_path, 3), [[0], [1], [2]])]
    code = f"""
        import os, signal, pyg_scale.loader
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        data = pyg_scale.open({paths!r}[rank], timeout=60)
        for batch in pyg_scale.loader.NeighborLoader(data, [3], batch_size=16):
            pass
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        data.close()
    """
    (first, said), (second, also), (third, _) = end(start(tmp_path, code, 3))
    assert (first, second, third) == (1, 1, -signal.SIGKILL), said + also
    for each in (said, also):
        assert "CommError: rank 2 ended without closing" in each, each


def test_what_is_a_failure() -> None:
    assert not any(map(is_failure, (None, SystemExit(), SystemExit(0))))
    assert all(map(is_failure, (SystemExit(3), SystemExit("why"), ValueError())))
