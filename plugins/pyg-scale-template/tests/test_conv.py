import pytest

from pyg_scale.testing import ConvTests
from pyg_scale_template.conv import TemplateConv


class TestTemplateConv(ConvTests):
    @pytest.fixture
    def conv(self):
        return TemplateConv

    def make(self, cls):
        return cls()
