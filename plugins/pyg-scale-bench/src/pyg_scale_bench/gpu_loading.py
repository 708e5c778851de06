"""The checks of loading in ``pyg-scale bench gpu``: rows, draws and batches equal the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData, TensorAttr

from pyg_scale.graph.topology import NodeType
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader
from pyg_scale.ops import colptr
from pyg_scale.ops.mapped_rows import why_not_mapped
from pyg_scale.sampler import CudaSampler, NativeSampler
from pyg_scale.store import DeviceFeatures, MemoryFeatureStore
from pyg_scale_bench.gpu_check import Checks

WIDTHS = ((torch.float32, 128), (torch.float32, 33), (torch.bfloat16, 7), (torch.int64, 1))
_BUDGET = 300_000
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"replace": True},
    {"disjoint": True},
    {"disjoint": True, "redraw": False},
    {"sample_direction": "backward"},
    {"weight_attr": "weight"},
    {"weight_attr": "weight", "replace": True},
    {"time_attr": "time"},
    {"time_attr": "time", "temporal_strategy": "last", "sample_direction": "backward"},
    {"time_attr": "when"},
    {"time_attr": "when", "temporal_strategy": "last"},
    {"time_attr": "when", "time_window": 40, "strictly_earlier": True},
    {"time_attr": "when", "weight_attr": "weight"},
    {"time_attr": "time", "weight_attr": "weight", "replace": True},
)
HETERO_OPTIONS = (OPTIONS[0], *OPTIONS[5:])
ON_HOST: tuple[dict[str, Any], ...] = (
    {},
    {"disjoint": True},
    {"weight_attr": "weight"},
    {"time_attr": "when", "weight_attr": "weight"},
    {"time_attr": "time", "temporal_strategy": "last"},
)
"""With these, the device reads the graph from the host, too."""
_LATEST = 100
_SEEDS: dict[str, Any] = {
    "num_neighbors": [7, 5, -1],
    "batch_size": 128,
    "shuffle": True,
    "seed": 1,
}


def checks(device: torch.device, quick: bool = False) -> Checks:
    """The checks of loading.

    Args:
        device: The device to check.
        quick: If True, draw fewer batches, and have no workers.
    """
    found: Checks = {}
    keys = 1 if quick else 10
    for host in ("staged", "mapped") if device.type == "cuda" else ("staged",):
        found[f"rows from the device and {host}"] = partial(_rows, host, device)
    for options in OPTIONS:
        found[f"draws of the sampler{_named(options)}"] = partial(
            _draws, options, device, keys=keys
        )
    for options in HETERO_OPTIONS:
        name = f"draws of the sampler, several types{_named(options)}"
        found[name] = partial(_draws, options, device, of=hetero_graph, keys=keys)
    for options in ON_HOST:
        name = f"draws of the sampler, graph on the host{_named(options)}"
        given: dict[str, Any] = {"of": hetero_graph, "host": "mapped", "keys": keys}
        found[name] = partial(_draws, options, device, **given)
    found["batches by weight and time"] = partial(_timed, device)
    found["batches around links"] = partial(_links, device)
    found["pointers of a batch that is moved"] = partial(_moved, device)
    for memory in (0, _BUDGET, "16MB"):
        for workers in (0,) if quick else (0, 2):
            name = f"batches, device_memory={memory}, num_workers={workers}"
            found[name] = partial(_batches, memory, workers, device)
    return found


def graph() -> Data:
    """A small graph with hubs, isolated nodes and multi-edges, and features of several kinds."""
    generator = torch.Generator().manual_seed(0)
    nodes, edges = 1000, 9_000
    ends = (torch.rand(2, edges, generator=generator).pow(2) * (nodes - 50)).to(torch.int64)
    data = Data(edge_index=ends, num_nodes=nodes)
    data.x = torch.randn(nodes, 100, generator=generator)
    data.y = torch.randint(0, 47, (nodes,), generator=generator)
    data.edge_attr = torch.randn(edges, 3, generator=generator)
    return data


def timed_graph() -> Data:
    """The same graph with times of nodes and edges, and weights, of which many are 0."""
    generator, data = torch.Generator().manual_seed(3), graph()
    data.time = torch.randint(0, _LATEST, (data.num_nodes,), generator=generator)
    data.when = torch.randint(0, _LATEST, (data.num_edges,), generator=generator)
    data.weight = torch.rand(data.num_edges, generator=generator).pow(8)
    data.weight[::3] = 0
    data.weight[data.edge_index[1] == 7] = 0
    return data


def hetero_graph() -> HeteroData:
    """Two node types and four edge types; the nodes of one type have no times."""
    generator, data = torch.Generator().manual_seed(4), HeteroData()
    sizes = {"item": 1000, "tag": 40}
    for node_type, size in sizes.items():
        data[node_type].num_nodes = size
    data["item"].time = torch.randint(0, _LATEST, (1000,), generator=generator)
    for edge_type in (
        *(("item", "to", "item"), ("item", "like", "item")),
        *(("item", "has", "tag"), ("tag", "of", "item")),
    ):
        ends = [torch.rand(4000, generator=generator).pow(2) * sizes[t] for t in edge_type[::2]]
        store = data[edge_type]
        store.edge_index = torch.stack(ends).to(torch.int64)
        store.when = torch.randint(0, _LATEST, (4000,), generator=generator)
        store.weight = torch.randint(0, 4, (4000,), generator=generator).float()
    return data


def _rows(host: str, device: torch.device) -> str:
    generator = torch.Generator().manual_seed(0)
    store, tables = MemoryFeatureStore(), {}
    for number, (dtype, width) in enumerate(WIDTHS):
        table = (torch.randn(5000, width, generator=generator) * 100).to(dtype)
        store.put_tensor(table, group_name=None, attr_name=f"x{number}", index=None)
        tables[f"x{number}"] = table
        if host == "mapped" and (reason := why_not_mapped(table, device)):
            raise ValueError(f"rows of the host cannot be mapped: {reason}")
    hot = torch.randperm(5000, generator=generator)
    before = _allocated(device)
    features = DeviceFeatures(store, device, _BUDGET, hot, host=host)
    taken = _allocated(device) - before
    _require(taken <= _BUDGET, f"features take {taken} bytes, more than {_BUDGET}")
    for _ in range(5):
        index = torch.randint(0, 5000, (4001,), generator=generator)
        asked = [TensorAttr(None, name, index) for name in tables]
        for name, found in zip(tables, features.multi_get_tensor(asked), strict=True):
            _require(torch.equal(found.cpu(), tables[name][index]), f"rows of {name} differ")
            there = features.get_tensor(TensorAttr(None, name, index.to(device)))
            _require(torch.equal(there, found), f"rows of {name} differ by ids on the device")
    return f"equal; {features.used} of {_BUDGET} bytes"


def _named(options: dict[str, Any]) -> str:
    return "".join(f", {name}={value}" for name, value in options.items())


def _draws(
    options: dict[str, Any],
    device: torch.device,
    of: Callable[[], Data | HeteroData] = timed_graph,
    host: str = "auto",
    keys: int = 10,
) -> str:
    data, hops = of(), [7, 5, -1]
    edges = 0
    native = NativeSampler(data, hops, **options)
    there = CudaSampler(data, hops, **options, device=device, host=host)
    _require((there.host_bytes > 0) == (host == "mapped"), f"{there.host_bytes} bytes are mapped")
    kind: NodeType = "item" if isinstance(data, HeteroData) else None
    for key in range(keys):
        generator = torch.Generator().manual_seed(key)
        seed: dict[NodeType, Tensor] = {kind: torch.randint(0, 1000, (50,), generator=generator)}
        time: dict[NodeType, Tensor] | None = None
        if "time_attr" in options:
            time = {kind: torch.randint(-1, _LATEST + 1, (50,), generator=generator)}
        wanted, found = native.sample(seed, time, key), there.sample(seed, time, key)
        for name in ("node", "row", "col", "edge", "batch", "colptr"):
            ours, theirs = getattr(found, name), getattr(wanted, name)
            for each, tensor in (theirs or {}).items():
                same = torch.equal(ours[each].cpu(), tensor)
                _require(same, f"{name} of batch {key} differs{_of(each)}")
        _require(found.num_sampled_nodes == wanted.num_sampled_nodes, "counts differ")
        _require(found.num_sampled_edges == wanted.num_sampled_edges, "counts of edges differ")
        edges += sum(row.numel() for row in wanted.row.values())
    return f"{edges} edges, equal"


def _of(kind: object) -> str:
    return "" if kind is None else f" for {kind}"


def _timed(device: torch.device) -> str:
    data = timed_graph()
    options: dict[str, Any] = {**_SEEDS, "time_attr": "time", "weight_attr": "weight"}
    loader = NeighborLoader(data, **options, device=device, device_memory="16MB", num_workers=2)
    _require_same(NeighborLoader(data, **options), loader)
    return f"equal; sampled on {loader.stats()['device']['sampling']['where']}"


def _require_same(wanted: Iterable[Any], found: Iterable[Any]) -> None:
    for expected, batch in zip(wanted, found, strict=True):
        for name, value in expected.to_dict().items():
            if isinstance(value, Tensor):
                _require(torch.equal(batch[name].cpu(), value), f"{name} differs")


def _links(device: torch.device) -> str:
    data = graph()
    options: dict[str, Any] = {**_SEEDS, "edge_label_index": data.edge_index[:, :600]}
    for disjoint in (False, True):
        options |= {"neg_sampling": "binary", "disjoint": disjoint}
        loader = LinkNeighborLoader(data, **options, device=device, device_memory="16MB")
        _require_same(LinkNeighborLoader(data, **options), loader)
    return f"equal; sampled on {loader.stats()['device']['sampling']['where']}"


def _moved(device: torch.device) -> str:
    batch = next(iter(NeighborLoader(graph(), **_SEEDS)))
    wanted = colptr.recall(batch.edge_index)
    _require(wanted is not None, "the loader does not know them")
    found = colptr.recall(batch.to(device).edge_index)
    if found is None or wanted is None:
        raise AssertionError("batch.to(device) loses them")
    _require(found.device.type == device.type, f"they are on {found.device}")
    _require(torch.equal(found.cpu(), wanted.cpu()), "they differ")
    return f"{found.numel()}, equal"


def _batches(memory: int | str, workers: int, device: torch.device) -> str:
    data = graph()
    options: dict[str, Any] = {**_SEEDS}
    loader = NeighborLoader(
        data, **options, device=device, device_memory=memory, num_workers=workers
    )
    for expected, batch in zip(NeighborLoader(data, **options), loader, strict=True):
        for name, value in expected.to_dict().items():
            if isinstance(value, Tensor):
                found = batch[name]
                _require(found.device.type == device.type, f"{name} is on {found.device}")
                _require(torch.equal(found.cpu(), value), f"{name} differs")
    where = loader.stats()["device"]
    return f"equal; sampled on {where['sampling']['where']}, {where['used']} bytes kept"


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
