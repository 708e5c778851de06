"""Who a process is, from environments that launchers make."""

from __future__ import annotations

from typing import Any

import pytest

from pyg_scale.distributed.launch.environment import Launch, read_launch

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_NODELIST": "gpu[08-10],login",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
}


def test_torchrun() -> None:
    expected = Launch("torchrun", 3, 4, 1, 2, "node-a", 29400, hosted=True, restarts=2)
    assert read_launch(TORCHRUN) == expected
    # torchrun started by srun is torchrun
    assert read_launch(SLURM | TORCHRUN) == expected
    # what a script repeats is no contradiction
    assert read_launch(TORCHRUN, rank=3, world_size=4, master_port=29400) == expected


def test_by_hand_with_four_variables() -> None:
    four = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert read_launch(four) == Launch("torchrun", 3, 4, None, None, "node-a", 29400)
    assert read_launch({"RANK": "0", "WORLD_SIZE": "1"}).world_size == 1


def test_slurm() -> None:
    found = read_launch(SLURM)
    assert found == Launch("slurm", 5, 7, 1, 2, "gpu08", 20000 + 7 * 1234)
    named = SLURM | {"MASTER_ADDR": "gpu08-ib", "MASTER_PORT": "4000"}
    assert (read_launch(named).master_addr, read_launch(named).master_port) == ("gpu08-ib", 4000)
    assert read_launch(SLURM, master_addr="x", master_port=7).master_addr == "x"


def test_slurm_on_one_machine_needs_no_name() -> None:
    one = SLURM | {"SLURM_JOB_NODELIST": "gpu08", "SLURM_LOCALID": "5"}
    assert read_launch(one) == Launch("slurm", 5, 7, 5, 7, "127.0.0.1", 28638)


def test_a_step_may_be_smaller_than_its_job() -> None:
    step = SLURM | {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "gpu[09-10]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "0",
    }
    assert read_launch(step) == Launch("slurm", 1, 2, 0, 1, "gpu09", 20000 + 7 * 1234)
    del step["SLURM_STEP_TASKS_PER_NODE"]  # the job's do not fit
    assert read_launch(step).local_world_size is None


def test_arguments() -> None:
    assert read_launch({}, rank=1, world_size=2) == Launch("arguments", 1, 2)
    spawned = {"MASTER_ADDR": "localhost", "MASTER_PORT": "12355"}
    found = read_launch(spawned, rank=1, world_size=2, local_rank=1, local_world_size=2)
    assert found == Launch("arguments", 1, 2, 1, 2, "localhost", 12355)
    # processes that the only task of a job spawned
    one = SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert read_launch(one, rank=2, world_size=4).launcher == "arguments"


def test_alone() -> None:
    assert read_launch({}) == Launch("none", local_rank=0, local_world_size=1)
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "ENVIRONMENT": "BATCH"}
    with pytest.warns(UserWarning, match="SLURM has 4 tasks, but srun did not start"):
        assert read_launch(script).world_size == 1


WRONG: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({"RANK": "0"}, {}, "RANK are set, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    ({"LOCAL_RANK": "0"}, {}, "LOCAL_RANK are set, but not RANK, WORLD_SIZE"),
    (TORCHRUN | {"RANK": "4"}, {}, "rank=4 contradicts world_size=4"),
    (TORCHRUN | {"RANK": "-1"}, {}, "rank=-1 must not be below 0"),
    (TORCHRUN | {"RANK": "x"}, {}, "RANK='x' must be a whole number"),
    (TORCHRUN | {"WORLD_SIZE": "0", "RANK": "0"}, {}, "world_size=0 must be 1 or more"),
    (TORCHRUN | {"LOCAL_RANK": "2"}, {}, "local_rank=2 contradicts local_world_size=2"),
    (TORCHRUN | {"LOCAL_WORLD_SIZE": "5"}, {}, "local_world_size=5 contradicts world_size=4"),
    (TORCHRUN | {"MASTER_PORT": "70000"}, {}, "MASTER_PORT must be from 1 to 65535"),
    (TORCHRUN, {"rank": 2, "world_size": 4}, "rank=2 contradicts the environment"),
    (TORCHRUN, {"master_addr": "node-b"}, "master_addr='node-b' contradicts"),
    ({}, {"rank": 1}, "rank and world_size go together"),
    ({}, {"local_rank": 1}, "local_rank: pass rank and world_size as well"),
    ({}, {"rank": 2, "world_size": 2}, "rank=2 contradicts world_size=2"),
    (SLURM, {"rank": 4, "world_size": 7}, "rank=4 contradicts SLURM_PROCID=5"),
    (SLURM, {"local_rank": 0}, "contradicts SLURM_LOCALID=1"),
    (SLURM | {"SLURM_JOB_NODELIST": "gpu[8"}, {}, "without its"),
    ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, {}, "SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB"),
]


@pytest.mark.parametrize(("environ", "given", "message"), WRONG, ids=[each[2] for each in WRONG])
def test_what_contradicts_itself_is_refused(
    environ: dict[str, str], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_launch(environ, **given)


def test_heterogeneous_jobs_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="heterogeneous SLURM job"):
        read_launch(SLURM | {"SLURM_HET_SIZE": "2"})
