"""Readers of other programs' graphs against the conformance kit."""

import pytest

from pyg_scale import plugins
from pyg_scale.testing import ReaderTests


class TestPyGReader(ReaderTests):
    @pytest.fixture
    def reader(self, tmp_path):
        return plugins.get("reader", "pyg")("KarateClub", root=tmp_path)
