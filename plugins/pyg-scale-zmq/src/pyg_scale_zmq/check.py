"""What `pyg-scale doctor` prints about ZeroMQ."""

from __future__ import annotations

from pyg_scale.hookspecs import Check


def check() -> Check:
    """Which ZeroMQ there is."""
    import zmq

    found = f"pyzmq {zmq.__version__} with libzmq {zmq.zmq_version()}"
    if zmq.has("curve"):
        return Check(True, found)
    return Check(False, f"{found}, without CURVE", "pip install --force-reinstall pyzmq")
