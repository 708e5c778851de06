"""The shape of the source tree: small modules, no circles, and private parts that stay private."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

import pyg_scale
from pyg_scale.loader import NeighborLoader
from pyg_scale.ops import library

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "pyg_scale"

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="needs a checkout, not an installed package"
)

# Of PyG's storages and layers, torch's tensors and process groups: there is no public way to these.
OF_OTHERS = {
    "_store",
    "_mapping",
    "_key",
    "_parent",
    "_version",
    "_base",
    "_values",
    "_data",
    "_timeout",
}
OF_OTHERS |= {"_collect", "_set_jittable_templates"}


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(node: ast.AST, deferred: bool = True) -> Iterator[str]:
    """Modules of the package that are imported, but for those that only types need."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        if isinstance(child, ast.If) and names_type_checking(child.test):
            continue
        if not deferred and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.ImportFrom) and child.module:
            names = [child.module, *(f"{child.module}.{alias.name}" for alias in child.names)]
            yield from (name for name in names if name in modules())
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name in modules())
        yield from imports(child, deferred)


def names_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))


def test_no_small_module_serves_one_sibling_alone() -> None:
    users: dict[str, set[str]] = defaultdict(set)
    for user, path in modules().items():
        for name in imports(tree_of(path)):
            users[name] |= {user} - {name}
    found = {}
    for name, path in modules().items():
        if path.name == "__init__.py" or len(users[name]) != 1:
            continue
        (user,) = users[name]
        sibling = user.rpartition(".")[0] == name.rpartition(".")[0]
        if sibling and len(path.read_text(encoding="utf-8").splitlines()) < 100:
            found[name] = user
    for folder in ("tests", "plugins", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if any(name.rpartition(".")[2] in text for name in found):
                for name in imports(tree_of(path)):
                    found.pop(name, None)
    assert not found, "put each of these into the module that uses it"


def test_no_modules_import_each_other_in_a_circle() -> None:
    needs = {
        name: {other for other in imports(tree_of(path), deferred=False) if other != name}
        for name, path in modules().items()
        if path.name != "__init__.py"
    }
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name in needs and name not in done:
            for other in sorted(needs[name]):
                visit(other, (*way, name))
            done.add(name)

    for name in needs:
        visit(name, ())


def owned(tree: ast.AST) -> set[str]:
    """Names of attributes that the classes of a module give to their objects."""
    found = set()
    for each in ast.walk(tree):
        if not isinstance(each, ast.ClassDef):
            continue
        for part in ast.walk(each):
            if isinstance(part, ast.FunctionDef):
                found.add(part.name)
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                found.add(part.target.id)
            elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                found.add(part.attr)
    return found


def private_uses(node: ast.AST) -> Iterator[ast.Attribute]:
    """Private attributes that code outside of a class reads or writes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            continue
        if isinstance(child, ast.Attribute) and child.attr.startswith("_"):
            yield child
        yield from private_uses(child)


def test_no_function_reaches_into_the_objects_of_another_module() -> None:
    owners: dict[str, set[str]] = defaultdict(set)
    for name, path in modules().items():
        for attribute in owned(tree_of(path)):
            owners[attribute].add(name)
    found = [
        f"{path.relative_to(ROOT)}:{use.lineno}: {ast.unparse(use)}"
        for name, path in modules().items()
        for use in private_uses(tree_of(path))
        if use.attr in owners and name not in owners[use.attr] and use.attr not in OF_OTHERS
    ]
    assert not [line for line in found if "__" not in line.rpartition(".")[2]]


def definitions(source: str) -> Iterator[tuple[str, int]]:
    """The functions that C++ code defines, and how many parameters each has."""
    source = re.sub(r"//[^\n]*", "", re.sub(r'"(\\.|[^"\\])*"', "0", source))
    for match in re.finditer(r"\b(\w+)\s*\(", source):
        depth, commas, end = 0, 0, match.end()
        for end in range(match.end() - 1, len(source)):
            depth += (source[end] in "([{<") - (source[end] in ")]}>")
            commas += source[end] == "," and depth == 1
            if depth == 0:
                break
        has_body = re.match(r"\s*(const|noexcept|override|\s)*\{", source[end + 1 : end + 60])
        if has_body and match[1] not in ("if", "for", "while", "switch", "catch"):
            yield match[1], commas + 1


def test_functions_take_few_arguments() -> None:
    """Ops take many, as schemas have no structures: entries unpack them, others take structures."""
    found = []
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix not in (".cpp", ".h", ".cu", ".cuh"):
            continue
        source = path.read_text(encoding="utf-8")
        entries = {*re.findall(r"TORCH_BOX\(&(?:\w+::)*(\w+)", source)}
        entries |= {"cuLaunchKernel", "cuLaunchCooperativeKernel"}
        for name, count in definitions(source):
            if count > 8 and name not in entries:
                found.append(f"{path.relative_to(ROOT)}: {name} takes {count}")
    for path in sorted((ROOT / PACKAGE / "ops").rglob("*.py")):
        for each in ast.walk(tree_of(path)):
            if isinstance(each, ast.FunctionDef):
                given = each.args
                count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
                if count > 11:
                    found.append(f"{path.relative_to(ROOT)}: {each.name} takes {count}")
    assert not found
    assert dict(definitions("int f(A<int, 2> a, B b) const { return g(a, b); }")) == {"f": 2}


def way_of(action: Callable[[], Any]) -> tuple[set[str], int]:
    """The modules of the package that an action enters, and its moves from one to another."""
    root = str(Path(pyg_scale.__file__).parent)
    entered: set[str] = set()
    moves = 0

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal moves
        here = frame.f_code.co_filename
        if event != "call" or not here.startswith(root):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(root):
            caller = caller.f_back
        entered.add(here)
        moves += caller is None or caller.f_code.co_filename != here

    sys.setprofile(look)
    try:
        action()
    finally:
        sys.setprofile(None)
    return entered, moves


def test_a_loader_and_a_batch_are_short_ways_through_the_modules() -> None:
    if not library.compiled():
        pytest.skip("plain torch takes other ways")
    edge_index = torch.arange(200).view(2, 100) % 20
    data = Data(x=torch.randn(20, 2), y=torch.arange(20), edge_index=edge_index)

    def loader() -> NeighborLoader:
        return NeighborLoader(data, [5, 5], batch_size=4, seed=1)

    batches = iter(loader())
    for _ in range(2):
        next(batches)
    modules, moves = way_of(loader)
    assert len(modules) <= 14, sorted(modules)
    assert moves <= 23
    modules, moves = way_of(lambda: next(batches))
    assert len(modules) <= 12, sorted(modules)
    assert moves <= 40
