"""A database becomes the graph that pandas, torch_frame and DuckDB say it is."""

import copy
import shutil
from collections import Counter

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pytest
import torch
import torch_frame
from torch_frame import stype
from torch_frame.data import Dataset

import pyg_scale
from pyg_scale.convert import convert
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader
from pyg_scale.testing import ReaderTests
from pyg_scale_tables import labels as labels_module
from pyg_scale_tables.relational import RelationalReader
from tests.shops import FOREIGN, KEYS, TIMES, graph_of


class TestReader(ReaderTests):
    @pytest.fixture
    def reader(self, written):
        return RelationalReader(written[0] / "manifest.yaml")


def pairs(edge_index):
    return Counter(map(tuple, edge_index.t().tolist()))


def test_types_edges_and_times_are_those_of_pandas(graph, tables):
    wanted = graph_of(tables)
    assert graph.node_types == wanted.node_types
    assert set(graph.edge_types) == set(wanted.edge_types)
    for edge_type in wanted.edge_types:
        assert torch.equal(graph[edge_type].edge_index, wanted[edge_type].edge_index)
    for name in tables:
        assert graph[name].num_nodes == len(tables[name])
        assert ("time" in graph[name]) == (name in TIMES)
        if name in TIMES:
            assert torch.equal(graph[name].time, wanted[name].time)
    graph.validate(raise_on_error=True)


def materialized(table, stypes):
    dataset = Dataset(table[list(stypes)], dict(stypes))
    dataset.materialize()
    return dataset


def categories(graph, table, column):
    (values, counts) = next(
        value
        for kind, value in graph.col_stats[table][column].items()
        if kind.value in ("COUNT", "MULTI_COUNT")
    )
    return values, counts


def test_columns_are_those_that_torch_frame_makes(graph, tables):
    stypes = {"age": stype.numerical, "joined": stype.timestamp}
    wanted = materialized(tables["customers"], stypes)
    frame = graph["customers"].tf
    assert frame.col_names_dict == {
        stype.numerical: ["age"],
        stype.categorical: ["city"],
        stype.timestamp: ["joined"],
    }
    for kind in (stype.numerical, stype.timestamp):
        expected = wanted.tensor_frame.feat_dict[kind]
        assert frame.feat_dict[kind].dtype == expected.dtype
        torch.testing.assert_close(frame.feat_dict[kind], expected, equal_nan=True, rtol=0, atol=0)
    for column in stypes:
        found, expected = graph.col_stats["customers"][column], wanted.col_stats[column]
        assert found.keys() == expected.keys()
        for kind, value in expected.items():
            torch.testing.assert_close(
                torch.as_tensor(found[kind]).double(), torch.as_tensor(value).double()
            )


def test_categories_keep_their_values(graph, tables):
    numbers = graph["customers"].tf.feat_dict[stype.categorical]
    assert numbers.dtype == torch.int64 and numbers.shape == (len(tables["customers"]), 1)
    values, counts = categories(graph, "customers", "city")
    found = [None if i < 0 else values[i] for i in numbers[:, 0].tolist()]
    assert found == [None if pd.isna(v) else v for v in tables["customers"]["city"]]
    assert dict(zip(values, counts)) == tables["customers"]["city"].value_counts().to_dict()
    gift = graph["orders"].tf.get_col_feat("gift").view(-1)
    values, _ = categories(graph, "orders", "gift")
    assert [values[i] for i in gift.tolist()] == tables["orders"]["gift"].tolist()


def test_lists_become_multicategorical_and_embeddings(graph, tables):
    frame = graph["products"].tf
    values, _ = categories(graph, "products", "tags")
    tags = frame.feat_dict[stype.multicategorical]
    for row, wanted in enumerate(tables["products"]["tags"]):
        assert [values[i] for i in tags[row, 0].tolist()] == list(wanted)
    pictures = torch.from_numpy(np.stack(tables["products"]["picture"]))
    assert torch.equal(frame.feat_dict[stype.embedding].values, pictures)
    assert graph.col_stats["products"]["picture"][torch_frame.data.stats.StatType.EMB_DIM] == 3


def test_ids_say_which_key_a_node_has(converted, tables):
    assert np.load(converted / "ids/customers.npy").tolist() == tables["customers"]["id"].tolist()
    skus = np.load(converted / "ids/products.npy")
    assert [sku.decode() for sku in skus] == tables["products"]["sku"].tolist()


def test_in_edges_are_in_the_order_of_time(converted):
    graph = pyg_scale.open(converted, verify=True)
    assert graph.graph_directory.meta.time_attr == "time"


# Batches ##################################################################################

TEMPORAL = {"time_attr": "time", "batch_size": 16, "seed": 1}


def seeds_of(tables, count, seed=0):
    generator = np.random.default_rng(seed)
    ids = torch.from_numpy(generator.integers(0, len(tables["customers"]), count))
    low, high = (tables["orders"]["at"].astype("int64") // 1).agg(["min", "max"])
    unit = 10 ** {"ns": 0, "us": 3, "ms": 6, "s": 9}[tables["orders"]["at"].dt.unit]
    return ids, torch.from_numpy(generator.integers(low * unit, high * unit, count))


def test_batches_are_those_of_the_graph_of_pandas(graph, tables):
    ids, time = seeds_of(tables, 64)
    own, other = (
        NeighborLoader(data, [-1, -1], input_nodes=("customers", ids), input_time=time, **TEMPORAL)
        for data in (graph, graph_of(tables))
    )
    for batch, wanted in zip(own, other, strict=True):
        for name in graph.node_types:
            assert torch.equal(batch[name].n_id, wanted[name].n_id)
            assert batch[name].tf == graph[name].tf[wanted[name].n_id]
        for edge_type in graph.edge_types:
            assert torch.equal(batch[edge_type].edge_index, wanted[edge_type].edge_index)


# The rows within two hops of a customer at a time, by SQL over the Parquet files alone.
NEIGHBOURHOOD = """
    WITH first AS (
        SELECT seed, t, o.oid, o.customer, o.sku, o.before
        FROM seeds JOIN orders o ON o.customer = seeds.id AND o.at <= t
    )
    SELECT seed, 'customers' AS kind, id::VARCHAR AS key FROM seeds
    UNION SELECT seed, 'customers', c.id::VARCHAR FROM first
        JOIN customers c ON c.id = first.customer AND c.joined <= t
    UNION SELECT seed, 'products', sku FROM first
    UNION SELECT seed, 'orders', oid::VARCHAR FROM first
    UNION SELECT seed, 'orders', o.oid::VARCHAR FROM first
        JOIN orders o ON o.before = first.oid AND o.at <= t
    UNION SELECT seed, 'orders', o.oid::VARCHAR FROM first
        JOIN orders o ON o.oid = first.before AND o.at <= t
"""


def test_batches_are_the_rows_that_a_query_finds(graph, tables, written):
    ids, time = seeds_of(tables, 48, seed=2)
    connection = duckdb.connect()
    for name in tables:
        connection.execute(f"CREATE VIEW {name} AS SELECT * FROM '{written[0]}/db/{name}.parquet'")
    keys = {name: tables[name][KEYS[name]].to_numpy() for name in tables}
    seeds = pd.DataFrame(
        {
            "seed": np.arange(len(ids)),
            "id": keys["customers"][ids.numpy()],
            "t": time.numpy().astype("M8[ns]"),
        }
    )
    connection.register("seeds", seeds)
    wanted = set(connection.execute(NEIGHBOURHOOD).fetchall())
    loader = NeighborLoader(
        graph, [-1, -1], input_nodes=("customers", ids), input_time=time, **TEMPORAL
    )
    found = set()
    for batch in loader:
        seed = batch["customers"].input_id
        for name in tables:
            for n_id, of in zip(batch[name].n_id.tolist(), seed[batch[name].batch].tolist()):
                found.add((of, name, str(keys[name][n_id])))
    assert len(wanted) > 500
    assert found == wanted


def later_rows(graph, batch, time):
    """Rows of a batch that are later than their seed, and all that are no seeds and have a time."""
    later = total = 0
    seed_time = time[batch["customers"].input_id]
    for name in TIMES:
        seeds = batch["customers"].batch_size if name == "customers" else 0
        rows = graph[name].time[batch[name].n_id[seeds:]]
        later += int((rows > seed_time[batch[name].batch[seeds:]]).sum())
        total += rows.numel()
    return later, total


@pytest.mark.parametrize(
    "count", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)], ids=["some", "million"]
)
def test_no_row_is_later_than_its_seed(graph, tables, count):
    ids, time = seeds_of(tables, count, seed=3)
    options = {"input_nodes": ("customers", ids), "batch_size": 4096, "seed": 1}
    loader = NeighborLoader(
        graph, [3, 3], input_time=time, time_attr="time", num_workers=1, **options
    )
    counts = [later_rows(graph, batch, time) for batch in loader]
    assert sum(total for _, total in counts) > 2 * count
    assert sum(later for later, _ in counts) == 0
    # the control: without times, rows of the future are everywhere
    loader = NeighborLoader(graph_of(tables), [3, 3], disjoint=True, **options)
    later, total = later_rows(graph, next(iter(loader)), time)
    assert later > total // 4


def test_seed_tables(graph, written, tables):
    keys = pd.Series(np.arange(len(tables["customers"])), index=tables["customers"]["id"])
    assert list(graph.tasks) == ["churn", "next"]
    for split, table in graph.tasks["churn"].splits.items():
        labels = pd.read_parquet(written[0] / f"tasks/churn/{split}.parquet")
        assert table.nodes[0] == "customers" and len(table) == len(labels)
        assert table.nodes[1].tolist() == keys.loc[labels["id"]].tolist()
        assert (
            table.time.tolist()
            == labels["timestamp"].to_numpy().astype("M8[ns]").astype(np.int64).tolist()
        )
        assert table.target.tolist() == labels["churn"].tolist()
    with pytest.raises(KeyError, match="no task 'chrun'.*churn, next"):
        graph.tasks["chrun"]
    with pytest.raises(KeyError, match="has no 'dev', only train, val, test"):
        graph.tasks["churn"]["dev"]


def test_a_seed_table_is_what_a_loader_takes(graph):
    train = graph.tasks["churn"].train
    loader = NeighborLoader(
        graph,
        [4, 4],
        input_nodes=train.nodes,
        input_time=train.time,
        transform=train.transform,
        shuffle=True,
        **TEMPORAL,
    )
    seen = 0
    for batch in loader:
        assert torch.equal(batch["customers"].y, train.target[batch["customers"].input_id])
        names = batch["customers"].tf.col_names_dict
        assert stype.numerical not in names and names[stype.categorical] == ["city"]  # no age
        assert "tasks" not in batch and "seed_tables" not in batch
        seen += batch["customers"].batch_size
    assert seen == len(train)


def test_pairs_of_a_task_that_recommends(graph, written, tables):
    train = graph.tasks["next"].train
    labels = pd.read_parquet(written[0] / "tasks/next/train.parquet").explode("sku")
    rows = pd.Series(np.arange(len(tables["products"])), index=tables["products"]["sku"])
    assert train.destinations[0] == "products"
    assert train.destinations[1].tolist() == rows.loc[labels["sku"]].tolist()
    assert train.pairs.tolist() == labels.index.tolist()
    edge = torch.stack([train.nodes[1][train.pairs], train.destinations[1]])
    loader = LinkNeighborLoader(
        graph,
        [2],
        edge_label_index=(("customers", "buys", "products"), edge),
        edge_label_time=train.time[train.pairs],
        **TEMPORAL,
    )
    assert next(iter(loader))["customers", "buys", "products"].edge_label_index.size(1) == 16


def test_label_tables_that_are_read_in_pieces(shop, graph, tmp_path, monkeypatch):
    monkeypatch.setattr(labels_module, "_ROWS", 7)
    file = shop / "tasks/next/train.parquet"
    labels = pd.read_parquet(file)
    labels.loc[[2, 30], "id"] = 99_999
    labels.at[40, "sku"] = [labels.at[40, "sku"][0], "p-none"]
    labels.to_parquet(file, index=False)
    convert(f"tables:{shop}", tmp_path / "graph", on_missing="drop", quiet=True)
    tasks = pyg_scale.open(tmp_path / "graph").tasks
    for name in ("ids", "time"):
        of = (lambda t: t.nodes[1]) if name == "ids" else (lambda t: t.time)
        assert torch.equal(of(tasks["churn"].train), of(graph.tasks["churn"].train))
    assert torch.equal(tasks["churn"].train.target, graph.tasks["churn"].train.target)
    wanted, found = graph.tasks["next"].train, tasks["next"].train
    kept = [row for row in range(len(wanted)) if row not in (2, 30)]
    assert torch.equal(found.nodes[1], wanted.nodes[1][kept])

    def pairs_of(table, rows):
        found = {row: table.destinations[1][table.pairs == row].tolist() for row in rows}
        return [found[row] for row in rows]

    expected = pairs_of(wanted, kept)
    expected[kept.index(40)] = expected[kept.index(40)][:1]
    assert pairs_of(found, range(len(kept))) == expected


def test_saved_again_it_is_the_same(graph, tmp_path):
    pyg_scale.save(graph, tmp_path / "again", time_attr="time")
    again = pyg_scale.open(tmp_path / "again")
    for name in graph.node_types:
        assert again[name].tf == graph[name].tf
    assert str(again.col_stats) == str(graph.col_stats)
    assert torch.equal(again.tasks["churn"].val.time, graph.tasks["churn"].val.time)
    assert copy.deepcopy(again)["products"].tf == graph["products"].tf


def test_parts_have_the_same_batches(graph, converted, tmp_path, tables):
    pyg_scale.partition(pyg_scale.open(converted), 3, "random", tmp_path / "parts")
    parts = pyg_scale.open(tmp_path / "parts")
    ids, time = seeds_of(tables, 32)
    options = {"input_nodes": ("customers", ids), "input_time": time, **TEMPORAL}
    loaders = [NeighborLoader(data, [5, 5], **options) for data in (graph, parts)]
    for own, other in zip(*loaders, strict=True):
        for name in graph.node_types:
            assert torch.equal(own[name].n_id, other[name].n_id)
            assert own[name].tf == other[name].tf
    assert torch.equal(parts.tasks["churn"].train.time, graph.tasks["churn"].train.time)
    assert str(parts.col_stats) == str(graph.col_stats)


# Other sources of rows ####################################################################


def same_graph(path, graph, but=()):
    found = pyg_scale.open(path)
    for name in graph.node_types:
        assert found[name].num_nodes == graph[name].num_nodes
        if name in TIMES:
            assert torch.equal(found[name].time, graph[name].time)
        if name not in but:
            assert found[name].tf == graph[name].tf
    for edge_type in graph.edge_types:
        assert torch.equal(found[edge_type].edge_index, graph[edge_type].edge_index)
    return found


def rewritten(shop, old, new):
    manifest = shop / "manifest.yaml"
    text = manifest.read_text()
    assert old in text
    manifest.write_text(text.replace(old, new))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("compression", ["uncompressed", "zstd"])
def test_arrow_files(shop, graph, tables, tmp_path, compression):
    for name in tables:
        file = shop / "db" / f"{name}.parquet"
        table = pa.parquet.read_table(file)
        pa.feather.write_feather(table, shop / f"{name}.feather", compression, chunksize=50)
        file.unlink()
    convert(f"tables:{shop}", tmp_path / "graph", quiet=True)
    same_graph(tmp_path / "graph", graph)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("ending", ["csv", "csv.gz", "tsv"])
def test_text_files(shop, graph, tables, tmp_path, ending):
    for name in ("customers", "orders"):
        separator = "\t" if ending == "tsv" else ","
        tables[name].to_csv(shop / "db" / f"{name}.{ending}", index=False, sep=separator)
        (shop / "db" / f"{name}.parquet").unlink()
    convert(f"tables:{shop}", tmp_path / "graph", quiet=True)
    same_graph(tmp_path / "graph", graph)


def test_a_table_of_many_files(shop, graph, tables, tmp_path):
    (shop / "db" / "orders.parquet").unlink()
    (shop / "orders").mkdir()
    for part, rows in enumerate(np.array_split(np.arange(len(tables["orders"])), 3)):
        tables["orders"].iloc[rows].to_parquet(shop / f"orders/{part}.parquet", index=False)
    rewritten(shop, "  orders:\n", "  orders:\n    file: orders/*.parquet\n")
    convert(f"tables:{shop}", tmp_path / "graph", quiet=True)
    same_graph(tmp_path / "graph", graph)


def test_a_database_and_a_query_of_duckdb(shop, graph, tables, tmp_path):
    with duckdb.connect(str(shop / "shop.duckdb")) as connection:
        for name in tables:
            file = shop / "db" / f"{name}.parquet"
            connection.execute(f"CREATE TABLE {name} AS SELECT * FROM '{file}'")
            file.unlink()
    rewritten(shop, "name: shop", "name: shop\ndatabase: shop.duckdb")
    rewritten(
        shop,
        "  orders:\n",
        "  orders:\n    query: SELECT * FROM orders WHERE oid > 0 ORDER BY oid\n",
    )
    convert(f"tables:{shop}", tmp_path / "graph", quiet=True)
    same_graph(tmp_path / "graph", graph)


@pytest.mark.parametrize("ending", ["parquet", "feather"])
def test_tables_without_rows_columns_or_keys(tmp_path, ending):
    write = {"parquet": pa.parquet.write_table, "feather": pa.feather.write_feather}[ending]
    none = pa.array([], pa.int64())
    tables = {
        "only": {"k": [3, 1, 2]},
        "empty": {"k": none, "v": pa.array([], pa.float64()), "w": pa.array([], pa.date32())},
        "child": {"a": [1, None, 2], "b": pa.array([None] * 3, pa.int64())},
    }
    for name, columns in tables.items():
        write(pa.table(columns), tmp_path / f"{name}.{ending}")
    (tmp_path / "manifest.yaml").write_text(
        "tables: {only: {pkey: k}, empty: {pkey: k}, child: {fkeys: {a: only, b: empty}}}"
    )
    convert(f"tables:{tmp_path}", tmp_path / "graph", quiet=True)
    graph = pyg_scale.open(tmp_path / "graph", verify=True)
    assert [graph[name].num_nodes for name in tables] == [3, 0, 3]
    assert graph["child", "f2p_a", "only"].edge_index.tolist() == [[0, 2], [1, 2]]
    assert graph["child", "f2p_b", "empty"].edge_index.shape == (2, 0)
    assert len(graph["only"].tf) == 3 and len(graph["empty"].tf) == 0
    for column, stats in graph.col_stats["empty"].items():
        assert len(stats) == {"v": 3, "w": 4}[column]
    batch = next(iter(NeighborLoader(graph, [2], input_nodes="only", batch_size=3)))
    assert len(batch["child"].tf) == 2 and len(batch["empty"].tf) == 0


def test_texts_that_are_embedded(shop, graph, tables, tmp_path):
    rewritten(shop, "    drop: [name]\n", "")
    rewritten(shop, "{joined: timestamp}", "{joined: timestamp, name: text_embedded}")

    def embed(texts):
        return torch.tensor([[len(text), sum(text.encode())] for text in texts])

    with pytest.raises(ValueError, match=r"'customers', column 'name'.*text_embedder="):
        convert(f"tables:{shop}", tmp_path / "graph", quiet=True)
    convert(RelationalReader(shop, text_embedder=embed), tmp_path / "graph", quiet=True)
    found = pyg_scale.open(tmp_path / "graph")["customers"].tf
    wanted = embed(tables["customers"]["name"].tolist()).float()
    assert torch.equal(found.feat_dict[stype.embedding].values, wanted)
    assert found.col_names_dict[stype.embedding] == ["name"]


def test_a_column_without_a_stype_is_left_out_and_said_so(shop, graph, tmp_path):
    rewritten(shop, "    drop: [name]\n", "")
    with pytest.warns(RuntimeWarning, match="'customers': 'name' left out"):
        convert(f"tables:{shop}", tmp_path / "graph", quiet=True)
    same_graph(tmp_path / "graph", graph)


def test_stypes_of_the_manifest(shop, tables, tmp_path):
    rewritten(
        shop,
        "      before: orders\n",
        "      before: orders\n    stypes:\n"
        "      amount: categorical\n      at: timestamp\n      gift: numerical\n",
    )
    convert(f"tables:{shop}", tmp_path / "graph", quiet=True)
    graph = pyg_scale.open(tmp_path / "graph")
    frame = graph["orders"].tf
    values, _ = categories(graph, "orders", "amount")
    amount = [values[i] for i in frame.get_col_feat("amount").view(-1).tolist()]
    assert amount == tables["orders"]["amount"].tolist()
    assert frame.get_col_feat("gift").view(-1).tolist() == tables["orders"]["gift"].tolist()
    assert frame.feat_dict[stype.timestamp].shape == (len(tables["orders"]), 1, 7)


def test_a_table_without_features_has_a_constant(shop, tmp_path):
    rewritten(shop, "    time_col: null\n", "    drop: [price, tags, picture]\n")
    convert(f"tables:{shop}", tmp_path / "graph", quiet=True)
    frame = pyg_scale.open(tmp_path / "graph")["products"].tf
    assert frame.col_names_dict == {stype.numerical: ["__const__"]}
    assert frame.feat_dict[stype.numerical].eq(1).all() and len(frame) == 20


# Times ####################################################################################


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    ("column", "entry"),
    [
        (lambda at: pa.array(at).cast(pa.timestamp("s")), ""),
        (lambda at: pa.array(at).cast(pa.timestamp("us")), ""),
        (lambda at: pa.array(at).cast(pa.timestamp("ns", "UTC")), ""),
        (
            lambda at: pa.compute.assume_timezone(pa.array(at), "UTC").cast(
                pa.timestamp("ms", "Asia/Kolkata")
            ),
            "",
        ),
        (lambda at: pa.array(at.astype("M8[s]").astype(np.int64)), "    time_unit: s\n"),
        (lambda at: pa.array(at.astype("M8[us]").astype(np.int64)), "    time_unit: us\n"),
        (lambda at: pa.array([str(t)[:19] for t in at]), ""),
        (lambda at: pa.array([f"{str(t)[:19]}Z" for t in at]), ""),
        (lambda at: pa.array([f"{str(t + np.timedelta64(2, 'h'))[:19]}+02:00" for t in at]), ""),
        (lambda at: pa.array([str(t)[:19].replace("T", " ") for t in at]), ""),
    ],
    ids=["s", "us", "utc", "zone", "integers", "micro", "text", "text-z", "text-offset", "space"],
)
def test_times_of_any_unit_and_zone_are_utc_nanoseconds(shop, graph, tmp_path, column, entry):
    file = shop / "db/orders.parquet"
    table = pa.parquet.read_table(file)
    at = table["at"].to_numpy().astype("M8[ns]")
    place = table.schema.get_field_index("at")
    pa.parquet.write_table(table.set_column(place, "at", column(at)), file)
    rewritten(shop, "    time_col: at\n", f"    time_col: at\n{entry}")
    convert(f"tables:{shop}", tmp_path / "graph", quiet=True)
    assert torch.equal(pyg_scale.open(tmp_path / "graph")["orders"].time, graph["orders"].time)


def test_dates_are_their_midnight(shop, graph, tmp_path):
    file = shop / "db/orders.parquet"
    table = pa.parquet.read_table(file)
    place = table.schema.get_field_index("at")
    days = table["at"].cast(pa.date32())
    pa.parquet.write_table(table.set_column(place, "at", days), file)
    convert(f"tables:{shop}", tmp_path / "graph", quiet=True)
    day = 86_400 * 10**9
    found = pyg_scale.open(tmp_path / "graph")["orders"].time
    assert torch.equal(found, graph["orders"].time // day * day)


# Keys #####################################################################################


@pytest.mark.parametrize("kind", ["spread", "text", "numbers"])
def test_keys_of_every_kind(shop, graph, tables, tmp_path, kind):
    generator = np.random.default_rng(5)
    count = len(tables["customers"])
    new = {
        "spread": generator.choice(2**62, count, replace=False) - 2**61,
        "text": np.array([f"{'long ' * (i % 9)}{i} é" for i in range(count)], object),
        "numbers": np.arange(count)[::-1].copy(),
    }[kind]
    rows = pd.Series(np.arange(count), index=tables["customers"]["id"])
    customers, orders = tables["customers"].copy(), tables["orders"].copy()
    there = orders["customer"].notna()
    found = new[rows.loc[orders["customer"][there]].to_numpy()]
    if kind == "numbers":  # as pandas has integers with missing values
        orders["customer"] = pd.Series(np.nan, index=orders.index)
    else:
        orders["customer"] = pd.Series(None, index=orders.index, dtype=object)
    orders.loc[there, "customer"] = found
    customers["id"] = new
    customers.to_parquet(shop / "db/customers.parquet", index=False)
    if kind == "spread":
        orders["customer"] = orders["customer"].astype("Int64")
    orders.to_parquet(shop / "db/orders.parquet", index=False)
    shutil.rmtree(shop / "tasks")
    convert(f"tables:{shop}", tmp_path / "graph", quiet=True)
    same_graph(tmp_path / "graph", graph)


def test_missing_keys_are_counted_and_dropped_when_asked(shop, graph, tables, tmp_path):
    orders = tables["orders"].copy()
    orders.loc[[3, 5], "customer"] = 77777
    orders.to_parquet(shop / "db/orders.parquet", index=False)
    with pytest.warns(RuntimeWarning, match="'orders', column 'customer': 2 keys are of no row of"):
        convert(f"tables:{shop}", tmp_path / "graph", on_missing="drop", quiet=True)
    found = pyg_scale.open(tmp_path / "graph")
    for edge_type in graph.edge_types:
        wanted = graph[edge_type].edge_index
        if "customer" in edge_type[1]:
            child = wanted[0 if edge_type[0] == "orders" else 1]
            wanted = wanted[:, (child != 3) & (child != 5)]
        assert torch.equal(found[edge_type].edge_index, wanted)


def test_foreign_keys_are_looked_up_in_any_order(shop, tables, tmp_path):
    generator = np.random.default_rng(0)
    mixed = {
        n: t.iloc[generator.permutation(len(t))].reset_index(drop=True) for n, t in tables.items()
    }
    for name, table in mixed.items():
        table.to_parquet(shop / "db" / f"{name}.parquet", index=False)
    convert(f"tables:{shop}", tmp_path / "graph", quiet=True)
    found, wanted = pyg_scale.open(tmp_path / "graph"), graph_of(mixed)
    for column, parent in FOREIGN:
        edge_type = ("orders", f"f2p_{column}", parent)
        assert pairs(found[edge_type].edge_index) == pairs(wanted[edge_type].edge_index)
