"""What pytest loads in every run of an environment that has pyg_scale: imports pytest alone."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Have assertions of the conformance kit explained as those of a test file are."""
    pytest.register_assert_rewrite(
        "pyg_scale.testing.ask",
        "pyg_scale.testing.draws",
        "pyg_scale.testing.graphs",
        "pyg_scale.testing.oracle",
        "pyg_scale.testing.plugin",
        "pyg_scale.testing.sampler",
        "pyg_scale.testing.statistics",
        "pyg_scale.testing.store",
    )
