"""Databases of SQLite and PostgreSQL, through DuckDB's extensions for them.

They are read where DuckDB has the extension (``pip install 'pyg-scale-tables[sqlite,postgres]'``),
and PostgreSQL where its server is installed. Where the extension is missing, the error is tested.
"""

import importlib.util
import os
import pwd
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pytest
import torch
from torch_frame import stype

import pyg_scale
from pyg_scale.convert import convert

MANIFEST = """
name: orders
database: "{database}"
tables:
  customers:
    pkey: id
    time_col: joined
    stypes: {{city: categorical}}
  orders:
    query: SELECT * FROM orders WHERE oid > 4 ORDER BY oid
    pkey: oid
    time_col: at
    fkeys: {{customer: customers}}
"""
SCHEMA = """
CREATE TABLE customers (
    id BIGINT PRIMARY KEY, city VARCHAR, age DOUBLE PRECISION, joined TIMESTAMP
);
CREATE TABLE orders (oid BIGINT, customer BIGINT, amount DOUBLE PRECISION, at TIMESTAMP);
"""


def has(name):
    """Returns True if DuckDB has an extension, of a package or installed."""
    package = importlib.util.find_spec(f"duckdb_extension_{name}")
    if package is not None:
        name = Path(package.origin).with_name("extensions") / f"v{duckdb.__version__}/{name}"
        name = f"'{name}.duckdb_extension'"
    with closing(duckdb.connect(config={"autoinstall_known_extensions": False})) as connection:
        try:
            connection.execute(f"LOAD {name}")
        except duckdb.Error:
            return False
    return True


@pytest.fixture(scope="module")
def rows():
    generator = np.random.default_rng(0)
    start = pd.Timestamp("2024-01-01")
    customers = pd.DataFrame(
        {
            "id": generator.permutation(30) * 7,
            "city": np.array(["Ulm", "Zürich", "O'Fallon"])[generator.integers(0, 3, 30)],
            "age": generator.random(30) * 90,
            "joined": start + pd.to_timedelta(generator.integers(0, 10**6, 30), "s"),
        }
    )
    orders = pd.DataFrame(
        {
            "oid": np.arange(200),
            "customer": customers["id"].to_numpy()[generator.integers(0, 30, 200)],
            "amount": generator.random(200),
            "at": start + pd.to_timedelta(generator.integers(10**6, 10**7, 200), "s"),
        }
    )
    return {"customers": customers, "orders": orders}


def inserts(rows):
    """The rows as SQL."""
    for name, table in rows.items():
        for row in table.itertuples(index=False):
            values = (
                "'" + str(value).replace("'", "''") + "'"
                if isinstance(value, str | pd.Timestamp)
                else repr(getattr(value, "item", lambda value=value: value)())
                for value in row
            )
            yield f"INSERT INTO {name} VALUES ({', '.join(values)});"


def assert_is_graph_of(rows, path):
    graph = pyg_scale.open(path, verify=True)
    customers, orders = rows["customers"], rows["orders"].query("oid > 4").reset_index(drop=True)
    position = pd.Series(np.arange(30), index=customers["id"])
    edge_index = graph["orders", "f2p_customer", "customers"].edge_index
    assert edge_index[0].tolist() == list(range(195))
    assert edge_index[1].tolist() == position.loc[orders["customer"]].tolist()
    for name, table, column in (("customers", customers, "joined"), ("orders", orders, "at")):
        wanted = table[column].to_numpy().astype("datetime64[ns]").astype(np.int64)
        assert graph[name].time.tolist() == wanted.tolist()
    amount = graph["orders"].tf.feat_dict[stype.numerical]
    assert torch.equal(amount, torch.tensor(orders[["amount"]].to_numpy(np.float32)))
    city = graph["customers"].tf.get_col_feat("city").view(-1).tolist()
    names = next(v for k, v in graph.col_stats["customers"]["city"].items() if k.value == "COUNT")
    assert [names[0][i] for i in city] == customers["city"].tolist()


def manifest(folder, database):
    folder.mkdir(exist_ok=True)
    (folder / "manifest.yaml").write_text(MANIFEST.format(database=database))
    return f"tables:{folder}"


@pytest.mark.slow
def test_the_result_of_a_query_is_not_held_in_memory(tmp_path):
    script = """
import pathlib, sys
from pyg_scale_tables.manifest import Manifest
from pyg_scale_tables.queries import check_query, copy_query
manifest = Manifest.read(sys.argv[1])
def peak():  # not ru_maxrss, which begins at the peak of whoever started the process
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) >> 10
(spec,) = manifest.tables.values()
check_query(spec, manifest)
before = peak()
copy_query(spec, manifest, pathlib.Path(sys.argv[1]) / "rows.arrow", 1 << 30)
print(peak() - before)
"""
    query = "SELECT i, 2 * i AS j, i / 3 AS k FROM range(20_000_000) rows(i)"
    (tmp_path / "manifest.yaml").write_text(f"tables: {{rows: {{query: '{query}'}}}}")
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert (tmp_path / "rows.arrow").stat().st_size > 400 << 20
    assert int(done.stdout) < 200  # MB


@pytest.fixture
def sqlite(rows, tmp_path):
    folder = tmp_path / "it's here"
    folder.mkdir()
    with closing(sqlite3.connect(folder / "shop.db")) as connection:
        connection.executescript(SCHEMA + "\n".join(inserts(rows)))
    return folder


@pytest.mark.skipif(not has("sqlite_scanner"), reason="needs pyg-scale-tables[sqlite]")
def test_sqlite(sqlite, rows, tmp_path):
    before = (sqlite / "shop.db").read_bytes()
    convert(manifest(sqlite, "sqlite:shop.db"), tmp_path / "graph", quiet=True)
    assert_is_graph_of(rows, tmp_path / "graph")
    assert (sqlite / "shop.db").read_bytes() == before


@pytest.mark.skipif(not has("sqlite_scanner"), reason="needs pyg-scale-tables[sqlite]")
@pytest.mark.parametrize(
    ("query", "match"),
    [
        ("SELECT * FROM nothing", "table 'orders', query: .*nothing"),
        ("SELECT oid, none FROM orders", "table 'orders', query: .*none"),
    ],
)
def test_queries_that_fail_in_sqlite(sqlite, tmp_path, query, match):
    source = manifest(sqlite, "sqlite:shop.db")
    path = sqlite / "manifest.yaml"
    path.write_text(
        path.read_text().replace("SELECT * FROM orders WHERE oid > 4 ORDER BY oid", query)
    )
    with pytest.raises(ValueError, match=match):
        convert(source, tmp_path / "graph", quiet=True)
    assert not (tmp_path / "graph").exists()


def test_a_missing_sqlite_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no database .*none\.db"):
        convert(manifest(tmp_path / "m", "sqlite:none.db"), tmp_path / "graph", quiet=True)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_without_the_extension_the_way_out_is_named(sqlite, tmp_path, monkeypatch, kind):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("HOME", str(tmp_path))  # where DuckDB has what INSTALL brought
    database = {"sqlite": "sqlite:shop.db", "postgres": "postgres:password=secret"}[kind]
    with pytest.raises(
        ModuleNotFoundError, match=rf"pip install 'pyg-scale-tables\[{kind}\]'"
    ) as e:
        convert(manifest(sqlite, database), tmp_path / "graph", quiet=True)
    assert "secret" not in str(e.value)
    assert not (tmp_path / "graph").exists()


# PostgreSQL ###############################################################################


def server_programs():
    """The folder of initdb and pg_ctl, if a server is installed."""
    folders = [
        *map(Path, os.environ["PATH"].split(":")),
        *Path("/usr/lib/postgresql").glob("*/bin"),
    ]
    return next((each for each in folders if (each / "initdb").is_file()), None)


def other_user():
    """A user whom PostgreSQL allows to run it, as it does not allow root; ``None``: this one."""
    if os.geteuid() != 0:
        return None
    if not os.stat(os.devnull).st_mode & 0o002:
        pytest.skip(f"PostgreSQL does not run as root, and others cannot write {os.devnull}")
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        return pytest.skip("PostgreSQL does not run as root")


@pytest.fixture
def postgres(rows, tmp_path):
    """The address of a server with the tables."""
    programs = server_programs()
    if programs is None or shutil.which("psql") is None:
        pytest.skip("needs a server of PostgreSQL")
    user = other_user()
    folder = Path("/tmp") / f"pyg-scale-{os.getpid()}"  # its sockets need short names
    folder.mkdir()
    if user is not None:
        shutil.chown(folder, user)

    def run(*command, **kwargs):
        subprocess.run(
            list(map(str, command)),
            check=True,
            user=user,
            timeout=60,
            cwd="/",
            stdout=subprocess.DEVNULL,
            **kwargs,
        )

    data = folder / "data"
    try:
        run(programs / "initdb", "-D", data, "-U", "reader", "--auth=trust", "-N")
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
        run(programs / "pg_ctl", "-D", data, "-w", "-l", folder / "log", "-o", options, "start")
        try:
            sql = SCHEMA + "\n".join(inserts(rows))
            run(
                shutil.which("psql"),
                "-h",
                folder,
                "-U",
                "reader",
                "-q",
                "-v",
                "ON_ERROR_STOP=1",
                "postgres",
                input=sql,
                text=True,
            )
            yield f"postgres:host={folder} user=reader dbname=postgres"
        finally:
            run(programs / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder)


@pytest.mark.skipif(not has("postgres_scanner"), reason="needs pyg-scale-tables[postgres]")
def test_postgres(postgres, rows, tmp_path):
    convert(manifest(tmp_path / "m", postgres), tmp_path / "graph", quiet=True)
    assert_is_graph_of(rows, tmp_path / "graph")


@pytest.mark.skipif(not has("postgres_scanner"), reason="needs pyg-scale-tables[postgres]")
def test_a_server_that_is_not_there(tmp_path):
    source = manifest(tmp_path / "m", f"postgres:host={tmp_path} dbname=none")
    with pytest.raises(ValueError, match="table 'customers', query: .*connect"):
        convert(source, tmp_path / "graph", quiet=True)
    assert not (tmp_path / "graph").exists()
