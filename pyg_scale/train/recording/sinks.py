"""Dashboards that see the steps of a run: TensorBoard and Prometheus."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from pyg_scale.comm.connect import rank_here
from pyg_scale.train.steps import Step

_INSTALL = "pip install 'pyg-scale[monitor]'"


class TensorBoard:
    """Writes the values and times of steps for TensorBoard, of each rank as a run of its own.

    Args:
        path: The folder to which ``tensorboard --logdir`` points.
        every: How many steps are put together into one point.

    Raises:
        ImportError: If ``tensorboard`` is not installed.
    """

    def __init__(self, path: str | Path, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every must be 1 or more (got {every})")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(f"TensorBoard needs the package tensorboard: {_INSTALL}") from error
        self._every, self._steps = every, list[Step]()
        self._writer = SummaryWriter(str(Path(path) / f"rank-{rank_here()}"))

    def write(self, step: Step) -> None:
        """Add a step."""
        self._steps.append(step)
        if len(self._steps) < self._every:
            return
        steps, self._steps = self._steps, []
        seconds = sum(each.load + each.body for each in steps)
        found = {
            "seconds/load": sum(each.load for each in steps) / len(steps),
            "seconds/compute": sum(each.compute for each in steps) / len(steps),
            "seconds/exchange": sum(each.exchange for each in steps) / len(steps),
            "seeds per second": sum(each.seeds for each in steps) / max(seconds, 1e-9),
        }
        names = sorted({name for each in steps for name in each.values})
        for name in names:
            given = [float(each.values[name]) for each in steps if name in each.values]
            found[f"values/{name}"] = sum(given) / len(given)
        for name, value in found.items():
            self._writer.add_scalar(name, value, step.number, time.time())

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class Prometheus:
    """Serves the sums of a run's steps to Prometheus, each rank at a port of its own.

    Args:
        port: Local rank 0's; local rank ``r`` has ``port + r``. 0: any that is free.
        address: Where to listen. Whoever can connect can read; by default that is this machine.

    Attributes:
        port: The port at which this rank listens.

    Raises:
        ImportError: If ``prometheus-client`` is not installed.
        OSError: If the port is in use.
    """

    def __init__(self, port: int = 9400, address: str = "127.0.0.1") -> None:
        try:
            import prometheus_client as client
        except ImportError as error:
            raise ImportError(
                f"Prometheus needs the package prometheus-client: {_INSTALL}"
            ) from error
        registry = client.CollectorRegistry()
        self._rank = str(rank_here())

        def counter(name: str, text: str, *labels: str) -> Any:
            return client.Counter(f"pyg_scale_{name}", text, ("rank", *labels), registry=registry)

        self._steps = counter("steps", "steps that were made")
        self._seeds = counter("seeds", "seeds of all steps")
        self._seconds = counter("seconds", "seconds of steps: load, compute, exchange", "part")
        self._stages = counter("stage_seconds", "seconds of the loader's stages", "stage")
        self._counts = counter("loaded", "what the loader read: rows, bytes, ...", "what")
        self._values = client.Gauge(
            "pyg_scale_value", "what the loop logs", ("rank", "name"), registry=registry
        )
        if port:
            port += int(os.environ.get("LOCAL_RANK", "0"))
        self._server, self._thread = client.start_http_server(port, address, registry)
        self.port = int(self._server.server_port)

    def write(self, step: Step) -> None:
        """Add a step."""
        rank = self._rank
        self._steps.labels(rank).inc()
        self._seeds.labels(rank).inc(step.seeds)
        for part in ("load", "compute", "exchange"):
            self._seconds.labels(rank, part).inc(max(0.0, getattr(step, part)))
        for stage, seconds in step.stages.items():
            self._stages.labels(rank, stage).inc(max(0.0, seconds))
        for what, count in step.counts.items():
            self._counts.labels(rank, what).inc(max(0, count))
        for name, value in step.values.items():
            self._values.labels(rank, name).set(float(value))

    def close(self) -> None:
        """Listen no longer."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
