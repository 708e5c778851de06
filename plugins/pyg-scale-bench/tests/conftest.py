"""As in the tests of the repository: real graphs, and a check that nothing is left behind."""

from tests.conftest import data_dir, leaves_nothing_behind

__all__ = ["data_dir", "leaves_nothing_behind"]
