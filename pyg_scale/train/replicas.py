"""A check that the replicas of a module are equal, before one is saved for all."""

from __future__ import annotations

import zlib

from torch import nn
from torch.distributed.tensor import DTensor

from pyg_scale.ops.raw_bytes import raw_bytes

_SAMPLES = 4096


def fingerprint(module: nn.Module) -> int:
    """A checksum of some values of each parameter, the same bits on ranks that trained together.

    A step of an optimizer changes nearly all values, so a few of them tell. Buffers, such as the
    running means of ``BatchNorm``, may differ between ranks.

    Args:
        module: At most 4096 values of each of its parameters are looked at.
    """
    crc = 0
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            crc = zlib.crc32(f"{name} {list(parameter.shape)}".encode(), crc)
            continue
        flat = parameter.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().cpu()
        crc = zlib.crc32(raw_bytes(some).numpy().data, crc)
    return crc


def differing(found: list[dict[str, int]]) -> str | None:
    """The error text for modules whose fingerprints differ; ``None`` if all are the same.

    Args:
        found: The fingerprints of each rank, by the name of the module.
    """
    for name in found[0]:
        others = [rank for rank, each in enumerate(found) if each[name] != found[0][name]]
        if others:
            return (
                f"the parameters of {name!r} on rank {others[0]} are not those of rank 0: the "
                f"ranks have not made the same steps (where the last batches of an epoch do not go "
                f"round, save at its end, or give the loader uneven='drop' or 'repeat'), or were "
                f"not trained together"
            )
    return None
