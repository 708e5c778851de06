"""The journal of a conversion on the disk: a killed one goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tqdm.auto import tqdm

from pyg_scale.files.place import replace_file

T = TypeVar("T")
_VERSION = 3


class Journal:
    """Steps that are finished, with what they found, and how far the present one is.

    Every change is written to another file, flushed and renamed: whenever the process is killed,
    the file is whole, and says nothing that is not on the disk. Whoever calls :meth:`finish` or
    :meth:`reach` has flushed its own files before.

    Args:
        file: Where it is kept.
        identity: Input and options, as JSON. A journal of others is not gone on with.

    Attributes:
        resumed: Whether something was left by a run before.
        changed: Whether there was a journal, of another input or other options.
        skipped: Names of the steps that were found finished.
    """

    def __init__(self, file: Path, identity: Any) -> None:
        self.file = file
        self._identity = json.loads(json.dumps(identity))
        self._done: dict[str, Any] = {}
        self._reached: dict[str, Any] = {}
        self.skipped: list[str] = []
        self.changed = False
        found = self._read()
        self.resumed = found is not None
        if found is not None:
            self._done, self._reached = found

    def _read(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            self.changed = True
            return None
        if not isinstance(found, dict) or found.get("version") != _VERSION:
            self.changed = True
            return None
        if found.get("identity") != self._identity:
            self.changed = True
            return None
        return found["done"], found["reached"]

    def once(self, name: str, work: Callable[[], T]) -> T:
        """Do a step, or return what it returned when it was finished before."""
        if name in self._done:
            self.skipped.append(name)
            return self._done[name]
        result = json.loads(json.dumps(work()))  # the same with and without a restart
        self.finish(name, result)
        return result

    def finished(self, name: str) -> bool:
        """Return True if a step is finished."""
        return name in self._done

    def result(self, name: str) -> Any:
        """The result of a finished step."""
        return self._done[name]

    def forget(self) -> None:
        """Begin anew."""
        self._done, self._reached, self.resumed = {}, {}, False

    def names(self) -> list[str]:
        """The steps that are finished."""
        return list(self._done)

    def finish(self, name: str, result: Any = None) -> None:
        """A step is finished."""
        self._done[name] = result
        self._reached.pop(name, None)
        self.write()

    def reached(self, name: str) -> Any:
        """The position of an unfinished step, ``None`` if it was not begun."""
        return self._reached.get(name)

    def reach(self, name: str, state: Any) -> None:
        """A step is so far; ``state`` is JSON."""
        self._reached[name] = state
        self.write()

    def write(self) -> None:
        """Put it on the disk."""
        text = json.dumps(
            {
                "version": _VERSION,
                "identity": self._identity,
                "done": self._done,
                "reached": self._reached,
            }
        )
        replace_file(self.file, text)


class ConversionWorkspace:
    """The :class:`~pyg_scale.convert.base.Workspace` of a conversion.

    Args:
        folder: For temporary files.
        memory: Bytes that a step may use.
        journal: What is done.
        quiet: Whether to show no progress.
    """

    def __init__(self, folder: Path, memory: int, journal: Journal, quiet: bool = False) -> None:
        self.folder = folder
        self.memory = memory
        self.journal = journal
        self.quiet = quiet

    def once(self, name: str, work: Callable[[], T]) -> T:
        """Do a step of a reader, or return what it returned before."""
        return self.journal.once(f"reader: {name}", work)

    def progress(self, what: str, total: int | None, unit: str, initial: int = 0) -> Any:
        """A progress bar; none where the output is no terminal."""
        return tqdm(
            desc=what,
            total=total,
            initial=initial,
            unit=f" {unit}",
            unit_scale=True,
            disable=True if self.quiet else None,
            delay=1,
        )
