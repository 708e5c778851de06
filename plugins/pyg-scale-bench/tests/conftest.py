"""As in the tests of the repository: real graphs, and a check that nothing is left behind."""

from tests.conftest import data_dir, fused_at_any_size, leaves_nothing_behind

__all__ = ["data_dir", "fused_at_any_size", "leaves_nothing_behind"]
