"""``pyg-scale``: every command is a plugin, and is imported only when it runs."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from pyg_scale import __version__
from pyg_scale import plugins as registry  # cli.plugins is the command
from pyg_scale.errors import KernelsError, PluginError, UnknownPluginError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""The exit statuses of commands; argparse exits with 2 too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``pyg-scale``.

    Args:
        argv: The arguments, without the program's name; by default those of the process.

    Returns:
        The exit status: 0 for success, 1 for a failure, 2 for wrong usage.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    with warnings.catch_warnings():
        # Commands that use all plugins print the skipped ones.
        warnings.filterwarnings("ignore", "pyg_scale plugin ", RuntimeWarning)
        if not args:
            print(_usage(), file=sys.stderr)
            return USAGE
        if args[0] in ("-h", "--help", "help"):
            return run(lambda _: print(_usage()), args)
        if args[0] in ("-V", "--version"):
            return run(lambda _: print(f"pyg-scale {__version__}"), args)
        return run(lambda argv: _status(args[0], argv), args[1:])


def run(command: Callable[[Sequence[str]], Any], argv: Sequence[str]) -> int:
    """Run the function of a command, and print errors that the user can fix.

    Args:
        command: Takes the arguments, returns the exit status or ``None``.
        argv: The arguments.

    Returns:
        The exit status, as of :func:`main`.
    """
    try:
        try:
            return int(command(argv) or OK)
        finally:
            sys.stdout.flush()  # what is not written then fails as Python ends, with a traceback
    except UnknownPluginError as error:
        print(f"pyg-scale: {error}", file=sys.stderr)
        return USAGE
    except (PluginError, KernelsError) as error:
        print(f"pyg-scale: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        sys.stderr.close()
        return FAILED
    except OSError as error:
        if error.filename is not None or not _output_is_lost():
            raise
        print(f"pyg-scale: the output cannot be written: {error.strerror}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _output_is_lost() -> bool:
    """True if standard output takes no more; what is left of it is dropped."""
    try:
        print(flush=True)  # without a buffer, nothing is left that flushing would try again
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        with contextlib.suppress(OSError):  # it is no file
            os.dup2(null, sys.stdout.fileno())
        os.close(null)
        return True
    return False


def _status(name: str, argv: Sequence[str]) -> int | None:
    """The exit status that the command of a name returns."""
    command = registry.get("command", name)
    if not callable(command):
        raise PluginError(
            f"command {name!r} must stand for a function (it is {command!r}, a fault of the plugin)"
        )
    status = command(argv)
    if status is not None and not isinstance(status, int):
        raise PluginError(
            f"command {name!r} must return an exit status, an integer or None (got {status!r}, a "
            "fault of the plugin)"
        )
    return status


def _usage() -> str:
    commands = [(registry.entry("command", name), name) for name in registry.names("command")]
    width = max(len(name) for _, name in commands)
    lines = ["usage: pyg-scale COMMAND ...", "", "commands:"]
    for entry, name in commands:
        origin = "" if entry.provider == registry.BUILTIN else f"  [{entry.provider}]"
        lines.append(f"  {name:<{width}}  {summary(entry.target)}{origin}")
    lines += ["", "`pyg-scale COMMAND --help` has more; `pyg-scale --version` prints the version."]
    return "\n".join(lines)


def summary(target: object) -> str:
    """The first line of the docstring of a target's module, read without importing it."""
    if not isinstance(target, str):
        return (getattr(target, "__doc__", None) or "").strip().partition("\n")[0]
    try:
        spec = importlib.util.find_spec(target.partition(":")[0])
        if spec is None or spec.origin is None:
            return f"({target} is missing)"
        with open(spec.origin, encoding="utf-8") as file:
            text = ast.get_docstring(ast.parse(file.read())) or ""
    except (Exception, SystemExit) as error:  # parent packages are imported
        return f"({target} cannot be read: {type(error).__name__}: {error})"
    return text.partition("\n")[0]
