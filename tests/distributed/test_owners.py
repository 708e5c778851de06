"""Who answers for which part: balanced, the same on all ranks, and errors that name who."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyg_scale.comm.gloo import Gloo
from pyg_scale.distributed.owners import Owners, share_out
from pyg_scale.errors import GraphDirectoryError
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.testing import graphs
from pyg_scale.testing.ranks import run_ranks
from tests.distributed.across import in_parts, on_ranks, shares, spread


def test_all_ranks_can_read_everything() -> None:
    assert share_out([range(5)] * 3, 5) == ((0,), (1,), (2,), (0,), (1,))
    assert share_out([range(2)] * 4, 2) == ((0, 2), (1, 3))
    assert share_out([range(3)] * 3, 3) == ((0,), (1,), (2,))
    assert share_out([range(1)] * 3, 1) == ((0, 1, 2),)


def test_ranks_have_what_they_have() -> None:
    assert share_out([[1], [0], []], 2) == ((1,), (0,))
    assert share_out([[0, 1, 2], [2]], 4) == ((0,), (0,), (1,), ())


@given(
    readable=st.lists(st.sets(st.integers(0, 6)), min_size=1, max_size=5),
    num_parts=st.just(7),
)
def test_shares_are_what_they_should_be(readable: list[set[int]], num_parts: int) -> None:
    answer = share_out([sorted(each) for each in readable], num_parts)
    for part, ranks in enumerate(answer):
        assert all(part in readable[rank] for rank in ranks) and len(set(ranks)) == len(ranks)
        assert bool(ranks) == any(part in each for each in readable)
    busy = {rank for ranks in answer for rank in ranks}
    assert busy == {rank for rank, each in enumerate(readable) if each}


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("world_size", "num_parts"), [(2, 3), (3, 2), (4, 2), (4, 9)])
def test_agreed_on_all_ranks(tmp_path: Path, world_size: int, num_parts: int) -> None:
    path = in_parts(graphs.hostile(), tmp_path, num_parts)
    for through in ("mappings", "requests"):
        found = on_ranks(
            [path] * world_size, lambda data: data.owners, through=through, timeout=20.0
        )
        for rank, owners in enumerate(found):
            assert (
                owners.ranks_of
                == found[0].ranks_of
                == share_out([range(num_parts)] * world_size, num_parts)
            )
            assert owners.rank == rank and owners.num_parts == num_parts
            mine = set(range(num_parts)) if through == "mappings" else set(owners.owned())
            assert owners.direct == mine and mine
            for part in range(num_parts):
                asked = owners.ask(part)
                assert asked == rank if part in mine else part in found[asked].direct
    found = on_ranks(spread(path, shares(world_size, num_parts)), lambda data: data.owners)
    assert [sorted(each.direct) for each in found] == shares(world_size, num_parts)


def test_what_is_wrong_is_said_on_every_rank(tmp_path: Path) -> None:
    path = in_parts(graphs.hostile(), tmp_path, 3)
    other = in_parts(graphs.hostile(), tmp_path, 3, "hash")
    only_two = spread(path, [[0], [2]])
    cases = [
        (only_two, "no rank has part 1"),
        ([path, tmp_path / "nowhere"], "rank 1 could not open the graph: .*nowhere"),
        ([path, other], "rank 1 opened .*another graph"),
    ]
    for paths, message in cases:
        with pytest.raises(ExceptionGroup) as caught:
            on_ranks(paths, lambda data: None)
        assert len(caught.value.exceptions) == 2
        for error in caught.value.exceptions:
            with pytest.raises(GraphDirectoryError, match=message):
                raise error


def test_ranks_that_want_different_things(tmp_path: Path) -> None:
    path = in_parts(graphs.hostile(), tmp_path, 2)
    directory = GraphDirectory(path)

    def work(group):
        with Gloo.join(group) as comm:
            through = "mappings" if group.rank == 0 else "requests"
            with pytest.raises(ValueError, match="rank 1 opened the graph with through='requests'"):
                Owners.agree(comm, directory, through=through)

    run_ranks(2, work)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    path = in_parts(graphs.hostile(), tmp_path, 2)
    paths = spread(path, [[0], [1]])
    broken = paths[1] / "part-1/edges/indices.npy"
    content = broken.read_bytes()
    broken.unlink()
    broken.write_bytes(content[:-4])
    with pytest.raises(ExceptionGroup) as caught:
        on_ranks(paths, lambda data: None)
    assert "rank 1 could not open the graph" in str(caught.value.exceptions[0])
    assert "indices.npy" in str(caught.value.exceptions[0])
