"""``distributed.init`` in one process, and in processes of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyg_scale import comm, distributed
from pyg_scale.comm import Group
from pyg_scale.distributed import DistContext, DistRole
from pyg_scale.distributed.launch import start as starting
from pyg_scale.distributed.launch.device import check_gpus, choose_backend, choose_device
from pyg_scale.errors import CommError, CommTimeoutError
from pyg_scale.testing.ranks import run_ranks
from tests import preloaded

ROOT = Path(__file__).parents[2]
VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "SLURM_PROCID",
    "SLURM_NTASKS",
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    distributed.shutdown()


def start(code: str, environs: list[dict[str, str]], timeout: float = 100) -> list[Any]:
    """Run code in one process for each environment; returns (status, output) of each."""
    base = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    base |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [preloaded.python(), "-c", textwrap.dedent(code)],
            env=base | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environ in environs
    ]
    try:
        return [(p.communicate(timeout=timeout)[0], p.returncode) for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_the_context_is_a_superset_of_pygs() -> None:
    context = DistContext(rank=1, global_rank=1, world_size=2, global_world_size=2, group_name="g")
    assert context.role is DistRole.WORKER and context.worker_name == "g-1"
    assert context.is_worker() and not context.is_server() and not context.is_client()
    assert (context.num_servers, context.num_clients) == (0, 0)


def test_one_process_is_alone_and_torch_distributed_works() -> None:
    with distributed.init(device="cpu") as context:
        assert (context.rank, context.world_size, context.launcher) == (0, 1, "none")
        assert (context.local_rank, context.local_world_size) == (0, 1)
        assert (context.node_rank, context.num_nodes) == (0, 1)
        assert context.device == torch.device("cpu") and context.backend == "gloo"
        assert context.worker_name == "worker-0" and len(context.addresses) == 1
        assert distributed.get_context() is context
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [1, 1] and dist.get_world_size() == 1
        with pytest.raises(RuntimeError, match="was called before"):
            distributed.init()
        with comm.connect() as ranks:
            assert ranks.world_size == 1
    assert distributed.get_context() is None and not dist.is_initialized()
    assert distributed.shutdown() == []
    distributed.init(device="cpu", group_name="again")
    assert distributed.get_context().worker_name == "again-0"  # type: ignore[union-attr]


def test_a_process_group_of_somebody_else_is_used_and_left(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="world_size=2 contradicts the existing process group"):
            distributed.init(0, 2, device="cpu")
        with pytest.raises(ValueError, match="backend='nccl' contradicts"):
            distributed.init(backend="nccl", device="cpu")
        with distributed.init(device="cpu") as context:
            assert (context.launcher, context.world_size) == ("torch", 1)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"timeout": 0}, "timeout must be above 0"),
        ({"start_timeout": -1}, "start_timeout must be above 0"),
        ({"bind": "numa"}, "bind must be one of exclusive, node, socket"),
        ({"num_threads": 0}, "num_threads must be"),
        ({"num_servers": 1}, "of 1 ranks at least one must be a client"),
        ({"device": "meta"}, "device must be 'cpu' or 'cuda'"),
        ({"backend": "nccl", "device": "cpu"}, "needs a GPU"),
    ],
)
def test_what_cannot_be_is_refused_before_any_wait(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        distributed.init(**given)
    assert distributed.get_context() is None and not dist.is_initialized()


def test_devices() -> None:
    def choose(wanted: str | None, rank: int, size: int, gpus: int, visible: str = "") -> str:
        return str(choose_device(wanted, rank, size, num_gpus=gpus, visible=visible))

    assert choose(None, 1, 2, 0) == "cpu" and choose("cpu", 1, 2, 8) == "cpu"
    assert choose(None, 1, 2, 2) == "cuda:1" and choose("cuda", 0, 2, 4) == "cuda:0"
    assert choose(None, 3, 4, 1, visible="3") == "cuda:0"  # each rank sees its own
    assert choose("cuda:0", 3, 4, 1) == "cuda:0"
    with pytest.raises(ValueError, match="4 ranks on this machine, but 2 GPUs: .*-node=2"):
        choose(None, 0, 4, 2)
    with pytest.raises(ValueError, match="4 ranks on this machine, but 1 GPUs"):
        choose(None, 3, 4, 1)
    with pytest.raises(ValueError, match="this machine has no GPU"):
        choose("cuda", 0, 1, 0)
    with pytest.raises(ValueError, match="sees 2 GPUs"):
        choose("cuda:2", 0, 1, 2)


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert choose_backend(None, cpu) == "gloo"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match="this build of torch has no NCCL"):
        choose_backend("nccl", gpu)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert choose_backend(None, gpu) == "cpu:gloo,cuda:nccl"
    assert choose_backend("gloo", gpu) == "gloo"
    check_gpus(["a", "b", "a"], ["m", "m", "n"], "nccl")
    check_gpus(["a", "a"], ["m", "m"], "gloo")
    with pytest.raises(ValueError, match="ranks 0 and 2 have the same GPU"):
        check_gpus(["a", "b", "a"], ["m", "m", "m"], "cpu:gloo,cuda:nccl")


def test_a_port_that_is_in_use_is_said() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(CommError, match=f"MASTER_PORT={port}: the port is in use"):
            distributed.init(0, 2, master_port=port, device="cpu", start_timeout=5)


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(CommTimeoutError, match="ranks 1, 2 of 3 did not come within 0.5 seconds"):
        distributed.init(0, 3, master_port=int(free_port()), device="cpu", start_timeout=0.5)
    assert not dist.is_initialized()


def test_ranks_under_slurm_and_by_hand() -> None:
    """Tasks of srun on one machine; with servers; then ranks that nobody told their local rank."""
    code = """
        import os, torch, torch.distributed as dist
        from pyg_scale import comm, distributed
        servers = int(os.environ.get("SERVERS", 0))
        options = {"num_servers": servers, "bind": os.environ.get("BIND")}
        with distributed.init(device="cpu", start_timeout=60, **options) as context:
            x = torch.tensor([context.global_rank])
            dist.all_reduce(x)
            with comm.connect(timeout=30) as ranks:
                assert ranks.world_size == context.world_size
                ranks.barrier()
            print(context.worker_name, context.global_rank, context.global_world_size,
                  context.local_rank, context.local_world_size, context.num_nodes,
                  context.launcher, int(x), ",".join(context.servers), context.num_clients)
    """
    task = {
        "SLURM_NTASKS": "3",
        "SLURM_JOB_NODELIST": "here",
        "SLURM_STEP_ID": "0",
        "MASTER_PORT": free_port(),
        "SERVERS": "1",
    }
    found = start(
        code, [task | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(3)]
    )
    assert [status for _, status in found] == [0, 0, 0], found
    assert [said.strip().splitlines()[-1] for said, _ in found] == [
        "server-0 0 3 0 3 1 slurm 0 server-0 2",
        "client-0 1 3 1 3 1 slurm 3 server-0 2",
        "client-1 2 3 2 3 1 slurm 3 server-0 2",
    ]
    cpus = len(os.sched_getaffinity(0))
    hand = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    hand |= {"OMP_NUM_THREADS": str(cpus), "BIND": "exclusive"} if cpus > 1 else {}
    found = start(code, [hand | {"RANK": str(r)} for r in range(2)])
    warned = [f"a rank of {cpus} threads on " in said for said, _ in found]
    assert warned == [cpus > 1, False], found
    assert [said.strip().splitlines()[-1] for said, _ in found] == [
        "worker-0 0 2 0 2 1 torchrun 1  0",
        "worker-1 1 2 1 2 1 torchrun 1  0",
    ], found


@pytest.mark.parametrize(
    ("silent", "ended", "first", "others"),
    [
        ([], [], ([], []), ([], [])),
        ([2], [2], ([], [2]), ([], [2])),  # killed
        ([2], [], ([2], []), ([], [])),  # at work still
        ([0], [0], None, ([], [0])),
        ([0], [], None, ([], [])),
    ],
)
def test_ranks_leave_together(
    silent: list[int],
    ended: list[int],
    first: Any,
    others: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starting, "_NEWS_SECONDS", 0.1)
    seconds = 20.0 if silent == ended else 0.6

    def leave(group: Group) -> Any:
        if group.rank in silent:
            return None
        group.store.set(f"left/{group.rank}", "")
        return starting.say_goodbye(
            group.store, group.rank, 4, seconds, lambda ranks: [r for r in ranks if r in ended]
        )

    found = run_ranks(4, leave)
    expected = [first, others, others, others]
    assert found == [None if rank in silent else expected[rank] for rank in range(4)]
