"""The graph of a database, and its batches, are those of PyG's ``from_relbench``."""

import warnings
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import torch_geometric.typing
from torch_geometric.loader import NeighborLoader as PyGNeighborLoader
from torch_geometric.utils import sort_edge_index

from pyg_scale.loader import NeighborLoader
from tests.parity.neighborhood import neighborhood
from tests.shops import FOREIGN, KEYS, TIMES


def pairs(edge_index):
    return Counter(map(tuple, edge_index.t().tolist()))


def relbench(tables):
    """The graph that PyG makes of the tables, as RelBench hands them over."""
    numbered = {}
    for name, table in tables.items():
        foreign = dict(FOREIGN) if name == "orders" else {}
        columns = {}
        for column, parent in foreign.items():
            rows = pd.Series(np.arange(len(tables[parent])), index=tables[parent][KEYS[parent]])
            columns[column] = rows.reindex(table[column]).to_numpy()
        if name in TIMES:
            columns[TIMES[name]] = table[TIMES[name]].astype("datetime64[ns]")
        numbered[name] = SimpleNamespace(
            df=table.assign(**columns),
            pkey_col=KEYS[name],
            time_col=TIMES.get(name),
            fkey_col_to_pkey_table=foreign,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyG says that it is experimental
        from torch_geometric.contrib.utils import from_relbench
    return from_relbench(SimpleNamespace(table_dict=numbered))


def test_edges_times_and_neighbourhoods(graph, tables):
    theirs = relbench(tables)
    assert theirs.node_types == graph.node_types
    assert set(theirs.edge_types) == set(graph.edge_types)
    for name in TIMES:
        assert torch.equal(theirs[name].time * 10**9, graph[name].time)  # theirs are seconds
    for edge_type in graph.edge_types:
        ours = sort_edge_index(graph[edge_type].edge_index)
        assert torch.equal(ours, theirs[edge_type].edge_index)
    random = torch.Generator().manual_seed(5)
    ids = torch.randint(0, len(tables["customers"]), (48,), generator=random)
    rows = torch.randint(0, len(tables["orders"]), (48,), generator=random)
    time = graph["orders"].time[rows]
    batches = NeighborLoader(
        graph, [-1, -1], ("customers", ids), time, time_attr="time", batch_size=16
    )
    nodes = 0
    for batch in batches:
        for position, seed in enumerate(batch["customers"].input_id.tolist()):
            start = {"customers": ids[seed].view(1)}
            limit = int(time[seed]) // 10**9
            expected = neighborhood(theirs, start, 2, no_later_than=limit)
            for name in graph.node_types:
                mine = batch[name].n_id[batch[name].batch == position].sort().values
                wanted = torch.cat([hop[name] for hop in expected.nodes]).sort().values
                assert torch.equal(mine, wanted)
                nodes += len(wanted)
            for edge_type in graph.edge_types:
                row, col = batch[edge_type].edge_index
                inside = batch[edge_type[2]].batch[col] == position
                mine = torch.stack(
                    [batch[edge_type[0]].n_id[row[inside]], batch[edge_type[2]].n_id[col[inside]]]
                )
                taken = torch.cat([hop[edge_type] for hop in expected.edges])
                assert pairs(mine) == pairs(theirs[edge_type].edge_index[:, taken])
    assert nodes > 500


@pytest.mark.skipif(
    not (torch_geometric.typing.WITH_TORCH_SPARSE or torch_geometric.typing.WITH_PYG_LIB),
    reason="PyG samples with pyg-lib or torch-sparse (make peers), and neither is installed",
)
@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without a 'pyg-lib'")
def test_batches_are_those_of_pygs_loader(graph, tables):
    """On torch-sparse PyG takes no times: it gets the graph as it was at the time of the seeds."""
    theirs = relbench(tables)
    random = torch.Generator().manual_seed(6)
    edges = 0
    for row in torch.randint(40, len(tables["orders"]), (5,), generator=random).tolist():
        limit = int(graph["orders"].time[row]) // 10**9
        then = theirs.clone()
        for source, name, destination in theirs.edge_types:
            store = then[source, name, destination]
            if source in TIMES:
                there = theirs[source].time[store.edge_index[0]] <= limit
                store.edge_index = store.edge_index[:, there]
        for name in TIMES:
            del then[name].time
        seeds = torch.randint(0, len(tables["customers"]), (12,), generator=random)
        wanted = PyGNeighborLoader(then, [-1, -1], ("customers", seeds), batch_size=1)
        time = torch.full_like(seeds, limit * 10**9)
        found = NeighborLoader(
            graph, [-1, -1], ("customers", seeds), time, time_attr="time", batch_size=1
        )
        for mine, other in zip(found, wanted, strict=True):
            for name in graph.node_types:
                assert torch.equal(mine[name].n_id.sort().values, other[name].n_id.sort().values)
            for edge_type in graph.edge_types:
                ends = [
                    torch.stack(
                        [
                            batch[end].n_id[batch[edge_type].edge_index[place]]
                            for place, end in enumerate(edge_type[::2])
                        ]
                    )
                    for batch in (mine, other)
                ]
                assert pairs(ends[0]) == pairs(ends[1])
                edges += ends[0].size(1)
    assert edges > 500
