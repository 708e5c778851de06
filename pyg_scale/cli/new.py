"""Creation of a new plugin from the template."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pyg_scale
from pyg_scale import plugins

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_SKIPPED = ("__pycache__", "dist", "build")


def new(name: str, kinds: Sequence[str], path: str | None) -> int:
    """Copy the template to ``path``, only for the given kinds and with all names replaced.

    Returns:
        0, or 2 if the name or the path cannot be used.
    """
    name = name.removeprefix("pyg-scale-")
    folder = Path(path or f"pyg-scale-{name}")
    problem = _problem(name, kinds, folder)
    if problem:
        print(f"pyg-scale plugins new: {problem}", file=sys.stderr)
        return 2
    source = template()
    for file in sorted(source.rglob("*")):
        inner = file.relative_to(source)
        if file.is_dir() or not _wanted(inner, kinds):
            continue
        text = file.read_text(encoding="utf-8")
        if inner.name == "__init__.py":
            text = only_hooks(text, kinds)
        target = folder / renamed(str(inner), name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(renamed(text, name), encoding="utf-8")
    print(
        f"made {folder}: a plugin that adds {', '.join(f'{kind} {name!r}' for kind in kinds)}\n\n"
        f"  pip install --editable {folder}\n"
        f"  pyg-scale plugins check pyg-scale-{name}\n"
        f"  pytest {folder}"
    )
    return 0


def _problem(name: str, kinds: Sequence[str], folder: Path) -> str | None:
    if not _NAME.fullmatch(name):
        return f"{name!r} is not a name: use lower-case letters, digits and -, such as my-sampler"
    for kind in kinds:
        for entry in plugins.entries(kind):
            if entry.name == name:
                return f"{kind} {name!r} is already provided by {entry.provider}: choose another"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return f"{folder} already exists: choose another --path"
    return None


def template() -> Path:
    """The folder of the template: beside the package in a checkout, else inside the package."""
    package = Path(pyg_scale.__file__).parent
    for folder in (package.parent / "plugins" / "pyg-scale-template", package / "_template"):
        if (folder / "pyproject.toml").is_file():
            return folder
    raise FileNotFoundError(
        f"the template of plugins is missing from {package / '_template'}: reinstall pyg_scale"
    )


def _wanted(file: Path, kinds: Sequence[str]) -> bool:
    kind = file.stem.removeprefix("test_")
    if any(part in _SKIPPED or part.startswith(".") for part in file.parts):
        return False
    return kind not in plugins.KINDS or kind in kinds


def only_hooks(source: str, kinds: Sequence[str]) -> str:
    """The source of a module without the hooks of other kinds."""
    lines = source.splitlines(keepends=True)
    others = {hook for kind, hook in plugins.KINDS.items() if kind not in kinds}
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef) and node.name in others:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            del lines[first - 1 : node.end_lineno]
    return re.sub(r"\n{4,}", "\n\n\n", "".join(lines)).rstrip() + "\n"


def renamed(text: str, name: str) -> str:
    """Text of the template with all spellings of the template's name replaced."""
    module = name.replace("-", "_")
    text = text.replace("pyg_scale_template", f"pyg_scale_{module}")
    text = text.replace("Template", "".join(word.capitalize() for word in name.split("-")))
    return text.replace("template", name)
