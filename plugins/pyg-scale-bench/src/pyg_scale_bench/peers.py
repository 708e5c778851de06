"""PyG's own neighbour sampling, if it works on this machine, for comparison."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch_geometric import typing as pyg_typing
from torch_geometric.data import Data

from pyg_scale_bench.rounds import in_one_line

PACKAGES = {"pyg-lib": "pyg_lib", "torch-sparse": "torch_sparse"}
"""Packages with which PyG can sample, in its order of preference, and their modules."""

_FLAGS = ("WITH_PYG_LIB", "WITH_TORCH_SPARSE")


@dataclass(frozen=True)
class Backend:
    """One of :data:`PACKAGES`, with its version if it works, else with the reason."""

    name: str
    version: str | None
    reason: str = ""


def backends() -> list[Backend]:
    """All packages, tried on a tiny graph with PyG's unchanged loader."""
    return [_try(name, module) for name, module in PACKAGES.items()]


def working(none: bool = False) -> list[str]:
    """The names of the packages with which PyG can sample; empty with ``none``."""
    return [] if none else [backend.name for backend in backends() if backend.version]


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """A context in which PyG samples with this package, without its warning."""
    flags = {flag: getattr(pyg_typing, flag) for flag in _FLAGS}
    pyg_typing.WITH_PYG_LIB = name == "pyg-lib"
    pyg_typing.WITH_TORCH_SPARSE = flags["WITH_TORCH_SPARSE"] or name == "torch-sparse"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for flag, value in flags.items():
            setattr(pyg_typing, flag, value)


def what_pyg_says() -> str:
    """The message of PyG's loader if it cannot sample, else an empty string."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _first_batch()
    except Exception as error:
        return in_one_line(error)
    return ""


def _try(name: str, module: str) -> Backend:
    if importlib.util.find_spec(module) is None:
        return Backend(name, None, "not installed")
    try:
        importlib.import_module(module)
        with using(name):
            _first_batch()
    except Exception as error:
        return Backend(name, None, in_one_line(error))
    try:
        return Backend(name, version(name))
    except PackageNotFoundError:
        return Backend(name, "of unknown version")


def _first_batch() -> None:
    from torch_geometric.loader import NeighborLoader

    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    next(iter(NeighborLoader(data, [1], batch_size=2)))
