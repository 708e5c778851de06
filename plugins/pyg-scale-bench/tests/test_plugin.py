import os
import subprocess
import sys
from pathlib import Path

import pytest

import pyg_scale
import pyg_scale_bench as us
from pyg_scale import cli
from pyg_scale.testing import PluginTests
from pyg_scale_bench import command


class TestPlugin(PluginTests):
    @pytest.fixture
    def plugin(self):
        return "pyg-scale-bench"


def test_the_command_is_found_by_its_name(capsys):
    assert cli.main(["bench", "--help"]) == 0
    assert list(command.BENCHMARKS) == sorted(command.BENCHMARKS)
    assert ", ".join(command.BENCHMARKS) in capsys.readouterr().out


BY_PATH = """
import runpy, sys
sys.modules["matplotlib"] = None  # as if it were not installed
sys.argv = ["pyg_scale_bench", *sys.argv[1:]]
runpy.run_module("pyg_scale_bench", run_name="__main__")
"""


def test_the_checks_of_a_gpu_need_no_installation_and_no_matplotlib():
    path = os.pathsep.join([str(Path(package.__file__).parents[1]) for package in (us, pyg_scale)])
    done = subprocess.run(
        [sys.executable, "-c", BY_PATH, "gpu", "--check-only"],
        env=os.environ | {"PYTHONPATH": path, "PYG_SCALE_PLUGINS": "", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("pyg-scale bench gpu needs a CUDA device")
