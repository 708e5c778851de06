"""Amounts of memory as text."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt]?)(i?)b?)\s*", re.IGNORECASE)


def byte_size(value: int | str, name: str = "size") -> int:
    """Bytes of ``"4GB"``, ``"512 MiB"``, ``"1.5g"`` or a number. A GB is 10^9, a GiB 2^30 bytes.

    Args:
        value: The amount.
        name: Its name in errors.

    Raises:
        ValueError: If it is not an amount of memory.
        TypeError: If it is neither a number nor text.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name} must be bytes or text such as '4GB' (got {value!r})")
    if isinstance(value, str):
        found = _SIZE.fullmatch(value)
        if found is None or (found[3] and not found[2]):
            raise ValueError(f"{name} must be bytes or text such as '4GB' (got {value!r})")
        unit = found[2].lower()
        value = int(float(found[1]) * (_BINARY if found[3] else _UNITS)[unit])
    if value < 1:
        raise ValueError(f"{name} must be at least one byte (got {value})")
    return value
