"""Samplers of pyg-lib and torch-sparse. Imports nothing heavy, as it is imported to list names."""

from pyg_scale import hookimpl


@hookimpl
def pyg_scale_samplers():
    return {
        "pyg-lib": "pyg_scale_pyglib.sampler:PygLibSampler",
        "torch-sparse": "pyg_scale_pyglib.sampler:TorchSparseSampler",
    }


@hookimpl
def pyg_scale_checks():
    return {
        "sampler-pyg-lib": "pyg_scale_pyglib.check:pyg_lib",
        "sampler-torch-sparse": "pyg_scale_pyglib.check:torch_sparse",
    }
