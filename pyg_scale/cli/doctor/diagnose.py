"""Problems of ranks that are about to start a job, and their fixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pyg_scale.comm.address import INTERFACE, is_loopback
from pyg_scale.distributed.launch.threads import complaint

Rank = dict[str, Any]
"""The facts of a rank: see :func:`pyg_scale.cli.doctor.examine.examine`."""

_SHARED_MEMORY = 1 << 30
_CLOCK_SECONDS = 1.0
_SLOW = 4.0  # times below the median
_FLOOR = 1e9  # bytes per second; Ethernet of 10 Gbit/s carries 1.1e9, a loopback several
_ROWS = 100_000  # nodes of a batch, for an example
_ROW_BYTES = 512  # 128 floats
_FAR_SECONDS = 2e-3  # of a round trip between machines; about 0.1e-3 is usual
_SPARE_FILES = 256


@dataclass(frozen=True)
class Finding:
    """A problem that a user should know.

    Attributes:
        ok: ``False`` if the job cannot run with it, ``None`` if it can, but slowly or at risk.
        what: The problem in one line, with the ranks.
        fix: The fix; a command line if there is one.
    """

    ok: bool | None
    what: str
    fix: str = ""


def diagnose(ranks: Sequence[Rank]) -> list[Finding]:
    """All problems, the worst first."""
    found: list[Finding] = []
    for look in _LOOKS:
        found += look(ranks)
    return sorted(found, key=lambda finding: finding.ok is None)


def name_ranks(ranks: Sequence[int]) -> str:
    """A text such as ``ranks 0-3, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def _differing(ranks: Sequence[Rank], of: Callable[[Rank], Any]) -> dict[Any, list[int]]:
    """Ranks grouped by a fact, the most common value first."""
    found: dict[Any, list[int]] = {}
    for number, rank in enumerate(ranks):
        found.setdefault(of(rank), []).append(number)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[1])))


def _versions(ranks: Sequence[Rank]) -> list[Finding]:
    found = []
    for name in ranks[0]["versions"]:
        there = _differing(ranks, lambda rank, name=name: rank["versions"].get(name))  # type: ignore[misc]
        if len(there) == 1:
            continue
        said = "; ".join(f"{version} on {name_ranks(who)}" for version, who in there.items())
        usual, fewer = next(iter(there)), [r for who in list(there.values())[1:] for r in who]
        where = ", ".join(sorted({ranks[rank]["host"] for rank in fewer}))
        major = name == "python"
        fix = f"pip install {name.replace('_', '-')}=={usual}"
        if name == "torch_geometric":
            fix = f"pip install torch_geometric=={usual}"
        found.append(
            Finding(
                None if major or name == "numpy" else False,
                f"{name} differs: {said}",
                f"{f'use Python {usual}' if major else fix}   # on {where}",
            )
        )
    return found


def _kernels(ranks: Sequence[Rank]) -> list[Finding]:
    there = _differing(ranks, lambda rank: rank["kernels"])
    without = there.pop("none", [])
    found = []
    if without and there:
        found.append(
            Finding(
                None,
                f"compiled kernels are missing on {name_ranks(without)}: this slows all ranks",
                "pyg-scale build",
            )
        )
    if without and not there:
        rank = ranks[without[0]]
        what = f"no rank uses compiled kernels, which is slower: {rank['kernels_missing']}"
        found.append(Finding(None, what, rank["kernels_fix"]))
    if len(there) > 1:
        said = "; ".join(f"{name} on {name_ranks(who)}" for name, who in there.items())
        found.append(
            Finding(None, f"compiled kernels differ: {said}", "pyg-scale build   # everywhere")
        )
    return found


def _directory(ranks: Sequence[Rank]) -> list[Finding]:
    found = []
    told = [(number, rank["directory"]) for number, rank in enumerate(ranks) if rank["directory"]]
    for number, said in told:
        if "error" in said:
            fix = f"copy {said['path']} to {ranks[number]['host']}, or at least its parts"
            found.append(Finding(False, f"rank {number}: {said['error']}", fix))
    good = [(number, said) for number, said in told if "error" not in said]
    sums: dict[str, list[int]] = {}
    for number, said in good:
        sums.setdefault(said["checksum"], []).append(number)
    if len(sums) > 1:
        text = "; ".join(f"{name} on {name_ranks(who)}" for name, who in sums.items())
        found.append(
            Finding(
                False,
                f"the ranks have different graphs: META.json is {text}",
                "copy the directory of rank 0 to the others (rsync -a --delete)",
            )
        )
    elif good:
        held = {part for _, said in good for part in said["parts"]}
        missing = sorted(set(range(good[0][1]["num_parts"])) - held)
        if missing:
            parts = (
                f"{'part' if len(missing) == 1 else 'parts'} {', '.join(map(str, missing[:16]))}"
            )
            path = good[0][1]["path"]
            found.append(
                Finding(
                    False,
                    f"{parts} of {path}: no rank can read {'it' if len(missing) == 1 else 'them'}",
                    f"copy part-{missing[0]} to a machine where a rank runs",
                )
            )
    return found


def _network(ranks: Sequence[Rank]) -> list[Finding]:
    found = []
    machines = {rank["machine"] for rank in ranks}
    for number, rank in enumerate(ranks):
        if len(machines) > 1 and is_loopback(rank["address"]):
            found.append(
                Finding(
                    False,
                    f"rank {number} gives its address as {rank['address']}, which on others "
                    "means the machine itself",
                    f"export {INTERFACE}=" + (_likely(rank) or "eth0") + f"   # on {rank['host']}",
                )
            )
    for number, rank in enumerate(ranks):
        for pair in rank["pairs"]:
            if pair["error"]:
                other = ranks[pair["rank"]]
                found.append(
                    Finding(
                        False,
                        f"rank {number} cannot reach rank {pair['rank']} at {other['address']} "
                        f"({other['interface']} of {other['host']}): {pair['error']}",
                        f"export {INTERFACE}={_likely(other) or 'eth0'}   # on {other['host']}; or "
                        "open its ports to the other machines",
                    )
                )
        if rank["collective"]:
            found.append(
                Finding(
                    False,
                    f"rank {number}: {rank['collective']}",
                    f"export {INTERFACE}=eth0 GLOO_SOCKET_IFNAME=eth0   # the interface between "
                    "the machines, on all of them",
                )
            )
    return found


def _likely(rank: Rank) -> str | None:
    """An interface other than the one in use."""
    for name, has in rank["interfaces"].items():
        if name != rank["interface"] and any(not is_loopback(address) for address in has):
            return str(name)
    return None


def _speed(ranks: Sequence[Rank]) -> list[Finding]:
    found = []
    for same, where in ((True, "on one machine"), (False, "between machines")):
        known: dict[tuple[int, int], float] = {}
        for number, rank in enumerate(ranks):
            for pair in rank["pairs"]:
                other = pair["rank"]
                if (ranks[other]["machine"] == rank["machine"]) == same:
                    ways = {(number, other): pair["sent"], (other, number): pair["received"]}
                    # only the lower rank of a pair measures both
                    known.update({way: rate for way, rate in ways.items() if rate})
        slow: list[tuple[float, tuple[int, int]]] = []
        if len(known) >= 6:
            usual = median(known.values())
            slow = sorted((rate, key) for key, rate in known.items() if rate * _SLOW < usual)
        if slow:
            rate, (a, b) = slow[0]
            found.append(
                Finding(
                    None,
                    f"{len(slow)} of {len(known)} links {where} are over {_SLOW:g} times slower "
                    f"than usual ({usual / 1e9:.2f} GB/s): rank {a} to {b} {rate / 1e9:.2f} GB/s",
                    f"ethtool {ranks[a]['interface']}   # on {ranks[a]['host']}, then on "
                    f"{ranks[b]['host']}: is it the fast network?",
                )
            )
        low = sorted((rate, key) for key, rate in known.items() if rate < _FLOOR)
        low = [each for each in low if each not in slow]
        if low:
            rate, (a, b) = low[0]
            found.append(
                Finding(
                    None,
                    f"{len(low)} of {len(known)} links {where} have less than "
                    f"{_FLOOR / 1e9:g} GB/s: rank {a} to {b} {rate / 1e9:.2f} GB/s, at which the "
                    f"rows of {_ROWS:,} nodes with {_ROW_BYTES // 4} floats take "
                    f"{_ROWS * _ROW_BYTES / rate:.2g} s",
                    _busy(ranks[a]) if same else _faster(ranks[a]),
                )
            )
    return found


def _busy(rank: Rank) -> str:
    return (
        f"top   # on {rank['host']}: are its cores busy, or its network emulated? Ranks that see "
        "one directory read each other's parts without it"
    )


def _faster(rank: Rank) -> str:
    """Advice on finding a faster network, and on doing without one."""
    other = _likely(rank)
    look = f"ethtool {rank['interface']}   # on {rank['host']}: is it the fast network?"
    if other is not None:
        look = f"export {INTERFACE}={other}   # on {rank['host']}, if that is the faster network;"
    return (
        f"{look} Or reduce traffic: pyg_scale.open(..., cache='2GB'), and a partition with few "
        "cut edges"
    )


def _distance(ranks: Sequence[Rank]) -> list[Finding]:
    """Machines that are far from each other: every hop of a batch waits for them."""
    trips = [
        (pair["latency"], number, pair["rank"])
        for number, rank in enumerate(ranks)
        for pair in rank["pairs"]
        if pair["latency"] and ranks[pair["rank"]]["machine"] != rank["machine"]
    ]
    far = sorted((each for each in trips if each[0] > _FAR_SECONDS), reverse=True)
    if not far:
        return []
    seconds, a, b = far[0]
    return [
        Finding(
            None,
            f"{len(far)} of {len(trips)} round trips between machines take over "
            f"{1e3 * _FAR_SECONDS:g} ms: rank {a} to {b} {1e3 * seconds:.2g} ms, which every hop "
            "of a batch waits for",
            f"ping {ranks[b]['address']}   # on {ranks[a]['host']}: are the machines in one place? "
            "Otherwise hide the latency: num_workers=8, and data.rank_features(in_flight=16)",
        )
    ]


def _clocks(ranks: Sequence[Rank]) -> list[Finding]:
    off = {p["rank"]: p["clock"] for p in ranks[0]["pairs"] if p["clock"] is not None}
    late = {rank: ahead for rank, ahead in off.items() if abs(ahead) > _CLOCK_SECONDS}
    if not late:
        return []
    worst = max(late, key=lambda rank: abs(late[rank]))
    return [
        Finding(
            None,
            f"the clock of rank {worst} is {late[worst]:+.1f} s ahead of rank 0's",
            f"timedatectl set-ntp true   # on {ranks[worst]['host']}",
        )
    ]


def _limits(ranks: Sequence[Rank]) -> list[Finding]:
    found = []
    small = [
        number
        for number, rank in enumerate(ranks)
        if rank["shared_memory"] is not None and rank["shared_memory"] < _SHARED_MEMORY
    ]
    if small:
        size = min(ranks[number]["shared_memory"] for number in small)
        found.append(
            Finding(
                None,
                f"/dev/shm has {size >> 20} MiB on {name_ranks(small)}, few for worker processes",
                "docker run --shm-size=8g ...   # or: mount -o remount,size=8G /dev/shm",
            )
        )
    for number, rank in enumerate(ranks):
        files = (rank["directory"] or {}).get("files", 0)
        needed = files + 8 * len(ranks) + _SPARE_FILES
        if 0 <= rank["open_files"] < needed:
            found.append(
                Finding(
                    False,
                    f"rank {number} may open {rank['open_files']} files; {needed} may be needed",
                    f"ulimit -n {max(65536, needed)}   # on {rank['host']}",
                )
            )
    return found


def _threads(ranks: Sequence[Rank]) -> list[Finding]:
    found = []
    sharing: dict[tuple[str, tuple[int, ...]], list[Rank]] = {}
    for rank in ranks:
        sharing.setdefault((rank["machine"], tuple(rank["cpus"])), []).append(rank)
    for here in sharing.values():
        said = complaint([rank["threads"] for rank in here], here[0]["cores"], here[0]["quota"])
        if said:
            found.append(Finding(None, f"{here[0]['host']}: {said}"))
    return found


def _devices(ranks: Sequence[Rank]) -> list[Finding]:
    return [
        Finding(False, f"rank {number}: {rank['device_error']}")
        for number, rank in enumerate(ranks)
        if rank["device_error"]
    ]


_LOOKS = (
    _versions,
    _directory,
    _network,
    _devices,
    _limits,
    _kernels,
    _speed,
    _distance,
    _clocks,
    _threads,
)
