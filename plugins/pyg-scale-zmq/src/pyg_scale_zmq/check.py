"""The check of ZeroMQ in `pyg-scale doctor`."""

from __future__ import annotations

from pyg_scale.hookspecs import Check


def check() -> Check:
    """Report the version of ZeroMQ."""
    import zmq

    found = f"pyzmq {zmq.__version__} with libzmq {zmq.zmq_version()}"
    if zmq.has("curve"):
        return Check(True, found)
    return Check(False, f"{found}, without CURVE", "pip install --force-reinstall pyzmq")
