"""One script on one process or many: the ranks, and graphs whose parts they share.

```python
with pyg_scale.distributed.init() as context:   # torchrun, SLURM, or alone
    data = pyg_scale.open("parts")              # each rank serves its parts to the others
    loader = NeighborLoader(data, [15, 10], data.index_set("train"), batch_size=1024)
```

Names are loaded when they are first used. ``docs/distributed.md`` and ``docs/launching.md`` are
the guides.
"""

from typing import TYPE_CHECKING

from pyg_scale import lazy

if TYPE_CHECKING:
    from pyg_scale.distributed.context import DistContext, DistRole
    from pyg_scale.distributed.launch.binding import Binding, bind
    from pyg_scale.distributed.launch.spawning import spawn
    from pyg_scale.distributed.launch.start import get_context, init, shutdown
    from pyg_scale.distributed.opening import open_graph
    from pyg_scale.distributed.options import SamplingOptions
    from pyg_scale.distributed.owners import Owners
    from pyg_scale.distributed.ranks import Ranks
    from pyg_scale.distributed.server.graph_server import GraphServer

_HOME = {
    "Binding": "launch.binding",
    "DistContext": "context",
    "DistRole": "context",
    "GraphServer": "server.graph_server",
    "Owners": "owners",
    "Ranks": "ranks",
    "SamplingOptions": "options",
    "bind": "launch.binding",
    "get_context": "launch.start",
    "init": "launch.start",
    "open_graph": "opening",
    "shutdown": "launch.start",
    "spawn": "launch.spawning",
}

__all__ = [
    "Binding",
    "DistContext",
    "DistRole",
    "GraphServer",
    "Owners",
    "Ranks",
    "SamplingOptions",
    "bind",
    "get_context",
    "init",
    "open_graph",
    "shutdown",
    "spawn",
]

# pyg-scale-migrate has the names of ``torch_geometric.distributed``.
_MOVED = dict.fromkeys(
    (
        "DistLinkNeighborLoader",
        "DistNeighborLoader",
        "LocalFeatureStore",
        "LocalGraphStore",
        "Partitioner",
    ),
    "pyg_scale_migrate.pyg_distributed",
)

__getattr__, __dir__ = lazy.names(__name__, _HOME, _MOVED)
