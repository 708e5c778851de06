"""A small database of a shop in RelBench's layout, and the graph that pandas makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch_geometric.data import HeteroData

START = np.datetime64("2023-01-01", "ns")
_DAY = 86_400

MANIFEST = """
name: shop
manifest_version: 1
description: "Customers who order products."
val_timestamp: 2023-09-01
test_timestamp: "2023-11-01"
tables:
  customers:
    pkey: id
    time_col: joined
    fkeys: {}
    stypes: {joined: timestamp}
    drop: [name]
  products:
    pkey: sku
    time_col: null
    fkeys: {}
  orders:
    pkey: oid
    time_col: at
    fkeys:
      customer: customers
      sku: products
      before: orders
"""

CHURN = """
name: churn
kind: forecast
task_type: binary_classification
entity_table: customers
entity_col: id
target_col: churn
time_col: timestamp
timedelta: 30 days
sql: |
  SELECT 1
remove_columns: [[customers, age]]
metrics: [roc_auc]
"""

NEXT = """
name: next
kind: forecast
task_type: recommendation
src_entity_table: customers
src_entity_col: id
dst_entity_table: products
dst_entity_col: sku
time_col: timestamp
eval_k: 5
"""


def write_shop(folder: Path, orders: int = 400, seed: int = 0) -> dict[str, pd.DataFrame]:
    """Write the tables, their manifest and two tasks; return the tables."""
    (folder / "db").mkdir(parents=True)
    tables = _tables(np.random.default_rng(seed), orders)
    for name, table in tables.items():
        table.to_parquet(folder / "db" / f"{name}.parquet", index=False, row_group_size=97)
    (folder / "manifest.yaml").write_text(MANIFEST)
    generator = np.random.default_rng(seed + 1)
    for name, text in (("churn", CHURN), ("next", NEXT)):
        (folder / "tasks" / name).mkdir(parents=True)
        (folder / "tasks" / name / "manifest.yaml").write_text(text)
        for split, size in (("train", 60), ("val", 20), ("test", 10)):
            labels: dict[str, Any] = {
                "timestamp": START + _seconds(generator, 300, size),
                "id": generator.choice(tables["customers"]["id"], size),
            }
            if name == "churn":
                labels["churn"] = generator.integers(0, 2, size)
            else:
                skus = tables["products"]["sku"].to_numpy()
                labels["sku"] = [list(generator.choice(skus, k)) for k in 1 + np.arange(size) % 3]
            file = folder / "tasks" / name / f"{split}.parquet"
            pd.DataFrame(labels).to_parquet(file, index=False)
    return tables


def _tables(generator: np.random.Generator, count: int) -> dict[str, pd.DataFrame]:
    people, things = max(8, count // 10), max(8, count // 20)
    ids = generator.permutation(3 * people)[:people]
    customers = pd.DataFrame(
        {
            "id": ids,
            "joined": START + np.sort(_seconds(generator, 100, people)),
            "age": generator.normal(40, 9, people).round(1),
            "city": generator.choice(["Bern", "Rom", "Zürich"], people),
            "name": [f"customer {i}" for i in ids],
        }
    )
    customers.loc[::7, "age"] = np.nan
    customers.loc[::5, "city"] = None
    tags = np.array(["new", "blue", "sale", "big"])
    products = pd.DataFrame(
        {
            "sku": [f"p-{i:05d}" for i in generator.permutation(things)],
            "price": generator.lognormal(size=things),
            "tags": [list(generator.choice(tags, i % 4, replace=False)) for i in range(things)],
            "picture": list(generator.normal(size=(things, 3)).astype(np.float32)),
        }
    )
    before = np.maximum(0, np.arange(count) - generator.integers(1, 50, count))
    orders = pd.DataFrame(
        {
            "oid": np.arange(count) + 5000,
            "customer": pd.array(generator.choice(ids, count), dtype="Int64"),
            "sku": generator.choice(products["sku"], count),
            "at": START + np.sort(_seconds(generator, 365, count)),
            "amount": generator.integers(1, 9, count),
            "gift": generator.random(count) < 0.1,
            "before": pd.array(before + 5000, dtype="Int64"),
        }
    )
    orders.loc[::11, "customer"] = None
    orders.loc[0, "before"] = None
    return {"customers": customers, "products": products, "orders": orders}


def _seconds(generator: np.random.Generator, days: int, size: int) -> Any:
    return generator.integers(0, days * _DAY, size).astype("m8[s]")


KEYS = {"customers": "id", "products": "sku", "orders": "oid"}
TIMES = {"customers": "joined", "orders": "at"}
FOREIGN = (("customer", "customers"), ("sku", "products"), ("before", "orders"))


def graph_of(tables: dict[str, pd.DataFrame]) -> HeteroData:
    """The graph that ``from_relbench`` describes, made by pandas: edges, times, numbers of rows."""
    data = HeteroData()
    for name, table in tables.items():
        data[name].num_nodes = len(table)
        if name in TIMES:
            time = table[TIMES[name]].to_numpy().astype("M8[ns]").astype(np.int64)
            data[name].time = torch.from_numpy(time.copy())
    orders = tables["orders"]
    for column, parent in FOREIGN:
        rows = pd.Series(np.arange(len(tables[parent])), index=tables[parent][KEYS[parent]])
        there = orders[column].notna().to_numpy()
        child = torch.from_numpy(np.flatnonzero(there))
        found = torch.from_numpy(rows.loc[orders[column][there]].to_numpy().copy())
        data["orders", f"f2p_{column}", parent].edge_index = torch.stack([child, found])
        data[parent, f"rev_f2p_{column}", "orders"].edge_index = torch.stack([found, child])
    return data
