"""The check of this plugin's samplers in `pyg-scale doctor`."""

from __future__ import annotations

import importlib.util

from pyg_scale.hookspecs import Check

_INSTALL = {
    "pyg-lib": "pip install --no-build-isolation git+https://github.com/pyg-team/pyg-lib.git",
    "torch-sparse": "pip install --no-build-isolation torch-scatter torch-sparse",
}


def pyg_lib() -> Check:
    """Check that pyg-lib samples."""
    return _check("PygLibSampler")


def torch_sparse() -> Check:
    """Check that torch-sparse samples."""
    return _check("TorchSparseSampler")


def _check(name: str) -> Check:
    if importlib.util.find_spec("torch_geometric") is None:
        return Check(None, "needs torch_geometric", "pip install torch_geometric")

    import torch
    from torch_geometric.data import Data
    from torch_geometric.sampler import NodeSamplerInput

    from pyg_scale_pyglib import sampler

    cls = getattr(sampler, name)
    if importlib.util.find_spec(cls.module) is None:
        return Check(
            None,
            f"{cls.library} is not installed: that name cannot be used",
            _INSTALL[cls.library],
        )
    try:
        data = Data(edge_index=torch.tensor([[1], [0]]), num_nodes=2)
        out = cls(data, [-1]).sample_from_nodes(NodeSamplerInput(None, torch.tensor([0])))
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        return Check(
            False,
            f"{cls.library} does not sample: {type(error).__name__}: {first}",
            f"reinstall {cls.library} for torch {torch.__version__}",
        )
    if out.node.tolist() != [0, 1]:
        return Check(False, f"{cls.library} samples wrongly: {out.node.tolist()} from 1 -> 0")
    return Check(True, f"{cls.library} samples: neighbor_sampler={cls.library!r}")
