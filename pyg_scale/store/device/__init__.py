"""Features on a device, within a budget; the rest where the device gets it from."""

from pyg_scale.store.device.features import DeviceFeatures
from pyg_scale.store.device.placement import Place, place

__all__ = ["DeviceFeatures", "Place", "place"]
