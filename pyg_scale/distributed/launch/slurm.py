"""The ranks as SLURM's environment describes them, without calling ``scontrol``.

Lists of hosts are compressed: ``gpu[01-03,7],login`` means ``gpu01 gpu02 gpu03 gpu7 login``. A name
may have several brackets (``rack[1-2]n[08-10]``), and brackets may hold brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

MAX_HOSTS = 1 << 16
_RANGE = re.compile(r"(\d+)-(\d+)")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_NO_STEP = 4294967290  # SLURM_INTERACTIVE_STEP; those of the script itself and others are larger


def expand_hosts(text: str) -> list[str]:
    """The hosts of a list as SLURM writes it, in its order.

    Args:
        text: A list such as ``SLURM_JOB_NODELIST``.

    Returns:
        The names; ``[01-03]`` keeps its zeros.

    Raises:
        ValueError: If it is not such a list, or has more than 65,536 hosts.
    """
    found: list[str] = []
    for item in _split(text, text):
        for name in _expand(item, text):
            found.append(name)
            if len(found) > MAX_HOSTS:
                raise ValueError(f"the host list {text[:60]!r} ... has more than {MAX_HOSTS} hosts")
    if not found:
        raise ValueError(f"the host list {text!r} is empty")
    return found


def _split(text: str, whole: str) -> list[str]:
    """Split at commas outside brackets."""
    items, depth, start = [], 0, 0
    for place, sign in enumerate(text):
        if sign == "[":
            depth += 1
        elif sign == "]":
            depth -= 1
            if depth < 0:
                raise ValueError(f"the host list {whole!r} has a ']' without its '['")
        elif sign == "," and depth == 0:
            items.append(text[start:place])
            start = place + 1
    if depth:
        raise ValueError(f"the host list {whole!r} has a '[' without its ']'")
    items = [item.strip() for item in [*items, text[start:]]]
    if any(not item for item in items) and text.strip():
        raise ValueError(f"the host list {whole!r} has an empty name")
    return items if text.strip() else []


def _expand(item: str, whole: str) -> Iterator[str]:
    """The names of an item: the text before a bracket, times its choices, times the rest."""
    before, bracket, after = item.partition("[")
    if re.search(r"[\s\]]", before):
        raise ValueError(f"the host list {whole!r} has a name with blanks: {before!r}")
    if not bracket:
        yield before
        return
    depth, end = 1, -1
    while depth:
        end += 1
        depth += (after[end] == "[") - (after[end] == "]")
    inner, rest = _split(after[:end], whole), after[end + 1 :]
    if not inner:
        raise ValueError(f"the host list {whole!r} has an empty bracket")
    for choice in inner:
        for middle in _choices(choice, whole):
            for tail in _expand(rest, whole) if rest else [""]:
                yield before + middle + tail


def _choices(choice: str, whole: str) -> Iterator[str]:
    """The texts that one item of a bracket stands for."""
    if found := _RANGE.fullmatch(choice):
        first, last = found.groups()
        if int(last) < int(first):
            raise ValueError(f"the host list {whole!r} has a range that runs backwards: {choice}")
        width = len(first)
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{width}d}"
        return
    yield from _expand(choice, whole)


def expand_tasks(text: str) -> list[int]:
    """The tasks of each node, of a list as SLURM writes it: ``2(x3),1`` is ``[2, 2, 2, 1]``.

    Raises:
        ValueError: If it is not such a list.
    """
    found: list[int] = []
    for item in text.split(","):
        match = _REPEATED.fullmatch(item.strip())
        if match is None:
            raise ValueError(f"the tasks per node {text!r} are not a list such as '2(x3),1'")
        found += [int(match[1])] * int(match[2] or 1)
        if len(found) > MAX_HOSTS:
            raise ValueError(f"the tasks per node {text!r} are for more than {MAX_HOSTS} nodes")
    return found


def is_step(environ: Mapping[str, str]) -> bool:
    """Return True if ``srun`` started this process.

    The batch script and the shell of ``salloc`` also have ``SLURM_NTASKS``, and often
    ``SLURM_PROCID=0``, but are one process, whatever the number of tasks.
    """
    if "SLURM_PROCID" not in environ:
        return False
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    if step is None:
        return environ.get("ENVIRONMENT") != "BATCH"
    return not step.isdigit() or int(step) < _NO_STEP


def default_port(environ: Mapping[str, str]) -> int:
    """A port from 20000 to 31999, the same for all tasks of a step and another for the next."""
    job, step = (environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    number = [int(text) if text.isdigit() else 0 for text in (job, step)]
    return 20000 + (7 * number[0] + number[1]) % 12000
