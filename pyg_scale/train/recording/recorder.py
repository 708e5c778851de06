"""Writes down what every step of a training loop took, on every rank."""

from __future__ import annotations

import json
import math
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Real
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

import numpy as np
import psutil
import torch
from torch import Tensor

from pyg_scale import __version__
from pyg_scale.comm import Communicator, connect
from pyg_scale.comm.connect import num_ranks
from pyg_scale.errors import RecordingError
from pyg_scale.train.recording.run import FORMAT, SESSION, as_float, sessions
from pyg_scale.train.steps import MeasuredLoader, Numbers, Sink, Step

FLUSH = 1.0
"""Seconds after which lines are on their way to the disk, and memory is looked at again."""
_ENCODER = json.JSONEncoder(allow_nan=False)


@runtime_checkable
class Closes(Protocol):
    """A sink with something to release."""

    def close(self) -> None: ...


class Recorder:
    """Records a training run, for ``pyg-scale report``.

    ```python
    with Recorder("runs/sage", model=model) as recorder:
        for epoch in range(10):
            for batch in recorder(loader):
                loss = train(batch)
                recorder.log(loss=loss)
            with recorder.span("validation"):
                validate()
    ```

    Every rank makes one. It writes ``session-1/rank-0.jsonl`` into the folder, a line for each
    step; a run that was started again writes ``session-2``. A step ends when the next batch is
    asked for: what a loop does is not touched.

    Recording never ends a training. Where something cannot be written later on (the disk is full,
    the folder was removed), there is one warning, and the training goes on without.

    Args:
        path: The folder of the run, one that all ranks see. Where they see none together, each
            writes its own, and you copy the files of a session into one folder.
        model: The model as :func:`pyg_scale.parallel.wrap` made it, so that waiting for other ranks
            is told apart from computing.
        sinks: Where else steps go: :class:`~pyg_scale.train.recording.TensorBoard`,
            :class:`~pyg_scale.train.recording.Prometheus`, a
            :class:`~pyg_scale.train.LoadMonitor`, or anything with ``write(step)``.
        comm: How ranks meet once, to agree on a session and on when it began: see
            :class:`~pyg_scale.train.Checkpoint`.
        timeout: Seconds that they wait for each other.
        clock: Returns seconds.

    Raises:
        RecordingError: If the folder cannot be written; on every rank, and says where.
        CommTimeoutError: If not all ranks make one in time.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        model: Any = None,
        sinks: Sequence[Sink] = (),
        comm: str | Communicator | None = None,
        timeout: float = 300.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.path, self._model, self._clock = Path(path), model, clock
        self._sinks = list(sinks)
        self._numbers, self._process = Numbers(), psutil.Process()
        self._values: dict[str, Any] = {}
        self._lines: list[dict[str, Any] | Step] = []
        self._out: IO[bytes] | None = None
        ranks = connect(comm or ("local" if num_ranks() == 1 else "gloo"), timeout=timeout)
        try:
            self.session = self._begin(ranks)
        finally:
            if ranks is not comm:
                ranks.close()
        self._flushed = self._start = clock()
        self._note_memory()

    def _begin(self, ranks: Communicator) -> int:
        """Agree on a session, make its file, and leave together."""
        mine = torch.tensor(_next_session(self.path) if ranks.rank == 0 else 0)
        session = int(ranks.broadcast(mine))
        folder, problem = self.path / SESSION.format(session), ""
        header = {
            "recording": FORMAT,
            "session": session,
            "rank": ranks.rank,
            "world_size": ranks.world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": _device(self._model),
            "waiting": MeasuredLoader((), self, model=self._model).model is not None,
            "version": __version__,
            "time": time.time(),
        }
        try:
            if session < 0:
                raise OSError("rank 0 cannot make a folder in it")
            folder.mkdir(parents=True, exist_ok=True)
            self._out = (folder / f"rank-{ranks.rank}.jsonl").open("xb")
            self._out.write(json.dumps(header).encode() + b"\n")
            self._out.flush()
        except OSError as error:
            problem = str(error)
        failed = ranks.all_gather(torch.tensor([bool(problem)]))
        if problem or any(bool(each) for each in failed):
            where = [rank for rank, each in enumerate(failed) if bool(each)]
            raise RecordingError(
                f"the run cannot be recorded in {self.path}: "
                + (problem or f"rank {where[0]} cannot write there")
            )
        ranks.barrier()  # all clocks begin when it ends
        return session

    # Recording #############################################################################

    def __call__(self, loader: Iterable[Any]) -> MeasuredLoader:
        """The loader, whose steps are recorded as it is iterated over."""
        return MeasuredLoader(
            loader,
            self,
            model=self._model,
            clock=self._clock,
            values=self._take_values,
            numbers=self._numbers,
        )

    def log(self, **values: float | Tensor) -> None:
        """Note values of this step, such as its loss.

        A tensor is read when its line is written, so that nothing waits for a device now.

        Args:
            **values: Numbers, or tensors of one number; True is 1.

        Raises:
            TypeError: If one is something else, also a complex number or a tensor without data.
        """
        checked = {name: _checked(name, value) for name, value in values.items()}
        self._values.update(checked)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record how long something takes that is no step, such as a validation."""
        begin = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - begin
            self._add({"span": str(name), "begin": begin - self._start, "seconds": seconds})

    def write(self, step: Step) -> None:
        """Take a step that was made. :class:`MeasuredLoader` calls it."""
        for sink in tuple(self._sinks):
            with self._forgiving(f"{type(sink).__name__} cannot go on", sink):
                sink.write(step)
        self._add(step)

    def _take_values(self) -> Mapping[str, Any]:
        values, self._values = self._values, {}
        return values

    def _add(self, line: dict[str, Any] | Step) -> None:
        if self._out is None:
            return
        self._lines.append(line)
        if self._clock() - self._flushed >= FLUSH:
            self._note_memory()
            self.flush()

    def _note_memory(self) -> None:
        with self._forgiving("memory cannot be measured"):
            line = {"memory": self._process.memory_info().rss}
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                line["device_memory"] = torch.cuda.memory_reserved()
            self._lines.append({**line, "begin": self._clock() - self._start})

    def flush(self) -> None:
        """Write what was recorded so far."""
        lines, self._lines = self._lines, []
        self._flushed = self._clock()
        if self._out is None or not lines:
            return
        texts = []
        for line in lines:
            with self._forgiving("a line of the recording is left out"):
                texts.append(f"{self._json(line)}\n")
        with self._forgiving(f"the run is no longer recorded in {self.path}", self._out):
            self._out.write("".join(texts).encode())
            self._out.flush()
            if not os.path.exists(self._out.name):  # the system goes on with a file without name
                raise FileNotFoundError(f"{self._out.name} was removed")

    def _json(self, line: dict[str, Any] | Step) -> str:
        """One line: numbers to the microsecond, tensors read now, what is not finite as a word."""
        if isinstance(line, Step):
            line = {
                "step": line.number,
                "epoch": line.epoch,
                "begin": line.begin - self._start,
                "load": line.load,
                "body": line.body,
                "exchange": line.exchange,
                "seeds": line.seeds,
                "stages": line.stages,
                "counts": line.counts,
                "values": line.values,
            }
        return _ENCODER.encode(_plain(line))

    @contextmanager
    def _forgiving(self, what: str, broken: Any = None) -> Iterator[None]:
        """Within it, an error becomes one warning, and what is broken is not used any more."""
        try:
            yield
        except Exception as error:
            warnings.warn(f"{what}: {error}", RuntimeWarning, stacklevel=3)
            if broken in self._sinks:
                self._sinks.remove(broken)
            out = self._out
            if out is not None and broken is out:
                self._out = None
                with suppress(OSError):  # it may try to write once more
                    out.close()

    def close(self) -> None:
        """Write what is left; may be called again."""
        self._note_memory()
        self.flush()
        out, self._out = self._out, None
        if out is not None:
            with self._forgiving(f"the recording in {self.path} may lack its end"):
                out.close()
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            with self._forgiving(f"{type(sink).__name__} cannot be closed"):
                if isinstance(sink, Closes):
                    sink.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _next_session(path: Path) -> int:
    """The number after those that there are; -1 if the folder cannot be read or made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        return max(sessions(path), default=0) + 1
    except OSError:
        return -1


def _device(model: Any) -> str:
    """The type of device that a model is on, ``"cpu"`` without one."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return next((parameter.device.type for parameter in parameters), "cpu")


def _checked(name: str, value: Any) -> Any:
    """A value that can be written down: a number, or a tensor of one that is read later.

    Raises:
        TypeError: If it is neither.
    """
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex() and not value.is_meta:
            return value.detach()
        got = f"a tensor of shape {list(value.shape)}, {value.dtype}, on {value.device}"
    elif isinstance(value, bool | np.bool_):
        return int(value)
    elif isinstance(value, Real):
        return value if type(value) is int and abs(value) < 1 << 63 else as_float(value)
    else:
        got = type(value).__name__
    raise TypeError(f"{name} must be a number or a tensor of one (got {got})")


def _plain(value: Any) -> Any:
    kind = type(value)  # a recorder looks at twenty values a step, and nearly all are of these
    if kind is float:
        return _rounded(value)
    if kind is int or kind is str:
        return value
    if kind is dict or isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, Tensor):
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, str | int) else _rounded(float(value))


def _rounded(number: float) -> float | str:
    if not math.isfinite(number):
        return str(number)
    return round(number, 6 if abs(number) >= 1e-3 else 12)
