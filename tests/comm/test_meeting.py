"""Ranks meet, whatever an earlier attempt left in the store, and say who did not come."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from pyg_scale.comm.meeting import leave, meet, open_store
from pyg_scale.errors import CommError, CommTimeoutError


def together(world_size: int, function: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(function, range(world_size), timeout=60))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_rank_hears_what_every_rank_says(world_size: int) -> None:
    store = HashStore()
    met = together(
        world_size,
        lambda r: meet(store, r, world_size, timeout=20, said={"rank": r, "x": [r, "é"]}),
    )
    for one in met:
        assert list(one.said) == [{"rank": r, "x": [r, "é"]} for r in range(world_size)]
    met[0].store.set("key", "value")
    assert met[-1].store.get("key") == b"value"


def test_what_an_earlier_attempt_left_is_not_found() -> None:
    store = HashStore()
    first = together(3, lambda r: meet(store, r, 3, timeout=20, said={"attempt": 1}))
    first[0].store.set("address", "of one that is gone")
    second = together(3, lambda r: meet(store, r, 3, timeout=20, said={"attempt": 2}))
    assert not second[2].store.check(["address"])
    assert all(each["attempt"] == 2 for one in second for each in one.said)


@pytest.mark.parametrize("answered", [[], [1], [1, 2]])
def test_an_attempt_that_died_in_the_meeting_does_no_harm(answered: list[int]) -> None:
    store = HashStore()
    store.set("offer", "old")  # of a rank 0 that is gone
    store.add("alive/old", 7)
    for rank in answered:
        store.set(f"here/old/{rank}", json.dumps({"word": "gone", "said": {}}))
    ready = threading.Event()

    def rank(r: int) -> Any:
        if r == 0:
            assert ready.wait(20)  # the others see the old offer first
        elif r == 2:
            threading.Timer(0.3, ready.set).start()
        return meet(store, r, 3, timeout=20, said={"rank": r})

    assert [each["rank"] for each in together(3, rank)[1].said] == [0, 1, 2]


def test_a_larger_or_smaller_attempt_follows() -> None:
    store = HashStore()
    for world_size in (3, 4, 2):
        met = together(
            world_size, lambda r, w=world_size: meet(store, r, w, timeout=20, said={"of": w})
        )
        assert [each["of"] for each in met[-1].said] == [world_size] * world_size


@pytest.mark.matrix(2)
@pytest.mark.parametrize("missing", [{1}, {2, 3}, {0}, {0, 2}])
def test_who_did_not_come_is_named_by_everyone(missing: set[int]) -> None:
    store = HashStore()

    def rank(r: int) -> str | None:
        if r in missing:
            return None
        with pytest.raises(CommTimeoutError) as raised:
            meet(store, r, 4, timeout=2.0)
        return str(raised.value)

    for r, said in enumerate(together(4, rank)):
        if said is None:
            continue
        # without rank 0 nobody knows of the others
        late = [0] if 0 in missing else sorted(missing)
        names = ("rank " if len(late) == 1 else "ranks ") + ", ".join(map(str, late))
        assert f"{names} of 4 did not come within 2 seconds (waited for by rank {r})" in said


def test_of_an_old_offer_it_is_rank_0_that_did_not_come() -> None:
    store = HashStore()
    store.set("offer", "old")
    store.add("alive/old", 3)
    with pytest.raises(CommTimeoutError, match="rank 0 of 3 did not come"):
        meet(store, 2, 3, timeout=0.2)


def test_rank_0_stays_until_the_others_need_its_store_no_more() -> None:
    store, order, waits = HashStore(), [], threading.Event()

    def rank(r: int) -> None:
        met = meet(store, r, 3, timeout=20)
        if r == 0:
            threading.Timer(0.3, waits.set).start()
        else:
            assert waits.wait(20)
            order.append(r)
        leave(met.store, r, 3, timeout=20)
        if r == 0:
            order.append(0)

    together(3, rank)
    assert order[-1] == 0 and sorted(order) == [0, 1, 2]
    leave(HashStore(), 0, 2, timeout=0.1)  # one that is gone is not waited for without end


def test_rank_0_says_that_its_port_is_in_use() -> None:
    taken = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(CommError, match=f"MASTER_PORT={port}: the port is in use"):
            open_store("127.0.0.1", port, 0, hosted=False, timeout=5)
    assert open_store("127.0.0.1", taken.port, 0, hosted=True, timeout=5).check(["x"]) is False


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_store_listens_at_its_address_alone(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    first, second = (open_store(host, port, 0, hosted=False, timeout=5) for _ in range(2))
    first.set("key", "value")  # a second one in the same process is the same
    assert second.get("key") == b"value"
    assert open_store(host, port, 1, hosted=False, timeout=5).get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_without_a_master_rank_0_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(CommTimeoutError, match=f"rank 0 did not come .*MASTER_PORT={port}"):
        open_store("127.0.0.1", port, 3, hosted=False, timeout=0.5)
