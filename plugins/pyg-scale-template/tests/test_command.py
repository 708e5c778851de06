import numpy as np

from pyg_scale.cli import main


def test_prints_degrees(tmp_path, capsys):
    np.save(tmp_path / "edges.npy", [[0, 1, 2, 0], [1, 2, 2, 2]])
    assert main(["template", str(tmp_path / "edges.npy")]) == 0
    assert "3 nodes, 1.3 in-edges on average, 3 at most" in capsys.readouterr().out
