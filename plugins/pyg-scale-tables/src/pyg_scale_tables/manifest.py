"""The manifest of a database: its tables, their keys, times and columns, and its tasks."""

from __future__ import annotations

import datetime
import difflib
import glob
import os
import reprlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

NAME = "manifest.yaml"
STYPES = ("numerical", "categorical", "multicategorical", "timestamp", "embedding", "text_embedded")
TIME_UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
FOREIGN = ("sqlite", "postgres", "mysql")
"""Databases that DuckDB reads by an extension."""
SPLITS = ("train", "val", "test")

_LARGEST = 4 << 20  # bytes of a manifest
_ENDINGS = ("parquet", "arrow", "feather", "csv", "csv.gz", "tsv", "tsv.gz")
_TOP = {"name", "manifest_version", "description", "val_timestamp", "test_timestamp", "tables"}
_TABLE = {"pkey", "time_col", "fkeys", "file", "query", "stypes", "drop", "time_unit"}


@dataclass(frozen=True)
class ColumnType:
    """The semantic type of a column, as torch_frame names it.

    Attributes:
        stype: One of :data:`STYPES`.
        sep: Separates the categories in a text.
    """

    stype: str
    sep: str | None = None


@dataclass(frozen=True)
class TableSpec:
    """One table.

    Attributes:
        name: Its name, and that of the node type.
        files: The files that hold its rows, one after the other.
        query: The DuckDB query that yields its rows, if it has no files.
        pkey: The column of its primary key.
        time_col: The column of the time of a row.
        time_unit: The unit of a time column of integers: ``"s"``, ``"ms"``, ``"us"``, ``"ns"``.
        fkeys: The table that each column of foreign keys refers to.
        stypes: Types of columns; of the others they follow from what they hold.
        drop: Columns to leave out.
    """

    name: str
    files: tuple[Path, ...]
    query: str | None
    pkey: str | None
    time_col: str | None
    time_unit: str | None
    fkeys: Mapping[str, str]
    stypes: Mapping[str, ColumnType]
    drop: tuple[str, ...]

    def identity(self) -> Any:
        """All of it as JSON."""
        stypes = {name: [each.stype, each.sep] for name, each in self.stypes.items()}
        rest = [self.query, self.pkey, self.time_col, self.time_unit, dict(self.fkeys)]
        return [self.name, *rest, stypes, list(self.drop)]


@dataclass(frozen=True)
class TaskSpec:
    """One task, as RelBench describes it.

    Attributes:
        name: Its name.
        task_type: ``"binary_classification"``, ...
        entity_table: The table of its entities.
        entity_col: The column of the label tables that holds them; ``None`` for their primary key.
        target_col: The column of the targets.
        time_col: The column of the times.
        destination_table: In a recommendation task, the table of what is recommended.
        destination_col: And its column, of lists of keys.
        hidden: Columns that a model must not see, as (table, column).
        files: The label table of each split.
    """

    name: str
    task_type: str
    entity_table: str
    entity_col: str | None
    target_col: str | None
    time_col: str | None
    destination_table: str | None
    destination_col: str | None
    hidden: tuple[tuple[str, str], ...]
    files: Mapping[str, Path]


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read and checked.

    Attributes:
        path: Its file.
        name: The name of the database.
        tables: By name, in the order of the file.
        database: A DuckDB database, or ``"sqlite:..."`` and the like; ``None`` if there is none.
        tasks: By name.
    """

    path: Path
    name: str
    tables: Mapping[str, TableSpec]
    database: str | None
    tasks: Mapping[str, TaskSpec]

    @classmethod
    def read(cls, source: str | os.PathLike[str]) -> Manifest:
        """Read a manifest, and those of the tasks beside it.

        Args:
            source: The file, or the folder that holds ``manifest.yaml``.

        Raises:
            FileNotFoundError: If it, or a file of a table, is missing.
            ValueError: If it is no YAML, or says something that is not understood; names the entry.
        """
        path = Path(source)
        path = path / NAME if path.is_dir() else path
        entries = _Entries.of(path)
        entries.warn_of_others(_TOP | {"database"})
        version = entries.get("manifest_version", int, 1)
        if version != 1:
            raise ValueError(f"{path}: manifest_version is {version}, this release reads 1")
        database = entries.get("database", str)
        found = entries.required("tables", dict)
        if not found:
            raise ValueError(f"{path} has no tables")
        tables = {}
        for name, table in found.items():
            spec = _table(entries.below(f"table {name!r}", table), str(name), database is not None)
            tables[spec.name] = spec
        for spec in tables.values():
            for column, parent in spec.fkeys.items():
                _check_parent(path, spec, column, tables.get(parent), parent)
        tasks = {}
        for file in sorted((path.parent / "tasks").glob(f"*/{NAME}")):
            task = _task(_Entries.of(file), file, tables)
            tasks[task.name] = task
        return cls(path, entries.get("name", str) or path.parent.name, tables, database, tasks)

    @property
    def database_at(self) -> tuple[str, str]:
        """The kind of the database, empty without one, and its file or its address."""
        if self.database is None:
            return "", ""
        kind, _, rest = self.database.partition(":")
        if kind not in FOREIGN:
            kind, rest = "duckdb", self.database
        return kind, str(self.path.parent / rest) if kind in ("duckdb", "sqlite") else rest

    @property
    def files(self) -> list[Path]:
        """The manifests and the files of all tables."""
        out = [self.path]
        for table in self.tables.values():
            out += table.files
        kind, name = self.database_at
        if kind in ("duckdb", "sqlite") and Path(name).is_file():
            out.append(Path(name))
        for task in self.tasks.values():
            out += [next(iter(task.files.values())).parent / NAME, *task.files.values()]
        return out


class _Entries:
    """The entries of a mapping in a manifest.

    Args:
        where: What errors call it.
        values: The mapping.
        folder: Where files that it names are.
    """

    def __init__(self, where: str, values: Any, folder: Path) -> None:
        if not isinstance(values, dict):
            raise ValueError(f"{where} must be a mapping (got {_shown(values)})")
        self.where, self.values, self.folder = where, values, folder

    @classmethod
    def of(cls, path: Path) -> _Entries:
        """Those of a file.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is no YAML.
        """
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {str(path)!r}")
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"{path} is too large for a manifest")
        try:
            values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{path} is no YAML that can be read: {reason}") from None
        return cls(str(path), values, path.parent)

    def below(self, name: str, values: Any) -> _Entries:
        """A mapping in this one."""
        return _Entries(f"{self.where}, {name}", {} if values is None else values, self.folder)

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A value, or the default.

        Raises:
            ValueError: If it is of another type.
        """
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not kind:
            raise ValueError(f"{self.where}: {name} must be {_KINDS[kind]} (got {_shown(value)})")
        return value

    def required(self, name: str, kind: type) -> Any:
        """A value that must be there.

        Raises:
            ValueError: If it is missing, or of another type.
        """
        value = self.get(name, kind)
        if value is None:
            raise ValueError(f"{self.where} has no {name}")
        return value

    def texts(self, name: str) -> dict[str, str]:
        """A mapping of names to names.

        Raises:
            ValueError: If it is something else.
        """
        found = self.get(name, dict, {})
        for key, value in found.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise ValueError(
                    f"{self.where}: {name} must map names to names (got "
                    f"{_shown(key)}: {_shown(value)})"
                )
        return found

    def names(self, name: str) -> tuple[str, ...]:
        """A list of names, or one name.

        Raises:
            ValueError: If it is something else.
        """
        value = self.values.get(name)
        found = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise ValueError(f"{self.where}: {name} must be a name or a list (got {_shown(value)})")
        return tuple(found)

    def refuse_others(self, known: set[str]) -> None:
        """Refuse entries that nobody reads.

        Raises:
            ValueError: If there is one; says what may be meant.
        """
        for name in self.values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                hint = (
                    f": did you mean {near[0]}?" if near else f", only {', '.join(sorted(known))}"
                )
                raise ValueError(f"{self.where} has an unknown entry {_shown(name)}{hint}")

    def warn_of_others(self, known: set[str]) -> None:
        """Say which entries nobody reads."""
        if others := [str(name) for name in self.values if name not in known]:
            warnings.warn(
                f"{self.where}: nothing is done about {', '.join(others)}",
                RuntimeWarning,
                stacklevel=4,
            )


class _Loader(yaml.SafeLoader):
    """Reads plain values, and refuses a key that is there twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # a few lines make billions of entries
                raise yaml.YAMLError(f"a merge key ({key_node.start_mark})")
            key = self.construct_object(key_node, deep=True)
            try:
                twice = key in keys
                keys.add(key)
            except TypeError:
                raise yaml.YAMLError(f"a key is no plain value ({key_node.start_mark})") from None
            if twice:
                raise yaml.YAMLError(f"the key {key!r} is there twice ({key_node.start_mark})")
        return super().construct_mapping(node, deep)


_KINDS = {str: "text", int: "an integer", dict: "a mapping", list: "a list"}


def _shown(value: Any) -> str:
    if isinstance(value, datetime.date):
        return f"the date {value}"
    return reprlib.repr(value)  # of bounded length


def _table(entries: _Entries, name: str, has_database: bool) -> TableSpec:
    entries.refuse_others(_TABLE)
    query, named = entries.get("query", str), entries.names("file")
    if query is not None and named:
        raise ValueError(f"{entries.where} has a file and a query: give one of them")
    files: tuple[Path, ...] = ()
    if named:
        files = tuple(path for each in named for path in _matching(entries, each))
    elif query is None:
        files = _beside(entries, name, has_database)
        if not files:
            query = f'SELECT * FROM "{name.replace(chr(34), chr(34) * 2)}"'
    unit = entries.get("time_unit", str)
    if unit is not None and unit not in TIME_UNITS:
        raise ValueError(f"{entries.where}: time_unit must be s, ms, us or ns (got {unit!r})")
    stypes = {
        column: _column_type(entries, column, value)
        for column, value in entries.get("stypes", dict, {}).items()
    }
    spec = TableSpec(
        name,
        files,
        query,
        entries.get("pkey", str),
        entries.get("time_col", str),
        unit,
        entries.texts("fkeys"),
        stypes,
        entries.names("drop"),
    )
    if unit is not None and spec.time_col is None:
        raise ValueError(f"{entries.where} has a time_unit and no time_col")
    for column in (spec.pkey, *spec.fkeys):
        if column in spec.stypes or column in spec.drop:
            raise ValueError(f"{entries.where}: {column!r} is a key and no feature: do not list it")
    if both := set(spec.drop) & set(spec.stypes):
        raise ValueError(f"{entries.where}: {both.pop()!r} is in drop and in stypes")
    return spec


def _matching(entries: _Entries, pattern: str) -> list[Path]:
    """The files of a path or a pattern, in order.

    Raises:
        FileNotFoundError: If there are none.
    """
    path = entries.folder / pattern
    if path.is_file():
        return [path]
    if path.is_dir():
        path = path / "*"
    found = [Path(each) for each in sorted(glob.glob(str(path))) if Path(each).is_file()]
    if not found:
        raise FileNotFoundError(f"{entries.where}: there is no file {str(path)!r}")
    return found


def _beside(entries: _Entries, name: str, has_database: bool) -> tuple[Path, ...]:
    """The file of a table that names none: ``db/NAME.parquet`` beside the manifest, as RelBench's.

    Raises:
        FileNotFoundError: If there is none, and no database either.
    """
    for folder in (entries.folder / "db", entries.folder):
        for ending in _ENDINGS:
            if (folder / f"{name}.{ending}").is_file():
                return (folder / f"{name}.{ending}",)
    if has_database:
        return ()
    raise FileNotFoundError(
        f"{entries.where}: there is no file {str(entries.folder / 'db' / name)!r}.parquet: name it "
        "by file, or give a query"
    )


def _column_type(entries: _Entries, column: Any, value: Any) -> ColumnType:
    if isinstance(value, str):
        value = {"stype": value}
    found = _Entries(f"{entries.where}, column {column!r}", value, entries.folder)
    found.refuse_others({"stype", "sep"})
    stype = found.required("stype", str)
    if stype not in STYPES:
        near = difflib.get_close_matches(stype, STYPES, 1)
        hint = f"did you mean {near[0]}?" if near else f"it must be one of {', '.join(STYPES)}"
        raise ValueError(f"{found.where}: unknown stype {stype!r}: {hint}")
    sep = found.get("sep", str)
    if sep is not None and (stype != "multicategorical" or not sep):
        raise ValueError(f"{found.where}: sep is a text, for multicategorical columns")
    return ColumnType(stype, sep)


def _check_parent(
    path: Path, spec: TableSpec, column: str, parent: TableSpec | None, name: str
) -> None:
    if parent is None:
        raise ValueError(
            f"{path}, table {spec.name!r}: the foreign key {column!r} refers to a table {name!r} "
            "that does not exist"
        )
    if parent.pkey is None:
        raise ValueError(
            f"{path}, table {spec.name!r}: the foreign key {column!r} refers to {name!r}, which "
            "has no pkey"
        )


def _task(entries: _Entries, file: Path, tables: Mapping[str, TableSpec]) -> TaskSpec:
    links = entries.required("task_type", str) == "recommendation"
    entity = entries.required("src_entity_table" if links else "entity_table", str)
    destination = entries.required("dst_entity_table", str) if links else None
    for table in (entity, destination):
        if table is not None and tables.get(table) is None:
            raise ValueError(f"{entries.where}: there is no table {table!r}")
    hidden = [_pair(entries, each) for each in entries.get("remove_columns", list, [])]
    target = entries.get("target_col", str)
    if entries.get("kind", str) == "autocomplete" and target is not None:
        hidden.append((entity, target))
    found = {split: file.parent / f"{split}.parquet" for split in SPLITS}
    files = {split: each for split, each in found.items() if each.is_file()}
    if not files:
        raise FileNotFoundError(
            f"{entries.where}: there is none of {', '.join(each.name for each in found.values())}: "
            "make the label tables first (queries in a task's manifest are not run)"
        )
    return TaskSpec(
        entries.get("name", str) or file.parent.name,
        entries.required("task_type", str),
        entity,
        entries.get("src_entity_col" if links else "entity_col", str),
        None if links else target,
        entries.get("time_col", str),
        destination,
        entries.required("dst_entity_col", str) if links else None,
        tuple(dict.fromkeys(hidden)),
        files,
    )


def _pair(entries: _Entries, value: Any) -> tuple[str, str]:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) for v in value):
        return value[0], value[1]
    raise ValueError(f"{entries.where}: remove_columns must list [table, column]")
