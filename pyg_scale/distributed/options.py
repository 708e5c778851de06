"""The sampling options of loaders, under the name that users of GLT expect."""

from pyg_scale.loader.options import SamplingOptions as SamplingOptions

__all__ = ["SamplingOptions"]
