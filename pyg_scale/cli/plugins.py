"""List, show, check and create plugins.

Exit status: 0 if all is well, 1 if something could not be loaded or failed its tests, 2 for wrong
usage, such as an unknown name.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyg_scale
from pyg_scale import plugins
from pyg_scale.errors import AmbiguousPluginError, PluginLoadError, UnknownPluginError
from pyg_scale.plugins import Entry


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale plugins``."""
    argv = list(argv)
    if not argv or argv[0] in ("--kind", "--json", "--check"):
        argv.insert(0, "list")
    args = _parser().parse_args(argv)
    return int(args.run(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pyg-scale plugins",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="{list,show,check,new}")

    lister = commands.add_parser("list", help="all names (the default)")
    lister.add_argument("--check", action="store_true", help="import each one and report errors")
    lister.set_defaults(run=_list)

    show = commands.add_parser("show", help="documentation, options and capabilities of one name")
    show.add_argument("name")
    show.set_defaults(run=_show)

    check = commands.add_parser("check", help="run the conformance tests on a name or a plugin")
    check.add_argument("name", help="a name (native), or a distribution (pyg-scale-mine)")
    check.add_argument(
        "pytest_args", nargs="*", metavar="-- PYTEST_ARG", help="for pytest, such as -- -k seeds"
    )
    check.set_defaults(run=_check)

    for command in (lister, show, check):
        command.add_argument("--kind", choices=list(plugins.KINDS))
        command.add_argument("--json", action="store_true", help="print JSON")

    new = commands.add_parser("new", help="create a plugin from the template")
    new.add_argument("name", help="the name that users will type, such as mine")
    new.add_argument(
        "--kind",
        choices=list(plugins.KINDS),
        action="append",
        help="a kind that it adds; can be repeated (default: sampler)",
    )
    new.add_argument("--path", help="the new folder (default: ./pyg-scale-NAME)")
    new.set_defaults(run=_new)
    return parser


# list ##########################################################################################


def _list(args: argparse.Namespace) -> int:
    rows = [_row(entry, args.check) for entry in plugins.entries(args.kind)]
    failures = [str(failure) for failure in plugins.failures()]
    bad = args.check and (bool(failures) or any(row["status"] != "ok" for row in rows))
    if args.json:
        print(json.dumps({"plugins": rows, "failures": failures}, indent=2))
        return int(bad)
    print(_table(rows))
    for failure in failures:
        print(failure, file=sys.stderr)
    return int(bad)


def _row(entry: Entry, load: bool) -> dict[str, str]:
    row = {
        "kind": entry.kind,
        "name": entry.name,
        "provider": entry.provider,
        "version": entry.version,
        "target": entry.target if isinstance(entry.target, str) else repr(entry.target),
    }
    if load:
        try:
            entry.load()
            row["status"] = "ok"
        except PluginLoadError as error:
            row["status"] = str(error)
    return row


def _table(rows: list[dict[str, str]]) -> str:
    if not rows:
        return "nothing of this kind"
    columns = list(rows[0])
    cells = [[column.upper() for column in columns], *([row[c] for c in columns] for row in rows)]
    width = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, width, strict=True)).rstrip()
        for line in cells
    )


# show ##########################################################################################


def _show(args: argparse.Namespace) -> int:
    found = [_description(entry) for entry in named(args.name, args.kind)]
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n\n".join(_page(description) for description in found))
    return int(any("error" in description for description in found))


def _description(entry: Entry) -> dict[str, Any]:
    out: dict[str, Any] = dict(_row(entry, load=False))
    try:
        target = entry.load()
    except PluginLoadError as error:
        return {**out, "error": str(error)}
    out["doc"] = inspect.getdoc(target) or ""
    try:
        parameters = inspect.signature(target).parameters.values()
        out["options"] = [str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters]
    except (TypeError, ValueError):  # built in C: without a signature
        out["options"] = []
    supports = getattr(target, "supports", None)
    if isinstance(supports, (set, frozenset, list, tuple)):  # else the conformance tests fail
        out["supports"] = sorted(supports)
    return out


def _page(description: dict[str, Any]) -> str:
    lines = [f"{description['kind']} {description['name']}"]
    lines.append(f"  from {description['provider']} {description['version']}".rstrip())
    lines.append(f"  is {description['target']}")
    if "error" in description:
        return "\n".join([*lines, f"  {description['error']}"])
    if "supports" in description:
        lines.append(f"  supports {', '.join(description['supports']) or 'nothing optional'}")
    if description["options"]:
        lines.append("  options")
        lines += [f"    {option}" for option in description["options"]]
    return "\n".join(
        [*lines, "", *(f"  {line}".rstrip() for line in description["doc"].splitlines())]
    )


def named(name: str, kind: str | None) -> list[Entry]:
    """The entries of a name, of one kind or of every kind that has it.

    Raises:
        UnknownPluginError: If there is none.
        AmbiguousPluginError: If several plugins have it; ``provider:name`` selects one.
    """
    if kind is not None:
        return [plugins.entry(kind, name)]
    found, several = [], None
    for each in plugins.KINDS:
        try:
            found.append(plugins.entry(each, name))
        except UnknownPluginError:
            continue
        except AmbiguousPluginError as error:
            several = error
    if several and not found:
        raise several
    if not found:
        known = sorted({n for each in plugins.KINDS for n in plugins.names(each)})
        close = difflib.get_close_matches(name, known, n=1)
        lines = [f"nothing is called {name!r}"]
        lines += [f"did you mean {close[0]!r}?"] if close else []
        lines += ["`pyg-scale plugins list` shows all names"]
        raise UnknownPluginError("\n  ".join(lines + [str(f) for f in plugins.failures()]))
    return found


# check, new ####################################################################################


def _check(args: argparse.Namespace) -> int:
    from pyg_scale.cli.check import check

    distribution = plugins.normal(args.name)
    if args.kind is None and distribution != plugins.BUILTIN:
        found = [
            entry
            for entry in plugins.entries()
            if distribution in (entry.provider, entry.provider.partition("/")[0])
        ]
        if found:
            return check(found, distribution, as_json=args.json, pytest_args=args.pytest_args)
    return check(named(args.name, args.kind), None, as_json=args.json, pytest_args=args.pytest_args)


def _new(args: argparse.Namespace) -> int:

    return new(args.name, args.kind or ["sampler"], args.path)


_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_SKIPPED = ("__pycache__", "dist", "build")


def new(name: str, kinds: Sequence[str], path: str | None) -> int:
    """Copy the template to ``path``, only for the given kinds and with all names replaced.

    Returns:
        0, or 2 if the name or the path cannot be used, or 1 if a file cannot be written.
    """
    name = name.removeprefix("pyg-scale-")
    folder = Path(path or f"pyg-scale-{name}")
    problem = _problem(name, kinds, folder)
    if problem:
        print(f"pyg-scale plugins new: {problem}", file=sys.stderr)
        return 2
    try:
        _copy(template(), folder, name, kinds)
    except OSError as error:
        print(f"pyg-scale plugins new: {error}", file=sys.stderr)
        return 1
    quoted = shlex.quote(str(folder))
    print(
        f"made {folder}: a plugin that adds {', '.join(f'{kind} {name!r}' for kind in kinds)}\n\n"
        f"  pip install --editable {quoted}\n"
        f"  pyg-scale plugins check pyg-scale-{name}\n"
        f"  pytest {quoted}"
    )
    return 0


def _copy(source: Path, folder: Path, name: str, kinds: Sequence[str]) -> None:
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
