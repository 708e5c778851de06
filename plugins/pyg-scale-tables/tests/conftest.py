"""The shop of ``tests/shops.py``, written and converted once."""

import shutil

import pytest

import pyg_scale
from pyg_scale.convert import convert
from tests.conftest import data_dir, fused_at_any_size, leaves_nothing_behind
from tests.shops import write_shop

__all__ = ["data_dir", "fused_at_any_size", "leaves_nothing_behind"]


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """The folder of the shop, and its tables."""
    folder = tmp_path_factory.mktemp("shop") / "shop"
    return folder, write_shop(folder)


@pytest.fixture
def tables(written):
    return written[1]


@pytest.fixture
def shop(written, tmp_path):
    """A copy of the folder, to be changed."""
    shutil.copytree(written[0], tmp_path / "shop")
    return tmp_path / "shop"


@pytest.fixture(scope="session")
def converted(written, tmp_path_factory):
    """The graph directory of the shop."""
    path = tmp_path_factory.mktemp("graph") / "graph"
    convert(f"tables:{written[0]}", path, quiet=True)
    return path


@pytest.fixture
def graph(converted):
    return pyg_scale.open(converted)
