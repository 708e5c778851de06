"""How batches are sampled: the options of loaders, under the name that users of GLT look for."""

from pyg_scale.loader.sampling_options import SamplingOptions as SamplingOptions

__all__ = ["SamplingOptions"]
