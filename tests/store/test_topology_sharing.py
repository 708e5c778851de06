"""One topology for the same graph, for all threads and processes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch_geometric.data import Data

from pyg_scale.store import MemoryFeatureStore, MemoryGraphStore, Topology, topology_of
from tests import preloaded
from tests.store.edges import CITES, E, N, assert_is, edge_index, hetero, in_edges


def test_one_topology_while_somebody_holds_it() -> None:
    data = Data(edge_index=edge_index(), num_nodes=N, t=torch.arange(N), w=torch.ones(E))
    graph = topology_of(data)
    assert topology_of(data) is graph
    assert topology_of(copy.copy(data)) is graph
    assert topology_of(Data(edge_index=data.edge_index, num_nodes=N)) is graph
    others = [
        topology_of(data, direction="backward"),
        topology_of(data, time_attr="t"),
        topology_of(data, weight_attr="w"),
        topology_of(Data(edge_index=data.edge_index, num_nodes=N + 1)),
        topology_of(data.clone()),
    ]
    assert all(other is not graph for other in others)
    data.edge_index[0, 0] = (data.edge_index[0, 0] + 1) % N
    changed = topology_of(data)
    assert changed is not graph
    assert_is(changed.csc[None], *data.edge_index, N)


@pytest.mark.parametrize("attribute", ["t", "w"])
def test_a_changed_attribute_is_another_topology(attribute: str) -> None:
    data = Data(edge_index=edge_index(), num_nodes=N, t=torch.arange(N), w=torch.ones(E))
    graph = topology_of(data, time_attr="t", weight_attr="w")
    assert topology_of(data, time_attr="t", weight_attr="w") is graph
    data[attribute][0] += 5
    assert topology_of(data, time_attr="t", weight_attr="w") is not graph


def test_a_change_that_cannot_be_seen_is_not_missed() -> None:
    with torch.inference_mode():
        data = Data(edge_index=edge_index().clone(), num_nodes=N)
        graph = topology_of(data)
        data.edge_index[0, 0] = (data.edge_index[0, 0] + 1) % N
        changed = topology_of(data)
    assert changed is not graph
    assert_is(changed.csc[None], *data.edge_index, N)


def test_a_changed_array_is_another_topology() -> None:
    data = Data(edge_index=edge_index(), num_nodes=N, w=np.ones(E))
    graph = topology_of(data, weight_attr="w")
    assert topology_of(data, weight_attr="w") is graph
    data.w[0] = 0
    assert topology_of(data, weight_attr="w") is not graph


def test_stores_share_too() -> None:
    features, store = MemoryFeatureStore(), MemoryGraphStore()
    edges = edge_index()
    store.put_edge_index((edges[0], edges[1]), edge_type=CITES, layout="coo", size=(N, N))
    features["paper", "t", None] = torch.arange(N)
    graph = topology_of((features, store), time_attr="t")
    assert topology_of((features, store), time_attr="t") is graph


def test_nothing_is_kept_for_nobody() -> None:

    from pyg_scale.store import topology as module

    gc.collect()
    before = len(module._built)
    data = Data(edge_index=edge_index(), num_nodes=N)
    graph = topology_of(data)
    ref = weakref.ref(graph)
    assert len(module._built) == before + 1
    del data
    gc.collect()
    assert len(module._built) == before and ref() is not None
    del graph
    gc.collect()
    assert ref() is None
    for seed in range(50):  # ids of dead tensors come back
        data = Data(edge_index=edge_index(seed=seed), num_nodes=N)
        graph = topology_of(data)
        assert in_edges(graph.csc[None], 1) == [
            (e, int(data.edge_index[0, e])) for e in range(E) if int(data.edge_index[1, e]) == 1
        ]
    del data, graph
    gc.collect()
    assert len(module._built) == before


def test_a_failed_build_leaves_nothing() -> None:
    data = Data(edge_index=edge_index(), num_nodes=5)
    for _ in range(2):
        with pytest.raises(IndexError):
            topology_of(data)


def test_threads_get_the_same() -> None:
    from concurrent.futures import ThreadPoolExecutor

    data = Data(edge_index=edge_index(), num_nodes=N)
    with ThreadPoolExecutor(4) as pool:
        graphs = list(pool.map(lambda _: topology_of(data), range(16)))
    assert all(graph is graphs[0] for graph in graphs)


def full(graph: Topology) -> list[Any]:
    out: list[Any] = [graph.node_types, graph.edge_types, dict(graph.num_nodes), graph.index_dtype]
    for csc in graph.csc.values():
        out += [t.tolist() if isinstance(t, torch.Tensor) else t for t in vars(csc).values()]
    return out + [t.tolist() for t in graph.node_time.values()]


def test_shared_memory_and_pickling() -> None:
    data = hetero()
    data["paper"].time = torch.randint(0, 9, (N,))
    data[CITES].w = torch.rand(E)
    graph = topology_of(data, time_attr="time", weight_attr="w")
    expected = full(graph)
    assert full(pickle.loads(pickle.dumps(graph))) == expected
    assert graph.share_memory_() is graph
    csc = graph.csc[CITES]
    tensors = [each for each in vars(csc).values() if isinstance(each, torch.Tensor)]
    assert len(tensors) == 4 and csc.time is None  # papers have times, edges have none
    assert all(tensor.is_shared() for tensor in (*tensors, graph.node_time["paper"]))
    assert csc.edge_id is not None and csc.indices.stride() == (2,)
    assert csc.edge_id.data_ptr() - csc.indices.data_ptr() == 4
    assert full(graph) == expected


def _in_child(graph: Topology, queue: Any) -> None:
    csc = graph.csc[None]
    assert csc.edge_id is not None
    side_by_side = csc.edge_id.data_ptr() - csc.indices.data_ptr() == 4
    queue.put((full(graph), side_by_side, csc.indices.is_shared()))


def test_another_process_gets_it_by_reference() -> None:
    from multiprocessing.reduction import ForkingPickler

    edges = torch.randint(0, 9000, (2, 200_000))
    graph = topology_of(Data(edge_index=edges, num_nodes=9000)).share_memory_()
    assert len(ForkingPickler.dumps(graph)) < 5000, "the tensors themselves are pickled"
    context = mp.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_in_child, args=(graph, queue))
    with preloaded.spawning():
        process.start()
    try:
        content, side_by_side, shared = queue.get(timeout=60)
    finally:
        process.join(10)
        process.kill()
    assert content == full(graph) and side_by_side and shared
