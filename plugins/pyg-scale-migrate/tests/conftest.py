"""The real graphs of the repository's own tests, whose tools these tests use too."""

from tests.conftest import data_dir, leaves_nothing_behind

__all__ = ["data_dir", "leaves_nothing_behind"]
