"""Features in fewer bytes over any store: int8 or half precision inside, unchanged outside."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import FeatureStore, TensorAttr

from pyg_scale import plugins
from pyg_scale.ops import quantize
from pyg_scale.store.base import is_read_only, returns_views
from pyg_scale.store.lending import LentRows, lend, lends_rows
from pyg_scale.store.rows import dense, existing, integers, key_of, name_of, unknown

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
_CODES = ("int8", *_HALF)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in quantize.FLOATS}


class _Form(NamedTuple):
    """The stored form of a feature, and its original dtype. It is part of the stored name."""

    name: str
    code: str
    axis: str
    dtype: torch.dtype
    row: tuple[int, ...]

    def stored_name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        row = "x".join(map(str, self.row)) or "-"
        return f"{self.name}.{self.code}.{self.axis}.{dtype}.{row}"

    @property
    def head(self) -> int:
        """Number of rows that hold the scale and zero of columns."""
        columns = self.code == "int8" and self.axis == "column"
        return quantize.head_of(self.dtype) if columns else 0


def _form_of(stored_name: str) -> _Form | None:
    """The form that a stored name describes; ``None`` for other names."""
    parts = stored_name.rsplit(".", 4)
    if len(parts) != 5 or parts[1] not in _CODES or parts[2] not in ("row", "column"):
        return None
    name, code, axis, dtype, row = parts
    sizes = [] if row == "-" else row.split("x")
    if dtype not in _DTYPES or not all(size.isdigit() for size in sizes):
        return None
    return _Form(name, code, axis, _DTYPES[dtype], tuple(map(int, sizes)))


class Quantized(FeatureStore):
    """A feature store whose floating point features take a half or a quarter of the bytes.

    Features are quantised and kept in another store; rows are returned in their original dtype,
    decoded while they are gathered. ``int8`` keeps a scale and a zero per row (8 bytes, 16 for
    ``float64``) or per column: the error of a number is at most half a scale, plus its rounding.
    :meth:`error_bound` returns that bound.

    Features that are not floating point numbers are refused; a loader that fills the store by name
    leaves them in the graph. Features that were put into the inner store directly are returned
    unchanged if they are not floating point numbers.

    Args:
        store: The inner store: a name or a ``FeatureStore``.
        dtype: ``"int8"``, ``"fp16"`` or ``"bf16"``.
        axis: With ``"int8"``, the numbers that share a scale: those of a ``"row"`` or of a
            ``"column"``. Columns take fewer bytes; with rows, large rows do not reduce the
            precision of small ones.

    Raises:
        TypeError: If ``store`` is not a feature store.
        ValueError: If another argument is invalid, or the store has floating point features that
            were not put through a ``Quantized``.

    Example::

        store = Quantized(Mmap("features/"), "int8")
        store["paper", "x", None] = x
        assert ((store["paper", "x", None] - x).abs() <= store.error_bound("x", "paper")).all()
    """

    dtypes = frozenset(quantize.FLOATS)
    """The dtypes that can be put; any other raises ``TypeError``."""

    def __init__(self, store: Any = "memory", dtype: str = "int8", *, axis: str = "row") -> None:
        super().__init__()
        if dtype not in _CODES:
            raise ValueError(f"dtype must be one of {', '.join(_CODES)} (got {dtype!r})")
        if axis not in ("row", "column"):
            raise ValueError(f"axis must be 'row' or 'column' (got {axis!r})")
        if axis == "column" and dtype != "int8":
            raise ValueError(f"axis='column' is for dtype='int8': {dtype} has no scale")
        if isinstance(store, str):
            store = plugins.get("feature_store", store)()
        if not isinstance(store, FeatureStore):
            raise TypeError(
                f"store must be a name or a FeatureStore (got {type(store).__name__}); the dtype "
                "is the second argument"
            )
        self.__dict__.update(store=store, code=dtype, axis=axis, _forms={})
        self.__dict__["read_only"] = is_read_only(store)
        self._check_inner()

    def accepts(self, value: Any) -> bool:
        """Return True if a tensor or an array can be put."""
        return dense(value, "the feature").dtype in self.dtypes

    # Writing ###############################################################################

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        """Quantise a tensor ``[n, ...]``, or rows of a stored one.

        Raises:
            TypeError: If it is not of floating point numbers.
            ValueError: If a number is NaN, infinite or too large, naming the row; or if rows are
                given in another shape or dtype.
            NotImplementedError: If rows are given and columns share scales.
        """
        value = dense(tensor, name_of(attr))
        if value.dtype not in self.dtypes:
            raise TypeError(
                f"{name_of(attr)} has {value.dtype}, only floating point features can be "
                "quantised: put it into a store of its own"
            )
        group, name = key_of(attr)
        if attr.index is not None:
            return self._put_rows(value, attr)
        form = _Form(name, self.code, self.axis, value.dtype, tuple(value.shape[1:]))
        stale = [known for known in self._stored(group, name) if known != form]
        self.store.put_tensor(self._encode(value, form, attr), group, form.stored_name(), None)
        self._forms[group, name] = form
        for known in stale:
            self.store.remove_tensor(group, known.stored_name(), None)
        return True

    def _put_rows(self, value: Tensor, attr: TensorAttr) -> bool:
        form = self._find(attr)
        if form.head:
            raise NotImplementedError(
                f"rows of {name_of(attr)} cannot be replaced, as its columns share scales: put the "
                "whole tensor, or use axis='row'"
            )
        index = attr.index
        if not isinstance(index, slice):
            index = integers(index, attr)
            value = value.unsqueeze(0) if index.dim() == 0 else value
            index = index.view(-1)
        if value.dtype != form.dtype or tuple(value.shape[1:]) != form.row:
            raise ValueError(
                f"{name_of(attr)} takes {form.dtype} of rows {list(form.row)} "
                f"(got {value.dtype} of rows {list(value.shape[1:])})"
            )
        encoded = self._encode(value, form, attr)
        return self.store.put_tensor(encoded, key_of(attr)[0], form.stored_name(), index)

    def update_tensor(self, tensor: Any, *args: Any, **kwargs: Any) -> bool:
        """Replace a tensor, or rows of it.

        Raises:
            KeyError: If it is not stored.
        """
        attr = self._tensor_attr_cls.cast(*args, **kwargs)
        self._find(attr)
        return self.put_tensor(tensor, attr)

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        group, name = key_of(attr)
        self._forms.pop((group, name), None)
        removed = False
        for form in self._stored(group, name):
            removed |= self.store.remove_tensor(group, form.stored_name(), None)
        return removed

    def _encode(self, value: Tensor, form: _Form, attr: TensorAttr) -> Tensor:
        flat = value.detach().cpu().reshape(value.size(0), math.prod(form.row))
        try:
            if form.code in _HALF:
                return quantize.narrow(flat, _HALF[form.code])
            if form.axis == "row":
                return quantize.quantize_rows(flat)
            return quantize.quantize_columns(flat)
        except ValueError as error:
            raise ValueError(f"{name_of(attr)}: {error}") from None

    # Reading ###############################################################################

    def _get_tensor(self, attr: TensorAttr) -> Tensor:
        """Read rows of a tensor, decoded.

        Raises:
            KeyError: If it is not stored.
            IndexError: If a row does not exist.
        """
        return self._multi_get_tensor([attr])[0]

    def _multi_get_tensor(self, attrs: list[TensorAttr]) -> list[Tensor]:
        """Read all tensors at once, so that the inner store may merge reads."""
        for attempt in (0, 1):
            forms = [self._find(attr, fresh=attempt == 1) for attr in attrs]
            try:
                asked = [self._inner(attr, form) for attr, form in zip(attrs, forms)]
                got = self.store.multi_get_tensor(asked)
                break
            except KeyError:
                if attempt:  # else another process replaced it in the meantime
                    raise
        return [self._decode(a, f, tensor) for a, f, tensor in zip(attrs, forms, got)]

    def _inner(self, attr: TensorAttr, form: _Form | None) -> TensorAttr:
        """The request to the inner store: the whole tensor if that is not a copy, else rows."""
        group, name = key_of(attr)
        index: Any = attr.index
        if form is None:
            return self._tensor_attr_cls(group, name, index)
        if returns_views(self.store):
            index = None
        elif index is not None:
            size = self._rows_of(group, form)
            rows = self._row_numbers(attr, size)
            if form.head:  # the scales are read with the rows, so that they fit each other
                tail = torch.arange(size, size + form.head)
                rows = torch.cat([existing(rows, size, attr), tail])
            index = rows
        return self._tensor_attr_cls(group, form.stored_name(), index)

    def _decode(self, attr: TensorAttr, form: _Form | None, stored: Tensor) -> Tensor:
        if form is None:
            return stored
        scale = zero = None
        if form.head:
            stored, tail = stored[: -form.head], stored[-form.head :]
            scale, zero = quantize.columns_of(tail, form.dtype)
        if attr.index is not None and returns_views(self.store):
            rows = self._row_numbers(attr, stored.size(0))
        else:
            rows = torch.arange(stored.size(0))
        try:
            flat = quantize.dequantize(stored, rows, form.dtype, scale, zero)
        except IndexError as error:
            raise IndexError(f"{name_of(attr)}: {error}") from None
        out = flat.view(-1, *form.row) if flat.numel() else flat.view(flat.size(0), *form.row)
        single = attr.index is not None and not isinstance(attr.index, slice)
        return out[0] if single and integers(attr.index, attr).dim() == 0 else out

    @property
    def lends_rows(self) -> bool:
        """True if the inner store has rows that can be read where they are."""
        return lends_rows(self.store)

    def lend_rows(self, attr: TensorAttr) -> LentRows | None:
        """Rows as they are stored, with what decodes them; ``None`` if they have to be read.

        Raises:
            KeyError: If it is not stored.
        """
        for attempt in (0, 1):
            form = self._find(attr, fresh=attempt == 1)
            if form is None:
                return lend(self.store, attr)
            if len(form.row) != 1:
                return None
            try:
                return self._lend_stored(attr, form)
            except KeyError:
                if attempt:  # else another process replaced it in the meantime
                    raise
        return None

    def _lend_stored(self, attr: TensorAttr, form: _Form) -> LentRows | None:
        group, _ = key_of(attr)
        index: Any = attr.index
        if form.head:  # the scales are lent with the rows, so that they fit each other
            size = self._rows_of(group, form)
            index = torch.cat([index, torch.arange(size, size + form.head)])
        lent = lend(self.store, self._tensor_attr_cls(group, form.stored_name(), index))
        if lent is None or not form.head:
            return lent and LentRows(lent.table.read_as(form.dtype), lent.places)
        table, places = lent
        tail = table.stored.gather(places[-form.head :])
        scales = quantize.columns_of(tail, form.dtype)
        return LentRows(table.read_as(form.dtype, *scales), places[: -form.head])

    def _row_numbers(self, attr: TensorAttr, size: int) -> Tensor:
        if isinstance(attr.index, slice):
            begin, end, step = attr.index.indices(size)
            return torch.arange(begin, max(begin, end), step)
        return integers(attr.index, attr).view(-1)

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        group, name = key_of(attr)
        try:
            form = self._find(attr)
        except KeyError:
            return None
        if form is None:
            return self.store.get_tensor_size(group_name=group, attr_name=name)
        return (self._rows_of(group, form), *form.row)

    def _rows_of(self, group: Any, form: _Form) -> int:
        size = self.store.get_tensor_size(group_name=group, attr_name=form.stored_name())
        if size is None:
            raise KeyError(form.stored_name())
        return int(size[0]) - form.head

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """The stored attributes, in the order of the inner store."""
        found: dict[Any, None] = {}
        for attr in self.store.get_all_tensor_attrs():
            group, name = key_of(attr)
            form = _form_of(name)
            found[group, name if form is None else form.name] = None
        return [self._tensor_attr_cls(group, name) for group, name in found]

    def error_bound(self, attr_name: str, group_name: Any = None, index: Any = None) -> Tensor:
        """Largest error of each stored number: ``float64``, one for each or to broadcast.

        With ``int8``, it is half the scale of the row (or column), plus the rounding of
        ``q * scale + zero``, which matters if a row's numbers differ by less than their last
        digits. In half precision, it is the rounding of the number: ``2**-11`` (``fp16``) or
        ``2**-8`` (``bf16``) of it, or of ``2**-14`` (``2**-126``) if it is smaller.

        Args:
            attr_name: The feature.
            group_name: Its node type or edge type.
            index: The rows; all if ``None``.

        Raises:
            KeyError: If it is not stored.
        """
        attr = self._tensor_attr_cls(group_name, attr_name, index)
        form = self._find(attr)
        if form is None:
            return torch.zeros((), dtype=torch.float64)
        size = self._rows_of(group_name, form)
        wanted = None if index is None else existing(self._row_numbers(attr, size), size, attr)
        name = form.stored_name()
        shape = (-1, *[1] * len(form.row))
        if form.head:
            tail = self.store.get_tensor(group_name, name, slice(size, size + form.head))
            bound = quantize.bound_of(*quantize.columns_of(tail, form.dtype), form.dtype)
            return bound.view(form.row)
        stored = self.store.get_tensor(group_name, name, wanted)
        if form.code in _HALF:
            bound = quantize.narrow_bound_of(stored, form.dtype)
            return bound.view(stored.size(0), *form.row)
        return quantize.bound_of(*quantize.rows_of(stored, form.dtype), form.dtype).view(shape)

    # Stored forms #########################################################################

    def _stored(self, group: Any, name: str) -> list[_Form]:
        """The forms of a feature; several only while it is being replaced."""
        found = []
        for attr in self.store.get_all_tensor_attrs():
            known, stored_name = key_of(attr)
            form = _form_of(stored_name) if known == group else None
            if form is not None and form.name == name:
                found.append(form)
        return found

    def _find(self, attr: TensorAttr, fresh: bool = False) -> Any:
        """The form of a feature; ``None`` if the inner store has it unquantised."""
        group, name = key_of(attr)
        if fresh:
            self._forms.pop((group, name), None)
        if (group, name) not in self._forms:
            if found := self._stored(group, name):
                self._forms[group, name] = found[-1]
            elif self.store.get_tensor_size(group_name=group, attr_name=name) is not None:
                return None
            else:
                raise unknown(attr, map(key_of, self.get_all_tensor_attrs()))
        return self._forms[group, name]

    def _check_inner(self) -> None:
        for attr in self.store.get_all_tensor_attrs():
            group, name = key_of(attr)
            if _form_of(name) is not None:
                continue
            size = self.store.get_tensor_size(group_name=group, attr_name=name)
            if size and self.store.get_tensor(group, name, slice(0, 1)).dtype in self.dtypes:
                raise ValueError(
                    f"{name_of(attr)} is already in the store, and not quantised: pass an empty "
                    "store and put the features through this one"
                )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_forms": {}}

    def __repr__(self) -> str:
        axis = f", axis={self.axis!r}" if self.axis != "row" else ""
        return f"{type(self).__name__}({self.store!r}, {self.code!r}{axis})"
