import pytest

from pyg_scale.testing import CommTests, ServerTests
from pyg_scale_template.comm import TemplateCommunicator


class TestTemplateCommunicator(CommTests):
    @pytest.fixture
    def comm(self):
        return TemplateCommunicator


class TestTemplateServers(ServerTests):
    @pytest.fixture
    def comm(self):
        return TemplateCommunicator
