"""Run the conformance kit on names or on a whole plugin."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from pyg_scale.errors import PluginLoadError
from pyg_scale.plugins import Entry
from pyg_scale.testing import KITS, kit_of

_KIT_TEST = """
class {title}({kit}):
    @pytest.fixture
    def {fixture}(self):
        return plugins.get({kind!r}, {name!r}){call}
"""

_PLUGIN_TEST = """
class TestPlugin(PluginTests):
    @pytest.fixture
    def plugin(self):
        return {provider!r}
"""


def check(
    entries: Sequence[Entry], provider: str | None, *, as_json: bool, pytest_args: Sequence[str]
) -> int:
    """Test the entries, and the whole plugin if ``provider`` is given; prints a report.

    Returns:
        0 if every test passed, 1 if one failed, an entry cannot be loaded or nothing could be
        tested.
    """
    if importlib.util.find_spec("pytest") is None:
        print("the conformance tests need pytest: pip install pytest", file=sys.stderr)
        return 1
    broken = _broken(entries)
    for error in broken.values():
        print(f"FAILED {error}", file=sys.stderr)
    loaded = [entry for entry in entries if _full(entry) not in broken]
    testable = [entry for entry in loaded if _has_kit(entry)]
    for entry in loaded:
        if entry not in testable:
            print(
                f"there are no conformance tests for {entry.kind} {entry.name!r}; it loads",
                file=sys.stderr,
            )
    if not testable and provider is None:
        return int(bool(broken))
    with tempfile.TemporaryDirectory() as folder:
        test = Path(folder, "test_conformance.py")
        test.write_text(module_source(testable, provider), encoding="utf-8")
        options = ["-q", "--rootdir", ".", "-p", "no:cacheprovider", "--junitxml", "report.xml"]
        # Run in that folder, so that names of tests are short; modules are found as in this
        # process.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *pytest_args, test.name],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdout=sys.stderr if as_json else None,
            check=False,
        )
        counts = _counts(Path(folder, "report.xml"))
    if as_json:
        print(
            json.dumps(
                {
                    "checked": [_full(entry) for entry in testable],
                    "not_loaded": broken,
                    "plugin": provider,
                    "ok": done.returncode == 0 and not broken,
                    **counts,
                },
                indent=2,
            )
        )
    return int(done.returncode != 0 or bool(broken))


def _full(entry: Entry) -> str:
    return f"{entry.kind} {entry.provider}:{entry.name}"


def _broken(entries: Sequence[Entry]) -> dict[str, str]:
    """The entries that cannot be loaded, with the errors."""
    found = {}
    for entry in entries:
        try:
            entry.load()
        except PluginLoadError as error:
            found[_full(entry)] = str(error)
    return found


def _has_kit(entry: Entry) -> bool:
    """Return True if the kit can test an entry.

    A sampler without keys has only the guarantees of PyG's, and a reader needs input.
    """
    if entry.kind == "reader":
        return False
    if entry.kind != "sampler":
        return entry.kind in KITS
    from torch_geometric.sampler import BaseSampler

    from pyg_scale.sampler.base import NeighborSampler

    sampler = entry.load()
    plain = isinstance(sampler, type) and issubclass(sampler, BaseSampler)
    return not plain or issubclass(sampler, NeighborSampler)  # any other class fails the kit


def _kit(entry: Entry) -> str:
    if entry.kind != "parallel":  # the only kind with two contracts; others are loaded by the test
        return KITS[entry.kind]
    return kit_of(entry.kind, entry.load())


def module_source(entries: Sequence[Entry], provider: str | None) -> str:
    """The test module that runs the kit, as an author would write it."""
    chosen = [_kit(entry) for entry in entries]
    kits = sorted(set(chosen))
    kits += ["PluginTests"] if provider else []
    source = [
        "import pytest\n\nfrom pyg_scale import plugins",
        f"from pyg_scale.testing import {', '.join(kits)}\n",
    ]
    if provider:
        source.append(_PLUGIN_TEST.format(provider=provider.partition("/")[0]))
    titles: list[str] = []
    for entry, kit in zip(entries, chosen, strict=True):
        words = re.split(r"[^a-z0-9]+", f"{entry.kind} {entry.name}")
        title = "Test" + "".join(word.capitalize() for word in words)
        titles.append(title)
        if titles.count(title) > 1:  # from two entry points; a second class would hide the first
            title += f"Of{titles.count(title)}"
        source.append(
            _KIT_TEST.format(
                title=title,
                kit=kit,
                fixture=entry.kind,
                kind=entry.kind,
                name=f"{entry.provider}:{entry.name}",
                call="" if entry.kind == "conv" else "()",  # layers are tested as classes
            )
        )
    return "\n".join(source)


def _counts(report: Path) -> dict[str, int]:
    if not report.exists():
        return {}
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    number = {
        k: sum(int(s.get(k, 0)) for s in suites) for k in ("tests", "failures", "errors", "skipped")
    }
    failed = number["failures"] + number["errors"]
    return {
        "passed": number["tests"] - failed - number["skipped"],
        "failed": failed,
        "skipped": number["skipped"],
    }
