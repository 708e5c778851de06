"""Servers and clients over ZeroMQ. Imports nothing heavy, as it is imported to list names."""

from __future__ import annotations

from pyg_scale import hookimpl


@hookimpl
def pyg_scale_comm_backends() -> dict[str, str]:
    return {"zmq": "pyg_scale_zmq.backend:Zmq"}


@hookimpl
def pyg_scale_checks() -> dict[str, str]:
    return {"zmq": "pyg_scale_zmq.check:check"}
