"""The conformance kit: subclass the class of a kind, return your object, run pytest.

```python
import pytest
from pyg_scale.testing import SamplerTests

class TestMySampler(SamplerTests):
    @pytest.fixture
    def sampler(self):
        return MySampler()
```

For your own tests, :mod:`~pyg_scale.testing.graphs` has the adversarial graphs of the kit, and
:mod:`~pyg_scale.testing.statistics` its tests of randomness. All names are loaded on first use, so
that pytest's plugin stays light.
"""

import importlib
from typing import Any

_MODULES = {
    "CommTests": "comm",
    "ConvTests": "conv",
    "FeatureStoreTests": "store",
    "GraphParallelTests": "graph_parallel",
    "GraphStoreTests": "store",
    "ImportanceTests": "importance",
    "ParallelTests": "parallel",
    "PartitionerTests": "partitioner",
    "PluginTests": "plugin",
    "ReaderTests": "reader",
    "SamplerTests": "sampler",
    "ServerTests": "servers",
}

_SUBMODULES = ("graphs", "shapes", "statistics")

KITS = {
    "comm": "CommTests",
    "conv": "ConvTests",
    "parallel": "ParallelTests",
    "sampler": "SamplerTests",
    "feature_store": "FeatureStoreTests",
    "graph_store": "GraphStoreTests",
    "partitioner": "PartitionerTests",
    "reader": "ReaderTests",
}
"""The class for each kind that has one. Its fixture has the name of the kind.

``ServerTests`` is for communicators with ``listen`` and ``connect``, ``GraphParallelTests`` for
parallel wrappers that divide a graph.
"""

__all__ = ["KITS", "kit_of", *_MODULES]


def kit_of(kind: str, target: Any) -> str:
    """The name of the class of the kit for a target of a kind that has one."""
    if kind == "parallel":
        from pyg_scale.parallel import GraphParallel

        if isinstance(target, type) and issubclass(target, GraphParallel):
            return "GraphParallelTests"
    return KITS[kind]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_SUBMODULES})
