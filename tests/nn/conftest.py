"""What every test of layers gets."""

import pytest


@pytest.fixture(autouse=True)
def fused(fused_at_any_size: None) -> None:
    """The fused path, however small the graph is."""
