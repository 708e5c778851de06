"""The built-in checks of ``pyg-scale doctor``, which do not fail on the faults they look for."""

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
    """Check that torch can be imported; report its devices and threads."""
    broken = _broken("torch", "pip install torch")
    if broken:
        return broken
    import torch

    cuda = "no CUDA in this build"
    if torch.version.cuda:
        cuda = f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} device(s)"
    return Check(True, f"{torch.__version__}, {cuda}, {torch.get_num_threads()} threads")


def torch_geometric() -> Check:
    """Check that PyG can be imported."""
    broken = _broken("torch_geometric", "pip install torch_geometric")
    if broken:
        return broken
    import torch_geometric

    return Check(True, torch_geometric.__version__)


def kernels() -> Check:
    """Check that compiled kernels are available; report what loaders and layers take."""
    from pyg_scale.ops import dense_product, library

    status = library.status()
    if status["loaded"]:
        maps = "compiled products" if dense_product.pays() else "products of torch"
        loaded = f"loaders take the native path, linear maps {maps}: {status['path']}"
        return Check(True, loaded)
    if status["mode"] in ("require", "invalid"):
        return Check(False, f"loaders raise: {status['reason']}", status["command"])
    broken = status["stale"] or bool(status["path"])  # it exists, but is unusable
    return Check(
        False if broken else None,
        f"loaders take the plain torch path, which is slower: {status['reason']}",
        status["command"],
    )


def cuda_kernels() -> Check:
    """Report the path that ops on CUDA tensors take, without compiling anything."""
    from pyg_scale.errors import KernelsError
    from pyg_scale.ops import cuda_modules, library, nvrtc

    status = library.status()
    if not status["loaded"]:
        return Check(None, f"no kernels are loaded: {status['reason']}", status["command"])
    import torch

    count = torch.cuda.device_count() if torch.version.cuda else 0
    capabilities = [torch.cuda.get_device_capability(device) for device in range(count)]
    try:
        found = nvrtc.find()
        ways = [library.way_on_cuda(10 * a + b) for a, b in capabilities or [(9, 0)]]
    except (KernelsError, ValueError) as error:
        return Check(False, str(error), "unset PYG_SCALE_NVRTC and PYG_SCALE_CUDA")
    texts = {
        "nvcc": f"nvcc compiled them for {library.cuda()} and later",
        "NVRTC": f"{found} compiles them at first use" + (f" ({found.path})" if found else ""),
    }
    for device, (way, reason) in enumerate(ways):
        if not way and not torch.version.cuda:
            return Check(None, "there are none; this torch is for the CPU and needs none")
        if not way:
            what, _, fix = reason.partition(". ")
            which = f"cuda:{device}" if count else "a device of compute capability 9.0"
            slow = f"ops on {which} take the plain torch path, which is slower: {what}"
            return Check(None, slow, fix.removeprefix("Run: "))
    used = "; ".join(texts[way] for way in sorted({way for way, _ in ways}))
    for capability in {10 * a + b for a, b in capabilities}:
        reason = cuda_modules.way_of_generated(capability)[1]
        if reason:
            what, _, fix = reason.partition(". ")
            rows = f"{used}; messages of steps on numbers gather rows, which is slower: {what}"
            return Check(None, rows, fix.removeprefix("Run: "))
    return Check(True, f"{used}; {count or 'no'} device(s)")


def compiler() -> Check:
    """Check that there is a C++ compiler, which is needed only to compile the kernels."""
    wanted = os.environ.get("CXX") or "g++"
    for name in (wanted, "c++", "clang++"):
        found = shutil.which(name)
        if found:
            return Check(True, found)
    return Check(
        None,
        f"no {wanted}: the kernels cannot be compiled (a wheel with kernels needs none)",
        "apt install g++   # or your system's compiler; CXX= selects another one",
    )


def pyg_lib() -> Check:
    """Report the optional pyg-lib, which pyg_scale does not need."""
    return _optional(
        "pyg_lib",
        "pyg-lib",
        "only neighbor_sampler='pyg-lib' uses it",
        "pip install --no-build-isolation git+https://github.com/pyg-team/pyg-lib.git   # compiles",
    )


def torch_sparse() -> Check:
    """Report the optional torch-sparse, which pyg_scale does not need."""
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
