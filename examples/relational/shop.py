"""Generate the database of a shop in RelBench's layout: customers, products, orders, clicks.

    python examples/relational/shop.py shop                     # a folder with manifest.yaml
    python examples/relational/shop.py shop --customers 20000   # more of everything

Customers order more or less often and stop one day for good. Before an order they click on what
they buy, and at other times on anything. Every row has its time, so that the question can be asked
on any day: will this customer order within four weeks?
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DAYS = 448
WEEKS = 28
START = np.datetime64("2024-01-01", "s")
TRAIN, VAL, TEST = range(112, 309, 28), [364], [420]

MANIFEST = """\
name: shop
val_timestamp: "{val}"
test_timestamp: "{test}"
tables:
  customers:
    pkey: id
    time_col: joined
  products:
    pkey: sku
  orders:
    time_col: at
    fkeys: {{customer: customers, product: products}}
  clicks:
    time_col: at
    fkeys: {{customer: customers, product: products}}
"""

TASK = """\
name: order
kind: external
task_type: binary_classification
description: Will the customer order within four weeks?
entity_table: customers
entity_col: id
target_col: orders
time_col: timestamp
"""


def visits(random, begin, end, per_day):
    """Days of visits of each customer, as (customer, day), at a rate, from begin to end."""
    counts = random.poisson(per_day * np.maximum(0, end - begin))
    customer = np.repeat(np.arange(len(begin)), counts)
    return customer, begin[customer] + random.random(len(customer)) * (end - begin)[customer]


def generate(customers, seed=0):
    """The tables as dictionaries of arrays; times are days."""
    random = np.random.default_rng(seed)
    products = max(20, customers // 10)
    joined = np.sort(random.random(customers) * 300)
    leaves = np.minimum(DAYS, joined + random.exponential(150, customers))
    rate = random.gamma(2.0, 0.02, customers)  # orders a day
    who, day = visits(random, joined, leaves, rate)
    bought = random.integers(0, products, len(who))
    idle = visits(random, joined, leaves, rate * 1.5)
    ahead = np.maximum(joined[who], day - random.exponential(2.0, len(who)))
    clicks = [
        np.concatenate([who, idle[0]]),
        np.concatenate([bought, random.integers(0, products, len(idle[0]))]),
        np.concatenate([ahead, idle[1]]),
    ]
    price = random.lognormal(3, 0.7, products)
    sku = np.array([f"sku-{i:05d}" for i in range(products)])
    kind = np.array(["shoes", "shirts", "hats", "bags"])
    city = np.array(["Bern", "Oslo", "Rome", "Graz", "Lund"])
    order, click = np.argsort(day), np.argsort(clicks[2])
    return {
        "customers": {
            "id": 1000 + np.arange(customers),
            "joined": joined,
            "age": random.normal(40, 12, customers).round(),
            "city": city[random.integers(0, len(city), customers)],
        },
        "products": {
            "sku": sku,
            "price": price.round(2),
            "kind": kind[random.integers(0, len(kind), products)],
        },
        "orders": {
            "customer": 1000 + who[order],
            "product": sku[bought[order]],
            "at": day[order],
            "amount": (price[bought] * random.uniform(0.8, 1.0, len(who)))[order].round(2),
        },
        "clicks": {
            "customer": 1000 + clicks[0][click],
            "product": sku[clicks[1][click]],
            "at": clicks[2][click],
        },
    }


def labels(tables, days):
    """A row for each customer who had joined on each of some days: does an order follow?"""
    who, at = tables["orders"]["customer"], tables["orders"]["at"]
    rows = []
    for day in days:
        known = tables["customers"]["id"][tables["customers"]["joined"] <= day]
        active = np.unique(who[(at > day) & (at <= day + WEEKS)])
        rows.append((np.full(len(known), float(day)), known, np.isin(known, active).astype(int)))
    time, customer, target = (np.concatenate(each) for each in zip(*rows))
    return {"timestamp": time, "id": customer, "orders": target}


def timestamps(days):
    return pa.array(START + (days * 86_400).astype("m8[s]"))


def table(columns):
    times = {"joined", "at", "timestamp"}
    return pa.table({n: timestamps(v) if n in times else pa.array(v) for n, v in columns.items()})


def write(folder, customers, seed=0):
    """Write the tables, their manifest, and the label tables of the task."""
    folder = Path(folder)
    tables = generate(customers, seed)
    task = folder / "tasks" / "order"
    for each in (folder / "db", task):
        each.mkdir(parents=True, exist_ok=True)
    for name, columns in tables.items():
        pq.write_table(table(columns), folder / "db" / f"{name}.parquet")
    for split, days in (("train", TRAIN), ("val", VAL), ("test", TEST)):
        pq.write_table(table(labels(tables, days)), task / f"{split}.parquet")
    (task / "manifest.yaml").write_text(TASK)
    val, test = (START + np.timedelta64(days[0], "D") for days in (VAL, TEST))
    (folder / "manifest.yaml").write_text(MANIFEST.format(val=val, test=test))
    return folder / "manifest.yaml"


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--customers", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    print(write(args.folder, args.customers, args.seed))


if __name__ == "__main__":
    main()
