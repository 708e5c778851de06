"""The in-edges among which nodes choose: compiled, in plain torch and in the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_scale.ops.candidates import Candidates, Choosing, candidates_along_types
from tests.ops import emulated

DEGREES = [0, 1, 2, 31, 32, 33, 64, 65, 1000, 1100, 0]
NUM_NODES = 300
KS = [-1, 0, 1, 5, 33, 64, 2000]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def in_edges(index_dtype: torch.dtype) -> dict[str, Tensor]:
    """In-edges in the order of their own times, which have ties, and sums of weights with zeros."""
    size, of = sum(DEGREES), generator()
    time = torch.cat([torch.randint(0, 9, (d,), generator=of).sort().values for d in DEGREES])
    node_time = torch.randint(0, 9, (NUM_NODES,), generator=of).sort().values
    drawn = [torch.randint(0, NUM_NODES, (d,), generator=of).sort().values for d in DEGREES]
    weight = torch.randint(0, 4, (size,), generator=of) - 1
    weight[sum(DEGREES[:6]) : sum(DEGREES[:7])] = 0
    sums = [each.clamp(min=0).cumsum(0) for each in weight.split(DEGREES)]
    return {
        "indptr": torch.tensor([0, *DEGREES]).cumsum(0),
        "indices": torch.cat(drawn).to(index_dtype),
        "time": time,
        "neighbor_time": node_time,
        "weight_prefix": torch.cat(sums),
    }


def expected(of: Choosing, replace: bool, last: bool) -> list[list[int]]:
    """Begin, end and count of each node, by loops."""
    found = []
    for i, v in enumerate(of.node.tolist()):
        first, stop = of.indptr[v : v + 2].tolist()
        chosen = list(range(first, stop))
        if of.latest is not None:
            times = of.time
            if times is None:
                assert of.neighbor_time is not None
                times = of.neighbor_time[of.indices.to(torch.int64)]
            latest = int(of.latest[i])
            after = -100 if of.after is None else int(of.after[i])
            end = first + sum(int(times[p]) <= latest for p in chosen)
            begin = first + sum(int(times[p]) <= after for p in chosen)
            if last and of.num_neighbors >= 0:
                begin = max(begin, end - of.num_neighbors)
            chosen, first, stop = list(range(begin, end)), begin, end
        count, k = len(chosen), of.num_neighbors
        if k >= 0 and count and (replace or k < count):
            weighted = chosen
            if of.weight_prefix is not None:
                sums = of.weight_prefix.tolist()
                start = int(of.indptr[v])
                weighted = [p for p in chosen if sums[p] > (sums[p - 1] if p > start else 0)]
            count = (k if weighted else 0) if replace else min(k, len(weighted))
        found.append([first, stop, count])
    return found


@pytest.fixture(params=["compiled", "plain", "emulated", "emulated backward"])
def way(request, monkeypatch):
    if "emulated" in request.param:
        order = "backward" if "backward" in request.param else "forward"
        monkeypatch.setenv("PYG_SCALE_EMULATOR_ORDER", order)
        with emulated.instead_of():
            yield candidates_along_types
        return

    def choose(*args: Any) -> list[Candidates]:
        if request.param == "plain":
            monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
        found = candidates_along_types(*args)
        monkeypatch.delenv("PYG_SCALE_KERNELS", raising=False)
        return found

    yield choose


def choosing(k: int, timed: str, weighted: bool, window: bool, dtype: torch.dtype) -> Choosing:
    graph, of = in_edges(dtype), generator()
    node = torch.randint(0, len(DEGREES), (25,), generator=of)
    out = Choosing(graph["indptr"], graph["indices"], node, k)
    if weighted:
        out = out._replace(weight_prefix=graph["weight_prefix"])
    if timed:
        latest = torch.randint(-1, 10, (25,), generator=of)
        out = out._replace(latest=latest, **{timed: graph[timed]})
        if window:
            out = out._replace(after=latest - torch.randint(1, 5, (25,), generator=of))
    return out


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("timed", "window"),
    [("", False), ("time", False), ("time", True), ("neighbor_time", False)],
)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_they_are_those_of_loops(way, timed, window, weighted, replace, last):
    asked = [choosing(k, timed, weighted, window, (torch.int64, torch.int32)[k % 2]) for k in KS]
    for of, found in zip(asked, way(asked, replace, last), strict=True):
        begin, end = found.begin, found.end
        if begin is None or end is None:  # all in-edges
            assert of.is_plain
            begin, end = of.indptr[of.node], of.indptr[of.node + 1]
        table = torch.stack([begin, end, found.counts], dim=1)
        assert table.tolist() == expected(of, replace, last)


def test_of_many_edge_types_there_is_one_kernel_for_16(way):
    asked = [choosing(k % 7, "time", k % 2 == 0, False, torch.int64) for k in range(18)]
    asked[3] = asked[3]._replace(**dict.fromkeys(("time", "latest", "weight_prefix")))
    asked[5] = asked[5]._replace(node=torch.empty(0, dtype=torch.int64), latest=asked[5].node[:0])
    for size, kernels in ((3, 1), (17, 1), (18, 2)):
        emulated.load()
        emulated.launches()
        found = way(asked[:size], False, False)
        if way is candidates_along_types:
            assert emulated.launches() == kernels
        for of, each in zip(asked, found, strict=False):
            assert each.counts.tolist() == [c for *_, c in expected(of, False, False)]


def test_a_graph_that_is_damaged_ends_the_kernel():
    of = choosing(3, "neighbor_time", False, False, torch.int64)._replace(
        node=torch.tensor([8, 9]), latest=torch.tensor([4, 4])
    )
    with emulated.instead_of():
        for wrong in (NUM_NODES, -1):
            bad = of._replace(indices=torch.full_like(of.indices, wrong))
            with pytest.raises(RuntimeError, match="candidates failed: the kernel trapped"):
                candidates_along_types([bad], False)
        bad = of._replace(indices=of.indices[:20])
        with pytest.raises(RuntimeError, match="candidates failed: the kernel trapped"):
            candidates_along_types([bad], False)


FAULTS = {
    "PYG_SCALE_FAULT_WHOLE_PIECES": "the candidates of a node differ",
    "PYG_SCALE_FAULT_COUNTS_ZEROS": "the candidates of a node differ",
    "PYG_SCALE_FAULT_TIES_ARE_LATER": "the candidates of a node differ",
    "PYG_SCALE_FAULT_NO_CHECKS": "AddressSanitizer: heap-buffer-overflow",
}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_alone_under_sanitizers_and_with_faults(fault):
    program = emulated.program("check_candidates.cpp", ["candidates"], fault=fault, of="candidates")
    done = emulated.run(program)
    if fault:
        assert done.returncode != 0
        assert FAULTS[fault] in done.stdout + done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "0 failures\n"), done.stdout + done.stderr
