import pymetis

from pyg_scale_metis import check


def test_says_that_metis_partitions():
    found = check.metis()
    assert found.ok
    assert "bits" in found.detail


def test_a_library_that_is_broken_is_reported(monkeypatch):
    def broken(*args):
        raise RuntimeError("bad\nworse")

    monkeypatch.setattr(pymetis, "part_graph", broken)
    found = check.metis()
    assert found.ok is False
    assert found.detail == "pymetis does not partition: RuntimeError: bad"
    assert "pip install" in found.fix


def test_a_wrong_cut_is_reported(monkeypatch):
    monkeypatch.setattr(pymetis, "part_graph", lambda *args: (3, [0, 1, 0, 1]))
    assert "wrongly" in check.metis().detail
