"""The check of METIS in `pyg-scale doctor`."""

from __future__ import annotations

from pyg_scale.hookspecs import Check


def metis() -> Check:
    """Check that METIS cuts a path of four nodes in the middle."""
    try:
        import numpy as np
        import pymetis

        pointers, neighbors = np.array([0, 1, 3, 5, 6]), np.array([1, 0, 2, 1, 3, 2])
        cut, part = pymetis.part_graph(2, pymetis.CSRAdjacency(pointers, neighbors))
        bits = pymetis.zero_copy_dtype().itemsize * 8
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        return Check(
            False,
            f"pymetis does not partition: {type(error).__name__}: {first}",
            "pip install --force-reinstall pymetis",
        )
    if cut != 1 or part[0] != part[1] or part[2] != part[3]:
        return Check(False, f"pymetis cuts wrongly: {list(part)}", "pip install -U pymetis")
    return Check(True, f"pymetis {pymetis.version} partitions, numbers of {bits} bits")
