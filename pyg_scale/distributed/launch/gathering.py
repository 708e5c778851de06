"""Ranks meet and exchange the facts that the launcher did not provide."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from pyg_scale.comm import address as addresses
from pyg_scale.comm.meeting import Meeting, leave, meet, open_store
from pyg_scale.distributed.launch.cpu_topology import allowed_cpus
from pyg_scale.distributed.launch.device import choose_device, gpu_name
from pyg_scale.distributed.launch.environment import Launch

_GLOO = "GLOO_SOCKET_IFNAME"
_LEAVE_SECONDS = 10.0


@dataclass(frozen=True)
class Gathered:
    """The result of a meeting of all ranks.

    Attributes:
        launch: The identity of this process, with its local rank.
        met: The meeting; each rank gave its ``host``, ``machine``, ``address``, ``cpus``,
            ``threads``, ``device`` and ``gpu``.
        device: Device of this process.
        network: Environment variables that make gloo, and services of ours, use the address.
    """

    launch: Launch
    met: Meeting
    device: torch.device
    network: dict[str, str]


def gather(
    launch: Launch,
    device: str | torch.device | None,
    num_servers: int,
    timeout: float,
    store: Any = None,
) -> Gathered:
    """Meet the other ranks.

    Args:
        launch: The identity of this process.
        device: The user's choice.
        num_servers: Number of servers, which are the first ranks; on the CPU unless a device is
            given.
        timeout: Seconds to wait for the others.
        store: The store in which they meet; by default that at the master's address.

    Raises:
        ValueError: If there are more ranks than GPUs on a machine; all ranks raise it.
        CommError: If rank 0 cannot use its port, or cannot be reached.
        CommTimeoutError: If ranks did not come in time; names them.
    """
    if store is None:
        store = _store(launch, timeout)
    address = _address(launch)
    said: dict[str, Any] = {
        "host": platform.node(),
        "machine": machine(),
        "address": address,
        "cpus": sorted(allowed_cpus()),
        "threads": torch.get_num_threads(),
    }
    rank, world_size = launch.rank, launch.world_size
    first = meet(PrefixStore("pyg_scale/init", store), rank, world_size, timeout=timeout, said=said)
    here = [r for r, each in enumerate(first.said) if each["machine"] == said["machine"]]
    local_rank = here.index(rank) if launch.local_rank is None else launch.local_rank
    launch = replace(
        launch,
        local_rank=local_rank,
        local_world_size=launch.local_world_size or max(len(here), local_rank + 1),
    )
    network = {}
    known = [each["address"] for each in first.said]
    if len({(each["machine"], each["address"]) for each in first.said}) > 1:
        address = _reachable(address, known)
        interface = addresses.interface_of(address)
        network = {addresses.ADDRESS: address} | ({_GLOO: interface} if interface else {})
        network = {name: value for name, value in network.items() if name not in os.environ}
    chosen, error = torch.device("cpu"), ""
    try:
        chosen = _device(launch, device, num_servers, here)
        said["gpu"] = gpu_name(chosen)
    except ValueError as found:
        error = str(found)
    said |= {"address": address, "device": str(chosen), "error": error}
    met = meet(PrefixStore("agreed", first.store), rank, world_size, timeout=timeout, said=said)
    for other, each in enumerate(met.said):  # so that nobody waits for one that gave up
        if each["error"]:
            leave(met.store, rank, world_size, timeout=_LEAVE_SECONDS)
            raise ValueError(f"rank {other}: {each['error']}")
    return Gathered(launch, met, chosen, network)


def adopted(given: Mapping[str, Any]) -> Launch:
    """The identity of this process in a process group that it did not create through ``init``.

    Args:
        given: The arguments that the user passed to ``init``, by name.

    Raises:
        ValueError: If they contradict the group.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = {"rank": rank, "world_size": world_size, "backend": dist.get_backend()}
    for name, value in given.items():
        servers = name == "num_servers" and value is not None
        if servers or (value is not None and found.get(name, value) != value):
            raise ValueError(
                f"{name}={value!r} contradicts the existing process group: call "
                "distributed.init() instead of init_process_group"
            )
    same = os.environ.get("RANK") == str(rank) and os.environ.get("WORLD_SIZE") == str(world_size)
    local: dict[str, int | None] = {}
    for name in ("local_rank", "local_world_size"):
        text = os.environ.get(name.upper(), "") if same else ""
        local[name] = given[name] if given[name] is not None else (int(text) if text else None)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launch(
        "torch",
        rank,
        world_size,
        local["local_rank"],
        local["local_world_size"],
        hosted=True,
        restarts=int(restarts) if restarts.isdigit() else 0,
    )


def _store(launch: Launch, timeout: float) -> Any:
    if launch.world_size == 1:
        return HashStore()
    return open_store(
        launch.master_addr,
        launch.master_port,
        launch.rank,
        hosted=launch.hosted,
        timeout=timeout,
    )


def _address(launch: Launch) -> str:
    if launch.world_size == 1:
        return addresses.LOOPBACK
    return addresses.own_address(None if launch.launcher == "torch" else launch.master_addr)


def _device(
    launch: Launch, wanted: str | torch.device | None, num_servers: int, here: list[int]
) -> torch.device:
    """The device of the local rank; servers leave the GPUs to their clients."""
    if not num_servers:
        return choose_device(wanted, launch.local_rank or 0, launch.local_world_size or 1)
    if launch.rank < num_servers:
        return choose_device("cpu" if wanted is None else wanted, 0, 1)
    clients = [rank for rank in here if rank >= num_servers]
    return choose_device(wanted, clients.index(launch.rank), len(clients))


def _reachable(address: str, others: list[str]) -> str:
    """An address by which other machines reach this one, too.

    On many systems ``/etc/hosts`` maps the name of the machine to its loopback address.
    """
    if addresses.is_loopback(address):
        for other in others:
            if not addresses.is_loopback(other):
                return addresses.address_towards(other)
    return address


def machine() -> str:
    """An identifier that tells this machine from others with the same name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{platform.node()}/{file.read().strip()}"
    except OSError:
        return platform.node()
