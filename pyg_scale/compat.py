"""Our sampler behind PyG's unchanged loaders, for code that cannot be edited.

    import pyg_scale.compat
    pyg_scale.compat.install()

    from torch_geometric.loader import NeighborLoader      # samples, with nothing else installed

PyG's samplers call ``torch.ops.pyg.neighbor_sample`` and ``hetero_neighbor_sample`` if they find
pyg-lib. :func:`install` provides functions of that signature and makes only PyG's sampler module
find pyg-lib: other uses of pyg-lib by PyG do not change. Node and link loaders, disjoint, weighted
and temporal (by nodes and by edges), forward and backward sampling work;
``subgraph_type="induced"`` and ``HGTLoader`` raise as before, as PyG uses torch-sparse for them.

``torch.ops.pyg.random_walk`` is provided, too: ``torch_geometric.nn.Node2Vec``,
``torch_geometric.utils.dropout_path`` and ``torch_geometric.transforms.RootedRWSubgraph`` run.
``torch_geometric.nn.MetaPath2Vec`` needs nothing: its walks are plain torch.

Draws depend on a key from torch's default generator, so that ``torch.manual_seed`` works as with
pyg-lib. PyG's loaders do not have the other guarantees of ``pyg_scale.loader`` (equal batches for
any number of workers, resuming, threads, one copy of the graph).
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch_geometric.nn.models.node2vec as pyg_node2vec
import torch_geometric.sampler.neighbor_sampler as pyg_module
import torch_geometric.typing
import torch_geometric.utils.dropout as pyg_dropout
from torch import Tensor

from pyg_scale.graph.pyg_tensors import PyGTensors, topology_of_tensors
from pyg_scale.graph.topology import EdgeType, NodeType, Topology
from pyg_scale.sampler.base import Sample
from pyg_scale.sampler.native import NativeSampler
from pyg_scale.sampler.walk_graph import walk_graph
from pyg_scale.sampler.walks import walk_on

_FLAGS = ("WITH_PYG_LIB", "WITH_EDGE_TIME_NEIGHBOR_SAMPLE", "WITH_WEIGHTED_NEIGHBOR_SAMPLE")
_MISSING = object()

# Installing ################################################################################


class Installed:
    """The result of :func:`install`; as a context manager, it uninstalls at the end."""

    def __init__(self, is_owner: bool) -> None:
        self._is_owner = is_owner

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_owner:
            uninstall()


def install(force: bool = False) -> Installed:
    """Put our sampler behind PyG's own loaders, until :func:`uninstall`.

    A second call does nothing. It also holds in worker processes, however they are started. To
    limit it to a block::

        with pyg_scale.compat.install():
            ...

    Args:
        force: If True, replace an installed pyg-lib.

    Raises:
        RuntimeError: If pyg-lib is installed and ``force`` is False.
    """
    with _lock:
        if _undo:
            return Installed(is_owner=False)
        has_op = hasattr(torch.ops.pyg, "neighbor_sample")
        if (has_op or torch_geometric.typing.WITH_PYG_LIB) and not force:
            raise RuntimeError(
                "pyg-lib is installed, so PyG's loaders sample with it: leave compat out, or call "
                "install(force=True) to replace it"
            )
        typing = _Overlay(torch_geometric.typing, **dict.fromkeys(_FLAGS, True))
        _set(pyg_module, "torch_geometric", _Overlay(torch_geometric, typing=typing))
        _set(pyg_dropout, "torch_geometric", _Overlay(torch_geometric, typing=typing))
        _set(pyg_node2vec, "WITH_PYG_LIB", True)
        _set(torch.ops.pyg, "random_walk", random_walk)
        _set(torch.ops.pyg, "neighbor_sample", neighbor_sample)
        _set(torch.ops.pyg, "hetero_neighbor_sample", hetero_neighbor_sample)
        _set(pyg_module.NeighborSampler, "__reduce_ex__", _reduce_ex)
        return Installed(is_owner=True)


def uninstall() -> None:
    """Undo :func:`install`, if it was called."""
    with _lock:
        while _undo:
            owner, name, before = _undo.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def is_installed() -> bool:
    """Return True if PyG's loaders use our sampler."""
    return bool(_undo)


_lock = threading.RLock()
_undo: list[tuple[Any, str, Any]] = []


def _set(owner: Any, name: str, value: Any) -> None:
    _undo.append((owner, name, vars(owner).get(name, _MISSING)))
    setattr(owner, name, value)


class _Overlay:
    """A module with some attributes replaced."""

    def __init__(self, module: Any, **values: Any) -> None:
        self.__dict__.update(values)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _reduce_ex(sampler: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle PyG's sampler such that the process that unpickles it first installs ours."""
    reduced: tuple[Any, ...] = object.__reduce_ex__(sampler, protocol)  # type: ignore[assignment]
    function, arguments, *rest = reduced
    return _in_worker, (function, arguments), *rest


def _in_worker(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Make an object; in a child process, install our sampler first."""
    # While a child process unpickles its arguments, it does not know its parent yet.
    starting = getattr(multiprocessing.current_process(), "_inheriting", False)
    if starting or multiprocessing.parent_process() is not None:
        install(force=True)  # the parent has decided
    return function(*arguments)


# The functions #############################################################################


def neighbor_sample(
    rowptr: Tensor,
    col: Tensor,
    seed: Tensor,
    num_neighbors: Sequence[int],
    node_time: Tensor | None = None,
    edge_time: Tensor | None = None,
    seed_time: Tensor | None = None,
    edge_weight: Tensor | None = None,
    csc: bool = False,
    replace: bool = False,
    directed: bool = True,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
    return_edge_id: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, list[int], list[int]]:
    """``torch.ops.pyg.neighbor_sample``; see :func:`hetero_neighbor_sample`."""
    graph = topology_of_tensors(
        PyGTensors(
            node_types=(None,),
            edge_types=(None,),
            rowptr={None: rowptr},
            col={None: col},
            node_time={None: node_time},
            edge_time={None: edge_time},
            weight={None: edge_weight},
        )
    )
    out = _sample(
        graph,
        {None: seed},
        None if seed_time is None else {None: seed_time},
        list(num_neighbors),
        csc,
        replace,
        directed,
        disjoint,
        temporal_strategy,
    )
    assert out.num_sampled_nodes is not None
    assert out.num_sampled_edges is not None
    edge = out.edge[None] if return_edge_id else None
    return (
        out.row[None],
        out.col[None],
        _nodes(out, None),
        edge,
        out.num_sampled_nodes[None],
        out.num_sampled_edges[None],
    )


def hetero_neighbor_sample(
    node_types: Sequence[str],
    edge_types: Sequence[tuple[str, str, str]],
    rowptr_dict: Mapping[str, Tensor],
    col_dict: Mapping[str, Tensor],
    seed_dict: Mapping[str, Tensor],
    num_neighbors_dict: Mapping[str, Sequence[int]],
    node_time_dict: Mapping[str, Tensor] | None = None,
    edge_time_dict: Mapping[str, Tensor] | None = None,
    seed_time_dict: Mapping[str, Tensor] | None = None,
    edge_weight_dict: Mapping[str, Tensor] | None = None,
    csc: bool = False,
    replace: bool = False,
    directed: bool = True,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
    return_edge_id: bool = True,
) -> tuple[Any, ...]:
    """``torch.ops.pyg.hetero_neighbor_sample``, with our sampler and a key from torch's generator.

    Arguments are those of pyg-lib's function. Edge ids are positions in ``col``.

    Raises:
        NotImplementedError: If ``directed=False`` (the induced subgraph).
        ValueError: If times or weights do not fit the graph.
        IndexError: If a seed is not a node.
    """
    types = [(source, relation, target) for source, relation, target in edge_types]
    name = {edge_type: "__".join(edge_type) for edge_type in types}

    def by_type(given: Mapping[str, Any] | None) -> dict[EdgeType, Any]:
        return {edge_type: (given or {}).get(name[edge_type]) for edge_type in types}

    graph = topology_of_tensors(
        PyGTensors(
            node_types=tuple(node_types),
            edge_types=tuple(types),
            rowptr=by_type(rowptr_dict),
            col=by_type(col_dict),
            node_time={t: (node_time_dict or {}).get(t) for t in node_types},
            edge_time=by_type(edge_time_dict),
            weight=by_type(edge_weight_dict),
        )
    )
    out = _sample(
        graph,
        dict(seed_dict),
        None if seed_time_dict is None else dict(seed_time_dict),
        {edge_type: list(num_neighbors_dict[name[edge_type]]) for edge_type in types},
        csc,
        replace,
        directed,
        disjoint,
        temporal_strategy,
    )
    assert out.num_sampled_nodes is not None
    assert out.num_sampled_edges is not None
    per_edge_type = [
        None if each is None else {name[edge_type]: each[edge_type] for edge_type in types}
        for each in (out.row, out.col, out.edge if return_edge_id else None)
    ]
    row, col, edge = per_edge_type
    return (
        row,
        col,
        {t: _nodes(out, t) for t in node_types},
        edge,
        {t: out.num_sampled_nodes[t] for t in node_types},
        {name[edge_type]: out.num_sampled_edges[edge_type] for edge_type in types},
    )


def random_walk(
    rowptr: Tensor, col: Tensor, seed: Tensor, walk_length: int, p: float = 1.0, q: float = 1.0
) -> Tensor:
    """``torch.ops.pyg.random_walk``, with the walks of :func:`pyg_scale.sampler.random_walk`.

    Args:
        rowptr: ``[num_nodes + 1]``, where the edges of each node begin.
        col: ``[num_edges]``, the end of each edge.
        seed: ``[num_walks]``, the first node of each walk.
        walk_length: Number of steps.
        p: The return parameter of node2vec.
        q: Its in-out parameter.

    Returns:
        ``[num_walks, walk_length + 1]``, of the dtype and on the device of ``seed``.

    Raises:
        ValueError: If the pointers do not fit, or ``p`` or ``q`` is not positive.
        IndexError: If a node does not exist.
    """
    graph = topology_of_tensors(
        PyGTensors(
            node_types=(None,),
            edge_types=(None,),
            rowptr={None: rowptr.cpu()},
            col={None: col.cpu()},
            node_time={None: None},
            edge_time={None: None},
            weight={None: None},
        )
    )
    key = int(torch.empty((), dtype=torch.int64).random_())
    edges = walk_graph(graph, rowptr, "compat")
    found = walk_on(edges, seed, walk_length, p, q, walk=None, key=key, edges=False)
    return found.node.to(seed.device, seed.dtype)


def _sample(
    graph: Topology,
    seed: Any,
    seed_time: Any,
    num_neighbors: Any,
    csc: bool,
    replace: bool,
    directed: bool,
    disjoint: bool,
    temporal_strategy: str,
) -> Sample:
    if not directed:
        raise NotImplementedError(
            "directed=False: PyG takes induced subgraphs from torch-sparse; "
            "pyg_scale.loader.NeighborLoader(subgraph_type='induced') has them"
        )
    sampler = NativeSampler(
        num_neighbors=num_neighbors,
        replace=replace,
        disjoint=disjoint,
        temporal_strategy=temporal_strategy,
    )
    sampler.topology = graph
    out = sampler.sample_checked(seed, seed_time, None)
    if not csc:  # then the edges that we take for in-edges are out-edges
        out.row, out.col = out.col, out.row
    return out


def _nodes(out: Sample, node_type: NodeType) -> Tensor:
    """Nodes ``[n]``, or pairs of seed position and node ``[n, 2]`` if disjoint."""
    node = out.node[node_type]
    if out.batch is None:
        return node
    return torch.stack([out.batch[node_type].to(node.dtype), node], dim=1)
