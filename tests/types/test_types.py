"""A type checker sees real signatures, not Any: of a small script of a user."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("user_script.py")
LIMIT = 280

pytestmark = pytest.mark.slow


def refused() -> list[int]:
    """The lines that a checker must refuse."""
    lines = SCRIPT.read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith("# error")]


def test_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    config = tmp_path / "mypy.ini"
    # As somebody's own configuration: errors in packages are not theirs to mend.
    config.write_text(
        "[mypy]\npython_version = 3.11\nfollow_imports = silent\n"
        "[mypy-torch_geometric.*]\nignore_missing_imports = true\n"
    )
    command = [sys.executable, "-m", "mypy", f"--config-file={config}", str(SCRIPT)]
    command += [f"--cache-dir={tmp_path}", "--no-error-summary", "--hide-error-context"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, env={**os.environ, "MYPYPATH": ROOT}
    )
    found = re.findall(r"user_script\.py:(\d+): error", done.stdout)
    assert sorted({int(line) for line in found}) == refused(), done.stdout + done.stderr


def test_pyright(tmp_path: Path) -> None:
    pyright = shutil.which("basedpyright", path=Path(sys.executable).parent)
    if pyright is None:
        pytest.skip("pyright is not here: pip install basedpyright, which brings it with node")
    config = tmp_path / "pyrightconfig.json"
    settings = {"include": [str(SCRIPT)], "extraPaths": [str(ROOT)], "typeCheckingMode": "basic"}
    config.write_text(json.dumps(settings | {"pythonVersion": "3.11"}))
    command = [pyright, "--project", str(config), "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    report = json.loads(done.stdout)
    errors = [each for each in report["generalDiagnostics"] if each["severity"] == "error"]
    found = {each["range"]["start"]["line"] + 1 for each in errors}
    assert sorted(found) == refused(), errors
