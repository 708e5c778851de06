"""Names of a package that are loaded on first use (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pyg_scale.errors import PluginLoadError, install_hint


def names(
    package: str, home: Mapping[str, str], moved: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: ``__name__`` of the package.
        home: The submodule that defines each name.
        moved: For each name that has moved to a plugin of ours, its module
            ``pyg_scale_<thing>.<...>`` of the distribution ``pyg-scale-<thing>``. Such names are
            not listed.

    Returns:
        The two functions. The first raises ``AttributeError`` for other names, and
        ``PluginLoadError`` for a name whose plugin is not installed.
    """
    moved = moved or {}

    def get(name: str) -> Any:
        if name in home:
            return getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        if name in moved:
            return getattr(plugin_module(f"{package}.{name}", moved[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home})

    return get, listed


def plugin_module(wanted: str, module: str) -> Any:
    """Import a module of a plugin of ours, which may not be installed.

    Args:
        wanted: Name of the requested object in the error.
        module: ``pyg_scale_<thing>.<...>``, of the distribution ``pyg-scale-<thing>``.

    Raises:
        PluginLoadError: If the plugin is not installed; names the command to install it.
    """
    plugin = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != plugin:
            raise
        distribution = plugin.replace("_", "-")
        raise PluginLoadError(f"{wanted}: {install_hint(distribution)}") from None
