"""A feature store: tensors by (group, attribute). Read them from where yours are instead."""

import torch
from torch_geometric.data import FeatureStore


class TemplateFeatureStore(FeatureStore):
    """Keeps features in a dictionary.

    `attr.group_name` is a node type (`None` if there is one only), `attr.attr_name` is a name
    such as `"x"`, and `attr.index` says which rows: a tensor, an array, a slice or `None` for all.
    """

    def __init__(self):
        super().__init__()
        self.tensors = {}

    def _put_tensor(self, tensor, attr):
        key = attr.group_name, attr.attr_name
        tensor = torch.as_tensor(tensor)
        if attr.index is None:
            self.tensors[key] = tensor
        elif key in self.tensors:
            self.tensors[key][_rows(attr, len(self.tensors[key]))] = tensor
        else:
            return False
        return True

    def _get_tensor(self, attr):
        tensor = self.tensors[attr.group_name, attr.attr_name]
        return tensor if attr.index is None else tensor[_rows(attr, len(tensor))]

    def _remove_tensor(self, attr):
        return self.tensors.pop((attr.group_name, attr.attr_name), None) is not None

    def _get_tensor_size(self, attr):
        return tuple(self._get_tensor(attr).shape)

    def get_all_tensor_attrs(self):
        return [self._tensor_attr_cls(group, name) for group, name in self.tensors]


def _rows(attr, size):
    """The rows that `attr` asks for; refuses those that do not exist."""
    if isinstance(attr.index, slice):
        return attr.index
    rows = torch.as_tensor(attr.index)
    if rows.dtype != torch.bool and rows.numel():
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= size:
            raise IndexError(
                f"row {low if low < 0 else high} of {attr.attr_name!r} is out of range: "
                f"there are {size} rows"
            )
        rows = rows.long()
    return rows
