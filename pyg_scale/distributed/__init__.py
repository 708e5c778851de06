"""One script on one process or many: graphs whose parts are read by several ranks.

```python
data = pyg_scale.open("parts")        # under torchrun: each rank serves its parts to the others
loader = NeighborLoader(data, [15, 10], data.index_set("train"), batch_size=1024)
```

Names are loaded when they are first used. ``docs/distributed.md`` is the guide.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyg_scale.distributed.opening import open_graph
    from pyg_scale.distributed.owners import Owners
    from pyg_scale.distributed.ranks import Ranks

_HOME = {
    "Owners": "owners",
    "Ranks": "ranks",
    "open_graph": "opening",
}

__all__ = ["Owners", "Ranks", "open_graph"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
