"""The folder and the files of every run, without measuring anything."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pyg_scale.ops import library
from pyg_scale_bench import benchmark, command
from pyg_scale_bench.benchmark import FOLDER, Benchmark
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.graphs import REUSE
from pyg_scale_bench.report import Report

pytestmark = pytest.mark.skipif(
    not library.status()["loaded"], reason="the kernels are not compiled"
)


class Writer:
    """A benchmark that writes a file, and notes whether one was there."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.found: list[bool] = []
        panels = [[Panel("a", [Bar("a", 1.0)], "s")]]
        self.benchmark = Benchmark(
            "store",
            None,
            {"how": {**FOLDER, **REUSE}},
            self.measure,
            lambda found: Report(found, ["done"], panels=panels),
        )

    def measure(self, args: argparse.Namespace, found: dict[str, Any]) -> None:
        graph = Path(args.dir) / "graph"
        self.found.append(graph.exists())
        graph.mkdir(exist_ok=args.reuse)
        (graph / "x").write_text("1")
        if self.fails:
            raise RuntimeError("halfway")

    def run(self, *argv: object) -> int:
        return benchmark.run(self.benchmark, [str(each) for each in argv])


def files(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): file.read_text()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_in_the_folder_before_stays(tmp_path: Path, fails: bool) -> None:
    (tmp_path / "graph").mkdir()
    for name in ("thesis.txt", "graph/x"):
        (tmp_path / name).write_text("thesis")
    before, writer = files(tmp_path), Writer(fails)
    if fails:
        with pytest.raises(RuntimeError, match="halfway"):
            writer.run("--dir", tmp_path)
    else:
        assert writer.run("--dir", tmp_path) == 0
    assert files(tmp_path) == before
    assert {each.name for each in tmp_path.iterdir()} == {"thesis.txt", "graph"}
    assert writer.found == [False]


def test_a_folder_that_the_run_made_goes(tmp_path: Path) -> None:
    assert Writer().run("--dir", tmp_path / "a" / "b") == 0
    assert list(tmp_path.iterdir()) == []


def test_kept_files_are_used_again_and_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer, kept = Writer(), tmp_path / "work" / "pyg-scale-bench-store"
    where = ("--dir", tmp_path / "work")
    assert writer.run(*where, "--reuse") == 0  # there is nothing yet
    assert not kept.exists()
    assert writer.run(*where, "--keep") == 0
    assert files(kept) == {"graph/x": "1"}
    assert writer.run(*where, "--reuse") == 0
    assert writer.run(*where, "--reuse", "--keep") == 0
    assert writer.found == [False, False, True, True]
    assert writer.run(*where) == 0  # another run without them
    with pytest.raises(SystemExit) as ended:
        writer.run(*where, "--keep")
    assert ended.value.code == 2
    assert f"{kept} is there" in capsys.readouterr().err
    assert files(tmp_path / "work") == {"pyg-scale-bench-store/graph/x": "1"}


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=f"--dir {tmp_path / 'file'}: "):
        Writer().run("--dir", tmp_path / "file")


@pytest.mark.parametrize("name", ["x.foo", "x"])
def test_a_picture_that_cannot_be_drawn_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    writer = Writer()
    with pytest.raises(SystemExit) as ended:
        writer.run("--dir", tmp_path / "work", "--png", tmp_path / name)
    assert ended.value.code == 2
    assert "must end in one of" in capsys.readouterr().err
    assert writer.found == []


def test_a_file_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "x.png").mkdir()
    writer = Writer()
    for option, path, why in (
        ("--json", tmp_path, "is a folder"),
        ("--report", tmp_path / "file" / "x.md", "is no folder"),
        ("--png", tmp_path / "x.png", "is a folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            writer.run("--dir", tmp_path / "work", option, path)
        assert ended.value.code == 2
        assert why in capsys.readouterr().err
    assert writer.found == []


def test_options_are_not_abbreviated(tmp_path: Path) -> None:
    """``--quic`` would be a run of seconds that is not called one."""
    for words in (["loader", "--quic"], ["store", "--di", str(tmp_path)]):
        with pytest.raises(SystemExit) as ended:
            command.main(words)
        assert ended.value.code == 2


@pytest.mark.parametrize(
    "words",
    [
        "loader --nodes inf",
        "tables --dir d --rows 1000 --memory -5",
        "recording --batch-sizes 64,0",
        "scale --dir d --communities 4",
        "transport --rows-in-all 100 --rows 500",
    ],
)
def test_options_that_would_fail_later_are_refused(words: str) -> None:
    name, *argv = words.split()
    with pytest.raises(SystemExit) as ended:
        benchmark.arguments(command._benchmark(name), argv)
    assert ended.value.code == 2


def test_sigterm_cleans_up_as_an_exception_does(tmp_path: Path) -> None:
    class Terminated(Writer):
        def measure(self, args: argparse.Namespace, found: dict[str, Any]) -> None:
            super().measure(args, found)
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: None)  # would go on
    try:
        expected = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            Terminated().run("--dir", tmp_path / "work")
        assert signal.getsignal(signal.SIGTERM) is expected
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_markdown_is_written_before_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(self: Report, path: str) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr(Report, "draw", draw)
    with pytest.raises(RuntimeError, match="no ink"):
        Writer().run(
            *("--dir", tmp_path / "work", "--png", tmp_path / "x.png"),
            *("--report", tmp_path / "x.md"),
        )
    assert (tmp_path / "x.md").read_text().startswith("# `pyg-scale bench store`")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{}", "it lacks 'benchmark'"),
        ("[1", "Expecting"),
        ("[]", "list indices"),
        ('{"benchmark": "report"}', "there is no benchmark 'report'"),
        ('{"benchmark": ["store"]}', "there is no benchmark"),
        ('{"benchmark": "store"}', "it lacks '"),
        (json.dumps({"benchmark": "events", "settings": None}), ""),
        (None, "No such file"),
    ],
)
def test_a_report_of_another_file_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, why: str
) -> None:
    file = tmp_path / "found.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit) as ended:
        command.main(["report", str(file)])
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"pyg-scale bench report: error: {file}")
    assert why in said
