"""Serve batches of a graph directory to clients on other machines.

Clients open tcp://host:port,tcp://host2:port with pyg_scale.open, and sample on these servers as
they would on the graph itself. Servers end when all clients have said goodbye (--clients), or on
SIGTERM. Clients need the same secret: give them the file (as PYG_SCALE_SECRET_FILE) or its content
(as PYG_SCALE_SECRET). It is proved and never sent, and the transport zmq encrypts with it. Exit
status: 0 if all went well, 1 if not, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from pyg_scale.errors import CommError, GraphDirectoryError, PluginError

_EXPECTED = (CommError, GraphDirectoryError, PluginError, ValueError, TypeError, OSError)
_JOIN_SECONDS = 5.0
_BIND = re.compile(r"(tcp://.+:(\d{1,5}|\*)|(?!tcp:)\w+://.+)")  # a transport may have others
_PORT = re.compile(r"(tcp://.*:)(\d+)")


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale serve``."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.clients < 0 or args.threads < 1:
        parser.error("--clients must not be negative, --threads at least 1")
    try:
        return _serve(args)
    except _EXPECTED as error:
        print(f"pyg-scale serve: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pyg-scale serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", help="a graph directory")
    parser.add_argument(
        "--bind",
        metavar="ADDRESS",
        required=True,
        help="interface or address to listen on, such as tcp://eth0:5555; port 0 is any "
        "free port, and is printed. Under torchrun each rank of a machine takes the next port",
    )
    parser.add_argument(
        "--clients",
        metavar="N",
        type=int,
        default=0,
        help="end when this many clients have said goodbye (default: 0, serve until SIGTERM)",
    )
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="the file of the secret, readable by you only; created if it is missing (default: "
        "$PYG_SCALE_SECRET_FILE, or the secret itself in $PYG_SCALE_SECRET)",
    )
    parser.add_argument(
        "--threads",
        metavar="K",
        type=int,
        default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        help="batches that are made at a time (default: one per core)",
    )
    parser.add_argument(
        "--feature-store",
        metavar="NAME",
        help="the feature store to read with, as in loaders (such as disk)",
    )
    parser.add_argument(
        "--transport", metavar="NAME", default="zmq", help="the transport of clients (default: zmq)"
    )
    return parser


def _serve(args: argparse.Namespace) -> int:
    from pyg_scale import plugins
    from pyg_scale.distributed.opening import open_graph
    from pyg_scale.distributed.server.graph_server import GraphServer

    threads = set(threading.enumerate())
    check_bind(args.bind)
    backend = plugins.get("comm", args.transport)
    graph: Any = open_graph(args.directory)
    try:
        server = GraphServer(
            graph,
            num_clients=args.clients,
            feature_store=args.feature_store,
            parallel=args.threads > 1,
        )
        secret = secret_in(args.secret_file)  # last, as it may make a file
        with _stopped_by_signals(server.finished):
            listener = backend.listen(
                bind_of_rank(args.bind), server.handlers, token=secret, num_threads=args.threads
            )
            try:
                print(f"serving {args.directory} at {listener.address}", flush=True)
                while not server.finished.wait(1.0):  # so that signals are seen
                    if listener.error is not None:
                        raise listener.error
                server.linger()
            finally:
                listener.close()
    finally:
        graph.close()
    for thread in set(threading.enumerate()) - threads:
        if not thread.daemon or thread.name.startswith("pyg_scale"):
            thread.join(_JOIN_SECONDS)  # no thread may be in compiled code when Python ends
    counts = server.counts()
    print(f"served {counts['batches']:,} batches, {counts['bytes']:,} bytes", flush=True)
    return 0


def secret_in(file: str | None) -> str:
    """The secret in a file, which is created if it is missing, or that of the environment.

    Raises:
        ValueError: If there is no secret, or others can read it.
        OSError: If the file can be neither read nor created.
    """
    from pyg_scale.comm.secret import read_secret
    from pyg_scale.distributed.server.servers import secret_of
    from pyg_scale.files.place import flush

    if file is None:
        return secret_of(None)
    if not os.path.lexists(file):
        # It is complete when it appears, as another server may be looking for it.
        number, made = tempfile.mkstemp(dir=os.path.dirname(file) or ".", prefix=".secret-")
        try:
            with os.fdopen(number, "w") as begun:
                begun.write(secrets.token_hex(32) + "\n")
                flush(begun)
            with suppress(FileExistsError):
                os.link(made, file)
        finally:
            os.unlink(made)
    return read_secret(file)


def check_bind(address: str) -> None:
    """Check that an address can be one, before anything is made for it.

    Raises:
        ValueError: If it cannot.
    """
    found = _BIND.fullmatch(address)
    if found is None or ((found[2] or "*") != "*" and int(found[2]) > 65535):
        raise ValueError(f"an address is like tcp://host:5555 (got {address!r})")


def bind_of_rank(address: str) -> str:
    """The address of this rank: ranks of one machine have consecutive ports."""
    found = _PORT.fullmatch(address)
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if found is None or int(found[2]) == 0:
        return address
    return f"{found[1]}{int(found[2]) + rank}"


@contextmanager
def _stopped_by_signals(event: threading.Event) -> Iterator[None]:
    """A context in which SIGTERM and SIGINT set an event."""
    if threading.current_thread() is not threading.main_thread():
        yield  # a caller in another thread ends it in its own way
        return
    before = {
        number: signal.signal(number, lambda *_: event.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
