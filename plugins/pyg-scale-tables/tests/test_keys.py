"""Keys are looked up as in a dictionary, however they are spread and hashed."""

import numpy as np
import pyarrow as pa
import pytest

import pyg_scale
from pyg_scale.convert import convert
from pyg_scale_tables import keys as module
from pyg_scale_tables.columns import nanoseconds
from pyg_scale_tables.keys import KeyIndex, plain_keys


def name(row):
    return f"row {row}"


def texts(generator, count):
    letters = np.array(list("abcé "))
    made = ("".join(generator.choice(letters, size)) for size in generator.integers(0, 30, count))
    return np.array(sorted({f"{i}{text}".encode() for i, text in enumerate(made)}))


def numbers(generator, count, spread):
    return generator.choice(count * spread, count, replace=False) - count


@pytest.mark.parametrize("kind", ["dense", "close", "far", "huge", "text", "colliding", "alike"])
def test_as_a_dictionary(kind, monkeypatch):
    generator = np.random.default_rng(0)
    if kind == "colliding":
        hashes = module._hashes
        monkeypatch.setattr(module, "_hashes", lambda values: hashes(values) % np.uint64(7))
    if kind == "alike":
        monkeypatch.setattr(module, "_hashes", lambda values: np.zeros(len(values), np.uint64))
    if kind in ("text", "colliding", "alike"):
        every = generator.permutation(texts(generator, 300))
    elif kind == "dense":
        every = np.arange(-5, 295)
    else:
        spread = {"close": 3, "far": 1000, "huge": 2**50}[kind]
        every = numbers(generator, 300, spread)
    own, other = every[:200], every[200:]
    index = KeyIndex(own, name)
    rows = {key: row for row, key in enumerate(own.tolist())}
    asked = generator.permutation(np.concatenate([own, other, own[:50]]))
    wanted = [rows.get(key, -1) for key in asked.tolist()]
    assert index.rows(asked).tolist() == wanted
    assert index.rows(asked[:0]).tolist() == []
    if own.dtype.kind == "S":  # a wider array of the same texts
        assert index.rows(asked.astype("S99")).tolist() == wanted
    twice = np.concatenate([own, own[7:8]])
    with pytest.raises(ValueError, match="row 200 is the primary key .*, which row 7 has already"):
        KeyIndex(twice, name)


def test_keys_at_the_ends_of_64_bits():
    own = np.array([-(2**63), 2**63 - 1, 0])
    index = KeyIndex(own, name)
    assert index.rows(np.array([2**63 - 1, -(2**63), 1, 0])).tolist() == [1, 0, -1, 2]
    near = KeyIndex(np.arange(10) + (2**63 - 10), name)
    assert near.rows(np.array([2**63 - 1, -(2**63), 2**63 - 11])).tolist() == [9, -1, -1]


def test_no_keys():
    assert KeyIndex(np.empty(0, np.int64), name).rows(np.array([1, 2])).tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("values", "wanted", "has"),
    [
        (pa.array([1, None, 3]), [1, 3], [True, False, True]),
        (pa.array([1.0, float("nan"), 3.0]), [1, 3], [True, False, True]),
        (pa.array([None, float("nan"), 3.0]), [3], [False, False, True]),
        (pa.array(["b", None, "a"]), [b"b", b"a"], [True, False, True]),
        (pa.array(["b", None, "b"]).dictionary_encode(), [b"b", b"b"], [True, False, True]),
        (pa.array([None, None], pa.null()), [], [False, False]),
        (pa.array([7, 8], pa.uint8()), [7, 8], None),
    ],
)
def test_plain_keys(values, wanted, has):
    found, mask = plain_keys(values, 0, name)
    assert found.tolist() == wanted
    assert (None if mask is None else mask.tolist()) == has


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        (pa.array([None, 1.0, 2.5]), ValueError, "row 12 is 2.5: keys are integers or text"),
        (pa.array([1.0, 1e19]), ValueError, r"row 11 is 1e\+19"),
        (pa.array([None, 2**63], pa.uint64()), ValueError, r"row 11 is 9223372036854775808: keys"),
        (pa.array([True]), TypeError, "row 10 holds bool"),
        (pa.array(["a", "x" * 5000]), ValueError, "row 11 is a key of 5000 bytes"),
    ],
)
def test_wrong_keys(values, error, match):
    with pytest.raises(error, match=match):
        plain_keys(values, 10, name)


def test_tables_that_refer_to_each_other_in_circles(tmp_path):
    write = pa.parquet.write_table
    write(
        pa.table({"k": ["x", "y"], "lead": [9, None], "v": [0.5, 1.5]}), tmp_path / "team.parquet"
    )
    people = {"id": [7, 8, 9], "team": ["y", "x", None], "boss": [9, 7, 9]}
    write(pa.table(people), tmp_path / "people.parquet")
    (tmp_path / "manifest.yaml").write_text(
        "tables: {team: {pkey: k, fkeys: {lead: people}},"
        " people: {pkey: id, fkeys: {team: team, boss: people}}}"
    )
    convert(f"tables:{tmp_path}", tmp_path / "graph", quiet=True)
    graph = pyg_scale.open(tmp_path / "graph", verify=True)
    edges = {edge_type: store.edge_index.tolist() for edge_type, store in graph.edge_items()}
    assert edges == {
        ("team", "f2p_lead", "people"): [[0], [2]],
        ("people", "rev_f2p_lead", "team"): [[2], [0]],
        ("people", "f2p_team", "team"): [[0, 1], [1, 0]],
        ("team", "rev_f2p_team", "people"): [[1, 0], [0, 1]],
        ("people", "f2p_boss", "people"): [[0, 1, 2], [2, 0, 2]],
        ("people", "rev_f2p_boss", "people"): [[2, 0, 2], [0, 1, 2]],
    }


def test_text_keys_that_end_in_nul_are_refused():
    values = pa.array(["skipped", None, "", "\0a", "b", "b\0"]).slice(1)
    with pytest.raises(ValueError, match="^row 14 ends in a NUL byte"):
        plain_keys(values, 10, name)
    assert plain_keys(values.slice(0, 4), 10, name)[0].tolist() == [b"", b"\0a", b"b"]


def test_times_of_text_have_nanoseconds():
    texts = [
        "2024-05-17T12:30:00.1234567Z",
        "2024-05-17 12:30:00.123456789+02:00",
        "1969-12-31T23:59:59.12345678999",
        "1969-12-31T23:59:59.9999999",
        "2024-05-17T12:30:00.12",
        "2024-05-17",
    ]
    expected = [
        "2024-05-17T12:30:00.1234567",
        "2024-05-17T10:30:00.123456789",
        "1969-12-31T23:59:59.123456789",
        "1969-12-31T23:59:59.9999999",
        "2024-05-17T12:30:00.12",
        "2024-05-17",
    ]
    found = nanoseconds(pa.array([*texts, None]), 0, None, name, missing_is=-1)
    assert found.tolist() == [*np.array(expected, "M8[ns]").astype(int), -1]
    with pytest.raises(ValueError, match="row 6 is '2024-05-17T12:30:00.1234567x', which is no"):
        nanoseconds(pa.array([*texts, f"{texts[0][:-1]}x"]), 0, None, name)
    with pytest.raises(ValueError, match="row 1 is .* from the year 1678 to 2261"):
        nanoseconds(pa.array([texts[0], "2262-04-11T23:47:16.854775999"]), 0, None, name)
