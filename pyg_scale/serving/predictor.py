"""Online predictions: requests wait in a line, and what waits together becomes one batch."""

from __future__ import annotations

import threading
import time as clock
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pyg_scale.errors import OverloadError, PredictionTimeoutError
from pyg_scale.graph.topology import NodeType
from pyg_scale.serving.following import NewestSnapshot
from pyg_scale.serving.forward import check_model, usual_forward
from pyg_scale.serving.neighborhoods import Neighborhoods
from pyg_scale.serving.new_rows import NewRows
from pyg_scale.store.device.target import device_of

_LATENCIES = 10_000  # of the last requests, from which quantiles are computed


class Predictor:
    """Predicts for nodes from their sampled neighbourhoods, many requests at a time.

    The neighbourhood of a node (at a time, in a graph with times) is that of ``NeighborLoader(...,
    disjoint=True, redraw=False, seed=seed)``, bit for bit: it depends neither on other requests nor
    on when a request comes. So training and bulk inference with that loader see what is served.
    Predictions are equal up to the rounding of matrix products of other sizes.

    A thread takes what waits, up to ``max_batch`` nodes, samples, reads features and calls the
    model, all in one batch. It waits no longer than ``max_delay`` for further requests; under load,
    batches fill while the one before is computed.

    Example::

        with Predictor(model, "graph", num_neighbors=[15, 10], seed=0) as predictor:
            out = predictor.predict(torch.tensor([7, 12]))  # [2, channels]

    Args:
        model: Is put into evaluation mode, and must stay in it.
        graph: ``Data``, ``HeteroData``, ``(FeatureStore, GraphStore)`` or the path of a graph
            directory.
        num_neighbors: Neighbours per node and hop, -1 for all; by edge type if there are several.
        input_type: The type of the nodes to predict for, in a graph with types.
        forward: Called with the model and a batch; returns a row for each of the first
            ``batch_size`` nodes. By default ``model(x, edge_index)``, or with types ``model(x_dict,
            edge_index_dict)[input_type]``.
        seed: The seed of the draws: that of the loader in training.
        feature_store: See :class:`~pyg_scale.loader.NeighborLoader`.
        attributes: The attributes that the model reads, by name; others are not read for batches.
            ``None``: all.
        max_batch: Nodes of a batch at most.
        max_delay: Seconds for which a request may wait for others to share its batch.
        max_waiting: Nodes that may wait; a request beyond that is refused.
        timeout: Seconds after which a request that waits is given up.
        workers: Threads that make batches. One uses all of torch's threads; several share them.
        device: The device of the model, to which batches are copied.
        follow: Look for new snapshots of the graph directory, so many seconds apart (``True``:
            1), see :func:`pyg_scale.append`. They are opened in a thread of their own, and seen
            from the next batch on. ``False``: only by :meth:`refresh`.
        options: ``replace``, ``time_attr``, ``temporal_strategy``, ``weight_attr``,
            ``time_window``, ``strictly_earlier``, ``subgraph_type``: arguments of the sampler.

    Raises:
        DeviceError: If the device is not there.
        IndexError: If an option is out of range; likewise ``TypeError`` and ``ValueError``.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Any,
        num_neighbors: Any,
        *,
        input_type: NodeType = None,
        forward: Callable[[Any, Any], Tensor] | None = None,
        seed: int = 0,
        feature_store: Any = None,
        attributes: Sequence[str] | None = None,
        max_batch: int = 64,
        max_delay: float = 0.0,
        max_waiting: int = 4096,
        timeout: float = 30.0,
        workers: int = 1,
        device: Any = "cpu",
        follow: bool | float = False,
        **options: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module (got {type(model).__name__})")
        check_model(model)
        self.max_batch = _at_least(1, "max_batch", max_batch)
        self.max_waiting = _at_least(self.max_batch, "max_waiting", max_waiting)
        self.max_delay = _seconds("max_delay", max_delay)
        self.timeout = _seconds("timeout", timeout)
        if self.timeout == 0:
            raise ValueError("timeout must be more than 0 seconds")
        num_workers = _at_least(1, "workers", workers)
        self._device = device_of(device)
        every = _looks(follow)
        if every is not None and not isinstance(feature_store, str | None):
            raise ValueError("follow= needs feature_store= by name: an instance has one graph")

        def make(graph: Any) -> Neighborhoods:
            return Neighborhoods(
                graph,
                num_neighbors,
                input_type=input_type,
                seed=seed,
                feature_store=feature_store,
                attributes=attributes,
                **options,
            )

        self._newest = NewestSnapshot(graph, make, every)
        self.model = model.eval()
        self._takes_blocks = forward is None
        self._forward = usual_forward(input_type) if forward is None else forward
        self._line = _Line(self.max_batch, self.max_waiting, self.max_delay)
        self._counts = _Counts()
        self._threads = [
            threading.Thread(target=self._work, name=f"predictor-{i}", daemon=True)
            for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def neighborhoods(self) -> Neighborhoods:
        """The neighbourhoods of nodes, in the newest snapshot that is known."""
        return self._newest.current

    def refresh(self) -> int:
        """Take the newest snapshot of the graph directory, from the next batch on.

        Returns:
            Its number.

        Raises:
            ValueError: If the graph is no directory as it was opened.
            GraphDirectoryError: If the directory is damaged, or another graph is there; predictions
                go on with the snapshot before.
        """
        return self._newest.refresh()

    # Requests ##############################################################################

    def predict(
        self,
        ids: Any = (),
        time: Any = None,
        new_rows: NewRows | None = None,
        timeout: float | None = None,
    ) -> Tensor:
        """The predictions for nodes, and after them for new rows.

        Args:
            ids: Nodes ``[n]``, a tensor or a list; more than ``max_batch`` are several requests.
            time: In a graph with times: one time, or one for each ``[n + num_new]``. A node sees
                nothing later. ``None``: those of the nodes.
            new_rows: Nodes that are not in the graph, with their rows and edges.
            timeout: Seconds to wait; by default that of the predictor.

        Returns:
            ``[n + num_new, ...]``, on the CPU.

        Raises:
            OverloadError: If too many requests wait already.
            PredictionTimeoutError: If there is no prediction in time.
            IndexError: If a node does not exist; likewise ``TypeError`` and ``ValueError``.
            RuntimeError: If the predictor was closed. What the model raises is raised here, too.
        """
        until = clock.monotonic() + (self.timeout if timeout is None else timeout)
        request = self._request(ids, time, new_rows, until)
        pieces = [request] if request.rows is not None else request.pieces(self.max_batch)
        self._submit(pieces)
        out = [self._result(piece, until) for piece in pieces]
        return out[0] if len(out) == 1 else torch.cat(out)

    def submit(
        self, ids: Any = (), time: Any = None, new_rows: NewRows | None = None
    ) -> Future[Tensor]:
        """The same without waiting: a future, which may be cancelled while it waits.

        Raises:
            ValueError: If the request has more than ``max_batch`` nodes.
            OverloadError: See :meth:`predict`, as for the other errors.
        """
        request = self._request(ids, time, new_rows, clock.monotonic() + self.timeout)
        self._submit([request])
        return request.future

    def warm_up(self, rounds: int = 3) -> None:
        """Make batches of 1 and of ``max_batch`` nodes, so that the first requests find all ready.

        In a graph with times these are seen at the nodes' own times; without such nothing is done.

        Args:
            rounds: Number of batches of each size.
        """
        size = min(self.max_batch, self.neighborhoods.num_nodes)
        if size == 0 or self.neighborhoods.needs_time:
            return
        for _ in range(rounds):
            for count in {1, size}:
                ids = torch.linspace(0, self.neighborhoods.num_nodes - 1, count).long()
                time = self.neighborhoods.own_times(ids)
                self._compute([self._request(ids, time, None, float("inf"))])

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and times of the last 10,000 requests.

        Returns:
            ``requests``, ``nodes``, ``batches``, ``failed``, ``refused``, ``expired``,
            ``cancelled``, ``waiting`` (nodes now); ``nodes_per_batch``; ``seconds`` of
            ``neighborhoods`` and ``model`` in all; ``latency``: seconds from request to prediction,
            ``p50``, ``p90``, ``p99`` and ``max``. ``snapshot`` of the graph directory, and
            ``follow_error``, the reason why the last look for a newer one failed; else ``None``.
        """
        error = self._newest.error
        return self._counts.as_dict() | {
            "waiting": self._line.num_nodes,
            "snapshot": self._newest.snapshot,
            "follow_error": None if error is None else f"{type(error).__name__}: {error}",
        }

    def close(self, timeout: float | None = None) -> None:
        """Take no further requests, answer those that wait, and end; a second call does nothing.

        Args:
            timeout: Seconds to wait for that; by default that of the predictor. Requests that are
                not answered by then end with a ``RuntimeError``.
        """
        until = clock.monotonic() + (self.timeout if timeout is None else timeout)
        self._line.close()
        self._newest.close(max(0.0, until - clock.monotonic()))
        for thread in self._threads:
            thread.join(max(0.0, until - clock.monotonic()))
        for request in self._line.rest():
            request.fail(RuntimeError("the predictor was closed before it answered this request"))

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _request(self, ids: Any, time: Any, rows: NewRows | None, until: float) -> _Request:
        """A request, checked."""
        node = torch.as_tensor(ids)
        if node.numel() == 0 and node.dim() == 1:
            node = node.to(torch.int64)
        self.neighborhoods.check(node)
        if rows is not None and not isinstance(rows, NewRows):
            raise TypeError(f"new_rows must be NewRows (got {type(rows).__name__})")
        size = node.numel() + (0 if rows is None else rows.num_rows)
        when = self._times(time, size, rows is not None)
        if rows is not None:
            self.neighborhoods.with_new_rows(rows)  # which refuses what does not fit
        if node.dtype != torch.int64:
            node = node.to(torch.int64)
        return _Request(node, when, rows, clock.monotonic(), until)

    def _times(self, time: Any, size: int, has_new_rows: bool) -> Tensor | None:
        if not self.neighborhoods.is_temporal:
            if time is not None:
                raise ValueError("time is given, but the predictor has no time_attr=")
            return None
        if time is None:
            if self.neighborhoods.needs_time or has_new_rows:
                raise ValueError("time is missing: say until when neighbours count")
            return None
        when = torch.as_tensor(time, dtype=torch.float64 if isinstance(time, float) else None)
        if when.dtype == torch.bool or when.is_complex():
            raise TypeError(f"time must be numbers (got {when.dtype})")
        when = when.to(torch.float64 if when.is_floating_point() else torch.int64)
        if when.is_floating_point() and bool(when.isnan().any()):
            raise ValueError("time must not be NaN")
        self.neighborhoods.check_time(when)
        if when.dim() == 0:
            return when.expand(size).contiguous()
        if when.dim() != 1 or when.numel() != size:
            raise ValueError(
                f"time must be one number, or one for each of the {size} nodes (got shape "
                f"{list(when.shape)})"
            )
        return when

    def _check_size(self, request: _Request) -> None:
        if request.size > self.max_batch:
            raise ValueError(
                f"{request.size} nodes exceed max_batch={self.max_batch}: make several requests"
            )

    def _submit(self, requests: Sequence[_Request]) -> None:
        for request in requests:
            self._check_size(request)
        try:
            self._line.put(requests)
        except OverloadError:
            self._counts.add("refused", len(requests))
            raise

    def _result(self, request: _Request, until: float) -> Tensor:
        try:
            return request.future.result(max(0.0, until - clock.monotonic()))
        except TimeoutError:
            if request.future.done():  # its own error is one, or it has come just now
                return request.future.result()
            request.future.cancel()
            raise PredictionTimeoutError(
                f"no prediction within the time limit: {self._line.num_nodes} nodes wait"
            ) from None

    # Batches ###############################################################################

    def _work(self) -> None:
        """The work of a thread: batch after batch, until the predictor is closed."""
        while (requests := self._line.take()) is not None:
            ready = []
            for request in requests:
                if request.future.cancelled():
                    self._counts.add("cancelled")
                elif clock.monotonic() > request.until:
                    self._counts.add("expired")
                    request.fail(PredictionTimeoutError("the request waited beyond its time limit"))
                else:
                    ready.append(request)
            if ready:
                self._answer(ready)
            self._line.done(requests)

    def _answer(self, requests: list[_Request]) -> None:
        try:
            rows = self._compute(requests)
        except BaseException as error:
            if len(requests) > 1:  # the others do not share the fate of the one that is at fault
                for request in requests:
                    self._answer([request])
                return
            self._counts.add("failed")
            requests[0].fail(error)
            return
        self._counts.answered(requests, clock.monotonic())
        for request, out in zip(requests, rows, strict=True):
            request.answer(out)

    def _compute(self, requests: Sequence[_Request]) -> list[Tensor]:
        """The predictions of requests that share a batch."""
        if self.model.training:
            raise RuntimeError("the model was put into training mode: call model.eval()")
        sizes = [request.size for request in requests]
        first = clock.perf_counter()
        rows = next((r.rows for r in requests if r.rows is not None), None)
        # New rows have the last ids of the graph, so the request that has them is last.
        ids = requests[0].ids if len(requests) == 1 else torch.cat([r.ids for r in requests])
        times = [request.time for request in requests if request.time is not None]
        time = torch.cat(times) if len(times) > 1 else next(iter(times), None)
        neighborhoods = self.neighborhoods
        batch: Any = None
        if self._takes_blocks and rows is None:
            batch = neighborhoods.block(ids, time)
        if batch is None:
            batch = neighborhoods.batch(ids, time, rows)
        second = clock.perf_counter()
        with torch.no_grad():
            if self._device.type != "cpu":
                batch = batch.to(self._device)
            out = self._forward(self.model, batch)
            if not isinstance(out, Tensor) or out.dim() == 0 or out.size(0) != sum(sizes):
                got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
                raise ValueError(
                    f"forward must return a row for each of the {sum(sizes)} nodes of the request "
                    f"(got {got})"
                )
            out = out.cpu()
            pieces = (out,) if len(sizes) == 1 else out.split(sizes)
            found = [piece.clone() for piece in pieces]
        self._counts.took(second - first, clock.perf_counter() - second)
        return found


@dataclass(eq=False)
class _Request:
    """Nodes for which one caller wants predictions.

    Attributes:
        ids: Nodes, ``int64`` ``[n]``.
        time: Times ``[n + num_new]``, or ``None``.
        rows: Nodes that are not in the graph.
        since: When it came, by the monotonic clock.
        until: When it is given up.
        future: The prediction.
        started: True once it cannot be cancelled any more.
    """

    ids: Tensor
    time: Tensor | None
    rows: NewRows | None
    since: float
    until: float
    future: Future[Tensor] = field(default_factory=Future)
    started: bool = False

    @property
    def size(self) -> int:
        """Number of predictions."""
        return self.ids.numel() + (0 if self.rows is None else self.rows.num_rows)

    def pieces(self, size: int) -> list[_Request]:
        """Requests of at most ``size`` nodes each."""
        if self.size <= size:
            return [self]
        ids = self.ids.split(size)
        times: Sequence[Tensor | None] = (
            [None] * len(ids) if self.time is None else self.time.split(size)
        )
        return [_Request(i, t, None, self.since, self.until) for i, t in zip(ids, times)]

    def may_join(self, others: Sequence[_Request]) -> bool:
        """Return True if it may share a batch with others, which come before it."""
        mine, theirs = (None if r.time is None else r.time.dtype for r in (self, others[0]))
        return mine == theirs and others[-1].rows is None

    def start(self) -> None:
        """Let nobody cancel it from now on; a second call does nothing."""
        if not self.started:
            self.started = True
            self.future.set_running_or_notify_cancel()

    def answer(self, out: Tensor) -> None:
        with suppress(InvalidStateError):  # given up meanwhile, when the predictor was closed
            self.future.set_result(out)

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class _Line:
    """Requests that wait, first come, first served."""

    def __init__(self, max_batch: int, max_waiting: int, max_delay: float) -> None:
        self._max_batch, self._max_waiting = max_batch, max_waiting
        self._max_delay = max_delay
        self._waiting: deque[_Request] = deque()
        self._taken: set[_Request] = set()  # that are not answered yet
        self._changed = threading.Condition()
        self._closed = False
        self.num_nodes = 0

    def put(self, requests: Sequence[_Request]) -> None:
        """Let requests wait, all or none of them.

        Raises:
            OverloadError: If too many nodes wait.
            RuntimeError: If the line was closed.
        """
        size = sum(request.size for request in requests)
        with self._changed:
            if self._closed:
                raise RuntimeError("the predictor is closed")
            if self.num_nodes + size > self._max_waiting:
                raise OverloadError(
                    f"{self.num_nodes} nodes wait for predictions, and {size} more would exceed "
                    f"max_waiting={self._max_waiting}: try again later"
                )
            self._waiting.extend(requests)
            self.num_nodes += size
            self._changed.notify()

    def take(self) -> list[_Request] | None:
        """The requests of the next batch, started; ``None`` once the line is closed and empty."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            taken = [self._pop()]
            size = taken[0].size
            until = taken[0].since + self._max_delay
            while True:
                while self._waiting:
                    nearest = self._waiting[0]
                    if size + nearest.size > self._max_batch or not nearest.may_join(taken):
                        return self._leave(taken)
                    taken.append(self._pop())
                    size += nearest.size
                left = until - clock.monotonic()
                alone = taken[-1].rows is not None
                if alone or size >= self._max_batch or left <= 0 or self._closed:
                    return self._leave(taken)
                self._changed.wait(left)

    def _pop(self) -> _Request:
        request = self._waiting.popleft()
        self.num_nodes -= request.size
        self._taken.add(request)
        return request

    def _leave(self, taken: list[_Request]) -> list[_Request]:
        if self._waiting:
            self._changed.notify()  # this thread may have taken the notice of another
        found = [request for request in taken if request in self._taken]
        for request in found:
            request.start()
        return found

    def done(self, requests: Sequence[_Request]) -> None:
        """Forget requests that were answered."""
        with self._changed:
            self._taken.difference_update(requests)

    def close(self) -> None:
        """Let nothing more in; those who wait go on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def rest(self) -> list[_Request]:
        """Take all that wait, and all that others have taken and not answered."""
        with self._changed:
            while self._waiting:
                self._pop()
            found, self._taken = list(self._taken), set()
            for request in found:
                request.start()
        return found


class _Counts:
    """Counts of a predictor, of all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        names = ("requests", "nodes", "batches", "failed", "refused", "expired", "cancelled")
        self._counts = dict.fromkeys(names, 0)
        self._seconds = {"neighborhoods": 0.0, "model": 0.0}
        self._latency: deque[float] = deque(maxlen=_LATENCIES)

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def took(self, neighborhoods: float, model: float) -> None:
        with self._lock:
            self._seconds["neighborhoods"] += neighborhoods
            self._seconds["model"] += model

    def answered(self, requests: Sequence[_Request], now: float) -> None:
        """Count a batch, before its callers can see that they are answered."""
        with self._lock:
            self._counts["batches"] += 1
            self._counts["requests"] += len(requests)
            self._counts["nodes"] += sum(request.size for request in requests)
            self._latency.extend(now - request.since for request in requests)

    def as_dict(self) -> dict[str, Any]:
        with self._lock:
            found: dict[str, Any] = dict(self._counts)
            seconds, latency = dict(self._seconds), sorted(self._latency)
        found["nodes_per_batch"] = found["nodes"] / max(1, found["batches"])
        found["seconds"] = seconds
        found["latency"] = {
            name: latency[round(share * (len(latency) - 1))] if latency else None
            for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
        }
        return found


def _looks(follow: bool | float) -> float | None:
    """Seconds between two looks for a snapshot; ``None``: nobody looks."""
    if isinstance(follow, bool):
        return 1.0 if follow else None
    every = _seconds("follow", follow)
    if every == 0:
        raise ValueError("follow must be more than 0 seconds, or False")
    return every


def _at_least(least: int, name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer (got {value!r})")
    if value < least:
        raise ValueError(f"{name} must be at least {least} (got {value})")
    return value


def _seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds (got {value!r})")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a finite number of seconds, at least 0 (got {value})")
    return float(value)
