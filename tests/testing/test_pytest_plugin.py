"""What pyg_scale adds to every pytest run: nothing heavy, and assertions that explain."""

import subprocess
import sys


def pytest_in(folder, *args):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(folder),
            *args,
            str(folder),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.stdout + done.stderr


def test_it_is_loaded_and_imports_neither_torch_nor_pyg(tmp_path):
    (tmp_path / "test_light.py").write_text(
        "import sys\n"
        "def test_light():\n"
        "    assert 'pyg_scale.testing.pytest_plugin' in sys.modules\n"
        "    assert not {'torch', 'torch_geometric', 'numpy'} & set(sys.modules)\n"
    )
    out = pytest_in(tmp_path, "-W", "error")
    assert "1 passed" in out, out


def test_assertions_of_the_kit_are_explained(tmp_path):
    (tmp_path / "test_absent.py").write_text(
        "import pytest\n"
        "from pyg_scale.testing import PluginTests\n"
        "class TestAbsent(PluginTests):\n"
        "    @pytest.fixture\n"
        "    def plugin(self): return 'pyg-scale-absent'\n"
        "class TestForgotten(PluginTests):\n"
        "    pass\n"
    )
    out = pytest_in(tmp_path, "-k", "found")
    assert "AssertionError: pyg-scale-absent adds nothing" in out
    assert "assert []" in out  # without rewriting there would be no value
    assert "NotImplementedError: return the name of your distribution" in out
