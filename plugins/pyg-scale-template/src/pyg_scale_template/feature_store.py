"""A feature store of tensors by (group, name). Replace it by the place of your features."""

import torch
from torch_geometric.data import FeatureStore


class TemplateFeatureStore(FeatureStore):
    """Keeps features in a dictionary.

    `attr.group_name` is a node type (`None` if there is only one), `attr.attr_name` is a name such
    as `"x"`, and `attr.index` selects rows: a tensor, an array, a slice or `None` for all. Several
    threads read at once, so tensors are replaced and never written to.
    """

    returns_views = True  # all rows, or a slice of them, are not copied

    def __init__(self):
        super().__init__()
        self.tensors = {}

    def _put_tensor(self, tensor, attr):
        key = attr.group_name, attr.attr_name
        tensor = torch.as_tensor(tensor)
        if attr.index is not None:
            rows, whole = self._rows(attr), self.tensors[key].clone()
            whole[rows] = tensor
            tensor = whole
        self.tensors[key] = tensor
        return True

    def update_tensor(self, tensor, *args, **kwargs):
        return self._put_tensor(tensor, self._tensor_attr_cls.cast(*args, **kwargs))

    def _get_tensor(self, attr):
        tensor = self.tensors[attr.group_name, attr.attr_name]
        return tensor if attr.index is None else tensor[self._rows(attr)]

    def _remove_tensor(self, attr):
        return self.tensors.pop((attr.group_name, attr.attr_name), None) is not None

    def _get_tensor_size(self, attr):
        return tuple(self.tensors[attr.group_name, attr.attr_name].shape)

    def get_all_tensor_attrs(self):
        return [self._tensor_attr_cls(group, name) for group, name in self.tensors]

    def _rows(self, attr):
        """The rows that `attr` selects; an error names a row that does not exist."""
        if isinstance(attr.index, slice):
            return attr.index
        rows, size = torch.as_tensor(attr.index), self._get_tensor_size(attr)[0]
        wrong = rows[(rows < 0) | (rows >= size)]
        if wrong.numel():
            raise IndexError(
                f"row {int(wrong.view(-1)[0])} of {attr.attr_name!r} is out of range: "
                f"there are {size} rows"
            )
        return rows.long()
