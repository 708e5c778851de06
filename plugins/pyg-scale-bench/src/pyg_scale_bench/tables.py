"""Convert a database of customers, products, orders and clicks to a graph directory.

The tables are generated as Parquet files in RelBench's layout, with text and integer keys, times,
numbers and categories, and converted within a limit of memory. Beside it, pandas reads the same
files and PyG's ``from_relbench`` makes a graph of them in memory.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import pyg_scale
from pyg_scale.convert import convert
from pyg_scale_bench import memory
from pyg_scale_bench.benchmark import FOLDER, Benchmark, Option, size_of
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.child import call
from pyg_scale_bench.report import GB, Report

KEYS = {"customers": "id", "products": "sku", "orders": "id", "clicks": "id"}
TIMES = {"customers": "joined", "orders": "at", "clicks": "at"}
FOREIGN = {"customer": "customers", "sku": "products"}

_CHUNK = 1 << 20  # rows
_ROW_BYTES = 400  # on the disk, with temporary files
_START = np.datetime64("2020-01-01", "us").astype(np.int64)
_SPAN = 1000 * 86_400 * 10**6  # microseconds

_MANIFEST = """\
name: shop
tables:
  customers: {pkey: id, time_col: joined}
  products: {pkey: sku}
  orders: {pkey: id, time_col: at, fkeys: {customer: customers, sku: products}}
  clicks: {pkey: id, time_col: at, fkeys: {customer: customers, sku: products}}
"""


# The database #############################################################################


def write(folder: Path, rows: int, seed: int = 0) -> None:
    """Write the tables and their manifest.

    A hundredth of the rows are products, a twentieth customers, a quarter orders, the rest clicks.
    """
    import pyarrow as pa

    random = np.random.default_rng(seed)
    customers, products, orders = rows // 20, rows // 100, rows // 4
    (folder / "db").mkdir(parents=True, exist_ok=True)
    ids = random.permutation(3 * customers)[:customers]
    cities = pa.array([f"city {i}" for i in range(200)])
    kinds = pa.array(list("abcdefgh"))
    channels = pa.array(["web", "app", "shop", "mail"])

    def some(values: Any, size: int) -> Any:
        return values.take(pa.array(random.integers(0, len(values), size)))

    def times(begin: int, end: int, of: int) -> Any:
        steps = np.arange(begin, end) * (_SPAN // max(1, of))
        return pa.array(_START + steps + random.integers(0, 1000, end - begin), pa.timestamp("us"))

    def skus(numbers: Any) -> Any:
        return pa.array([f"p-{number:08d}" for number in numbers.tolist()])

    sku = skus(random.permutation(products))
    _write(
        folder,
        "customers",
        customers,
        lambda begin, end: {
            "id": ids[begin:end],
            "joined": times(begin, end, customers),
            "age": random.normal(40, 9, end - begin),
            "city": some(cities, end - begin),
        },
    )
    _write(
        folder,
        "products",
        products,
        lambda begin, end: {
            "sku": sku[begin:end],
            "price": random.lognormal(size=end - begin),
            "kind": some(kinds, end - begin),
        },
    )
    for name, size in (("orders", orders), ("clicks", rows - customers - products - orders)):
        _write(
            folder,
            name,
            size,
            lambda begin, end, size=size: {
                "id": np.arange(begin, end),
                "customer": ids[random.integers(0, customers, end - begin)],
                "sku": some(sku, end - begin),
                "at": times(begin, end, size),
                "amount": random.random(end - begin, dtype=np.float32),
                "count": random.integers(0, 9, end - begin),
                "channel": some(channels, end - begin),
            },
        )
    (folder / "manifest.yaml").write_text(_MANIFEST)


def _write(folder: Path, name: str, rows: int, columns: Any) -> None:
    """Write a table in pieces."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    for begin in range(0, rows, _CHUNK):
        piece = pa.table(columns(begin, min(rows, begin + _CHUNK)))
        if writer is None:
            writer = pq.ParquetWriter(folder / "db" / f"{name}.parquet", piece.schema)
        writer.write_table(piece)
    assert writer is not None
    writer.close()


# Measuring ################################################################################


def measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Generate, convert, and let PyG do it in memory."""
    root = Path(args.dir).absolute()
    source, graph = root / "shop", root / "graph"
    again = args.reuse and (source / "manifest.yaml").exists()
    if not again:
        print("generating ...", file=sys.stderr)
        write(source, args.rows)
    found["source_bytes"] = size_of(source)
    found["rounds"] = []
    for number in range(args.rounds):
        print(f"converting, {number + 1} of {args.rounds} ...", file=sys.stderr)
        shutil.rmtree(graph, ignore_errors=True)
        options = {"source": str(source), "path": str(graph), "limit": args.memory}
        found["rounds"].append(call(converted, options))
    if again:
        found["settings"]["rows"] = found["rounds"][0]["rows"]
    found["graph_bytes"] = size_of(graph)
    if not args.alone:
        print("in memory by pandas and PyG ...", file=sys.stderr)
        found["in_memory"] = call(in_memory, {"source": str(source)})


def converted(source: str, path: str, limit: int) -> Iterator[dict[str, Any]]:
    """Convert the database."""
    done = convert(f"tables:{source}", path, memory=limit, quiet=True)
    graph = pyg_scale.open(path)
    yield {
        "seconds": done.seconds,
        "peak_bytes": done.peak_memory,
        "rows": sum(done.num_nodes.values()),
        "edges": sum(done.num_edges.values()),
        "types": len(graph.node_types),
    }


def in_memory(source: str) -> Iterator[dict[str, Any]]:
    """Read the tables by pandas, number the keys, and make a graph by ``from_relbench``."""
    import pandas as pd
    from torch_geometric.contrib.utils import from_relbench

    start = time.perf_counter()
    tables = {name: pd.read_parquet(f"{source}/db/{name}.parquet") for name in KEYS}
    rows = {name: pd.Series(np.arange(len(t)), t[KEYS[name]]) for name, t in tables.items()}
    for name, table in tables.items():
        for column, parent in FOREIGN.items():
            if column in table and name != parent:
                table[column] = rows[parent].reindex(table[column]).to_numpy()
        if name in TIMES:
            table[TIMES[name]] = table[TIMES[name]].astype("datetime64[ns]")
    database = SimpleNamespace(
        table_dict={
            name: SimpleNamespace(
                df=table,
                pkey_col=KEYS[name],
                time_col=TIMES.get(name),
                fkey_col_to_pkey_table={
                    c: p for c, p in FOREIGN.items() if p != name and c in table
                },
            )
            for name, table in tables.items()
        }
    )
    data = from_relbench(database)
    yield {
        "seconds": time.perf_counter() - start,
        "peak_bytes": memory.peak(),
        "rows": data.num_nodes,
        "edges": data.num_edges,
    }


# Report ###################################################################################


def report(found: Mapping[str, Any]) -> Report:
    """The report of the results."""
    settings = found["settings"]
    rounds = sorted(found["rounds"], key=lambda each: each["seconds"])
    middle = rounds[len(rounds) // 2]
    rate = middle["rows"] / middle["seconds"] / 1e6
    peak = max(each["peak_bytes"] for each in rounds)
    lines = [
        (
            f"database: {middle['types']} tables, {middle['rows']:,} rows, "
            f"{found['source_bytes'] / GB:.2f} GB of Parquet; graph directory: {middle['edges']:,} "
            f"edges in both directions, {found['graph_bytes'] / GB:.2f} GB"
        ),
        (
            f"pyg-scale convert: {middle['seconds']:.1f} s, {rate:.2f} M rows/s (median of "
            f"{len(rounds)}), at most {peak / GB:.2f} GB of memory, limit "
            f"{settings['memory'] / GB:.2f} GB"
        ),
    ]
    speeds = [Bar("convert", rate, spread=(_rate(rounds[-1]), _rate(rounds[0])))]
    peaks = [Bar("convert", peak / GB)]
    if other := found.get("in_memory"):
        lines.append(
            f"pandas and from_relbench, in memory, without columns of text: {other['seconds']:.1f} "
            f"s, {_rate(other):.2f} M rows/s, {other['peak_bytes'] / GB:.2f} GB of memory"
        )
        speeds.append(Bar("from_relbench", _rate(other), "PyG"))
        peaks.append(Bar("from_relbench", other["peak_bytes"] / GB, "PyG"))
    limit = settings["memory"] / GB
    return Report(
        found,
        lines,
        panels=[
            [
                Panel("Speed", speeds, "million rows per second"),
                Panel("Memory", peaks, "GB", mark=(limit, f"limit {limit:.1f}")),
            ]
        ],
        caption=f"{middle['rows']:,} rows of four tables, {middle['edges']:,} edges",
    )


def _rate(result: Mapping[str, Any]) -> float:
    return float(result["rows"] / result["seconds"] / 1e6)


def _complaint(args: argparse.Namespace) -> str | None:
    """Refuse what is not installed, and a database that does not fit on the disk."""
    from pyg_scale import plugins

    if "tables" not in plugins.names("reader"):
        return "it needs pyg-scale-tables: pip install ./plugins/pyg-scale-tables"
    root = Path(args.dir).absolute()
    there = next(path for path in (root, *root.parents) if path.exists())
    free, needed = shutil.disk_usage(there).free, args.rows * _ROW_BYTES
    if free >= needed:
        return None
    return f"about {needed / GB:.0f} GB are needed in --dir, {free / GB:.0f} GB are free"


BENCHMARK = Benchmark(
    "tables",
    __doc__,
    {
        "database": {
            "rows": Option(22_000_000, "of all tables", least=200),
            "reuse": Option(False, "use the database that an earlier run with --keep left"),
        },
        "how": {
            **FOLDER,
            "memory": Option(2_000_000_000, "bytes that the conversion may have", least=1),
            "rounds": Option(3, least=1),
            "alone": Option(False, "without pandas and PyG"),
        },
    },
    measure,
    report,
    quick={"rows": 100_000, "rounds": 1},
    complaint=_complaint,
)
