"""Facts that ranks compare before they start: versions, directory, limits, addresses."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
from pathlib import Path
from typing import Any

import torch

from pyg_scale import __version__
from pyg_scale.comm.address import interface_of, interfaces
from pyg_scale.errors import GraphDirectoryError
from pyg_scale.ops import library

_ENVIRONMENT = ("PYG_SCALE_", "GLOO_", "NCCL_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
SHARED_MEMORY = Path("/dev/shm")


def probe(directory: str | None, address: str) -> dict[str, Any]:
    """The facts about a rank, as values that JSON can represent.

    Args:
        directory: A graph directory, or ``None``.
        address: The address at which others reach it.
    """
    return {
        "versions": versions(),
        "kernels": kernels(),
        "kernels_missing": library.status()["reason"],
        "kernels_fix": library.status()["command"],
        "directory": None if directory is None else describe_directory(directory),
        "interface": interface_of(address),
        "interfaces": interfaces(),
        "shared_memory": shared_memory(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "gpus": torch.cuda.device_count(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_ENVIRONMENT) and "TOKEN" not in name
        },
    }


def versions() -> dict[str, str]:
    """Versions of the software that must be the same on all ranks."""
    import numpy
    import torch_geometric

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torch_geometric": str(torch_geometric.__version__),
        "numpy": str(numpy.__version__),
        "pyg_scale": __version__,
    }


def kernels() -> str:
    """The compiled kernels of this rank: a checksum, or ``"none"``."""
    status = library.status()
    if not status["loaded"]:
        return "none"
    try:
        with open(str(status["path"]), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except OSError:
        return str(status["path"])


def describe_directory(path: str) -> dict[str, Any]:
    """The contents of a graph directory that a rank can read."""
    from pyg_scale.store.directory import GraphDirectory

    found: dict[str, Any] = {"path": str(Path(path).absolute())}
    try:
        directory = GraphDirectory(path)
        meta = (Path(directory.path) / "META.json").read_bytes()
        return found | {
            "checksum": hashlib.sha256(meta).hexdigest()[:12],
            "num_parts": directory.meta.num_parts,
            "parts": list(directory.parts),
            "files": len(directory.files_here()),
        }
    except (GraphDirectoryError, OSError) as error:
        return found | {"error": f"{type(error).__name__}: {error}"}


def shared_memory(path: Path = SHARED_MEMORY) -> int | None:
    """Size in bytes of the file system for shared memory, or ``None``."""
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return None
