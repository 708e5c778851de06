"""The registry of plugins, which looks up the objects of names.

Built-in names are found without reading the list of installed plugins, and are reserved: if a
plugin uses one too, it is reached as ``provider:name``. Other names are searched once per process,
in the entry points of the group ``pyg_scale``. A plugin that fails is skipped, reported once, and
listed by :func:`failures`.

``PYG_SCALE_PLUGINS`` (a comma-separated list of distributions) limits the plugins that are loaded;
empty means only built-ins. ``PYG_SCALE_TRACE_PLUGINS=1`` prints each step to stderr.
"""

from __future__ import annotations

import difflib
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

import pluggy

from pyg_scale import __version__, default_plugins, hookspecs
from pyg_scale.errors import (
    AmbiguousPluginError,
    PluginError,
    UnknownPluginError,
    install_hint,
)
from pyg_scale.kinds import (
    BUILTIN,
    KINDS,
    Entry,
    Failure,
    checked_targets,
    known_kind,
    trace,
)

__all__ = [
    "BUILTIN",
    "KINDS",
    "Entry",
    "Failure",
    "Registry",
    "entries",
    "entry",
    "failures",
    "get",
    "names",
    "normal",
    "register",
    "unregister",
]


class Registry:
    """The plugins of a process. The functions of this module are methods of a shared instance."""

    def __init__(self) -> None:
        self._failures: list[Failure] = []
        self._manager = pluggy.PluginManager("pyg_scale")
        self._manager.add_hookspecs(hookspecs)
        self._manager.register(default_plugins, BUILTIN)
        self._versions = {BUILTIN: __version__}
        self._by_hand: set[str] = set()
        self._entries: dict[tuple[str, str], list[Entry]] = {}
        self._discovered = False
        self._lock = threading.RLock()

    # Looking up ############################################################################

    def get(self, kind: str, name: str) -> Any:
        """The target of a name, such as a class or a function.

        Args:
            kind: One of :data:`KINDS`, such as ``"sampler"``.
            name: A name, or ``provider:name``.

        Raises:
            UnknownPluginError: If no plugin provides the name.
            AmbiguousPluginError: If several plugins provide it; ``provider:name`` selects one.
            PluginLoadError: If it cannot be imported.
        """
        return self.entry(kind, name).load()

    def entry(self, kind: str, name: str) -> Entry:
        """The provider and target of a name, without importing it; errors are as for ``get``."""
        known_kind(kind)
        provider, _, short = name.rpartition(":")
        if provider in ("", BUILTIN):
            for entry in self._of(kind, BUILTIN):
                if entry.name == short:
                    return entry
        found = [
            entry
            for entry in self.entries(kind)
            if entry.name == short and entry.provider == (normal(provider) or entry.provider)
        ]
        if not found:
            raise UnknownPluginError(self._unknown(kind, name))
        if len(found) > 1:
            raise AmbiguousPluginError(
                f"{kind} {name!r} is provided by more than one plugin; say which: "
                + ", ".join(repr(f"{e.provider}:{e.name}") for e in found)
            )
        return found[0]

    def entries(self, kind: str | None = None) -> list[Entry]:
        """All entries of one kind or of all kinds, without importing any."""
        if kind is not None:
            known_kind(kind)
        self._discover()
        return [
            entry
            for each in ([kind] if kind else KINDS)
            for provider in self._providers()
            for entry in self._of(each, provider)
        ]

    def names(self, kind: str) -> list[str]:
        """All names that ``get`` finds, sorted, without importing any."""
        entries = self.entries(kind)
        count: dict[str, int] = {}
        for entry in entries:
            count[entry.name] = count.get(entry.name, 0) + 1
        return sorted(
            e.name if e.provider == BUILTIN or count[e.name] == 1 else f"{e.provider}:{e.name}"
            for e in entries
        )

    def failures(self) -> list[Failure]:
        """The plugins, or hooks of one, that were skipped, with the errors."""
        self.entries()
        return list(self._failures)

    def _unknown(self, kind: str, name: str) -> str:
        names = self.names(kind)
        lines = [f"unknown {kind} {name!r}"]
        if (kind, name) in default_plugins.FIRST_PARTY:
            lines.append(install_hint(default_plugins.FIRST_PARTY[kind, name]))
        elif close := difflib.get_close_matches(name, names, n=1):
            lines.append(f"did you mean {close[0]!r}?")
        lines.append("available: " + (", ".join(names) or "none"))
        lines += [str(failure) for failure in self._failures]
        return "\n  ".join(lines)

    # Registering ###########################################################################

    def register(self, plugin: Any, name: str | None = None) -> str:
        """Register a plugin: a module, class or object with functions marked as hooks.

        A later one under the same name replaces it, as when a notebook cell is run again.

        Args:
            plugin: The object with the hooks.
            name: The name of the provider; by default that of the module or class.

        Returns:
            The name of the provider, for ``provider:name`` and ``unregister``.

        Raises:
            PluginError: If the plugin is invalid; then nothing was added.
        """
        provider = normal(name or _name_of(plugin))
        with self._lock:
            self._discover()
            old = self._manager.get_plugin(provider)
            if old is not None and provider not in self._by_hand:
                raise PluginError(
                    f"a plugin {provider!r} already exists: pass another name= to register"
                )
            if old is not None:
                self.unregister(provider)
            if self._manager.is_registered(plugin):
                raise PluginError(
                    f"this plugin is already registered, as {self._manager.get_name(plugin)!r}"
                )
            self._add(plugin, provider, "")
            self._by_hand.add(provider)
            try:
                for kind in KINDS:
                    self._collect(kind, provider)
            except BaseException:
                self.unregister(provider)
                raise
        return provider

    def unregister(self, name: str) -> None:
        """Remove a plugin that ``register`` added."""
        provider = normal(name)
        with self._lock:
            if provider not in self._by_hand:
                raise PluginError(
                    f"{name!r} was not added by register(); added: "
                    + (", ".join(sorted(self._by_hand)) or "none")
                )
            self._manager.unregister(name=provider)
            self._by_hand.discard(provider)
            for kind in KINDS:
                self._entries.pop((kind, provider), None)

    def _add(self, plugin: Any, provider: str, version: str) -> None:
        """Register a plugin with pluggy, either completely or not at all."""
        try:
            self._manager.register(plugin, provider)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            if self._manager.has_plugin(provider):
                self._manager.unregister(name=provider)
            raise PluginError(_explain(plugin, error)) from error
        if not self._manager.get_hookcallers(plugin):
            self._manager.unregister(name=provider)
            raise PluginError(
                f"{_name_of(plugin)} implements no hook: decorate its functions with "
                f"@pyg_scale.hookimpl and call them {', '.join(KINDS.values())}"
            )
        self._versions[provider] = version

    # Finding ###############################################################################

    def _providers(self) -> list[str]:
        """Providers: built-ins, then installed plugins by name, then registered ones."""
        names = {name for name, plugin in self._manager.list_name_plugin() if plugin is not None}
        return sorted(names, key=lambda n: (n != BUILTIN, n in self._by_hand, n))

    def _of(self, kind: str, provider: str) -> list[Entry]:
        """The entries of a provider of a kind, collected once; none if the hook fails."""
        with self._lock:
            if (kind, provider) not in self._entries:
                try:
                    self._collect(kind, provider)
                except (Exception, SystemExit) as error:
                    self._entries[kind, provider] = []
                    self._failed(provider, self._versions[provider], error)
            return self._entries[kind, provider]

    def _collect(self, kind: str, provider: str) -> None:
        hook = KINDS[kind]
        version = self._versions[provider]
        entries = []
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            if implementation.plugin_name == provider:
                targets = _call(hook, implementation.function)
                trace(f"{hook}() of {provider} is {targets}")
                for name, target in checked_targets(hook, targets).items():
                    entries.append(Entry(kind, name, provider, version, target))
        self._entries[kind, provider] = entries

    def _discover(self) -> None:
        with self._lock:
            if self._discovered:
                return
            self._discovered = True  # set now, as a plugin may look up a name
            allowed = os.environ.get("PYG_SCALE_PLUGINS")
            wanted = None if allowed is None else {normal(n) for n in allowed.split(",")} - {""}
            missing = set(wanted or ())
            for provider, point in _entry_points():
                distribution = provider.partition("/")[0]
                missing.discard(distribution)
                if wanted is None or distribution in wanted:
                    self._load(provider, point)
            for name in sorted(missing):
                message = f"PYG_SCALE_PLUGINS names it, but it is not installed: pip install {name}"
                self._failed(name, "", PluginError(message))

    def _load(self, provider: str, point: EntryPoint) -> None:
        # None if the METADATA of a distribution is damaged or missing
        version = (point.dist and point.dist.version) or ""
        try:
            self._add(point.load(), provider, version)
        except (Exception, SystemExit) as error:
            self._failed(provider, version, error)
        else:
            trace(f"loaded {provider} {version} ({point.value})")

    def _failed(self, provider: str, version: str, error: BaseException) -> None:
        failure = Failure(provider, version, error)
        self._failures.append(failure)
        trace(str(failure))
        warnings.warn(f"pyg_scale plugin {failure}", RuntimeWarning, stacklevel=2)


def _entry_points() -> Iterator[tuple[str, EntryPoint]]:
    """The entry points of the group with the names of their providers, ordered by these.

    A distribution is a provider; if it has several entry points, each of these is one.
    """
    points = []
    for point in entry_points(group="pyg_scale"):
        owner = (point.dist and point.dist.name) or point.name  # without METADATA, dist is missing
        points.append((normal(owner), point))
    owners = [owner for owner, _ in points]
    for owner, point in sorted(points, key=lambda pair: (pair[0], pair[1].name)):
        yield (owner if owners.count(owner) == 1 else f"{owner}/{normal(point.name)}"), point


def _call(hook: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (Exception, SystemExit) as error:
        hint = ""
        if "missing 1 required positional argument" in str(error):
            hint = "; classes are not instantiated: leave out self, or register an instance"
        raise PluginError(f"{hook}() failed: {type(error).__name__}: {error}{hint}") from error


def _explain(plugin: Any, error: pluggy.PluginValidationError) -> str:
    """Pluggy's error, with the hook that was probably meant."""
    hooks = list(KINDS.values())
    wrong = re.search(r"hook '(\w+)'", str(error))
    close = difflib.get_close_matches(wrong[1], hooks, n=1) if wrong else []
    if wrong and close and wrong[1] not in hooks:
        return f"{_name_of(plugin)}: unknown hook {wrong[1]!r}; did you mean {close[0]!r}?"
    return f"{_name_of(plugin)}: {' '.join(str(error).split())}; the hooks are {', '.join(hooks)}"


def _name_of(plugin: Any) -> str:
    if isinstance(plugin, (ModuleType, type)):
        return plugin.__name__
    return type(plugin).__name__


def normal(name: str) -> str:
    """The normalised name of a distribution, according to the packaging specification."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


_shared = Registry()
get = _shared.get
entry = _shared.entry
names = _shared.names
entries = _shared.entries
failures = _shared.failures
register = _shared.register
unregister = _shared.unregister
