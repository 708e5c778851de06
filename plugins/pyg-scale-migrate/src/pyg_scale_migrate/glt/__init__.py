"""Partition directories of GraphLearn-for-PyTorch (GLT), and its partition books."""

from pyg_scale_migrate.glt.book import read_book
from pyg_scale_migrate.glt.reader import GLTReader, assignment

__all__ = ["GLTReader", "assignment", "read_book"]
