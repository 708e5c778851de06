"""All ranks meet, under a store prefix that no earlier attempt has used.

The torchrun of torch 2.13 starts its workers again with the same store (one ``TCPStore`` for all
rounds of a rendezvous), while ``env://`` takes it for a new one. The second attempt then finds the
keys of the first, above all its addresses: ``Gloo connectFullMesh failed ... Connection refused``,
and a restart is lost. The number of restarts, ``TORCHELASTIC_RESTART_COUNT``, does not help on
several machines: each agent counts its own. So the ranks agree on a prefix that is new in every
attempt: rank 0 offers one, each other rank answers with a random word, and rank 0 confirms the
words that it has received. An old offer never confirms the word of a new process.

``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` in the environment of torchrun avoids the fault for code
that does not use this module.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]
    DistStoreError,
    PrefixStore,
    TCPStore,
)

from pyg_scale.comm.address import LOOPBACK
from pyg_scale.comm.time_limit import check, within
from pyg_scale.errors import CommError, CommTimeoutError

_SLICE = 0.5  # seconds after which rank 0 announces itself again
_GRACE = 10.0  # seconds to find out which ranks are late
_BACKLOG = 1024
_PAUSES = (0.01, 0.2)  # seconds between two checks, at first and at last


@dataclass(frozen=True)
class Meeting:
    """A completed meeting of all ranks.

    Attributes:
        store: A store of this meeting alone.
        said: The facts that each rank gave about itself.
    """

    store: Any
    said: tuple[dict[str, Any], ...]


def open_store(host: str, port: int, rank: int, *, hosted: bool, timeout: float) -> Any:
    """The store at a master's address.

    It lets in whoever reaches its port, so it listens at the master's address alone if the master
    is given by an IP address or as ``localhost``. Any other name may resolve to another address on
    other machines: then it listens on all interfaces, as torch does.

    Args:
        host: Host of the master.
        port: Port of the master.
        rank: Rank of this process; rank 0 is the master unless ``hosted``.
        hosted: True if torchrun's agent already has the store.
        timeout: Seconds to wait for the master.

    Raises:
        CommError: If rank 0 cannot use the port.
        CommTimeoutError: If the master does not answer in time.
    """
    serves, options = rank == 0 and not hosted, dict[str, Any]()
    if not serves:
        _wait_for_port(host, port, rank, timeout)
    elif (listener := _listen(host, port)) is not None:
        options["master_listen_fd"] = listener.detach()
    try:
        return TCPStore(
            host,
            port,
            None,
            serves,
            timedelta(seconds=timeout),
            multi_tenant=True,
            wait_for_workers=False,
            **options,
        )
    except RuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        if not serves:
            raise CommTimeoutError(
                f"rank {rank} finds no store at MASTER_ADDR={host}, MASTER_PORT={port}: {first}"
            ) from None
        used = "EADDRINUSE" in first or "in use" in first
        raise CommError(
            f"rank 0 cannot use MASTER_PORT={port}"
            + (": the port is in use; choose another one" if used else f": {first}")
        ) from None


def _listen(host: str, port: int) -> socket.socket | None:
    """A socket at an address of this machine; ``None`` if torch is to listen by itself."""
    try:
        address = ipaddress.ip_address(LOOPBACK if host == "localhost" else host)
    except ValueError:
        return None
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        return socket.create_server((str(address), port), family=family, backlog=_BACKLOG)
    except OSError:  # not of this machine (NAT), or the store is in this process
        return None


def _wait_for_port(host: str, port: int, rank: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    pause, longest = _PAUSES
    reason: OSError | None = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(left, 5.0))).close()
            return
        except OSError as error:
            reason = error
        time.sleep(min(pause, max(0.0, left)))
        pause = min(longest, 2 * pause)
    raise CommTimeoutError(
        f"rank 0 did not come within {timeout:g} seconds: rank {rank} cannot reach "
        f"MASTER_ADDR={host}, MASTER_PORT={port} ({reason})"
    )


def meet(
    store: Any,
    rank: int,
    world_size: int,
    *,
    timeout: float,
    said: Mapping[str, Any] | None = None,
) -> Meeting:
    """Wait until all ranks have called this; every rank does.

    Args:
        store: A store common to the ranks, even one that an earlier attempt used.
        rank: Rank of this process.
        world_size: Number of ranks.
        timeout: Seconds to wait for the others.
        said: Facts to give the others; must be serialisable as JSON.

    Raises:
        CommTimeoutError: If ranks did not come in time; names them.
        CommError: If the store is gone.
    """
    mine = {"word": secrets.token_hex(8), "said": dict(said or {})}
    try:
        meeting = _Meeting(store, rank, world_size, timeout, mine)
        way = meeting.lead if rank == 0 else meeting.follow
        offer, heard = within(timeout + _GRACE, way)
    except CommError:
        raise
    except TimeoutError:
        raise CommTimeoutError(
            f"the store of rank 0 did not answer rank {rank} within {timeout:g} seconds: the "
            "network between them is lost"
        ) from None
    except RuntimeError as error:  # the type that stores raise
        raise store_failure(error, "a rank ended while all were meeting") from error
    return Meeting(PrefixStore(f"met/{offer}", store), tuple(each["said"] for each in heard))


def leave(store: Any, rank: int, world_size: int, *, timeout: float) -> None:
    """Let rank 0, whose process may hold the store, wait until no other rank needs it.

    Args:
        store: The store of a meeting. All ranks call this and do not use the store afterwards.
        rank: Rank of this process.
        world_size: Number of ranks.
        timeout: Seconds after which rank 0 stops waiting.
    """
    if rank != 0:
        store.set(f"left/{rank}", "")
        return
    others = [f"left/{other}" for other in range(1, world_size)]
    deadline, (pause, longest) = time.monotonic() + timeout, _PAUSES
    while others and not store.check(others) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(longest, 1.5 * pause)


def store_failure(error: RuntimeError, late: str) -> CommError:
    """The error to raise for one of a store: it timed out, or the store is gone.

    Args:
        error: The error that the store raised.
        late: The message for a timeout: the rank that did not answer, and the time limit.
    """
    first = str(error).strip().partition("\n")[0]
    if isinstance(error, DistStoreError) and "timeout" in first.lower():
        return CommTimeoutError(late)
    return CommError(f"the store of rank 0, in which the ranks meet, is gone: {first}")


def named(ranks: Sequence[int]) -> str:
    """Ranks in a message, the first of many."""
    some = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {some}"


class _Meeting:
    def __init__(
        self, store: Any, rank: int, world_size: int, timeout: float, mine: dict[str, Any]
    ) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.timeout, self.mine = timeout, mine
        self.deadline = time.monotonic() + timeout

    def lead(self) -> tuple[str, list[dict[str, Any]]]:
        """Rank 0's side of the meeting."""
        offer = str(self.mine["word"])
        self.store.set("offer", offer)
        missing = list(range(1, self.world_size))
        (pause, longest), looked = _PAUSES, time.monotonic()
        # Not by the store's wait: torch logs its timeouts, and nothing can interrupt it.
        while missing and not self.store.check([f"here/{offer}/{rank}" for rank in missing]):
            check()
            now = time.monotonic()
            if now > self.deadline:
                missing = self._absent(offer, missing)
                if missing:
                    self._tell(offer, missing)
                    raise self._late(missing)
                break
            if now > looked + _SLICE:
                self.store.add(f"alive/{offer}", 1)
                missing, looked = self._absent(offer, missing), now
            time.sleep(pause)
            pause = min(longest, 1.5 * pause)
        heard = [self.mine]
        for rank in range(1, self.world_size):
            heard.append(json.loads(self.store.get(f"here/{offer}/{rank}")))
        self.store.set(f"go/{offer}", json.dumps(heard))
        return offer, heard

    def follow(self) -> tuple[str, list[dict[str, Any]]]:
        """The other ranks' side of the meeting."""
        answered: str | None = None
        old: set[str] = set()
        pause, longest = _PAUSES
        while True:
            if self.store.check(["offer"]):
                offer = self.store.get("offer").decode()
                if offer != answered and offer not in old and self.store.check([f"late/{offer}"]):
                    old.add(offer)
                elif offer != answered and offer not in old:
                    self.store.set(f"here/{offer}/{self.rank}", json.dumps(self.mine))
                    answered = offer
            if answered is not None and self.store.check([f"go/{answered}"]):
                heard = json.loads(self.store.get(f"go/{answered}"))
                if len(heard) == self.world_size and (
                    heard[self.rank]["word"] == self.mine["word"]
                ):
                    return answered, heard
                old.add(answered)  # an offer of an earlier attempt
                answered = None
            if answered is not None and (missing := self._told(answered)):
                raise self._late(missing)
            check()
            if time.monotonic() > self.deadline:
                raise self._late(self._who_is_late(answered))
            time.sleep(pause)
            pause = min(longest, 1.5 * pause)

    def _tell(self, offer: str, missing: list[int]) -> None:
        """Tell the ranks that came which ones are late, before the store ends with this process."""
        self.store.set(f"late/{offer}", json.dumps(missing))
        here = [rank for rank in range(1, self.world_size) if rank not in missing]
        with contextlib.suppress(RuntimeError):
            if here:
                told = [f"told/{offer}/{rank}" for rank in here]
                self.store.wait(told, timedelta(seconds=_GRACE / 4))

    def _told(self, offer: str) -> list[int]:
        """The ranks that rank 0 waited for in vain, if any."""
        if not self.store.check([f"late/{offer}"]):
            return []
        missing = json.loads(self.store.get(f"late/{offer}"))
        self.store.set(f"told/{offer}/{self.rank}", "")
        return [int(rank) for rank in missing]

    def _who_is_late(self, offer: str | None) -> list[int]:
        if offer is None:
            return [0]
        before = self.store.add(f"alive/{offer}", 0)
        until = time.monotonic() + 3 * _SLICE
        while time.monotonic() < until:
            if missing := self._told(offer):
                return missing
            time.sleep(_SLICE / 10)
        if self.store.add(f"alive/{offer}", 0) == before:  # the offer of a process that is gone
            return [0]
        return self._absent(offer, range(1, self.world_size)) or [0]

    def _absent(self, offer: str, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if not self.store.check([f"here/{offer}/{rank}"])]

    def _late(self, ranks: list[int]) -> CommTimeoutError:
        return CommTimeoutError(
            f"{named(ranks)} of {self.world_size} did not come within {self.timeout:g} seconds "
            f"(waited for by rank {self.rank})"
        )
