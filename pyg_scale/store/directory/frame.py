"""Columns of tables as plain arrays: a ``TensorFrame`` taken apart, and put together again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.typing import WITH_TORCH_FRAME, TensorFrame

FRAME = "tf"
"""The attribute of nodes that is a ``TensorFrame``."""

COLUMNS = "tf_columns"
"""The value beside its arrays that says what is in them."""

TARGET = "tf_y"
"""The array of a frame's targets."""

PADDING = -2
"""Fills rows of ``tf_multicategorical`` behind their categories; -1 is a missing value."""

TIME_PARTS = 7
"""Year, month and day (from 0), day of the week (Monday is 0), hour, minute, second."""

_FLAT = ("numerical", "categorical")
_EMBEDDED = ("embedding", "text_embedded", "image_embedded")
_LISTS = "multicategorical"
_LONGEST = 1024  # categories in a row


@dataclass
class FrameColumns:
    """The columns of a ``TensorFrame``.

    Each semantic type (``stype``) of torch_frame has one array with a row per node,
    ``tf_<stype>``: ``numerical`` and ``categorical`` ``[n, columns]``, ``timestamp``
    ``[n, columns, 7]``, ``embedding`` ``[n, sum of lengths]``, ``multicategorical`` ``int32``
    ``[n, columns, longest]``, filled up with -2. Missing values are NaN or -1, as in torch_frame.

    Attributes:
        names: The columns of each stype, in the order of the array.
        offsets: For stypes of embeddings, where each column begins, and the end of the last.
        details: Statistics and categories by column, see :meth:`col_stats`.
        has_target: True if there is an array ``tf_y``.
    """

    names: dict[str, list[str]]
    offsets: dict[str, list[int]] = field(default_factory=dict)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)
    has_target: bool = False

    @property
    def arrays(self) -> dict[str, str]:
        """The name of the array of each stype."""
        return {stype: f"{FRAME}_{stype}" for stype in self.names}

    @property
    def parts(self) -> list[str]:
        """The names of all arrays."""
        return [*self.arrays.values(), *([TARGET] if self.has_target else [])]

    def plain(self) -> dict[str, Any]:
        """The value :data:`COLUMNS`: dictionaries, lists, strings, numbers and tensors."""
        found: dict[str, Any] = {"stypes": self.names}
        for name in ("offsets", "details", "has_target"):
            if value := getattr(self, name):
                found[name] = value
        return found

    @classmethod
    def of(cls, value: Any, rows: Mapping[str, tuple[int, ...]]) -> FrameColumns | None:
        """The columns that a value describes; ``None`` if it is another value of that name.

        Args:
            value: An attribute named :data:`COLUMNS`.
            rows: The shape of a row of each array that there is.
        """
        if not isinstance(value, dict) or not isinstance(value.get("stypes"), dict):
            return None
        offsets, details = value.get("offsets", {}), value.get("details", {})
        if not isinstance(offsets, dict) or not isinstance(details, dict):
            return None
        names = {s: n for s, n in value["stypes"].items() if _are_names(n)}
        out = cls(names, offsets, details, value.get("has_target") is True)
        fits = [out._fits(stype, rows.get(array)) for stype, array in out.arrays.items()]
        whole = len(names) == len(value["stypes"]) and bool(names) and all(fits)
        return out if whole and (not out.has_target or TARGET in rows) else None

    def _fits(self, stype: str, row: tuple[int, ...] | None) -> bool:
        if row is None:
            return False
        count = len(self.names[stype])
        if stype in _FLAT:
            return row == (count,)
        if stype == "timestamp":
            return row == (count, TIME_PARTS)
        if stype == _LISTS:
            return len(row) == 2 and row[0] == count
        if stype not in _EMBEDDED:
            return False
        ends = self.offsets.get(stype)
        if not isinstance(ends, list) or not all(type(end) is int for end in ends):
            return False
        return (
            len(ends) == count + 1 and ends[0] == 0 and ends == sorted(ends) and row == (ends[-1],)
        )

    def frame(self, arrays: Mapping[str, Tensor]) -> TensorFrame:
        """A ``TensorFrame`` of some rows; arrays are not copied, but lists are packed.

        Args:
            arrays: The arrays named by :attr:`parts`, each with the same number of rows.

        Raises:
            ModuleNotFoundError: If torch_frame is not installed.
        """
        torch_frame = _torch_frame()
        features = {
            torch_frame.stype(stype): self._feature(stype, arrays[array])
            for stype, array in self.arrays.items()
        }
        names = {torch_frame.stype(stype): list(each) for stype, each in self.names.items()}
        return TensorFrame(features, names, arrays[TARGET] if self.has_target else None)

    def _feature(self, stype: str, rows: Tensor) -> Any:
        if stype in _EMBEDDED:
            from torch_frame.data import MultiEmbeddingTensor

            ends = torch.tensor(self.offsets[stype], device=rows.device)
            return MultiEmbeddingTensor(rows.size(0), len(self.names[stype]), rows, ends)
        if stype == _LISTS:
            from torch_frame.data import MultiNestedTensor

            inside = rows != PADDING
            ends = torch.zeros(rows.size(0) * rows.size(1) + 1, dtype=torch.int64)
            ends = ends.to(rows.device)
            torch.cumsum(inside.sum(-1).view(-1), 0, out=ends[1:])
            values = rows[inside].to(torch.int64)
            return MultiNestedTensor(rows.size(0), rows.size(1), values, ends)
        return rows

    def sketch(self, num_rows: int) -> TensorFrame:
        """A frame without content, of the same columns and number of rows."""
        stype = _torch_frame().stype
        empty = {
            stype(s): torch.empty(num_rows, len(names), device="meta")
            for s, names in self.names.items()
        }
        return TensorFrame(empty, {stype(s): list(n) for s, n in self.names.items()})

    def col_stats(self) -> dict[str, dict[Any, Any]]:
        """The statistics of columns, as models of torch_frame take them.

        Returns:
            ``{column: {StatType: value}}``: mean, standard deviation and quantiles of numbers, the
            categories and their counts, the range of years, the length of embeddings.

        Raises:
            ModuleNotFoundError: If torch_frame is not installed.
        """
        _torch_frame()
        from torch_frame.data.stats import StatType

        found: dict[str, dict[Any, Any]] = {}
        for stype, names in self.names.items():
            for number, name in enumerate(names):
                known = self.details.get(name, {})
                stats = {StatType(k): v for k, v in known.items() if k in StatType.__members__}
                for key in (StatType.OLDEST_TIME, StatType.MEDIAN_TIME, StatType.NEWEST_TIME):
                    if key in stats:
                        stats[key] = torch.tensor(stats[key])
                if "categories" in known:
                    kind = StatType.MULTI_COUNT if stype == _LISTS else StatType.COUNT
                    stats[kind] = (categories(known), known["counts"].tolist())
                if stype in _EMBEDDED:
                    ends = self.offsets[stype]
                    stats[StatType.EMB_DIM] = ends[number + 1] - ends[number]
                found[name] = stats
        return found


def categories(details: Mapping[str, Any]) -> list[Any]:
    """The values of a column's categories, in the order of their numbers.

    Args:
        details: Of the column: ``categories``, ``int64`` ``[n]`` of integers, ``bool`` ``[n]``, or
            ``uint8`` ``[n, longest]`` of text in UTF-8, filled up with zeros.
    """
    values: Tensor = details["categories"]
    if values.dim() == 1:
        return values.tolist()
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in values.numpy()]


def taken_apart(frame: TensorFrame, what: str) -> tuple[FrameColumns, dict[str, Tensor]]:
    """The columns and the arrays of a frame.

    Args:
        frame: The frame.
        what: What errors call it.

    Raises:
        NotImplementedError: If it has a stype that has no array here.
        ValueError: If a row has more categories than an array takes.
    """
    columns = FrameColumns({}, has_target=frame.y is not None)
    arrays: dict[str, Tensor] = {}
    for stype, feature in frame.feat_dict.items():
        name = stype.value
        columns.names[name] = [str(each) for each in frame.col_names_dict[stype]]
        if name in (*_FLAT, "timestamp"):
            rows = feature
        elif name in _EMBEDDED:
            rows = feature.values
            columns.offsets[name] = feature.offset.tolist()
        elif name == _LISTS:
            rows = _filled_up(feature, what)
        else:
            raise NotImplementedError(
                f"{what} has columns of stype {name} ({', '.join(columns.names[name])}), which a "
                "graph directory does not hold: embed them, or leave them out"
            )
        arrays[f"{FRAME}_{name}"] = rows
    if frame.y is not None:
        arrays[TARGET] = frame.y
    return columns, arrays


def _filled_up(lists: Any, what: str) -> Tensor:
    """Lists of categories as rows of one length, ``int32`` ``[n, columns, longest]``."""
    lengths = lists.offset.diff()
    longest = max(1, int(lengths.max())) if lengths.numel() else 1
    if longest > _LONGEST:
        raise ValueError(f"{what} has {longest} categories in a row, at most {_LONGEST} are kept")
    out = torch.full((lengths.numel(), longest), PADDING, dtype=torch.int32)
    out[torch.arange(longest) < lengths.cpu().view(-1, 1)] = lists.values.cpu().to(torch.int32)
    return out.view(lists.num_rows, lists.num_cols, longest)


def without_columns(frame: TensorFrame, names: Iterable[str]) -> TensorFrame:
    """A frame without some columns; a column of ones where nothing is left, as in RelBench."""
    torch_frame, gone = _torch_frame(), set(names)
    out = copy.copy(frame)
    for stype, own in frame.col_names_dict.items():
        kept = [i for i, name in enumerate(own) if name not in gone]
        if len(kept) == len(own):
            continue
        if kept:
            out.feat_dict[stype] = frame.feat_dict[stype][:, kept]
            out.col_names_dict[stype] = [own[i] for i in kept]
        else:
            del out.feat_dict[stype], out.col_names_dict[stype]
    if not out.feat_dict:
        ones = torch.ones(len(frame), 1, device=frame.device)
        out.feat_dict = {torch_frame.numerical: ones}
        out.col_names_dict = {torch_frame.numerical: [CONSTANT]}
    return TensorFrame(out.feat_dict, out.col_names_dict, frame.y)


CONSTANT = "__const__"
"""The column of ones of a table that has no other."""


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(n, str) for n in value)


def _torch_frame() -> Any:
    if not WITH_TORCH_FRAME:
        raise ModuleNotFoundError(NOT_INSTALLED)
    import torch_frame

    return torch_frame


NOT_INSTALLED = (
    f"{FRAME!r} is a TensorFrame, and torch_frame is not installed: pip install pytorch-frame, or "
    f"take its arrays as they are, {FRAME}_numerical, {FRAME}_categorical, ..."
)
