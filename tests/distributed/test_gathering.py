"""What ranks learn of each other when they meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pyg_scale.comm import Group, address
from pyg_scale.distributed.launch import gathering
from pyg_scale.distributed.launch.environment import Launch
from pyg_scale.testing.ranks import run_ranks

NETWORK = (address.ADDRESS, address.INTERFACE, "GLOO_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NETWORK, "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def gather(group: Group, launch: Launch, servers: int = 0, device: str | None = "cpu") -> Any:
    return gathering.gather(launch, device, servers, 20.0, PrefixStore("t", group.store))


def test_local_ranks_are_counted_where_the_launcher_does_not_say() -> None:
    def rank(group: Group) -> Any:
        return gather(group, Launch("arguments", group.rank, group.world_size))

    found = run_ranks(3, rank)
    assert [(g.launch.local_rank, g.launch.local_world_size) for g in found] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]
    for one in found:
        assert one.network == {} and one.device == torch.device("cpu")
        assert {each["address"] for each in one.met.said} == {"127.0.0.1"}


def test_an_address_that_means_the_machine_itself_is_not_told_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 is the master, and its own name is its loopback address in its /etc/hosts."""
    own = {"master-0": "127.0.1.1", "master-1": "10.0.0.2"}
    monkeypatch.setattr(address, "own_address", lambda master: own[master])
    monkeypatch.setattr(address, "address_towards", lambda host: f"10.0.0.1 towards {host}")
    monkeypatch.setattr(address, "interface_of", lambda text: f"eth-{text}")

    def rank(group: Group) -> Any:
        return gather(group, Launch("arguments", group.rank, 2, master_addr=f"master-{group.rank}"))

    first, second = run_ranks(2, rank)
    assert [e["address"] for e in second.met.said] == ["10.0.0.1 towards 10.0.0.2", "10.0.0.2"]
    assert second.network == {address.ADDRESS: "10.0.0.2", "GLOO_SOCKET_IFNAME": "eth-10.0.0.2"}
    assert first.network[address.ADDRESS] == "10.0.0.1 towards 10.0.0.2"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    first, second = run_ranks(2, rank)
    assert second.network == {address.ADDRESS: "10.0.0.2"}  # what the user has set stays


def test_servers_leave_the_gpus_to_their_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(gathering, "gpu_name", str)

    def rank(group: Group) -> Any:
        return gather(group, Launch("arguments", group.rank, 3, group.rank, 3), 1, None)

    assert [str(g.device) for g in run_ranks(3, rank)] == ["cpu", "cuda:0", "cuda:1"]
    with pytest.raises(ExceptionGroup) as raised:
        run_ranks(4, lambda g: gather(g, Launch("arguments", g.rank, 4, g.rank, 4), 1, None))
    said = [str(error) for error in raised.value.exceptions]  # of the server, too
    assert len(said) == 4 and set(said) == {said[0]}
    assert said[0].startswith("rank 1: there are 3 ranks on this machine, but 2 GPUs")


def test_a_group_that_is_there_says_who_the_ranks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    given = dict.fromkeys(("rank", "world_size", "local_rank", "local_world_size", "backend"))
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    found = gathering.adopted(given | {"backend": "gloo"})
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (
        3,
        4,
        1,
        None,
    )
    monkeypatch.setenv("RANK", "7")  # of a launcher that has started something else
    assert gathering.adopted(given).local_rank is None
    with pytest.raises(ValueError, match="num_servers=1 contradicts the existing process group"):
        gathering.adopted(given | {"num_servers": 1})
