"""Tables that are queries of DuckDB: of a database of its own, of SQLite, or of PostgreSQL."""

from __future__ import annotations

import importlib.util
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa

from pyg_scale_tables.manifest import FOREIGN, Manifest, TableSpec
from pyg_scale_tables.records import BATCH_ROWS, copy_batches, in_one_line


def check_query(spec: TableSpec, manifest: Manifest) -> None:
    """Refuse a query that cannot be run, before any work.

    Raises:
        ModuleNotFoundError: If DuckDB, or its extension for the database, is not installed.
        FileNotFoundError: If the database is missing.
        ValueError: If the query is no single SELECT.
    """
    duckdb = _duckdb(spec)
    kind, name = manifest.database_at
    if kind in ("duckdb", "sqlite") and not Path(name).is_file():
        raise FileNotFoundError(f"{manifest.path}: there is no database {name!r}")
    with closing(duckdb.connect(config=_CONFIG)) as connection:
        if kind in FOREIGN:
            _load(duckdb, connection, kind, manifest)
        _statement(duckdb, connection, spec)


def copy_query(spec: TableSpec, manifest: Manifest, file: Path, memory: int) -> None:
    """Copy the result of a query to an Arrow file, once, as its order may be another one.

    Args:
        spec: The table with the query.
        manifest: Says which database.
        file: The file to write.
        memory: Bytes that DuckDB may use.

    Raises:
        ModuleNotFoundError: If DuckDB, or its extension for the database, is not installed.
        ValueError: If DuckDB refuses it, or cannot reach the database.
    """
    duckdb = _duckdb(spec)
    try:
        with closing(_connection(duckdb, manifest, file.parent, memory)) as connection:
            connection.execute("SET enable_progress_bar = false")  # it goes to standard output
            # Of what execute() returns, some releases of DuckDB copy all rows to memory first.
            relation = connection.sql(_statement(duckdb, connection, spec).query)
            reader = relation.to_arrow_reader(BATCH_ROWS)
            copy_batches(reader.schema, reader, file)
    except (duckdb.Error, pa.ArrowException) as error:
        raise ValueError(f"table {spec.name!r}, query: {in_one_line(error)}") from None


def _duckdb(spec: TableSpec) -> Any:
    try:
        import duckdb
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"table {spec.name!r} comes from a query, and DuckDB is not installed: pip install "
            "'pyg-scale-tables[duckdb]'"
        ) from None
    return duckdb


def _statement(duckdb: Any, connection: Any, spec: TableSpec) -> Any:
    assert spec.query is not None
    try:
        found = connection.extract_statements(spec.query)
    except duckdb.Error as error:
        raise ValueError(f"table {spec.name!r}, query: {in_one_line(error)}") from None
    if len(found) != 1 or found[0].type != duckdb.StatementType.SELECT:
        raise ValueError(f"table {spec.name!r}: the query must be one SELECT (got {spec.query!r})")
    return found[0]


_CONFIG = {"autoinstall_known_extensions": False}  # nothing is downloaded


def _connection(duckdb: Any, manifest: Manifest, folder: Path, memory: int) -> Any:
    """A connection that only reads, with the database of a manifest."""
    config = _CONFIG | {
        "memory_limit": f"{max(64, memory >> 20)}MiB",
        "temp_directory": str(folder / "duckdb"),
        "file_search_path": str(manifest.path.parent.absolute()),
    }
    kind, name = manifest.database_at
    if kind == "duckdb":
        return duckdb.connect(name, read_only=True, config=config)
    connection = duckdb.connect(config=config)
    if kind:
        _load(duckdb, connection, kind, manifest)
        connection.execute(f"ATTACH {_text(name)} AS attached (TYPE {kind}, READ_ONLY)")
        connection.execute("USE attached")
    return connection


def _load(duckdb: Any, connection: Any, kind: str, manifest: Manifest) -> None:
    """Load DuckDB's extension for a database: that of a Python package, or an installed one.

    Raises:
        ModuleNotFoundError: If there is none for this version of DuckDB.
    """
    name = f"{kind}_scanner"
    package = importlib.util.find_spec(f"duckdb_extension_{name}")
    for folder in (package and package.submodule_search_locations) or ():
        file = Path(folder) / f"extensions/v{duckdb.__version__}/{name}.duckdb_extension"
        if file.is_file():
            connection.execute(f"LOAD {_text(str(file))}")
            return
    try:
        connection.execute(f"LOAD {name}")
    except duckdb.Error as error:
        raise ModuleNotFoundError(
            f"{manifest.path}: a database of {kind} needs DuckDB's extension {name}, and DuckDB "
            f"{duckdb.__version__} has none: pip install 'pyg-scale-tables[{kind}]', which chooses "
            f"a version of DuckDB that has, or run INSTALL {kind} in DuckDB ({in_one_line(error)})"
        ) from None


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
