"""Features on a device within a budget; the other rows are read from the host."""

from pyg_scale.store.device.features import DeviceFeatures
from pyg_scale.store.device.placement import DeviceShare, place

__all__ = ["DeviceFeatures", "DeviceShare", "place"]
