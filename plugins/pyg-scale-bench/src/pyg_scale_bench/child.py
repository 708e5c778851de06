"""Child processes of a benchmark, each of which runs a generator of JSON values.

Benchmarks that measure or limit memory, or compare processes, need new processes.
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
from pyg_scale_bench.report import as_json

_MODULE = "pyg_scale_bench.child"
_SECONDS = 6 * 3600.0
_END_SECONDS = 30.0


class ChildEnded(SystemExit):
    """A process ended that should have answered; ends this one, too, unless it is caught."""


class Child:
    """A process that runs a generator, one step per request.

    Args:
        target: A generator function of JSON values.
        arguments: Its keyword arguments, JSON values.
        group: The limit of its memory.
        prefix: The start of its command.
        environ: Further variables of its environment.
        seconds: Time limit of a step.
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
        """Start the next step of the process; :meth:`answer` waits for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() reports the end of the process
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """Wait for the value that the step yields.

        Raises:
            ChildEnded: If the process ended, for example because it exceeded its memory limit.
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
            raise ChildEnded(f"pyg-scale bench: {self.name} ended with {code}{reason}")
        return json.loads(line)

    def next(self) -> Any:
        """Start a step and wait for its value, see :meth:`answer`."""
        self.ask()
        return self.answer()

    def kill(self) -> None:
        """Kill the process; :meth:`close` must still be called."""
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
    """Serve the requests of the parent until it has no more, or the generator ends."""
    module, _, function = name.partition(":")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # printed text is for people, not for the parent
    steps = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    with contextlib.closing(steps):
        for _ in sys.stdin:
            print(as_json(next(steps)), file=answers, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
