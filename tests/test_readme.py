"""What the README and the pages show runs, and what they link to exists."""

import gc
import re
from pathlib import Path

import pytest
import torch

from pyg_scale import default_plugins, plugins

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
MARK = "<!-- run -->"
WRITTEN_BY_BENCH = {f"docs/benchmarks/loader.{ending}" for ending in ("json", "md", "png")}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def snippets(page: Path) -> list[str]:
    return re.findall(rf"{MARK}\n```python\n(.*?)```", page.read_text(), re.DOTALL)


RUN = [page for page in PAGES if snippets(page)]


@pytest.mark.filterwarnings("ignore:.*takes the plain-torch path:RuntimeWarning")
@pytest.mark.parametrize("page", RUN, ids=name)
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where snippets leave files
    before = {(entry.kind, entry.provider) for entry in plugins.entries()}
    namespace: dict = {"__name__": "__snippet__"}
    threads = torch.get_num_threads()
    try:
        for number, code in enumerate(snippets(page), start=1):
            exec(compile(code, f"{name(page)}, snippet {number}", "exec"), namespace)
    finally:
        torch.set_num_threads(threads)
        gc.unfreeze()
        for _, provider in {(e.kind, e.provider) for e in plugins.entries()} - before:
            plugins.unregister(provider)


def test_the_pages_that_should_have_snippets_have_some():
    assert {"README.md", "docs/drop-in.md", "docs/writing-a-plugin.md"} <= set(map(name, RUN))
    for page in PAGES:
        assert page.read_text().count(MARK) == len(snippets(page)), f"{name(page)}: a stray mark"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            path = (page.parent / target).resolve()
            known = name(path) in WRITTEN_BY_BENCH if path.is_relative_to(ROOT) else False
            assert path.exists() or known, f"{name(page)} links to {target}"


def test_the_readme_is_short_and_names_what_is_built_in():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    for entry in plugins.entries():
        if entry.provider == plugins.BUILTIN:
            assert f"`{entry.name}`" in text, f"the README does not name {entry.kind} {entry.name}"


def test_every_page_and_example_can_be_found_from_the_readme():
    text = (ROOT / "README.md").read_text()
    for file in [*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]:
        if file.name != "index.md":
            assert f"({name(file)})" in text
    index = (ROOT / "docs" / "index.md").read_text()
    for file in (ROOT / "docs").glob("*.md"):
        assert file.name == "index.md" or f"({file.name})" in index


def test_what_the_pages_call_exists():
    text = "\n".join(page.read_text() for page in PAGES)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"`make ([\w-]+)`|^make ([\w-]+)", text, re.MULTILINE):
        assert "".join(target) in targets
    ours = {name for kind, name in default_plugins.FIRST_PARTY if kind == "command"}
    commands = ours | set(plugins.names("command"))
    for command in re.findall(r"pyg-scale (?!COMMAND)([a-z]+)", text):
        assert command in commands
