"""A Python that has imported torch, PyG and pyg_scale already, for tests that start processes.

Importing them takes seconds of processor time, which is most of what a short script costs. So
:func:`python` gives the path of a program that takes the arguments of ``python`` and behaves like
it, but whose process is forked from one that has imported everything: a server, of which each
process of pytest has one at most, from the first use to its end.

The program itself is small: it hands over its arguments, environment, directory and open files,
passes signals on, and ends as the forked process does, by an exit code or a signal. When it is
killed, so is the forked process. What is not as with ``python``: the forked process has another
pid (:func:`pid_behind`) and, as all of them, the hash seed of the server; and it finds imported
what it did not import. Tests of any of this, and of the memory of a process, want
``sys.executable``. Where a fork would not do - another ``pyg_scale`` is on its path, an option or
a variable that matters while the interpreter starts - the forked process becomes a fresh Python.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.machinery
import io
import json
import multiprocessing.spawn
import os
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyg_scale

PATIENCE = 60.0
"""Seconds that the imports may take."""
MODULES = (
    "torch",
    "torch.distributed.run",
    "torch_geometric.datasets",
    "torch_geometric.loader",
    "torch_geometric.nn",
    "pyg_scale.cli",
    "pyg_scale.comm",
    "pyg_scale.convert.run",
    "pyg_scale.distributed",
    "pyg_scale.loader",
    "pyg_scale.train",
)
"""What has been imported; nothing of it may start a thread."""
WITHOUT_THREADS = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""For the server alone: libraries of NumPy and Arrow would start threads when they are loaded."""
FRESH = ("PYTHON", "LD_", "TORCH_LOGS")
"""Beginnings of variables that the server has acted on, but for :data:`APPLIED`."""
APPLIED = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHON_EXEC")

PROGRAM = '''#!{python} -IS
"""Stands in for a process that is forked from one that has imported everything."""
import array, json, os, signal, socket, struct, sys

def fresh():
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])

arguments, options = sys.argv[1:], []
while arguments[:1] in (["-u"], ["-B"]):
    options.append(arguments.pop(0))
known = arguments[:1] in (["-c"], ["-m"]) and len(arguments) > 1
if not known and not (arguments and not arguments[0].startswith("-")):
    fresh()
if arguments[0] == "-c" and any(f"{{kept}} import main" in arguments[1] for kept in {kept!r}):
    fresh()  # multiprocessing keeps it, which must be seen from outside
connection = socket.socket(socket.AF_UNIX)
try:
    connection.connect({address!r})
except OSError:
    fresh()
files = [int(name) for name in os.listdir("/proc/self/fd") if int(name) != connection.fileno()]
files = [file for file in files if os.path.exists(f"/proc/self/fd/{{file}}")]
request = json.dumps({{
    "arguments": arguments,
    "options": options,
    "environ": dict(os.environ),
    "directory": os.getcwd(),
    "files": files,
    "leads": os.getsid(0) == os.getpid(),
    "pid": os.getpid(),
}}).encode()
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
connection.sendmsg([struct.pack("<I", len(request))], rights)
connection.sendall(request)
for number in {forwarded!r}:
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, lambda number, frame: connection.sendall(bytes([number])))
answer = connection.recv(4)
if len(answer) < 4:
    os._exit(70)  # the server is gone
(code,) = struct.unpack("<i", answer)
if code < 0:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
'''
KEPT = ("resource_tracker", "forkserver")
FORWARDED = [
    int(number)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGCONT,
    )
]

CLI = (
    "import sys; from pyg_scale.cli import main; sys.executable = sys.argv.pop(1); "
    "sys.exit(main(sys.argv[1:]))"
)
"""``pyg-scale``, of which the first argument is the Python that it starts."""


# In pytest's process ###########################################################################


class _Server:
    """The process that has imported everything, and the program that asks it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pyg-scale-preloaded-"))
        address = self.folder / "socket"
        self.program = self.folder / "python"
        text = PROGRAM.format(
            python=sys.executable, address=str(address), forwarded=FORWARDED, kept=KEPT
        )
        self.program.write_text(text)
        self.program.chmod(0o700)
        environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        paths = [str(Path(pyg_scale.__file__).parents[1]), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(address)],
            env=environ | WITHOUT_THREADS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        try:
            assert self.process.stdout.readline() == b"ready\n", "could not import everything"
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=5)  # the end of its input is what it waits for
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


_server: _Server | None = None


def python() -> str:
    """The path of the program; the server is started with the first call."""
    global _server
    if _server is None:
        _server = _Server()
        atexit.register(_server.end)
    return str(_server.program)


def server_pid() -> int | None:
    """The process that stays until the end of pytest; those that it has forked do not."""
    return None if _server is None else _server.process.pid


@contextlib.contextmanager
def spawning() -> Iterator[None]:
    """Let multiprocessing start the processes of its method "spawn" by the program."""
    before = multiprocessing.spawn.get_executable()
    multiprocessing.spawn.set_executable(python())
    try:
        yield
    finally:
        multiprocessing.spawn.set_executable(before)


def pid_behind(process: subprocess.Popen[Any]) -> int:
    """The pid of what was forked for a process that runs the program, once it has begun."""
    assert _server is not None
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            return int((_server.folder / f"{process.pid}").read_text())
        time.sleep(0.01)
    raise AssertionError(f"nothing was forked for {process.args}")


# In the server #################################################################################


class _Child:
    """A process that was forked, and the connection to the program that asked for it."""

    def __init__(self, connection: socket.socket, pid: int, note: Path) -> None:
        self.connection, self.pid, self.note = connection, pid, note
        self.ended = os.pidfd_open(pid)

    def signal(self) -> bool:
        """Passes on what was received; false when the program is gone."""
        try:
            received = self.connection.recv(64)
        except ConnectionError:
            received = b""
        for number in received or [signal.SIGKILL]:
            os.kill(self.pid, number)
        return bool(received)

    def end(self) -> None:
        """The process has ended; its program is told how."""
        _, status = os.waitpid(self.pid, 0)
        self.note.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.connection.sendall(struct.pack("<i", os.waitstatus_to_exitcode(status)))
        self.forget()

    def forget(self) -> None:
        self.connection.close()
        os.close(self.ended)


def _serve(address: str) -> tuple[dict[str, Any], list[int]]:
    """Fork whenever asked to; returns in the forked process, with what was asked and the files."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    os.write(1, b"ready\n")
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    children: list[_Child] = []
    while True:
        for key, _ in selector.select():
            child: _Child | None = key.data
            if key.fileobj == 0:
                for each in children:
                    os.kill(each.pid, signal.SIGKILL)
                shutil.rmtree(Path(address).parent, ignore_errors=True)
                os._exit(0)
            elif child is None:
                connection, _ = listener.accept()
                received = _receive(connection)
                if received is None:
                    connection.close()
                    continue
                pid = os.fork()
                if not pid:
                    for each in children:
                        each.forget()
                    for one in (connection, listener, selector):
                        one.close()
                    return received
                request, files = received
                for file in files:
                    os.close(file)
                note = Path(address).with_name(str(request["pid"]))
                child = _Child(connection, pid, note)
                note.write_text(str(pid))
                children.append(child)
                selector.register(connection, selectors.EVENT_READ, child)
                selector.register(child.ended, selectors.EVENT_READ, child)
            elif child not in children:
                continue  # it has ended in this very round
            elif key.fileobj is child.connection:
                if not child.signal():
                    selector.unregister(child.connection)
            else:
                selector.unregister(child.ended)
                with contextlib.suppress(KeyError):
                    selector.unregister(child.connection)
                children.remove(child)
                child.end()


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """What a program asks for, and its open files; nothing from one that is gone."""
    files: list[int] = []
    try:
        head, files, _, _ = socket.recv_fds(connection, 4, 253)
        (length,) = struct.unpack("<I", head)
        text = b""
        while len(text) < length:
            more = connection.recv(length - len(text))
            if not more:
                raise ConnectionError
            text += more
        return json.loads(text), files
    except (ConnectionError, struct.error):
        for file in files:
            os.close(file)
        return None


# In the forked process #########################################################################


def _become(request: dict[str, Any], files: list[int], started_with: dict[str, str]) -> None:
    """Be the process that was asked for, but for its code."""
    if request["leads"]:
        os.setsid()
    _enter_network(request["pid"])
    _place(files, request["files"])
    os.chdir(request["directory"])
    environ = request["environ"]
    os.environ.clear()
    os.environ.update(environ)
    first = {"-m": request["directory"], "-c": ""}.get(
        request["arguments"][0], os.path.dirname(os.path.realpath(request["arguments"][0]))
    )
    named = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    given = started_with.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [first, *named, *(path for path in sys.path[1:] if path not in given)]
    if _must_be_fresh(environ, started_with):
        os.execv(sys.executable, [sys.executable, *request["options"], *request["arguments"]])
    importlib.invalidate_caches()
    unbuffered = "-u" in request["options"] or bool(environ.get("PYTHONUNBUFFERED"))
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(number, "wb", closefd=False)
        stream = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),
            errors="backslashreplace" if number == 2 else None,
            line_buffering=number == 2,
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    np.random.seed()
    if threads := environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))


def _enter_network(pid: int) -> None:
    """Be in the network namespace of a process."""
    path = f"/proc/{pid}/ns/net"
    if os.stat(path).st_ino != os.stat("/proc/self/ns/net").st_ino:
        with open(path) as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")


def _place(files: list[int], wanted: list[int]) -> None:
    """Have open files at the numbers where they are in another process, and no others."""
    high = max([*files, *wanted]) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, high) for file in files]
    os.closerange(0, high)
    for file, number in zip(moved, wanted, strict=True):
        os.dup2(file, number)
    os.closerange(high, max(moved) + 1)


def _must_be_fresh(environ: dict[str, str], started_with: dict[str, str]) -> bool:
    """Whether something counts that was decided when the server started."""

    def deciding(values: dict[str, str]) -> dict[str, str]:
        return {k: v for k, v in values.items() if k.startswith(FRESH) and k not in APPLIED}

    if deciding(environ) != deciding(started_with):
        return True
    for name in ("torch", "torch_geometric", "pyg_scale"):
        found = importlib.machinery.PathFinder.find_spec(name, sys.path)
        if found is not None and found.origin != sys.modules[name].__file__:
            return True
    return False


def _run(arguments: list[str]) -> None:
    """What Python does with its arguments."""
    what, *rest = arguments
    if what == "-m":
        name, *rest = rest
        sys.argv[:] = [name, *rest]
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)  # it runs once more, and runpy would warn
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if what == "-c":
        text, *rest = rest
        code = compile(text, "<string>", "exec")
    else:
        main.__file__ = what
        code = compile(Path(what).read_bytes(), what, "exec")
    sys.argv[:] = [what, *rest]
    exec(code, main.__dict__)


if __name__ == "__main__":
    import numpy as np
    import torch

    started_with = {k: v for k, v in os.environ.items() if k not in WITHOUT_THREADS}
    for module in MODULES:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a forked process would lack threads"
    gc.collect()
    gc.freeze()  # or each forked process would write to, and so copy, all objects in the end
    request, files = _serve(sys.argv[1])
    _become(request, files, started_with)
    _run(request["arguments"])
