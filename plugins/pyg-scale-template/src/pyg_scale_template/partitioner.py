"""A partitioner into runs of neighbouring nodes, in breadth-first order."""

import torch

from pyg_scale.partitioner import Partitioner


class TemplatePartitioner(Partitioner):
    """Numbers the nodes breadth first and cuts that order into equal runs.

    `graph` is undirected: the neighbours of node `v` are `graph.indices[graph.indptr[v] :
    graph.indptr[v + 1]]`. Any random choice must come from `seed` (see `pyg_scale.ops.keys`), so
    that the same seed gives the same parts.
    """

    balances = ("nodes",)  # kept within `max_imbalance`; other requests are refused

    def assign(self, graph, num_parts, *, seed, shares):
        part = torch.empty(graph.num_nodes, dtype=torch.int32)
        order = breadth_first(graph)
        for begin, end in graph.offsets.values():  # each node type is balanced by itself
            mine = order[(order >= begin) & (order < end)]
            until = (shares.cumsum(0)[:-1] * mine.numel()).round()
            part[mine] = torch.searchsorted(
                until, torch.arange(mine.numel(), dtype=until.dtype), right=True, out_int32=True
            )
        return part


def breadth_first(graph):
    """All nodes, `[num_nodes]`, one component after the other, nearest first."""
    indptr, indices = graph.indptr.tolist(), graph.indices
    seen = torch.zeros(graph.num_nodes, dtype=torch.bool)
    order = []
    for start in range(graph.num_nodes):
        if seen[start]:
            continue
        seen[start] = True
        queue = [start]
        for node in queue:  # grows while it is walked
            neighbors = indices[indptr[node] : indptr[node + 1]]
            new = neighbors[~seen[neighbors]]
            seen[new] = True
            queue += new.tolist()
        order += queue
    return torch.tensor(order)
