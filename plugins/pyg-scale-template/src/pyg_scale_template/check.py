"""The check of this plugin in `pyg-scale doctor`."""

import os

from pyg_scale.hookspecs import Check


def check() -> Check:
    """Check that there is room for temporary files; check what your plugin needs instead."""
    folder = os.environ.get("TMPDIR", "/tmp")
    if os.access(folder, os.W_OK):
        return Check(True, f"{folder} can be written")
    return Check(False, f"{folder} cannot be written", "export TMPDIR=/a/folder/of/yours")
