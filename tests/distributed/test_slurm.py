"""SLURM's lists, against an expansion that is written another way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyg_scale.distributed.launch.slurm import default_port, expand_hosts, expand_tasks, is_step

# A list is made together with what it stands for: text, and names.
Made = tuple[str, list[str]]
names = st.text("abcxyz019-.", min_size=1, max_size=5)


@st.composite
def ranges(draw: st.DrawFn) -> Made:
    first = draw(st.integers(0, 99))
    last = first + draw(st.integers(0, 12))
    width = len(str(first)) + draw(st.integers(0, 3))
    texts = [str(number).rjust(width, "0") for number in range(first, last + 1)]
    return f"{texts[0]}-{last}", texts


def listed(items: st.SearchStrategy[Made]) -> st.SearchStrategy[Made]:
    def join(made: list[Made]) -> Made:
        return ",".join(text for text, _ in made), [name for _, found in made for name in found]

    return st.lists(items, min_size=1, max_size=3).map(join)


def sequence(pieces: st.SearchStrategy[Made]) -> st.SearchStrategy[Made]:
    def times(made: list[Made]) -> Made:
        found = [""]
        for _, choices in made:
            found = [head + tail for head in found for tail in choices]
        return "".join(text for text, _ in made), found

    return st.lists(pieces, min_size=1, max_size=3).map(times)


plain = names.map(lambda name: (name, [name]))
digits = st.integers(0, 999).map(lambda number: (str(number), [str(number)]))


def brackets(items: st.SearchStrategy[Made]) -> st.SearchStrategy[Made]:
    return listed(items).map(lambda made: (f"[{made[0]}]", made[1]))


def started(name: Made, rest: Made) -> Made:
    return name[0] + rest[0], [name[1][0] + tail for tail in rest[1]]


flat = brackets(ranges() | digits)
nested = brackets(ranges() | digits | st.builds(started, plain, sequence(flat)))
hosts = st.builds(started, plain, sequence(flat | plain | nested)) | plain


some = given(listed(hosts).filter(lambda made: len(made[1]) <= 1000))


@settings(max_examples=20)
@some
def test_lists_expand_as_they_were_made(made: Made) -> None:
    assert expand_hosts(made[0]) == made[1]


@pytest.mark.slow
@some
def test_many_lists_expand_as_they_were_made(made: Made) -> None:
    assert expand_hosts(made[0]) == made[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", "n1"),
        ("a[01-03,7]", "a01 a02 a03 a7"),
        ("a[08-10]", "a08 a09 a10"),
        ("a[8-10]", "a8 a9 a10"),
        ("a[098-101]", "a098 a099 a100 a101"),
        ("a[1-2]b[3-4]-ib", "a1b3-ib a1b4-ib a2b3-ib a2b4-ib"),
        ("gpu[1,3],cpu-[007-008],login", "gpu1 gpu3 cpu-007 cpu-008 login"),
        ("r[1-2n[1-2],5]", "r1-2n1 r1-2n2 r5"),
        ("a[1,2b[3-4]]c", "a1c a2b3c a2b4c"),
        ("ip-10-0-0-[1-2]", "ip-10-0-0-1 ip-10-0-0-2"),
    ],
)
def test_lists(text: str, expected: str) -> None:
    assert expand_hosts(text) == expected.split()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("a[1-3", "a '\\[' without its '\\]'"),
        ("a1-3]", "a '\\]' without its '\\['"),
        ("a[]", "an empty bracket"),
        ("a,,b", "an empty name"),
        ("a[1,,3]", "an empty name"),
        ("a[3-1]", "runs backwards: 3-1"),
        ("a b", "with blanks"),
        ("a[0-99999]", "more than 65536 hosts"),
        ("a[0-9999]b[0-9999]", "more than 65536 hosts"),
    ],
)
def test_what_is_no_list_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand_hosts(text)


def test_tasks_of_each_node() -> None:
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks("4") == [4]
    for text in ("", "2(x)", "x3", "-1", "2(x99999)"):
        with pytest.raises(ValueError, match="tasks per node"):
            expand_tasks(text)


def test_only_srun_makes_tasks() -> None:
    assert is_step({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"})
    assert is_step({"SLURM_PROCID": "1"})
    assert not is_step({"SLURM_NTASKS": "4"})
    assert not is_step({"SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"})
    assert not is_step({"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"})
    assert is_step({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "ENVIRONMENT": "BATCH"})


def test_steps_have_ports_of_their_own() -> None:
    ports = {
        default_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        for job in (1000, 1001)
        for step in range(4)
    }
    assert len(ports) == 8 and all(20000 <= port < 32000 for port in ports)
    assert 20000 <= default_port({}) < 32000
