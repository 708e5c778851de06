"""The checks of ``pyg-scale doctor`` that are built in. Each one survives what it looks for."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shutil

from pyg_scale.hookspecs import Check


def version(distribution: str) -> str | None:
    """The version of an installed distribution, or ``None``; imports nothing of it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch() -> Check:
    """Whether torch can be imported, and what it can use."""
    broken = _broken("torch", "pip install torch")
    if broken:
        return broken
    import torch

    cuda = "no CUDA in this build"
    if torch.version.cuda:
        cuda = f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} device(s)"
    return Check(True, f"{torch.__version__}, {cuda}, {torch.get_num_threads()} threads")


def torch_geometric() -> Check:
    """Whether PyG can be imported."""
    broken = _broken("torch_geometric", "pip install torch_geometric")
    if broken:
        return broken
    import torch_geometric

    return Check(True, torch_geometric.__version__)


def kernels() -> Check:
    """Whether the compiled kernels are there and which path a loader takes."""
    from pyg_scale.ops import library

    status = library.status()
    if status["loaded"]:
        return Check(True, f"loaders take the native path: {status['path']}")
    if status["mode"] == "require":
        return Check(False, f"loaders raise: {status['reason']}", status["command"])
    broken = status["stale"] or bool(status["path"])  # there, and of no use
    return Check(
        False if broken else None,
        f"loaders take the plain torch path, which is slower: {status['reason']}",
        status["command"],
    )


def cuda_kernels() -> Check:
    """Whether the compiled library has kernels for CUDA devices; looks for one only if so."""
    from pyg_scale.ops import library

    status = library.status()
    if not status["loaded"]:
        return Check(None, f"no kernels are loaded: {status['reason']}", status["command"])
    held, reason = library.cuda()
    import torch

    devices = torch.cuda.device_count() if torch.version.cuda else 0
    nvcc = shutil.which(os.environ.get("CUDACXX") or "nvcc")
    if held:
        found = f"{devices} device(s) here" if devices else "no device here"
        return Check(True, f"compiled for compute capability {held} and later; {found}")
    fix = "PYG_SCALE_CUDA=1 pyg-scale build"
    if not nvcc:
        fix += "   # with the CUDA toolkit's nvcc on the PATH"
    return Check(None, reason.partition(". ")[0], fix)


def compiler() -> Check:
    """Whether there is a C++ compiler, needed only to compile the kernels."""
    wanted = os.environ.get("CXX") or "g++"
    for name in (wanted, "c++", "clang++"):
        found = shutil.which(name)
        if found:
            return Check(True, found)
    return Check(
        None,
        f"no {wanted}: the kernels cannot be compiled here (a wheel that holds them needs none)",
        "apt install g++   # or the compiler of your system; CXX= names another one",
    )


def pyg_lib() -> Check:
    """Whether pyg-lib is there; nothing of ours needs it."""
    return _optional(
        "pyg_lib",
        "pyg-lib",
        "only neighbor_sampler='pyg-lib' uses it",
        "pip install --no-build-isolation git+https://github.com/pyg-team/pyg-lib.git   # compiles",
    )


def torch_sparse() -> Check:
    """Whether torch-sparse is there; nothing of ours needs it."""
    return _optional(
        "torch_sparse",
        "torch-sparse",
        "only neighbor_sampler='torch-sparse' uses it",
        "pip install --no-build-isolation torch-scatter torch-sparse   # compiles for 20 minutes",
    )


def _broken(module: str, fix: str) -> Check | None:
    if importlib.util.find_spec(module) is None:
        return Check(False, "not installed", fix)
    try:
        importlib.import_module(module)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        detail = f"{version(module) or ''} cannot be imported: {type(error).__name__}: {first}"
        return Check(False, detail.strip(), fix.replace("install", "install --force-reinstall"))
    return None


def _optional(module: str, distribution: str, use: str, fix: str) -> Check:
    if importlib.util.find_spec(module) is None:
        return Check(None, f"not installed; {use}", fix)
    try:
        importlib.import_module(module)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        fix = f"pip uninstall {distribution}   # or reinstall it for this torch"
        return Check(False, f"cannot be imported: {type(error).__name__}: {first}", fix)
    return Check(True, f"{version(distribution) or version(module) or 'version unknown'}; {use}")
