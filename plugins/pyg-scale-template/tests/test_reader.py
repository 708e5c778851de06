import pytest

from pyg_scale.testing import ReaderTests
from pyg_scale_template.reader import TemplateReader


class TestTemplateReader(ReaderTests):
    @pytest.fixture
    def reader(self, tmp_path):
        file = tmp_path / "edges.template"
        file.write_text("".join(f"{i} {i * 7 % 20}\n" for i in range(30)))
        return TemplateReader(file)
