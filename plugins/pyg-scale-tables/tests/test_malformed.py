"""Wrong input is an error that names the table, the column and the row, and leaves nothing."""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pyg_scale
from pyg_scale.convert import convert
from pyg_scale.errors import GraphDirectoryError
from pyg_scale_tables.manifest import Manifest
from tests import preloaded

ROOT = Path(__file__).parents[3]


def refused(shop, tmp_path, error, match, **options):
    with pytest.raises(error, match=match):
        convert(f"tables:{shop}", tmp_path / "graph", quiet=True, **options)
    assert [each.name for each in tmp_path.iterdir()] == ["shop"]


def changed(shop, table, column, change):
    """Change a column of a table, an array of objects, and write it with its old type."""
    file = shop / "db" / f"{table}.parquet"
    found = pq.read_table(file)
    values = found[column].to_pylist()
    change(values)
    place = found.schema.get_field_index(column)
    field = found.schema.field(column)
    pq.write_table(found.set_column(place, field, pa.array(values, field.type)), file)


def put(place, value):
    def change(values):
        values[place] = values[value[1]] if isinstance(value, tuple) else value

    return change


@pytest.mark.parametrize(
    ("table", "column", "change", "match"),
    [
        ("customers", "id", put(4, None), "'customers', column 'id', row 4 of .* is missing"),
        (
            "orders",
            "oid",
            put(9, ("row", 2)),
            "'orders', column 'oid', row 9 .*5002.*row 2 of .* has",
        ),
        (
            "products",
            "sku",
            put(7, ("row", 3)),
            "'products', column 'sku', row 7 .*row 3 of .* has",
        ),
        ("orders", "customer", put(5, 98765), "'orders', column 'customer', row 5 .*98765.*drop"),
        ("orders", "sku", put(6, "p-x"), "'orders', column 'sku', row 6 .*'p-x'.*'products'"),
        ("orders", "at", put(8, None), "'orders', column 'at', row 8 .* is missing: give every"),
    ],
    ids=["no-key", "twice", "text-twice", "nowhere", "text-nowhere", "no-time"],
)
def test_a_wrong_value_is_named(shop, tmp_path, table, column, change, match):
    changed(shop, table, column, change)
    refused(shop, tmp_path, ValueError, match)


@pytest.mark.parametrize(
    ("first", "second", "match"),
    [
        ("1,1\n2,2\n", "7,1\n7,2\n", r"row 2 of .*b\.csv is .* 7, which row 1 of .*b\.csv has"),
        ("1,1\n2,2\n", "7,1\n2,2\n", r"row 2 of .*b\.csv is .* 2, which row 2 of .*a\.csv has"),
        ("1,1\n2,2\n", "7,1\n,2\n", r"row 2 of .*b\.csv is missing"),
        ("1,1\n2,2\n", "x,1\n", r"changes its type: int64 in .*a\.csv, string in .*b\.csv"),
    ],
)
def test_rows_of_text_files_are_named_by_these(tmp_path, first, second, match):
    """The copies that are read are gone by then."""
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "a.csv").write_text(f"id,v\n{first}")
    (folder / "b.csv").write_text(f"id,v\n{second}")
    (folder / "manifest.yaml").write_text("tables:\n  c:\n    pkey: id\n    file: [a.csv, b.csv]\n")
    with pytest.raises(ValueError, match=match) as error:
        convert(f"tables:{folder}", tmp_path / "graph", quiet=True)
    assert "partial" not in str(error.value)


def rewritten(shop, table, **columns):
    file = shop / "db" / f"{table}.parquet"
    pd.read_parquet(file).assign(**columns).to_parquet(file, index=False)


def test_numbers_beyond_float32(shop, tmp_path):
    rewritten(shop, "orders", size=np.where(np.arange(400) == 19, -1e39, np.inf))
    refused(shop, tmp_path, ValueError, "'orders', column 'size', row 19 .* is -1e.*39, beyond")


def test_lists_of_numbers_beyond_float32(shop, tmp_path):
    lists = [[1.0, 2.0]] * 400
    lists[2], lists[21] = None, [0.0, 1e300]
    rewritten(shop, "orders", lists=lists)
    refused(shop, tmp_path, ValueError, "'orders', column 'lists', row 21 .* is 1e.*300, beyond")


def test_text_keys_that_end_in_nul(shop, tmp_path):
    """NumPy takes them for keys without it."""
    changed(shop, "orders", "sku", lambda values: put(6, values[6] + "\0")(values))
    refused(shop, tmp_path, ValueError, "'orders', column 'sku', row 6 .* ends in a NUL byte")


def test_a_key_far_away_that_is_there_twice(shop, tmp_path):
    count = len(pd.read_parquet(shop / "db/customers.parquet"))
    ids = np.arange(count) * 10**12
    ids[11] = ids[3]
    rewritten(shop, "customers", id=ids)
    refused(shop, tmp_path, ValueError, "'customers', column 'id', row 11 .*row 3 of .* has")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("2023-02-30 10:00:00", "row 13 .*'2023-02-30 10:00:00', which is no time as in ISO 8601"),
        ("yesterday", "'orders', column 'at', row 13 .*'yesterday'"),
        ("3023-01-01", "row 13 .*from the year 1678 to 2261"),
    ],
)
def test_a_time_that_cannot_be_read(shop, tmp_path, text, match):
    at = pd.read_parquet(shop / "db/orders.parquet")["at"].astype(str).to_numpy().copy()
    at[13] = text
    rewritten(shop, "orders", at=at)
    refused(shop, tmp_path, ValueError, match)


def test_times_that_are_integers_need_a_unit(shop, tmp_path):
    rewritten(shop, "orders", at=np.arange(400))
    refused(shop, tmp_path, ValueError, "'orders', column 'at'.*time_unit")


def test_keys_of_another_kind(shop, tmp_path):
    rewritten(shop, "orders", customer="x")
    refused(shop, tmp_path, TypeError, "'orders', column 'customer'.* text, but .*'customers' is")


def test_keys_that_are_no_integers(shop, tmp_path):
    numbers = np.full(400, 1.0)
    numbers[17] = 2.5
    rewritten(shop, "orders", customer=numbers)
    refused(shop, tmp_path, ValueError, "'orders', column 'customer', row 17 .*2.5: keys are")


def test_lists_of_another_length(shop, tmp_path):
    file = shop / "db/products.parquet"
    table = pd.read_parquet(file)
    table.at[5, "picture"] = np.zeros(2, np.float32)
    table.to_parquet(file, index=False)
    refused(shop, tmp_path, ValueError, "'products', column 'picture', row 5 .* has 2 numbers")


def test_a_type_that_changes_from_file_to_file(shop, tmp_path):
    table = pd.read_parquet(shop / "db/orders.parquet")
    (shop / "db/orders.parquet").unlink()
    (shop / "orders").mkdir()
    table.iloc[:200].to_parquet(shop / "orders/a.parquet")
    table.iloc[200:].assign(amount="3").to_parquet(shop / "orders/b.parquet")
    edit(shop, "  orders:\n", "  orders:\n    file: orders\n")
    refused(shop, tmp_path, ValueError, "'orders', column 'amount' changes its type: int64 in")


def test_a_type_that_changes_within_a_text(shop, tmp_path):
    table = pd.read_parquet(shop / "db/orders.parquet")
    (shop / "db/orders.parquet").unlink()
    table = pd.concat([table] * 60).assign(oid=np.arange(24_000))
    table["amount"] = table["amount"].astype(object)
    table.iat[23_000, 4] = "many"
    table.to_csv(shop / "db/orders.csv", index=False)
    match = "'orders', column 'amount' changes its type: .*orders.csv, .*Row #23002.*many"
    refused(shop, tmp_path, ValueError, match)


# Files ####################################################################################


@pytest.mark.parametrize("kept", [0, 3, 0.5, 0.99])
def test_a_parquet_file_that_was_cut_short(shop, tmp_path, kept):
    file = shop / "db/orders.parquet"
    data = file.read_bytes()
    file.write_bytes(data[: int(kept if kept > 1 else kept * len(data))])
    match = "table 'orders': .*orders.parquet is no Parquet file, or was cut short"
    refused(shop, tmp_path, ValueError, match)


def test_a_label_table_that_was_cut_short(shop, tmp_path):
    file = sorted((shop / "tasks/churn").glob("*.parquet"))[0]
    file.write_bytes(file.read_bytes()[:-9])
    match = f"task 'churn': .*{file.name} is no Parquet file, or was cut short"
    refused(shop, tmp_path, ValueError, match)


def test_a_parquet_file_with_a_hole(shop, tmp_path):
    file = shop / "db/orders.parquet"
    group = pq.ParquetFile(file).metadata.row_group(2)
    place = next(i for i in range(group.num_columns) if group.column(i).path_in_schema == "amount")
    data = bytearray(file.read_bytes())
    begin = group.column(place).dictionary_page_offset or group.column(place).data_page_offset
    data[begin : begin + 40] = b"\xff" * 40
    file.write_bytes(data)
    refused(shop, tmp_path, ValueError, "'orders': .*orders.parquet, column 'amount', behind row")


@pytest.mark.parametrize("suffix", ["arrow", "feather"])
@pytest.mark.parametrize("kept", [0, 4, 0.5, 0.9])
def test_an_arrow_file_that_was_cut_short(shop, tmp_path, kept, suffix):
    table = pq.read_table(shop / "db/orders.parquet")
    (shop / "db/orders.parquet").unlink()
    file = shop / f"db/orders.{suffix}"
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, 100)
    data = file.read_bytes()
    file.write_bytes(data[: int(kept if kept > 1 else kept * len(data))])
    refused(shop, tmp_path, ValueError, f"table 'orders': .*orders.{suffix} is no Arrow file")


@pytest.mark.parametrize(
    ("line", "match"), [(0, "Empty CSV file or block"), (9, "Row #10")], ids=["header", "row"]
)
def test_a_quotation_mark_without_an_end(shop, tmp_path, line, match):
    table = pd.read_parquet(shop / "db/orders.parquet")
    (shop / "db/orders.parquet").unlink()
    lines = table.to_csv(index=False).splitlines()
    lines[line] = lines[line].replace(",", ',"', 1)
    (shop / "db/orders.csv").write_text("\n".join(lines) + "\n")
    match = f"table 'orders': .*orders.csv cannot be read as CSV: .*{match}"
    refused(shop, tmp_path, ValueError, match)


def quoted_orders(shop):
    """The lines of the orders as CSV, with a last column of text in quotation marks."""
    table = pd.read_parquet(shop / "db/orders.parquet")
    (shop / "db/orders.parquet").unlink()
    header, *rows = table.to_csv(index=False).splitlines()
    return [f"{header},note", *(f'{row},"note {k}"' for k, row in enumerate(rows))]


@pytest.mark.parametrize("line", [1, 40, -2])
def test_a_quotation_mark_without_an_end_does_not_join_rows(shop, tmp_path, line):
    lines = quoted_orders(shop)
    line %= len(lines)
    lines[line] = lines[line].removesuffix('"')
    (shop / "db/orders.csv").write_text("\n".join(lines) + "\n")
    match = f"table 'orders': .*orders.csv, behind row {line - 1}: is a quotation mark not closed"
    refused(shop, tmp_path, ValueError, match)


def test_line_breaks_and_quotation_marks_within_text_are_kept(shop, tmp_path):
    lines = quoted_orders(shop)
    lines[5] = lines[5].removesuffix('"') + '\nand ""more"""'
    (shop / "db/orders.csv").write_text("\n".join(lines) + "\n")
    convert(f"tables:{shop}", tmp_path / "g", quiet=True)
    assert pyg_scale.open(tmp_path / "g")["orders"].num_nodes == len(lines) - 1


def test_a_missing_file(shop, tmp_path):
    (shop / "db/orders.parquet").unlink()
    refused(shop, tmp_path, FileNotFoundError, "table 'orders': there is no file")


# Manifests ################################################################################


def edit(shop, old, new):
    manifest = shop / "manifest.yaml"
    text = manifest.read_text()
    assert old in text
    manifest.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("name: shop", "name: [shop", "is no YAML that can be read"),
        ("name: shop", "name: !!python/object/apply:os.system [ls]", "is no YAML"),
        ("name: shop", "name: shop\nname: again", "the key 'name' is there twice"),
        ("  orders:", "  customers:", "the key 'customers' is there twice"),
        ("name: shop", "<<: {a: 1}", "a merge key"),
        ("manifest_version: 1", "manifest_version: 2", "manifest_version is 2, .* reads 1"),
        ("manifest_version: 1", "manifest_version: one", "manifest_version must be an integer"),
        ("pkey: id", "pkee: id", "'customers' has an unknown entry 'pkee': did you mean pkey"),
        ("pkey: id", "pkey: [id]", "'customers': pkey must be text"),
        ("pkey: id", "pkey: key", "'customers': .* has no column 'key', only id, joined"),
        ("time_col: at", "time_col: when", "'orders': .* has no column 'when'"),
        ("customer: customers", "customer: people", "'customer' refers to a table 'people' that"),
        ("customer: customers", "buyer: customers", "'orders': .* has no column 'buyer'"),
        ("customer: customers", "customer: 3", "fkeys must map names to names"),
        ("    pkey: sku\n", "", "'sku' refers to 'products', which has no pkey"),
        ("joined: timestamp", "joined: timestmp", "'timestmp': did you mean timestamp"),
        ("joined: timestamp", "city: numerical", "'customers', column 'city'.*cannot be numerical"),
        ("joined: timestamp", "id: numerical", "'id' is a key and no feature"),
        ("joined: timestamp", "name: categorical", "'name' is in drop and in stypes"),
        ("joined: timestamp", "name: embedding", "'name' is in drop and in stypes"),
        ("joined: timestamp", "city: multicategorical", "say which sep separates"),
        ("tables:", "tables: {}\nothers:", "has no tables"),
        ("tables:", "tables: [a]\nothers:", "tables must be a mapping"),
        (
            "  customers:\n",
            "  customers:\n    query: SELECT 1\n    file: a\n",
            "a file and a query",
        ),
        ("  customers:\n", "  customers:\n    query: DROP TABLE a\n", "must be one SELECT"),
        ("  customers:\n", "  customers:\n    query: SELECT 1; SELECT 2\n", "must be one SELECT"),
        ("  customers:\n", "  customers:\n    query: SELEC\n", "table 'customers', query: Parser"),
        ("name: shop", "database: none.duckdb", "there is no database"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*nothing is done about")
def test_a_manifest_that_is_wrong(shop, tmp_path, old, new, match):
    edit(shop, old, new)
    if "database" in new:
        (shop / "db/orders.parquet").unlink()
    refused(shop, tmp_path, (ValueError, TypeError, FileNotFoundError), match)


def test_entries_that_nobody_reads_are_named(shop):
    edit(shop, "name: shop", "name: shop\nlicense: MIT")
    with pytest.warns(RuntimeWarning, match="nothing is done about license"):
        Manifest.read(shop)


def test_a_manifest_of_many_aliases_ends(shop, tmp_path):
    lines = ["a0: &a0 [x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    edit(shop, "name: shop", "\n".join([*lines, "name: *a11"]))
    with pytest.warns(RuntimeWarning):
        refused(shop, tmp_path, ValueError, "name must be text")


@pytest.mark.parametrize("text", ["", "- a", "3", "\x00", "{" * 5000, "\udcff"])
def test_a_file_that_is_no_manifest(shop, tmp_path, text):
    (shop / "manifest.yaml").write_bytes(text.encode(errors="surrogateescape"))
    refused(shop, tmp_path, ValueError, "manifest.yaml (is no YAML|must be a mapping)")


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("entity_table: customers", "entity_table: people", "there is no table 'people'"),
        ("entity_col: id", "entity_col: who", "has no column 'who', only timestamp, id, churn"),
        ("[[customers, age]]", "[customers]", r"remove_columns must list \[table, column\]"),
        ("binary_classification", "multilabel_classification", "'churn'.*is no target of multi"),
    ],
)
def test_a_task_that_is_wrong(shop, tmp_path, old, new, match):
    manifest = shop / "tasks/churn/manifest.yaml"
    manifest.write_text(manifest.read_text().replace(old, new))
    refused(shop, tmp_path, (ValueError, TypeError), match)


def test_a_seed_that_does_not_exist(shop, tmp_path):
    file = shop / "tasks/churn/val.parquet"
    labels = pd.read_parquet(file)
    labels.loc[4, "id"] = 99_999
    labels.to_parquet(file, index=False)
    refused(shop, tmp_path, ValueError, "task 'churn', column 'id', row 4 of .*99999.*drop")
    convert(f"tables:{shop}", tmp_path / "graph", quiet=True, on_missing="drop")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"on_missing": "ignore"}, "on_missing must be 'fail' or 'drop'"),
        ({"text_embedder": "bert"}, "text_embedder must be a function"),
        ({"delimiter": ";"}, "delimiter"),
    ],
)
def test_a_wrong_option(shop, tmp_path, options, match):
    refused(shop, tmp_path, (ValueError, TypeError), match, **options)


def test_more_keys_than_memory(shop, tmp_path, monkeypatch):
    from pyg_scale_tables import relational

    monkeypatch.setattr(
        relational, "check_memory", lambda needed, memory, path: _refuse(needed, path)
    )
    refused(shop, tmp_path, ValueError, "need .* to be numbered")


def _refuse(needed, path):
    from pyg_scale.convert.ids import check_memory

    check_memory(needed, 0, path)


# Without torch_frame ######################################################################


@pytest.mark.slow
def test_without_torch_frame_there_are_plain_arrays(converted):
    code = """
        import sys
        sys.modules["torch_frame"] = None
        import pyg_scale
        from pyg_scale.loader import NeighborLoader
        graph = pyg_scale.open(sys.argv[1])
        train = graph.tasks["churn"].train
        loader = NeighborLoader(graph, [2], input_nodes=train.nodes, input_time=train.time,
                                time_attr="time", batch_size=8)
        batch = next(iter(loader))
        assert batch["customers"].tf_numerical.shape == (batch["customers"].num_nodes, 1)
        assert batch["customers"].tf_columns["stypes"]["numerical"] == ["age"]
        for asked in (lambda: graph["customers"].tf, lambda: graph.col_stats):
            try:
                asked()
            except ModuleNotFoundError as error:
                assert "pip install pytorch-frame" in str(error)
            else:
                raise AssertionError("no error")
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(converted)], check=True, timeout=120
    )


# Killed ###################################################################################

# As in tests/convert/test_resume.py: every child goes on with what the killed one before it left.
DRIVER = """
    import os, signal, sys
    from pyg_scale.convert import journal, run
    from pyg_scale.convert.options import Options
    from pyg_scale_tables import relational, table_pass

    folder, kill_every, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    table_pass._MOST_ROWS = table_pass._LEAST_ROWS = 64
    os.fsync = os.fdatasync = lambda _: None
    calls = 0

    def deadly(function):
        def call(*args, **kwargs):
            global calls
            calls += 1
            if calls == kill_every:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call

    def child():
        for name in ("pwrite", "unlink", "posix_fallocate", "rename", "replace", "link"):
            setattr(os, name, deadly(getattr(os, name)))
        journal.Journal.write = deadly(journal.Journal.write)
        relational.save_array = deadly(relational.save_array)
        reader = relational.RelationalReader(f"{folder}/shop")
        path = run.Path(f"{folder}/graph")
        run.run(reader, path, Options(), 1 << 20, overwrite=False, quiet=True)

    killed = 0
    while True:
        pid = os.fork()
        if pid == 0:
            try:
                child()
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            killed += 1
            assert killed < 1000
            assert not os.path.exists(f"{folder}/graph/META.json") or killed > 20
            kill_every += 2 + killed // 2 if step == 1 else killed % step == 0
            continue
        assert os.WEXITSTATUS(status) == 0
        break
    print(killed)
"""


def raw(folder):
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.mark.parametrize(
    ("first", "step", "least"),
    [(2, 1, 8), pytest.param(1, 2, 100, marks=pytest.mark.slow)],
    ids=["often", "a-hundred-times"],
)
def test_killed_again_and_again(shop, converted, tmp_path, first, step, least):
    done = subprocess.run(
        [preloaded.python(), "-c", textwrap.dedent(DRIVER), str(tmp_path), str(first), str(step)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= least
    found, wanted = raw(tmp_path / "graph"), raw(converted)
    assert found.keys() == wanted.keys()
    assert found == wanted
    assert sorted(each.name for each in tmp_path.iterdir()) == ["graph", "shop"]


def test_what_was_wrong_can_be_corrected(shop, tmp_path, written, converted):
    changed(shop, "orders", "at", put(8, None))
    refused(shop, tmp_path, ValueError, "row 8")
    shutil.copyfile(written[0] / "db/orders.parquet", shop / "db/orders.parquet")
    convert(f"tables:{shop}", tmp_path / "graph", quiet=True)
    assert raw(tmp_path / "graph") == raw(converted)


def test_a_task_that_was_damaged_afterwards(converted, tmp_path):
    import pyg_scale
    from pyg_scale.store.directory import GraphDirectory
    from pyg_scale.store.directory.meta import META

    shutil.copytree(converted, tmp_path / "graph")
    meta = GraphDirectory(tmp_path / "graph").meta
    del meta.graph_attributes["seed_tables"]["$dict"]["churn"]["splits"]["train"]["ids"]
    (tmp_path / "graph" / META).write_text(meta.to_json())
    graph = pyg_scale.open(tmp_path / "graph")
    with pytest.raises(GraphDirectoryError, match="task 'churn' of .* is incomplete or wrong"):
        graph.tasks["churn"]
