"""The secret that the processes of a job share: its sources, and the keys derived from it.

Ranks and servers answer whoever has it. Each process gets it from its environment or a file. It is
never sent: each side proves that it has it, see :mod:`pyg_scale.comm.handshake`.
"""

from __future__ import annotations

import hmac
import os
import stat
from os import PathLike

SECRET = "PYG_SCALE_SECRET"
"""The environment variable with the secret."""
SECRET_FILE = "PYG_SCALE_SECRET_FILE"
"""The environment variable with the path of a file that holds it, readable by its owner only."""

MIN_SECRET = 16
"""Smallest number of characters of a secret."""
_MOST_BYTES = 4096
_MAKE_ONE = "python -c 'import secrets; print(secrets.token_hex(32))'"


def known_secret() -> str | None:
    """The secret of the environment; ``None`` if there is none.

    Raises:
        ValueError: If it is too short, its file can be read by others or is not a regular file, or
            both variables are set.
        OSError: If its file cannot be read.
    """
    if SECRET in os.environ and SECRET_FILE in os.environ:
        raise ValueError(f"both {SECRET} and {SECRET_FILE} are set: set one of them")
    if SECRET in os.environ:
        return checked_secret(os.environ[SECRET], SECRET)
    if SECRET_FILE in os.environ:
        return read_secret(os.environ[SECRET_FILE], f"{SECRET_FILE}: ")
    return None


def read_secret(path: str | PathLike[str], what: str = "") -> str:
    """The secret in a file, without surrounding white space.

    Args:
        path: The file.
        what: The start of error messages, such as the variable that names the file.

    Raises:
        ValueError: If others than its owner may read or write it, it is not a regular file, or it
            holds no secret.
        OSError: If it cannot be read.
    """
    # Otherwise a pipe that nobody writes to would block.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{what}{path} is not a regular file")
        mode = stat.S_IMODE(found.st_mode)
        if os.name == "posix" and mode & 0o077:
            raise ValueError(
                f"{what}{path} holds a secret, and others than its owner may read or write it "
                f"(mode {mode:04o}): chmod 600 {path}"
            )
        held = file.read(_MOST_BYTES + 1)
    try:
        if len(held) > _MOST_BYTES:
            raise ValueError
        text = held.decode().strip()
    except ValueError:
        raise ValueError(
            f"{what}{path} is not a secret, which is text of at most {_MOST_BYTES} bytes"
        ) from None
    return checked_secret(text, f"{what}{path}")


def checked_secret(text: str, what: str = "token") -> str:
    """Return a secret after checking that it is text and long enough.

    Args:
        text: The secret.
        what: Its name in errors.

    Raises:
        TypeError: If it is not text.
        ValueError: If it is too short.
    """
    if not isinstance(text, str):
        raise TypeError(f"{what} must be text (got {type(text).__name__})")
    if len(text) < MIN_SECRET:
        raise ValueError(
            f"{what} must have at least {MIN_SECRET} characters (got {len(text)}): make a secret "
            f"by {_MAKE_ONE}"
        )
    return text


def derive_key(secret: str, purpose: str) -> bytes:
    """A key of 32 bytes for one purpose, from which nobody learns the secret or other keys.

    It is the HMAC-SHA256 (RFC 2104) of the purpose. A secret that can be guessed can be found by
    trial: use a random one.
    """
    return hmac.digest(secret.encode(), f"pyg_scale {purpose}".encode(), "sha256")
