"""Docstrings say what a thing is or does: see the style guide in CONTRIBUTING.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*ROOT.glob("pyg_scale/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")])
QUESTION = re.compile(r"\s*(What|Which|Whether|How|Who|Where|When|Why)\b")


def docstrings(path: Path) -> Iterator[ast.Expr]:
    """Those of a module, its classes, functions and attributes."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement


def test_no_docstring_begins_with_a_question() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{each.lineno}: {each.value.value.splitlines()[0]}"
        for path in FILES
        for each in docstrings(path)
        if isinstance(each.value, ast.Constant)
        and isinstance(each.value.value, str)
        and QUESTION.match(each.value.value)
    ]
    assert FILES and not found, "begin with a verb or a noun phrase:\n" + "\n".join(found)
