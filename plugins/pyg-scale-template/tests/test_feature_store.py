import pytest

from pyg_scale.testing import FeatureStoreTests
from pyg_scale_template.feature_store import TemplateFeatureStore


class TestTemplateFeatureStore(FeatureStoreTests):
    @pytest.fixture
    def feature_store(self):
        return TemplateFeatureStore()
