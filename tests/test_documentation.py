"""The documentation site has every public name, and builds without a warning."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pyg_scale

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
INTERNAL = {  # how kernels are compiled, found and registered, and how bytes are looked at
    "aggregate_rules", "attention_plain", "attention_rules", "build", "cuda_modules", "fused",
    "library", "mapped_file", "memory", "nvcc", "nvrtc", "raw_bytes", "sources", "threads",
}  # fmt: skip


def documented() -> set[str]:
    text = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    return set(re.findall(r"automodule:: (\S+)", text))


def test_the_reference_has_every_public_module():
    modules = {*pyg_scale._SUBMODULES, "hookspecs", "kinds"} - {"ops"}
    ops = {path.stem for path in (ROOT / "pyg_scale" / "ops").glob("*.py")} - {"__init__"}
    expected = {f"pyg_scale.{name}" for name in modules}
    expected |= {f"pyg_scale.ops.{name}" for name in ops - INTERNAL}
    assert documented() == expected


def test_the_reference_has_every_function_of_the_package():
    text = (REFERENCE / "index.md").read_text()
    for name in pyg_scale._FUNCTIONS:
        kind = "class" if isinstance(getattr(pyg_scale, name), type) else "function"
        assert f".. auto{kind}:: {name}\n" in text


def test_every_page_is_in_the_navigation():
    text = (ROOT / "docs" / "index.md").read_text()
    listed = {
        line.strip()
        for block in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
        if line and not line.startswith(":")
    }
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    assert listed == pages | {"benchmarks/README", "reference/index"}


def test_a_page_of_markdown_that_is_linked_is_in_the_site():
    for page in [*(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+\.md)[)#]", page.read_text()):
            found = (page.parent / target).resolve()
            assert found.is_file() and found.is_relative_to(ROOT / "docs"), (page.name, target)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not importlib.util.find_spec("sphinx"), reason="Sphinx is missing: make docs")
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "-q"]
    built = subprocess.run(
        [*command, "-b", "html", "-d", tmp_path / "doctrees", ROOT / "docs", tmp_path / "html"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=500,
    )
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "html" / "reference" / "loader.html").read_text()
    assert 'id="pyg_scale.loader.NeighborLoader"' in page
