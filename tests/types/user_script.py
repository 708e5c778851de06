"""What a user's type checker sees of pyg_scale: run by tests/types/test_types.py, never imported.

A line that ends in ``# error`` is one that a checker must refuse.
"""

from pathlib import Path
from typing import assert_type

import torch
from torch_geometric.data import Data

import pyg_scale
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader
from pyg_scale.nn import accelerate, fallbacks
from pyg_scale.store import Cached, MemoryFeatureStore
from pyg_scale.store.base import look_ahead_of
from pyg_scale.train import Checkpoint

data = Data(x=torch.ones(4, 2), edge_index=torch.tensor([[0, 1], [1, 2]]))
path: Path = pyg_scale.save(data, "graph")
opened = pyg_scale.open(path)
pyg_scale.open(path, timeout="long")  # error

loader = NeighborLoader(opened, num_neighbors=[15, 10], batch_size=128, shuffle=True)
NeighborLoader(opened, [15, 10], batch_size=128, disjoint="yes")  # error
LinkNeighborLoader(opened, [5], neg_sampling_ratio=1.0, batch_size=64)
for batch in loader:
    print(batch.num_nodes)
state = loader.state_dict()
loader.load_state_dict(state)

store = Cached(MemoryFeatureStore(), "2GB")
assert_type(look_ahead_of(store), int)
rows = store.get_tensor("user", "x", torch.arange(3))

model = torch.nn.Linear(2, 2)
accelerate(model, min_work="none")  # error
assert_type(fallbacks(model), dict[str, dict[str, int]])
Checkpoint("run", {"model": model}, keep_last="two")  # error
