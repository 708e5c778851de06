"""The Temporal Graph Benchmark (Huang et al., NeurIPS 2023): events, negatives, evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import TemporalData

from pyg_scale.files.plain_pickle import load_pickle
from pyg_scale_ogb.tgb_files import (
    LARGEST,
    TGBTable,
    negatives_file,
    parts_of,
    tgb_facts,
    tgb_folder,
)

_ROWS = 1 << 18


def load(name: str, root: str | PathLike[str] = "datasets") -> TemporalData:
    """The events of a data set, in memory.

    Args:
        name: Such as ``"tgbl-wiki"``.
        root: The folder of data sets, with ``tgbl_wiki``.

    Returns:
        ``src``, ``dst``, ``t`` ``int64``, ``msg`` ``float32`` and the masks ``train_mask``,
        ``val_mask`` and ``test_mask`` ``[num_events]``, numbered and split as by TGB.

    Raises:
        ValueError: If the data set is unknown or its table damaged.
        FileNotFoundError: If it is not there.
    """
    facts = tgb_facts(name)
    table = TGBTable(facts, tgb_folder(facts, root))
    columns = [np.concatenate(each) for each in zip(*table.pieces(_ROWS), strict=True)]
    src, dst, t, msg = (torch.from_numpy(each) for each in columns)
    part = torch.from_numpy(parts_of(columns[2]))
    return TemporalData(
        src=src,
        dst=dst + table.shift(int(src.max())),
        t=t,
        msg=msg,
        train_mask=part == 0,
        val_mask=part == 1,
        test_mask=part == 2,
    )


class Negatives:
    """The negative destinations with which TGB ranks each event of a part.

    Their files are pickles: plain numbers and arrays are read from them, and nothing in them is
    run.

    Args:
        name: Such as ``"tgbl-wiki"``.
        part: ``"val"`` or ``"test"``.
        root: The folder of data sets.

    Raises:
        ValueError: If the data set is unknown, or the file holds anything else.
        FileNotFoundError: If it is not there.
    """

    def __init__(self, name: str, part: str, root: str | PathLike[str] = "datasets") -> None:
        facts = tgb_facts(name)
        self.part, self.path = part, negatives_file(facts, tgb_folder(facts, root), part)
        found = load_pickle(self.path)
        if not isinstance(found, dict):
            raise ValueError(f"{self.path} must hold a dictionary by (src, dst, t)")
        self._of: dict[tuple[int, int, int], Any] = {}
        for event, negatives in found.items():
            if not isinstance(event, tuple) or len(event) != 3 or not all(map(_is_whole, event)):
                raise ValueError(f"{self.path} has the key {event!r}, which is no (src, dst, t)")
            self._of[int(event[0]), int(event[1]), int(event[2])] = negatives

    def __len__(self) -> int:
        """The number of events."""
        return len(self._of)

    def __call__(self, src: Tensor, dst: Tensor, t: Tensor) -> list[Tensor]:
        """The negative destinations of events.

        Args:
            src: Sources ``int64`` ``[n]``.
            dst: Destinations ``int64`` ``[n]``.
            t: Times ``int64`` ``[n]``.

        Returns:
            For each event, destinations ``int64`` ``[k]``.

        Raises:
            KeyError: If there are none for an event.
            ValueError: If the file has something else than nodes for an event.
        """
        out = []
        for event in zip(*(torch.as_tensor(each).tolist() for each in (src, dst, t)), strict=True):
            if event not in self._of:
                raise KeyError(f"{self.path} has no negatives of the event (src, dst, t) = {event}")
            negatives = _nodes(self._of[event])
            if negatives is None:
                raise ValueError(
                    f"{self.path} must have node numbers as negatives of the event (src, dst, t) = "
                    f"{event} (got {self._of[event]!r:.80})"
                )
            out.append(negatives)
        return out


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer | float | np.floating) and float(value).is_integer()


def _nodes(value: Any) -> Tensor | None:
    """Numbers of nodes, ``int64`` ``[k]``; ``None`` if they are none."""
    try:
        found = np.asarray(value).reshape(-1)
    except ValueError:  # lists of different lengths
        return None
    if (
        found.dtype.kind not in "iuf"
        or not ((found >= 0) & (found <= LARGEST) & (found == np.floor(found))).all()
    ):
        return None
    return torch.from_numpy(found.astype(np.int64))


class Evaluator:
    """Ranks events among their negatives, as TGB does.

    The rank of an event is the mean of two: that if it came before all negatives with its score,
    and that if it came after them.

    Args:
        k: Of ``hits@k``.

    Example::

        evaluator = Evaluator()
        evaluator.eval({"y_pred_pos": pos, "y_pred_neg": neg, "eval_metric": ["mrr"]})["mrr"]
    """

    metrics = ("mrr", "hits@")

    def __init__(self, name: str | None = None, k: int = 10) -> None:
        if name is not None:
            tgb_facts(name)
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k must be an integer, at least 1 (got {k!r})")
        self.k = k

    def eval(self, scores: Mapping[str, Any]) -> dict[str, float]:
        """The means over events.

        Args:
            scores: ``y_pred_pos`` ``[n]`` or ``[n, 1]``; ``y_pred_neg`` ``[n, k]``, or ``[k]`` of a
                single event; ``eval_metric``, if given, a list of ``"mrr"`` and ``"hits@"``.

        Returns:
            ``{"mrr": ..., "hits@10": ...}``.

        Raises:
            KeyError: If scores are missing.
            TypeError: If ``scores`` is no dictionary, or scores are no numbers.
            ValueError: If a metric is unknown, shapes do not fit, or a score is NaN.
        """
        if not isinstance(scores, Mapping):
            raise TypeError(f"scores must be a dictionary (got {type(scores).__name__})")
        for metric in scores.get("eval_metric", self.metrics):
            if str(metric).rstrip("0123456789") not in self.metrics:
                raise ValueError(f"eval_metric {metric!r} is not one of {', '.join(self.metrics)}")
        pos, neg = (_scores(scores, name) for name in ("y_pred_pos", "y_pred_neg"))
        if pos.dim() != 1 and pos.shape[1:] != (1,):
            raise ValueError(f"y_pred_pos must be of shape [n] or [n, 1] (got {list(pos.shape)})")
        pos = pos.view(-1, 1)
        neg = neg.view(1, -1) if neg.dim() == 1 and pos.size(0) == 1 else neg
        if neg.dim() != 2 or neg.size(0) != pos.size(0) or not pos.size(0):
            raise ValueError(
                f"y_pred_neg must have a row for each of the {pos.size(0)} events (got shape "
                f"{list(neg.shape)})"
            )
        rank = ((neg > pos).sum(1) + (neg >= pos).sum(1)).double() / 2 + 1
        return {
            f"hits@{self.k}": float((rank <= self.k).double().mean()),
            "mrr": float((1 / rank).mean()),
        }

    def eval_lists(self, pos: Tensor, neg: Sequence[Tensor]) -> dict[str, float]:
        """The means over events that have different numbers of negatives.

        Args:
            pos: Scores of events ``[n]``.
            neg: For each event, the scores of its negatives ``[k]``.
        """
        if len(neg) != pos.numel() or not neg:
            raise ValueError(f"there are {len(neg)} lists of negatives for {pos.numel()} events")
        found = [
            self.eval({"y_pred_pos": pos[i : i + 1], "y_pred_neg": neg[i]}) for i in range(len(neg))
        ]
        return {name: sum(each[name] for each in found) / len(found) for name in found[0]}


def _scores(scores: Mapping[str, Any], name: str) -> Tensor:
    if name not in scores:
        raise KeyError(f"{name} is missing")
    try:
        value = torch.as_tensor(scores[name]).detach().cpu()
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{name} must be a tensor or an array of numbers: {error}") from None
    if bool(value.isnan().any()):
        raise ValueError(f"{name} has a NaN")
    return value
