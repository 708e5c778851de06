"""Processes of a benchmark: a generator that runs in one of its own, and yields JSON.

Whoever measures memory, limits it, or compares processes needs some that have done nothing else.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pyg_scale_bench.memory import MemoryLimit

_MODULE = "pyg_scale_bench.child"
_SECONDS = 6 * 3600.0
_END_SECONDS = 30.0


class Child:
    """A process that runs a generator, a step whenever it is asked to.

    Args:
        target: A generator function of JSON values.
        arguments: Its keyword arguments, JSON values.
        group: A limit on its memory.
        prefix: What its command begins with.
        environ: More of its environment.
        seconds: Within which a step has to be done.
    """

    def __init__(
        self,
        target: Callable[..., Iterator[Any]],
        arguments: Mapping[str, Any],
        *,
        group: MemoryLimit | None = None,
        prefix: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        seconds: float = _SECONDS,
    ) -> None:
        self.name, self._seconds = f"{target.__module__}:{target.__qualname__}", seconds
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", _MODULE, self.name, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | dict(environ or {}),
            preexec_fn=None if group is None else group.enter,
        )

    def ask(self) -> None:
        """Let the process do its next step; :meth:`answer` waits for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() says what became of the process
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """The answer that the step yielded.

        Raises:
            SystemExit: If the process ended, such as for more memory than its limit.
        """
        assert self._process.stdout is not None
        timer = threading.Timer(self._seconds, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            code = self._process.wait(_END_SECONDS)
            reason = ": it was killed, for memory or for time" if code == -9 else ", see above"
            raise SystemExit(f"pyg-scale bench: {self.name} ended with {code}{reason}")
        return json.loads(line)

    def next(self) -> Any:
        """Ask and wait: see :meth:`answer`."""
        self.ask()
        return self.answer()

    def kill(self) -> None:
        """End the process at once; :meth:`close` it as well."""
        self._process.kill()

    def close(self) -> None:
        """End the process, by force after some seconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def call(target: Callable[..., Iterator[Any]], arguments: Mapping[str, Any], **options: Any) -> Any:
    """The first value of a generator that runs in a :class:`Child`."""
    with Child(target, arguments, **options) as child:
        return child.next()


def _main(name: str, arguments: str) -> None:
    """Answer the questions of a parent until it has no more, or there is nothing more to say."""
    module, _, function = name.partition(":")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anybody prints is for people
    steps = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    with contextlib.closing(steps):
        for _ in sys.stdin:
            print(json.dumps(next(steps)), file=answers, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
