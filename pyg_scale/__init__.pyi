"""The names that ``__init__.py`` loads when they are first used, for type checkers."""

import pluggy

from pyg_scale import comm as comm
from pyg_scale import compat as compat
from pyg_scale import convert as convert
from pyg_scale import datasets as datasets
from pyg_scale import distributed as distributed
from pyg_scale import errors as errors
from pyg_scale import loader as loader
from pyg_scale import nn as nn
from pyg_scale import ops as ops
from pyg_scale import parallel as parallel
from pyg_scale import partitioner as partitioner
from pyg_scale import plugins as plugins
from pyg_scale import sampler as sampler
from pyg_scale import serving as serving
from pyg_scale import store as store
from pyg_scale import testing as testing
from pyg_scale import train as train
from pyg_scale.distributed.opening import open_graph
from pyg_scale.inference.layerwise import layerwise_inference as layerwise_inference
from pyg_scale.partitioner import partition as partition
from pyg_scale.store.directory.appending import Appender as Appender
from pyg_scale.store.directory.appending import append as append
from pyg_scale.store.directory.compacting import compact as compact
from pyg_scale.store.directory.saving import save as save

__version__: str
hookimpl: pluggy.HookimplMarker
open = open_graph  # noqa: A001
