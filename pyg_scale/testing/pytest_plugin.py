"""The pytest plugin of pyg_scale; as it is loaded in every run, it imports only pytest."""

import pkgutil

import pytest

import pyg_scale.testing


def pytest_configure(config: pytest.Config) -> None:
    """Have assertions of the conformance kit explained like those of a test file."""
    kit = pkgutil.iter_modules(pyg_scale.testing.__path__, "pyg_scale.testing.")
    pytest.register_assert_rewrite(*(m.name for m in kit if m.name != __name__))
