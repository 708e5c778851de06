"""Ranks that die, are late or answer garbage, and requests that make no sense."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import TensorAttr

from pyg_scale.distributed.features.serve import MAX_TEXT, FeatureAnswers
from pyg_scale.errors import CommError, CommTimeoutError
from pyg_scale.loader import NeighborLoader
from pyg_scale.store.directory import GraphDirectory
from tests.distributed.rank_features import ranks
from tests.distributed.test_features import edges_with_features, parts_of

INDEX = torch.arange(300)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parts_of(edges_with_features(), tmp_path_factory.mktemp("faults"))


def changed(change: Callable[[list[Tensor]], Any]) -> Any:
    """What rank 1 answers with, made of what it should."""
    return lambda rank, answers: (lambda got: change(answers(got))) if rank == 1 else answers


def _raise(_: Any) -> Any:
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found[:-1], "rank 1 answered .* with 3 tensors, expected 4"),
        (lambda found: [], "rank 1 answered .* with 0 tensors"),
        (lambda found: [each[:-1] for each in found], r"rank 1 answered .*'x' of the nodes.*\[\d+"),
        (lambda found: [each.view(-1) for each in found], "rank 1 answered .*'x' of the nodes"),
        (lambda found: [each.int() for each in found], "rank 1 answered .* with torch.int32"),
        (_raise, "'x' of the nodes.*rank 1 could not answer: OSError: the disk is gone"),
    ],
)
def test_garbage_names_the_rank(path: Path, change: Any, message: str) -> None:
    with ranks(path, 2, handler=changed(change)) as made:
        store = made.features[0]
        attrs = [TensorAttr(None, name, INDEX) for name in ("x", "y")]
        with pytest.raises(CommError, match=message):
            store.multi_get_tensor(attrs)
        with pytest.raises(CommError, match="rank 1"):  # which is not the end of it
            store.multi_get_tensor(attrs)


@pytest.mark.parametrize("options", [{}, {"cache": "2kB"}, {"cache": "2kB", "policy": "belady"}])
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_hear_of_a_rank_that_died(
    path: Path, workers: int, options: dict[str, Any]
) -> None:
    data = edges_with_features()
    with ranks(path, 3, **options) as made:
        loader = NeighborLoader(
            data, [4], batch_size=10, seed=0, num_workers=workers, feature_store=made.features[0]
        )
        batches = iter(loader)
        next(batches)
        made.services[2].close()
        with pytest.raises(CommError, match="rank 2"):
            list(batches)


def test_a_late_rank_is_named(path: Path) -> None:
    release = threading.Event()

    def late(found: list[Tensor]) -> list[Tensor]:
        release.wait(20)
        return found

    with ranks(path, 2, handler=changed(late), timeout=0.5) as made:
        try:
            with pytest.raises(CommTimeoutError, match="'x' of the nodes.*rank 1 did not answer"):
                made.features[0].get_tensor(None, "x", INDEX)
        finally:
            release.set()


def test_a_closed_service(path: Path) -> None:
    with ranks(path, 2) as made:
        made.services[0].close()
        with pytest.raises(CommError, match="closed"):
            made.features[0].get_tensor(None, "x", INDEX)


def text(entries: Any) -> Tensor:
    content = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return torch.tensor(list(content), dtype=torch.uint8)


IDS = torch.tensor([0])


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ([], ValueError, "must begin with a text"),
        ([text([]).int()], ValueError, "must begin with a text"),
        ([text([]).view(1, -1)], ValueError, "must begin with a text"),
        ([text(b"[")], ValueError, "not JSON"),
        ([text(b"\xff\xfe")], ValueError, "not JSON"),
        ([text(b"[" * 5000)], ValueError, "not JSON"),
        ([torch.full((MAX_TEXT + 1,), 32, dtype=torch.uint8)], ValueError, "at most"),
        ([text({}), IDS], ValueError, "one tensor for each entry"),
        ([text([[False, None, 0, ["x"]]])], ValueError, "one tensor for each entry"),
        ([text([[False, None, 0]]), IDS], ValueError, "four fields"),
        ([text([[0, None, 0, ["x"]]]), IDS], ValueError, "wrong types"),
        ([text([[False, None, True, ["x"]]]), IDS], ValueError, "wrong types"),
        ([text([[False, None, 0, []]]), IDS], ValueError, "wrong types"),
        ([text([[False, ["a"], 0, ["x"]]]), IDS], ValueError, "wrong types"),
        ([text([[False, None, 0, ["z"]]]), IDS], KeyError, "no attribute 'z'"),
        ([text([[True, None, 0, ["x"]]]), IDS], KeyError, "no attribute 'x' of the edges"),
        ([text([[False, "user", 0, ["x"]]]), IDS], KeyError, "nodes 'user'"),
        ([text([[False, None, 1, ["x"]]]), IDS], IndexError, "part 1 is not served, only"),
        ([text([[False, None, -1, ["x"]]]), IDS], IndexError, "part -1 is not served, only"),
        ([text([[False, None, 0, ["x"]]]), IDS.float()], ValueError, "int64 or int32"),
        ([text([[False, None, 0, ["x"]]]), IDS.view(1, 1)], ValueError, "int64 or int32"),
        ([text([[False, None, 0, ["x"]]]), IDS - 1], IndexError, "row -1 of the nodes"),
        ([text([[False, None, 0, ["x"]]]), IDS + 2**40], IndexError, "does not exist"),
        ([text([[True, None, 0, ["kind"]]]), IDS + 2_000], IndexError, "does not exist"),
    ],
)
def test_requests_that_make_no_sense(
    path: Path, tensors: list[Tensor], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        FeatureAnswers(GraphDirectory(path), [0, 2])(tensors)


def test_edges_of_another_part_are_refused(path: Path) -> None:
    directory = GraphDirectory(path)
    other = directory.part(1).edge_ids(None)
    request = [text([[True, None, 0, ["kind"]]]), other[:1]]
    with pytest.raises(IndexError, match=f"edge {int(other[0])} is not in the edges of part 0"):
        FeatureAnswers(directory, [0, 2])(request)


def test_an_answer_may_not_be_too_long(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyg_scale.distributed.features.serve.MAX_BYTES", 100)
    request = [text([[False, None, 0, ["x"]]]), torch.zeros(6, dtype=torch.int64)]
    with pytest.raises(ValueError, match="120 bytes, more than 100"):
        FeatureAnswers(GraphDirectory(path), [0, 2])(request)
