"""The stub that type checkers read names what ``pyg_scale`` loads, and nothing else."""

import ast
from pathlib import Path

import pyg_scale


def test_the_stub_has_the_names_of_the_package() -> None:
    stub = Path(pyg_scale.__file__).with_suffix(".pyi")
    names: set[str] = set()
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.asname}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    loaded = {*pyg_scale._SUBMODULES, *pyg_scale._FUNCTIONS, *pyg_scale.__all__}
    assert names == loaded
