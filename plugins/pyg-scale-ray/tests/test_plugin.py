import pytest

from pyg_scale.testing import PluginTests


class TestPlugin(PluginTests):
    @pytest.fixture
    def plugin(self):
        return "pyg-scale-ray"
