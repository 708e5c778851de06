"""Requests and answers as JSON and as Arrow streams."""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_scale.serving import NewRows, Predictor

JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"
_ENCODER = json.JSONEncoder(allow_nan=False)  # made once, as json.dumps makes one for each call


class BadRequest(ValueError):
    """A request that cannot be understood; the text is for whoever sent it.

    Attributes:
        status: The HTTP status to answer with.
    """

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Asked:
    """The arguments of :meth:`pyg_scale.serving.Predictor.submit`."""

    ids: Tensor
    time: Any = None
    new_rows: NewRows | None = None


def read(body: bytes, content_type: str, predictor: Predictor) -> Asked:
    """The request in a body.

    Args:
        body: The bytes.
        content_type: Their form: JSON or an Arrow stream.
        predictor: Its graph has the dtypes of attributes.

    Raises:
        BadRequest: If it is none, with what was expected.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind == JSON:
        return _read_json(body, predictor)
    if kind == ARROW:
        return _read_arrow(body)
    raise BadRequest(f"Content-Type must be {JSON} or {ARROW} (got {kind or 'none'})", 415)


def write(rows: Tensor, accept: str) -> tuple[bytes, str]:
    """The answer with predictions ``[n, ...]``, and its content type.

    JSON has no NaN and no infinities: ``null`` stands for them. Arrow carries every value.

    Args:
        rows: The predictions.
        accept: The header ``Accept``: an Arrow stream if it names that, else JSON.
    """
    if ARROW in accept:
        return _write_arrow(rows), ARROW
    values = rows.tolist()
    try:
        text = _ENCODER.encode({"predictions": values})
    except ValueError:
        text = _ENCODER.encode({"predictions": _finite(values)})
    return text.encode(), JSON


def _finite(value: Any) -> Any:
    """Nested lists in which ``None`` stands for numbers that JSON does not have."""
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value if math.isfinite(value) else None


# JSON #####################################################################################


def _read_json(body: bytes, predictor: Predictor) -> Asked:
    try:
        found = json.loads(body, parse_constant=_no_json)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadRequest('the body must be an object, such as {"ids": [7, 12]}')
    unknown = sorted(found.keys() - {"ids", "time", "new_rows"})
    if unknown:
        raise BadRequest(f"unknown: {', '.join(unknown)}; expected ids, time and new_rows")
    new_rows = None
    if found.get("new_rows") is not None:
        new_rows = _new_rows(found["new_rows"], predictor)
    ids = _tensor(found.get("ids", []), torch.int64, "ids")
    if ids.dim() != 1:
        raise BadRequest("ids must be a list of integers")
    if not ids.numel() and new_rows is None:
        raise BadRequest("the request asks for no predictions: give ids or new_rows")
    return Asked(ids, _time(found.get("time")), new_rows)


def _no_json(name: str) -> None:
    """Refuse NaN and Infinity, which Python reads."""
    raise ValueError(f"{name} is no number of JSON")


def _time(value: Any) -> Any:
    """One time or a list of them; integers stay exact."""
    if value is None:
        return None
    values = value if isinstance(value, list) else [value]
    if any(isinstance(each, bool) or not isinstance(each, int | float) for each in values):
        raise BadRequest("time must be a number or a list of numbers")
    whole = all(isinstance(each, int) for each in values)
    return _tensor(value, torch.int64 if whole else torch.float64, "time")


def _new_rows(value: Any, predictor: Predictor) -> NewRows:
    if not isinstance(value, dict) or value.keys() - {
        "attributes",
        "edge_index",
        "edge_attributes",
    }:
        raise BadRequest("new_rows must have attributes, edge_index and edge_attributes only")
    neighborhoods = predictor.neighborhoods
    attributes = value.get("attributes")
    if not isinstance(attributes, dict):
        raise BadRequest('attributes of new_rows must be an object, such as {"x": [[0.5, 1.0]]}')
    rows = _attributes(attributes, neighborhoods.dtypes(neighborhoods.input_type), "attributes")
    edge_index, edge_attributes = value.get("edge_index"), value.get("edge_attributes") or {}
    if not isinstance(edge_attributes, dict):
        raise BadRequest("edge_attributes of new_rows must be an object")
    if neighborhoods.input_type is None:
        edges: Any = None
        if edge_index is not None:
            edges = _tensor(edge_index, torch.int64, "edge_index")
        of_edges: Any = _attributes(edge_attributes, neighborhoods.dtypes(None), "edge_attributes")
        return NewRows(rows, edges, of_edges)
    edges, of_edges = {}, {}
    if not isinstance(edge_index or {}, dict):
        raise BadRequest("edge_index of new_rows must be an object: edges by type")
    for name, each in (edge_index or {}).items():
        edges[_edge_type(name)] = _tensor(each, torch.int64, f"edge_index of {name}")
    for name, each in edge_attributes.items():
        edge_type = _edge_type(name)
        if not isinstance(each, dict):
            raise BadRequest(f"edge_attributes of {name} must be an object")
        of_edges[edge_type] = _attributes(each, neighborhoods.dtypes(edge_type), name)
    return NewRows(rows, edges, of_edges)


def _edge_type(name: str) -> tuple[str, str, str]:
    parts = name.split(",")
    if len(parts) != 3:
        raise BadRequest(f"an edge type is written 'source,relation,destination' (got {name!r})")
    return parts[0], parts[1], parts[2]


def _attributes(
    given: Mapping[str, Any], dtypes: Mapping[str, torch.dtype], what: str
) -> dict[str, Tensor]:
    unknown = sorted(given.keys() - dtypes.keys())
    if unknown:
        raise BadRequest(f"{what}: the graph has no {', '.join(unknown)}")
    return {name: _tensor(value, dtypes[name], name) for name, value in given.items()}


def _tensor(value: Any, dtype: torch.dtype, name: str) -> Tensor:
    """A tensor of nested lists of numbers."""
    numbers = _flat(value)
    kinds = {type(each) for each in numbers}
    real = dtype.is_floating_point or dtype.is_complex
    try:
        if not real:
            _check_whole(numbers, kinds, dtype, name)
        elif not kinds <= {int, float}:
            raise BadRequest(f"{name} must be numbers")
        made = torch.tensor(value, dtype=torch.float64 if real else dtype).to(dtype)
        if real and not bool(made.isfinite().all()):
            raise BadRequest(f"{name} must be numbers within the range of {dtype}")
        return made
    except BadRequest:
        raise
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise BadRequest(f"{name} must be numbers in lists of equal length: {reason}") from None


def _flat(value: Any) -> list[Any]:
    """The values in nested lists, in any order."""
    found, level = [], [value]
    while level:
        found += [each for each in level if not isinstance(each, list)]
        level = [each for part in level if isinstance(part, list) for each in part]
    return found


def _check_whole(numbers: list[Any], kinds: set[type], dtype: torch.dtype, name: str) -> None:
    """Refuse what an integer or a boolean attribute cannot hold."""
    if dtype == torch.bool:
        if not kinds <= {int, bool} or not {0, 1}.issuperset(numbers):
            raise BadRequest(f"{name} must be true, false, 0 or 1")
        return
    if not kinds <= {int}:
        raise BadRequest(f"{name} must be integers")
    limits = torch.iinfo(dtype)
    if numbers and (min(numbers) < limits.min or max(numbers) > limits.max):
        raise BadRequest(
            f"{name} must be integers within the range of {dtype}, {limits.min} to {limits.max}"
        )


# Arrow ####################################################################################


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise BadRequest("Arrow needs pyarrow on the server: pip install pyarrow", 415) from None
    return pyarrow


def _read_arrow(body: bytes) -> Asked:
    pyarrow = _arrow()
    try:
        for message in pyarrow.ipc.MessageReader.open_stream(body):
            if message.type == "schema":
                continue
            if message.type != "record batch":  # which may be compressed, too
                raise BadRequest(
                    f"an Arrow stream must have record batches only (got a {message.type}): no "
                    "column can be a dictionary"
                )
            if _is_compressed(bytes(message.metadata)):
                raise BadRequest("a compressed Arrow stream is not read: a small body may be huge")
        with pyarrow.ipc.open_stream(body) as reader:
            table = reader.read_all()
        table.validate(full=True)
    except BadRequest:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, struct.error) as error:
        raise BadRequest(f"the body is not an Arrow stream: {error}") from None
    names = table.column_names
    if "ids" not in names or set(names) - {"ids", "time"}:
        raise BadRequest("an Arrow stream must have a column ids, and time if nodes have times")
    for name in ("ids", "time"):
        if names.count(name) > 1:
            raise BadRequest(f"an Arrow stream has the column {name} more than once")
    columns = {}
    for name in names:
        column = table[name]
        number = pyarrow.types.is_integer(column.type)
        if not number and not (name == "time" and pyarrow.types.is_floating(column.type)):
            raise BadRequest(f"column {name} must be numbers (got {column.type})")
        if column.null_count:
            raise BadRequest(f"column {name} has missing values")
        wide = pyarrow.int64() if number else pyarrow.float64()
        try:
            found = column.cast(wide).combine_chunks()
        except pyarrow.ArrowException as error:
            raise BadRequest(f"column {name}: {error}") from None
        dtype = torch.int64 if number else torch.float64
        columns[name] = torch.tensor(found.to_pylist(), dtype=dtype)
    if not columns["ids"].numel():
        raise BadRequest("the request asks for no predictions: column ids is empty")
    return Asked(columns["ids"], columns.get("time"))


def _is_compressed(message: bytes) -> bool:
    """Return True if a record batch has a compression.

    Args:
        message: The metadata: a FlatBuffer ``Message`` (Arrow's ``format/Message.fbs``), whose
            field 2 is the ``RecordBatch``, whose field 3 is the compression.
    """

    def field(table: int, number: int) -> int:
        """The position of a field of a table; 0 if it is absent."""
        fields = table - struct.unpack_from("<i", message, table)[0]
        at = 4 + 2 * number
        if at >= struct.unpack_from("<H", message, fields)[0]:
            return 0
        offset: int = struct.unpack_from("<H", message, fields + at)[0]
        return table + offset if offset else 0

    header = field(struct.unpack_from("<I", message, 0)[0], 2)
    return header != 0 and field(header + struct.unpack_from("<I", message, header)[0], 3) != 0


def _write_arrow(rows: Tensor) -> bytes:
    pyarrow = _arrow()
    flat = rows.reshape(rows.size(0), -1)
    if flat.dtype in (torch.bfloat16, torch.float16):
        flat = flat.float()
    values = pyarrow.array(flat.contiguous().view(-1).numpy())
    column = pyarrow.FixedSizeListArray.from_arrays(values, flat.size(1))
    table = pyarrow.table({"predictions": column})
    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()
