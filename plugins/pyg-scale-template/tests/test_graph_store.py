import pytest

from pyg_scale.testing import GraphStoreTests
from pyg_scale_template.graph_store import TemplateGraphStore


class TestTemplateGraphStore(GraphStoreTests):
    @pytest.fixture
    def graph_store(self):
        return TemplateGraphStore()
