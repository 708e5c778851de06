"""Parts as graphs, compared with PyG's own subgraphs and with the edge list."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_scale.datasets import load
from pyg_scale.partitioner import subgraphs

K = 3


def graph() -> Data:
    g = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(50, 4, generator=g),
        edge_index=torch.randint(0, 50, (2, 300), generator=g),
        edge_attr=torch.randn(300, 2, generator=g),
        train_mask=torch.rand(50, generator=g) < 0.5,
    )
    data.name = "shared"
    return data


def test_inner_edges_are_those_of_pyg():
    data = graph()
    parts = torch.arange(50) * 7 % K
    for number, part in enumerate(subgraphs(data, parts)):
        want = data.subgraph(parts == number)
        for name in ("x", "edge_index", "edge_attr", "train_mask"):
            assert torch.equal(part[name], want[name])
        assert torch.equal(part.n_id, (parts == number).nonzero().view(-1))
        assert torch.equal(part.n_id[part.edge_index], data.edge_index[:, part.e_id])
        assert part.name == "shared" and part.num_nodes == want.num_nodes
    assert "n_id" not in data and data.num_nodes == 50


def test_halo_edges_come_from_other_parts():
    data = graph()
    parts = torch.arange(50) * 7 % K
    seen = []
    for number, part in enumerate(subgraphs(data, parts, halo=True)):
        own = (parts == number).nonzero().view(-1)
        e_id = (parts[data.edge_index[1]] == number).nonzero().view(-1)
        assert torch.equal(part.e_id, e_id)
        assert torch.equal(part.n_id[part.edge_index], data.edge_index[:, e_id])
        source = data.edge_index[0, e_id]
        others = source[parts[source] != number].unique()
        assert torch.equal(part.n_id, torch.cat([own, others]))
        assert torch.equal(part.is_halo, parts[part.n_id] != number)
        assert torch.equal(part.x, data.x[part.n_id])
        assert torch.equal(part.edge_attr, data.edge_attr[e_id])
        seen.append(e_id)
    assert torch.cat(seen).sort().values.tolist() == list(range(300))


@pytest.mark.parametrize("halo", [False, True])
def test_types(data_dir, halo):
    data = load(data_dir / "dblp.npz")
    parts = {t: torch.arange(data[t].num_nodes) % K for t in data.node_types}
    found = subgraphs(data, parts, halo=halo)
    for edge_type in data.edge_types:
        src, _, dst = edge_type
        whole = data[edge_type].edge_index
        for number, part in enumerate(found):
            mine = parts[dst][whole[1]] == number
            if not halo:
                mine &= parts[src][whole[0]] == number
            store = part[edge_type]
            assert torch.equal(store.e_id, mine.nonzero().view(-1))
            row, col = store.edge_index
            assert torch.equal(part[src].n_id[row], whole[0, mine])
            assert torch.equal(part[dst].n_id[col], whole[1, mine])
    for number, part in enumerate(found):
        own = part["author"].n_id if not halo else part["author"].n_id[~part["author"].is_halo]
        assert torch.equal(own, torch.arange(number, data["author"].num_nodes, K))
        assert torch.equal(part["author"].y, data["author"].y[part["author"].n_id])
        assert part.validate()


def test_empty_parts_and_graphs():
    found = subgraphs(graph(), torch.full((50,), 2), halo=True)
    assert [part.num_nodes for part in found] == [0, 0, 50]
    assert found[0].x.shape == (0, 4) and found[2].num_edges == 300
    alone = Data(x=torch.ones(4, 1))
    assert [p.num_nodes for p in subgraphs(alone, torch.tensor([0, 1, 1, 0]))] == [2, 2]


def test_bad_input():
    with pytest.raises(ValueError, match="49 entries for 50 nodes"):
        subgraphs(graph(), torch.zeros(49, dtype=torch.int64))
    with pytest.raises(ValueError, match="51, but the graph has only 50 nodes"):
        subgraphs(graph(), torch.zeros(50, dtype=torch.int64), num_parts=51)
    with pytest.raises(TypeError, match="Data or HeteroData"):
        subgraphs([], torch.zeros(1))
    data = HeteroData()
    data["a"].num_nodes = 2
    data["b", "to", "a"].edge_index = torch.tensor([[0], [1]])
    with pytest.raises(ValueError, match="num_nodes of the node type 'b'"):
        subgraphs(data, {"a": torch.zeros(2, dtype=torch.int64)})
