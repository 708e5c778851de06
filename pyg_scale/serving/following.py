"""The newest snapshot of a graph directory, which requests see from the next batch on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.graph.base import directory_of
from pyg_scale.serving.neighborhoods import Neighborhoods
from pyg_scale.store.directory.data import unchanged_directory
from pyg_scale.store.directory.opening import open_graph
from pyg_scale.store.directory.reader import GraphDirectory


class NewestSnapshot:
    """The neighbourhoods of a graph, those of its newest snapshot if it is a directory.

    Batches are made of one snapshot each: that which is :attr:`current` when they begin.

    Args:
        graph: The path of a graph directory, an opened one, or any other graph, which never
            changes.
        make: Makes the neighbourhoods of a graph.
        every: Seconds between two looks for a new snapshot; ``None``: nobody looks.

    Raises:
        ValueError: If the graph is to be looked for, and is no directory as it was opened.
    """

    def __init__(
        self, graph: Any, make: Callable[[Any], Neighborhoods], every: float | None = None
    ) -> None:
        opened = open_graph(graph) if isinstance(graph, str | Path) else graph
        self._make = make
        self._directory: GraphDirectory | None = unchanged_directory(opened)
        if every is not None:
            self._required()
        self.current = make(opened)
        self.error: Exception | None = None
        """The reason why the last look failed; the snapshot before is served meanwhile."""
        self._refreshing = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if every is not None:
            self._thread = threading.Thread(
                target=self._look, args=(every,), name="predictor-follows", daemon=True
            )
            self._thread.start()

    @property
    def snapshot(self) -> int | None:
        """The number of the snapshot; ``None`` if the graph is no directory."""
        return None if self._directory is None else self._directory.snapshot

    def refresh(self) -> int:
        """Take the newest snapshot.

        Returns:
            Its number.

        Raises:
            ValueError: If the graph is no directory as it was opened.
            GraphDirectoryError: If the directory is damaged, or another graph is there.
        """
        before = self._required()
        with self._refreshing:
            newest = open_graph(before.path)
            found = directory_of(newest)
            if found.checksum == before.checksum:
                return found.snapshot
            grown = found.head.lineage == before.head.lineage or not before.head.lineage
            if not grown or found.snapshot < before.snapshot:
                raise GraphDirectoryError(
                    f"another graph is at {before.path} than the one that is served: start again"
                )
            made = self._make(newest)
            self.current, self._directory = made, found
            return found.snapshot

    def close(self, timeout: float) -> None:
        """Look for no further snapshots."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _required(self) -> GraphDirectory:
        if self._directory is None:
            raise ValueError(
                "only a graph directory has snapshots to follow: give its path, or what "
                "pyg_scale.open(path) returned, without changes"
            )
        return self._directory

    def _look(self, every: float) -> None:
        """The work of the thread."""
        while not self._closed.wait(every):
            try:
                self.refresh()
                self.error = None
            except Exception as error:  # whatever it is, the snapshot before is served
                self.error = error
