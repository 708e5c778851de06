"""Finding the other ranks, and what happens to them, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroupGloo, Store

from pyg_scale import comm, plugins
from pyg_scale.comm.address import own_address
from pyg_scale.comm.gloo import Gloo, _options
from pyg_scale.comm.hybrid import Hybrid
from pyg_scale.comm.local import Local
from pyg_scale.comm.message import SIZE, empty_for, header
from pyg_scale.comm.nccl import Nccl
from pyg_scale.errors import CommError, CommTimeoutError
from pyg_scale.testing.ranks import run_ranks
from tests import preloaded

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def torchrun(tmp_path: Path, code: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    command = [preloaded.python(), "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, f"--nproc-per-node={ranks}", "--max-restarts=0", str(script)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHON_EXEC": preloaded.python(),
        },
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def test_without_an_environment_this_process_is_alone() -> None:
    with comm.connect() as ranks:
        assert isinstance(ranks, Local) and (ranks.rank, ranks.world_size) == (0, 1)
        x = torch.ones(2)
        assert ranks.all_gather(x)[0] is not None and ranks.broadcast(x) is not None
        assert comm.connect(ranks) is ranks


def test_who_leaves_a_call_alone_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call keeps the communicator, which then ends in the thread that receives."""
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: said.append(each.exc_value))
    left = threading.Event()

    def leave(group: comm.Group) -> None:
        ranks = Gloo.join(group)
        if group.rank == 0:
            assert left.wait(20)
            assert len(ranks.all_gather(torch.ones(1))) == 3
            ranks.close()
        else:
            ranks.all_gather(torch.ones(1), async_op=True)
            del ranks
            left.set()

    run_ranks(3, leave)
    deadline = time.monotonic() + 20
    while any(t.name == "pyg_scale-comm" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not said


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="timeout must be above 0"):
        comm.connect(timeout=0)
    with pytest.raises(plugins.UnknownPluginError, match="gloo"):
        comm.connect("glooo")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        comm.connect()
    with pytest.raises(ExceptionGroup) as raised:
        run_ranks(2, Local.join)
    assert "use 'gloo'" in str(raised.value.exceptions[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("backend", [Nccl, Hybrid])
def test_without_a_gpu_its_backends_say_so(backend: type) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        run_ranks(1, backend.join)
    assert isinstance(raised.value.exceptions[0], CommError)
    assert "use 'gloo'" in str(raised.value.exceptions[0])


def test_ranks_that_never_come_are_a_timeout() -> None:
    def only_rank_0(group: comm.Group) -> None:
        if group.rank == 0:
            late = "could not meet all of the 2 ranks within 1 seconds: rank 1 did not come"
            with pytest.raises(CommTimeoutError, match=late):
                plugins.get("comm", "gloo").join(group)

    run_ranks(2, only_rank_0, timeout=1.0)


class LateStore(Store):
    """A store that tells a rank only after a while where rank 2 is."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        return self._store.get(key)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait(keys, *timeout)
        if "0/2" in keys:
            time.sleep(0.05)
            self._store.set("told", "")


# Which side of a connection is ready first depends on the ports, which differ in each try.
@pytest.mark.parametrize("number", range(10))
def test_no_rank_has_joined_before_all_are_connected(number: int) -> None:
    def join(group: comm.Group) -> bool:
        store = group.store
        late = comm.Group(LateStore(store), group.rank, group.world_size, group.timeout)
        with Gloo.join(late if group.rank == 0 else group) as ranks:
            told = bool(store.check(["told"]))
            assert ranks.all_reduce(torch.ones(1)).tolist() == [3]
            return told

    assert run_ranks(3, join) == [True] * 3


@pytest.mark.parametrize(
    ("seconds", "error", "what"),
    [(5.5, CommTimeoutError, "did not come"), (0.0, CommError, "ended")],
    ids=["hangs", "ends"],
)
def test_a_rank_that_is_connected_and_says_nothing_is_named(
    seconds: float, error: type[CommError], what: str
) -> None:
    def join(group: comm.Group) -> None:
        if group.rank == 2:
            options = _options(own_address(), group.timeout)
            kept = ProcessGroupGloo(group.store, group.rank, group.world_size, options)
            time.sleep(seconds)
            del kept
            return
        reason = f"rank {group.rank} at .* could not meet all of the 3 .*: rank 2 {what}"
        with pytest.raises(error, match=reason) as found:
            Gloo.join(group)
        assert found.type is error

    run_ranks(3, join, timeout=2.0, limit=20.0)


def test_headers_say_what_comes() -> None:
    x = torch.zeros(3, 0, 2, dtype=torch.bfloat16)
    made = header("all_gather", x)
    assert made.shape == (SIZE,)
    found = empty_for(made, "all_gather", 1, torch.device("cpu"))
    assert found.shape == x.shape and found.dtype == x.dtype
    with pytest.raises(CommError, match="rank 1 in another collective"):
        empty_for(made, "barrier", 1, torch.device("cpu"))
    with pytest.raises(CommError, match="not a message of pyg_scale"):
        empty_for(torch.zeros(SIZE, dtype=torch.int64), "barrier", 1, torch.device("cpu"))
    with pytest.raises(TypeError, match="cannot be sent"):
        header("all_gather", torch.zeros(1, dtype=torch.complex32))


def test_a_rank_that_met_others_before_still_finds_this_group(tmp_path: Path) -> None:
    done = torchrun(
        tmp_path,
        """
        import os
        import torch, torch.distributed as dist
        from pyg_scale import comm
        from pyg_scale.errors import CommTimeoutError
        if int(os.environ["RANK"]) == 1:  # a larger group, of which only this rank has been part
            os.environ["WORLD_SIZE"] = "3"
            try:
                comm.connect(timeout=1.0)
            except CommTimeoutError:
                pass
            os.environ["WORLD_SIZE"] = "2"
        with comm.connect(timeout=20) as ranks:
            assert ranks.all_reduce(torch.ones(1)).tolist() == [2]
        print("well")
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("well") == 2


def test_three_ranks_meet_after_two_of_them_have(tmp_path: Path) -> None:
    done = torchrun(
        tmp_path,
        """
        import os
        import torch
        from pyg_scale import comm

        def meet(size):
            os.environ["WORLD_SIZE"] = str(size)
            with comm.connect(timeout=20) as ranks:
                assert ranks.world_size == size
                return ranks.all_reduce(torch.tensor([10 ** ranks.rank])).tolist()

        for _ in range(2):
            if os.environ["RANK"] != "2":
                assert meet(2) == [11]
            assert meet(3) == [111]
        print("well")
        """,
        ranks=3,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("well") == 3


@pytest.mark.slow
@pytest.mark.parametrize("initialised", [False, True], ids=["", "with torch.distributed"])
def test_under_torchrun_the_ranks_find_each_other(tmp_path: Path, initialised: bool) -> None:
    done = torchrun(
        tmp_path,
        f"""
        import torch, torch.distributed as dist
        from pyg_scale import comm
        if {initialised}:
            dist.init_process_group("gloo")
        first, second = comm.connect(timeout=60), comm.connect(timeout=60)
        call = first.all_gather(torch.tensor([first.rank]), async_op=True)
        if {initialised}:
            dist.barrier()
        total = second.all_reduce(torch.ones(1 + second.world_size))
        assert [int(x) for x in call.wait()] == [0, 1] and total.tolist() == [2, 2, 2]
        first.barrier()
        second.close(), first.close()
        if {initialised}:
            dist.destroy_process_group()
        print("well")
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("well") == 2


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_by_the_others(tmp_path: Path) -> None:
    done = torchrun(
        tmp_path,
        """
        import signal, sys, torch
        from pyg_scale import comm
        from pyg_scale.comm import Fault, Faulty
        from pyg_scale.errors import CommError
        ranks = comm.connect(timeout=30)
        if ranks.rank == 1:
            ranks = Faulty(ranks, [Fault("kill", 2)])
        else:  # torchrun ends this rank too, maybe before it has noticed anything
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            for _ in range(4):
                ranks.all_gather(torch.ones(3))
        except CommError as error:
            with open(f"{sys.argv[0]}.said-{ranks.rank}", "w") as out:
                out.write(str(error))
            sys.exit(3)
        """,
        ranks=3,
    )
    assert done.returncode != 0
    for rank in (0, 2):
        said = (tmp_path / f"script.py.said-{rank}").read_text()
        assert "the connection to rank 1 is lost" in said, said
    assert f"Signal {signal.SIGKILL.value}" in done.stderr or "-9" in done.stderr
