"""Conclusions from a recorded run: the slow rank, the stage in which it lags, and a remedy."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyg_scale.train.load import Load, load_of
from pyg_scale.train.recording.run import Rank, Run

SLOW = 1.2
"""A rank is slow if it is busy for so many times as long as the others."""
LOW_USE = 0.5
"""A device is used little if it computes in a smaller share of the time."""
LOADER = ("sample", "fetch", "transform", "pin", "copy")
"""The stages of a loader in which something is done."""

REMEDIES = {
    "sample": "give the loader more workers (num_workers=), or fewer neighbours (num_neighbors=); "
    "`pyg-scale doctor` says whether the compiled sampler is in use",
    "fetch": "keep rows that are used often in a cache (feature_store=Cached(...)), or in memory; "
    "partition so that fewer of them are on other ranks; give the loader more workers",
    "transform": "transforms run in the training process: make them cheaper, or store what they "
    "make in the graph",
    "pin": "raise num_workers= or let the loader bring batches to the device (device=)",
    "copy": "let the loader bring batches to the device ahead (device=), and keep features there",
    "load": "give the loader workers (num_workers=2), which make batches while the model computes",
    "exchange": "ranks wait for each other's gradients: add up several batches for a step "
    "(Accumulation), or take larger batches",
    "between steps": "something between the steps takes that time, such as a validation: name it "
    "by recorder.span(...)",
}


@dataclass(frozen=True)
class Summary:
    """Sums over the steps of a rank, in seconds unless something else is said.

    Attributes:
        rank: Which.
        num_steps: How many steps it made.
        elapsed: From the beginning of its first step to the end of its last one.
        load: In which it waited for its loader.
        compute: In which the body of the loop did something of its own.
        exchange: In which the body waited for other ranks.
        seeds: Seeds of all steps.
        stages: Of the loader's stages, which workers spend beside the loop.
        counts: Sums of what the loader counted.
    """

    rank: int
    num_steps: int
    elapsed: float
    load: float
    compute: float
    exchange: float
    seeds: int
    stages: Mapping[str, float]
    counts: Mapping[str, int]

    @property
    def use(self) -> float:
        """The share of the time in which the rank computed."""
        return self.compute / self.elapsed if self.elapsed > 0 else 0.0

    @property
    def throughput(self) -> float:
        """Seeds for each second."""
        return self.seeds / self.elapsed if self.elapsed > 0 else 0.0


@dataclass(frozen=True)
class Finding:
    """Something that slows a run down.

    Attributes:
        kind: ``"slow rank"`` or ``"low use"``.
        ranks: Those that it is about.
        stage: ``"compute"``, ``"load"``, ``"exchange"``, ``"between steps"``, or one of the loader.
        text: What was found, in a sentence.
        remedy: What to do about it.
    """

    kind: str
    ranks: tuple[int, ...]
    stage: str
    text: str
    remedy: str


def summaries(run: Run) -> list[Summary]:
    """The sums over the steps of each rank of a run."""
    return [_summary(rank) for rank in run.ranks]


def load(run: Run) -> Load:
    """The load of the ranks of a run."""
    return load_of(rank.steps for rank in run.ranks)


def findings(run: Run) -> list[Finding]:
    """List what slows a run down, the worst first; empty if nothing does."""
    found = [each for each in summaries(run) if each.num_steps]
    slow = _slow_rank(found)
    return [*slow, *_low_use(found, run, bool(slow))]


def milliseconds(seconds: float) -> str:
    """Seconds as a number of milliseconds, of three digits or whole: ``2,020``, ``20.1``."""
    found = 1e3 * seconds
    return f"{found:,.0f}" if found >= 999.5 else f"{found:.3g}"


def _summary(rank: Rank) -> Summary:
    steps = rank.steps
    stages: dict[str, float] = {}
    counts: dict[str, int] = {}
    for step in steps:
        for stage, seconds in step.stages.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
        for name, count in step.counts.items():
            counts[name] = counts.get(name, 0) + count
    elapsed = steps[-1].begin + steps[-1].load + steps[-1].body - steps[0].begin if steps else 0.0
    return Summary(
        rank.rank,
        len(steps),
        elapsed,
        sum(step.load for step in steps),
        sum(step.compute for step in steps),
        sum(step.exchange for step in steps),
        sum(step.seeds for step in steps),
        stages,
        counts,
    )


def _slow_rank(found: Sequence[Summary]) -> list[Finding]:
    """The rank that the others wait for, and the stage in which it lags most behind them."""
    if len(found) < 2:
        return []
    busy = {each.rank: (each.load + each.compute) / each.num_steps for each in found}
    slowest = max(found, key=lambda each: busy[each.rank])
    others = [each for each in found if each is not slowest]
    usual = statistics.median(busy[each.rank] for each in others)
    if usual <= 0 or busy[slowest.rank] < SLOW * usual:
        return []

    def lag(seconds: Mapping[int, float]) -> float:
        return seconds[slowest.rank] - statistics.median(seconds[each.rank] for each in others)

    parts = {
        "load": lag({each.rank: each.load / each.num_steps for each in found}),
        "compute": lag({each.rank: each.compute / each.num_steps for each in found}),
    }
    stage = max(parts, key=lambda name: parts[name])
    if stage == "load":
        lags = {
            name: lag({each.rank: each.stages.get(name, 0.0) / each.num_steps for each in found})
            for name in LOADER
        }
        worst = max(lags, key=lambda name: lags[name])
        stage = worst if lags[worst] > 0.25 * parts["load"] else "load"
    ratio = busy[slowest.rank] / usual
    text = (
        f"Rank {slowest.rank} is busy {milliseconds(busy[slowest.rank])} ms in a step, {ratio:.2f} "
        f"times as long as the others ({milliseconds(usual)} ms), and they wait for it. It lags "
        f"behind in {stage!r}."
    )
    remedy = REMEDIES.get(stage, "")
    if stage == "compute":
        remedy = (
            f"look what else runs on the machine of rank {slowest.rank}, and at its device; where "
            "it is slower for good, give it fewer seeds (SpeedShares)"
        )
    return [Finding("slow rank", (slowest.rank,), stage, text, remedy)]


def _low_use(found: Sequence[Summary], run: Run, has_slow_rank: bool) -> list[Finding]:
    low = [each for each in found if each.use < LOW_USE]
    if not low:
        return []
    devices = {rank.rank: rank.device for rank in run.ranks}
    elapsed = sum(each.elapsed for each in low) or 1.0
    parts = {
        "load": sum(each.load for each in low) / elapsed,
        "exchange": sum(each.exchange for each in low) / elapsed,
    }
    parts["between steps"] = 1 - sum(parts.values()) - sum(each.compute for each in low) / elapsed
    stage = max(parts, key=lambda name: parts[name])
    share = parts[stage]
    if stage == "load":
        seconds = {name: sum(each.stages.get(name, 0.0) for each in low) for name in LOADER}
        worst = max(seconds, key=lambda name: seconds[name])
        stage = worst if seconds[worst] > 0 else "load"
    use = sum(each.compute for each in low) / elapsed
    kind = devices[low[0].rank]
    names = ", ".join(str(each.rank) for each in low)
    device = f"The {'CPU' if kind == 'cpu' else kind.upper()}"
    text = (
        f"{device} of {'rank' if len(low) == 1 else 'ranks'} {names} computes in {use:.0%} of the "
        f"time; {share:.0%} go into {stage!r}."
    )
    remedy = REMEDIES.get(stage, "")
    if stage == "exchange" and has_slow_rank:
        remedy = "mend the slow rank first, for which the others wait"
    return [Finding("low use", tuple(each.rank for each in low), stage, text, remedy)]
