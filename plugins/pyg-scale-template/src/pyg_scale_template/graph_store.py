"""A graph store of edges by (edge type, layout). Replace it by the place of your edges."""

import torch
from torch_geometric.data import GraphStore


class TemplateGraphStore(GraphStore):
    """Keeps edges in a dictionary.

    `attr.layout` is the form of the two tensors of `edge_index`: `coo` has sources and
    destinations, `csc` has sources and the positions where the in-edges of each destination begin,
    `csr` is the reverse.
    """

    def __init__(self):
        super().__init__()
        self.edges = {}

    def _put_edge_index(self, edge_index, edge_attr):
        row, col = (torch.as_tensor(x) for x in edge_index)
        self.edges[edge_attr.edge_type, edge_attr.layout] = (row, col), edge_attr
        return True

    def _get_edge_index(self, edge_attr):
        edge_index, _ = self.edges.get((edge_attr.edge_type, edge_attr.layout), (None, None))
        return edge_index

    def _remove_edge_index(self, edge_attr):
        return self.edges.pop((edge_attr.edge_type, edge_attr.layout), None) is not None

    def get_all_edge_attrs(self):
        return [attr for _, attr in self.edges.values()]
