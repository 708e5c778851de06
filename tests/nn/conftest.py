"""What every test of layers gets."""

import pytest
import torch

from pyg_scale.ops import dense_product, library
from pyg_scale.testing import graphs


@pytest.fixture(autouse=True)
def fused(fused_at_any_size: None) -> None:
    """The fused path, however small the graph is."""


@pytest.fixture(params=["torch's products", "compiled products"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Linear maps by torch and by the compiled op, whatever the processor and their sizes.

    True for the op, which rounds otherwise.
    """
    compiled = request.param == "compiled products"
    if compiled and not library.compiled():
        pytest.skip("the kernels are not compiled")
    monkeypatch.setattr(dense_product, "pays", lambda: compiled)
    monkeypatch.setattr(dense_product, "_MIN_MACS", 1)
    return compiled


@pytest.fixture(scope="module")
def edge_index() -> torch.Tensor:
    """Edges of 100 nodes: with a hub, self-loops, parallel edges and isolated nodes."""
    return graphs.hostile().edge_index


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    """Features ``[100, 8]``, ``float64``."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(100, 8, generator=generator, dtype=torch.float64)
