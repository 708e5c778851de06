"""``pyg-scale bench dist``: ranks find what the report says that they found."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyg_scale_bench import command, dist, dist_network
from pyg_scale_bench.dist_network import WAYS
from pyg_scale_bench.dist_rank import STAGES

SMALL = shlex.split("--quick --nodes 600 --edges 5000 --batches 3 --latency-batches 4 --latency 0")


@pytest.mark.slow
def test_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / "out" / f"r.{name}" for name in ("json", "png", "md")}
    args = ["--json", files["json"], "--png", files["png"], "--report", files["md"]]
    graph = np.arange(40) % 20
    edges = np.stack([graph, np.roll(graph, 1)]).astype(np.int32)
    np.savez(tmp_path / "small.npz", edge_index=edges, x=np.ones((20, 3), np.float32), y=graph[:20])
    args += ["--compare-npz", tmp_path / "small.npz", "--compare-methods", "random,ldg"]
    link = not _no_link()
    args += ["--link", "10gbit"] if link else []
    folder = tmp_path / "work"
    assert command.main(["dist", *SMALL, "--dir", str(folder), *map(str, args)]) == 0
    assert not folder.exists()
    printed = capsys.readouterr().out
    found = json.loads(files["json"].read_text())
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert {len(rank["bandwidth"][way]) for way in WAYS} == {1}
        assert not link or {len(rank["link"][way]) for way in WAYS} == {1}
        epochs = rank["caches"]
        assert {each["batches"] for each in epochs.values()} == {3}
        assert len({each["bytes"] for each in epochs.values()}) == 1, "the same batches"
        none, placed = epochs["none"]["fetch"], epochs["placed"]["fetch"]
        assert none["cache_bytes"] == 0
        assert none["remote_bytes"] + none["local_bytes"] == epochs["none"]["bytes"]
        assert placed["cache_hits"] > 0 and placed["remote_bytes"] < none["remote_bytes"]
        assert set(epochs["none"]["timeline"][0]) == {*STAGES, "end"}
        assert [each["batches"] for each in rank["in_flight"].values()] == [4, 4]
        assert rank["shared"]["batches"] == 8 and len(rank["shared"]["one"]) == 1
        assert rank["methods"]["random"]["none"]["batches"] == 1
    assert found["compared"]["methods"] == ["random", "ldg"]
    report = files["md"].read_text()
    for text in (printed, report):
        assert "of plain sockets" in text and "bytes from other ranks" in text
        assert ("on a network of 10gbit" in text) == link
    for hidden in ("work", "small.npz"):
        assert str(tmp_path / hidden) not in report + files["json"].read_text()
    assert files["png"].stat().st_size > 5000


def test_the_numbers_of_a_report() -> None:
    def rank(tcp: list[float], ours: list[float], remote: int, seconds: float) -> dict[str, Any]:
        epoch = {"batches": 2, "fetch": {"remote_bytes": remote}}
        return {
            "bandwidth": {"tcp": tcp, "features": ours},
            "methods": {"metis": {"placed": epoch}},
            "caches": {"none": epoch},
            "in_flight": {"1": {"seconds": 3 * seconds}, "4": {"seconds": seconds}},
            "shared": {"one": [9.0, 8.0], "ranks": [10.0, 10.0]},
        }

    ranks = [rank([4, 8], [1, 6], 30, 1), rank([4, 2], [3, 4], 10, 2)]
    found = {"settings": {"in_flight": 4}, "ranks": ranks}
    assert dist.share_of_tcp(found) == [0.5, 1.0]
    assert dist.remote_bytes(found, "none") == 10
    assert dist.remote_bytes(found, "placed", "metis") == 10
    assert dist.gain_of_flight(found) == 3
    assert dist.share_of_one(found) == [0.9, 0.8]


SEND = """
import socket, subprocess, threading, time
from pyg_scale.comm.local import Local
from pyg_scale_bench.dist_network import limited

def seconds():
    listener = socket.create_server(("127.0.0.1", 0))
    out = socket.create_connection(listener.getsockname())
    into, _ = listener.accept()
    start, left = time.perf_counter(), 12 << 20
    threading.Thread(target=out.sendall, args=(bytes(left),)).start()
    while left:
        left -= len(into.recv(left))
    return time.perf_counter() - start

with limited(Local(), "80mbit"):
    print(seconds())
print(subprocess.run(["tc", "qdisc", "show", "dev", "lo"], capture_output=True, text=True).stdout)
"""


@pytest.mark.slow
def test_a_link_has_its_speed() -> None:
    """What goes beyond the bucket of 4 MB takes its time, which no machine can beat."""
    if reason := _no_link():
        pytest.skip(reason)
    with dist_network.namespace() as prefix:
        sending = [*prefix, sys.executable, "-c", SEND]
        done = subprocess.run(sending, capture_output=True, text=True, timeout=60)
        name = prefix[-1]
        assert name in subprocess.check_output(["ip", "netns"], text=True)
    assert done.returncode == 0, done.stderr
    taken, _, after = done.stdout.partition("\n")
    assert float(taken) > 0.98 * (8 << 20) / 10e6 and "tbf" not in after
    assert name not in subprocess.check_output(["ip", "netns"], text=True)


def test_where_there_is_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist_network.os, "geteuid", lambda: 1000)
    with (
        pytest.raises(SystemExit, match="--link: a network namespace needs root"),
        dist_network.namespace(),
    ):
        pass


def _no_link() -> str | None:
    """Why there are no networks of a given speed here."""
    reason = dist_network.missing()
    if reason is None:
        try:
            with dist_network.namespace() as prefix:
                adding = [*prefix, "tc", "qdisc", "add", "dev", "lo", "root", "tbf"]
                adding += ["rate", "1gbit", "burst", "1mb", "latency", "20ms"]
                done = subprocess.run(adding, capture_output=True, text=True, timeout=30)
                reason = done.stderr.strip() or None
        except SystemExit as error:
            reason = str(error)
    return reason and f"no network of a given speed here: {reason}"


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, message in (
        (["--ranks", "1"], "--ranks must be at least 2"),
        (["--cache", "0"], "--cache must be a share"),
        (["--link", "fast"], "--link: a rate is a number of mbit or gbit (got 'fast')"),
        (["--in-flight", "0"], "--in-flight must be at least 1"),
    ):
        with pytest.raises(SystemExit):
            command.main(["dist", "--dir", "x", *wrong])
        assert message in capsys.readouterr().err
