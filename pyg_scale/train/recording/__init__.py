"""Recordings of training runs: written by every rank, read by `pyg-scale report`."""

from pyg_scale.train.recording.recorder import Recorder
from pyg_scale.train.recording.run import Run, read_run
from pyg_scale.train.recording.sinks import Prometheus, TensorBoard

__all__ = ["Prometheus", "Recorder", "Run", "TensorBoard", "read_run"]
