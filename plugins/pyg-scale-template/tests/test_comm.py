import pytest

from pyg_scale.testing import CommTests
from pyg_scale_template.comm import TemplateCommunicator


class TestTemplateCommunicator(CommTests):
    @pytest.fixture
    def comm(self):
        return TemplateCommunicator
