"""A cache in memory over any feature store, which can look ahead."""

from pyg_scale.store.cache.cached import Cached
from pyg_scale.store.cache.hot import by_degree
from pyg_scale.store.cache.schedule import Schedule

__all__ = ["Cached", "Schedule", "by_degree"]
