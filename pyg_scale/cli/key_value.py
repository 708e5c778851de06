"""Options ``key=value`` on a command line."""

from __future__ import annotations

import argparse
import ast
import json
from typing import Any


def option(text: str) -> tuple[str, Any]:
    """Parse a key and a value, which is JSON, a Python literal, or else a string.

    Raises:
        argparse.ArgumentTypeError: If it is not ``key=value``.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"write it as key=value (got {text!r})")
    for read in (json.loads, ast.literal_eval):
        try:
            return key, read(value)
        except (ValueError, SyntaxError):
            continue
    return key, value
