"""The plugin's reader against the conformance kit."""

import pytest
import torch

from pyg_scale import plugins
from pyg_scale.testing import PluginTests, ReaderTests

from .glt_directory import write_glt


class TestPlugin(PluginTests):
    @pytest.fixture
    def plugin(self):
        return "pyg-scale-migrate"


class TestGLTReader(ReaderTests):
    @pytest.fixture(params=["one type", "types"])
    def reader(self, request, tmp_path):
        random = torch.Generator().manual_seed(0)
        part = torch.randint(3, (40,), generator=random)
        edges = torch.randint(40, (2, 200), generator=random)
        if request.param == "one type":
            write_glt(
                tmp_path / "glt",
                {None: 40},
                {None: edges},
                {None: part},
                node_feat={None: torch.randn(40, 3, generator=random)},
                weights={None: torch.rand(200, generator=random)},
            )
        else:
            write_glt(
                tmp_path / "glt",
                {"a": 40, "b": 40},
                {("a", "to", "b"): edges, ("b", "to", "b"): edges[:, :50]},
                {"a": part, "b": part.flip(0)},
                node_feat={"b": torch.randn(40, 3, generator=random).half()},
                edge_feat={("a", "to", "b"): torch.arange(200)},
                strategy="by_dst",
            )
        return plugins.get("reader", "glt")(tmp_path / "glt")
