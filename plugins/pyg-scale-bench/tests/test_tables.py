"""``pyg-scale bench tables``: the database is the one that it says, and the whole run works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyg_scale.ops import library
from pyg_scale_bench import command
from pyg_scale_bench.tables import FOREIGN, KEYS, write

pytest.importorskip("pyg_scale_tables", reason="pip install ./plugins/pyg-scale-tables")


def test_the_database_has_its_rows_and_its_keys(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    write(tmp_path, 3000)
    tables = {name: pandas.read_parquet(tmp_path / "db" / f"{name}.parquet") for name in KEYS}
    assert sum(map(len, tables.values())) == 3000
    for name, table in tables.items():
        assert table[KEYS[name]].is_unique
        for column, parent in FOREIGN.items():
            if column in table:
                assert table[column].isin(tables[parent][KEYS[parent]]).all()


@pytest.mark.slow
@pytest.mark.skipif(not library.status()["loaded"], reason="the kernels are not compiled")
def test_the_whole_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")
    files = {name: tmp_path / "out" / f"r.{name}" for name in ("json", "png", "md")}
    args = ["--json", files["json"], "--png", files["png"], "--report", files["md"]]
    folder = tmp_path / "work"
    options = ["--quick", "--rows", "4000", "--dir", folder, *args]
    assert command.main(["tables", *map(str, options)]) == 0
    assert not folder.exists()
    found = json.loads(files["json"].read_text())
    (result,) = found["rounds"]
    orders_and_clicks = 4000 - 4000 // 20 - 4000 // 100
    assert result["rows"] == 4000 and result["edges"] == 4 * orders_and_clicks
    assert found["in_memory"]["rows"] == 4000
    assert found["in_memory"]["edges"] == result["edges"]
    for text in (capsys.readouterr().out, files["md"].read_text()):
        assert "4 tables, 4,000 rows" in text and "M rows/s (median of 1)" in text
    assert files["png"].stat().st_size > 5000


def test_what_the_disk_cannot_hold_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["tables", "--rows", "1e13", "--dir", str(tmp_path)])
    assert "are needed in --dir" in capsys.readouterr().err


def test_a_folder_with_files_of_others_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run deletes its folder at the end."""
    (tmp_path / "photo.jpg").write_text("irreplaceable")
    with pytest.raises(SystemExit):
        command.main(["tables", "--quick", "--dir", str(tmp_path)])
    assert "holds other files: give an empty or new folder" in capsys.readouterr().err
    assert (tmp_path / "photo.jpg").exists()
