"""A communicator, which sends tensors between ranks. Replace it by your own transport.

The second half, `listen` and `connect`, is for servers that are not ranks. Leave it out if you do
not need it.
"""

import contextlib
import json
import re
import socket
import struct
import threading
import time
from datetime import timedelta

import torch

from pyg_scale.comm import Communicator, Connection, Listener, Reply, Work
from pyg_scale.comm.handshake import Acceptor, introduce
from pyg_scale.comm.remote import MAX_ANSWER, MAX_REQUEST
from pyg_scale.comm.secret import checked_secret, derive_key
from pyg_scale.comm.service import Handlers
from pyg_scale.errors import AccessError, CommError, CommTimeoutError, RequestError
from pyg_scale.ops.raw_bytes import raw_bytes


class TemplateCommunicator(Communicator):
    """Sends messages through the store where the ranks meet: slow, but easy to read.

    A message is plain bytes: the collective, the dtype, the shape, then the values.
    """

    @classmethod
    def join(cls, group):
        """The communicator of this rank in `group`."""
        made = cls()
        made.store, made.rank, made.world_size = group.store, group.rank, group.world_size
        made.timeout = group.timeout
        return made

    def _exchange(self, name, tensors, tag):
        for rank, tensor in enumerate(tensors):
            if rank != self.rank:
                self.store.set(f"{tag}/{self.rank}/{rank}", _to_bytes(name, tensor))
        return TemplateWork(self, name, tensors, tag)

    def close(self):
        self._break("it was closed")

    @classmethod
    def listen(cls, address, handlers, *, token, num_threads=2, max_bytes=MAX_REQUEST):
        return TemplateListener(_parse(address), handlers, token, num_threads, max_bytes)

    @classmethod
    def connect(cls, addresses, *, token, timeout=60.0):
        return TemplateConnection(addresses, token, timeout)


class TemplateWork(Work):
    def __init__(self, comm, name, tensors, tag):
        self.comm, self.name, self.tensors, self.tag = comm, name, tensors, tag
        self.result = None

    def wait(self, timeout=None):
        if self.result is None:
            deadline = time.monotonic() + (self.comm.timeout if timeout is None else timeout)
            ranks = range(self.comm.world_size)
            self.result = [self.from_rank(rank, deadline) for rank in ranks]
        return self.result

    def from_rank(self, rank, deadline):
        if rank == self.comm.rank:
            return self.tensors[rank]
        key = f"{self.tag}/{rank}/{self.comm.rank}"
        try:
            self.comm.store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        except RuntimeError:
            reason = f"{self.name}: rank {rank} did not answer in time"
            self.comm._break(reason)
            raise CommTimeoutError(reason) from None
        found = self.comm.store.get(key)
        self.comm.store.delete_key(key)
        return _from_bytes(self.name, found, rank)


def _to_bytes(name, tensor):
    values = raw_bytes(tensor.contiguous()).numpy().tobytes()
    shape = ",".join(map(str, tensor.shape))
    return f"{name} {tensor.dtype} {shape} ".encode() + values


def _from_bytes(name, found, rank):
    called, dtype, shape, values = found.split(b" ", 3)
    if called.decode() != name:
        raise CommError(f"this rank is in {name}, rank {rank} in another collective")
    tensor = torch.frombuffer(bytearray(values), dtype=torch.uint8) if values else torch.empty(0)
    dtype = getattr(torch, dtype.decode().removeprefix("torch."))
    sizes = [int(size) for size in shape.split(b",") if size]
    return (tensor.view(dtype) if values else tensor.to(dtype)).view(sizes)


# Servers that are not ranks #######################################################################

ADDRESS = re.compile(r"tcp://([\w.-]+):(\d{1,5}|\*)")
LENGTH = struct.Struct("<Q")
SECONDS = 10.0


class TemplateListener(Listener):
    """Answers one request of each connection, then closes it: slow, but easy to read."""

    def __init__(self, where, handlers, token, num_threads, max_bytes):
        key, self.max_bytes = key_of(token), max_bytes
        self.open, self.lock, self.closed = set(), threading.Lock(), False
        try:
            listener = socket.create_server(where)
        except OSError as error:
            raise CommError(f"cannot listen at {where}: {error}") from None
        self.address = "tcp://{}:{}".format(*listener.getsockname())
        self.handlers = Handlers(handlers, num_threads)  # has the threads that call them
        # One thread accepts connections; those that have proved the secret are passed to `admit`.
        self.acceptor = Acceptor(listener, key, 0, 1, self.admit)

    def admit(self, connection, _):
        threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        with self.lock:
            self.open.add(connection)
        # Bytes from the wire may be anything: an error ends only this connection.
        with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            connection.settimeout(SECONDS)
            name, tensors = unpacked(receive(connection, self.max_bytes + 65536))
            if not self.closed:
                send(connection, self.answer(name, tensors))
        with self.lock:
            self.open.discard(connection)

    def answer(self, name, tensors):
        try:
            return packed("", self.handlers.submit(name, tensors).result())
        except Exception as error:
            return packed(f"{type(error).__name__}: {error}", [])

    def close(self):
        self.closed = True
        self.acceptor.close()
        with self.lock:
            shut(self.open)
        self.handlers.close()


class TemplateConnection(Connection):
    """Makes a connection for each request, in a thread."""

    def __init__(self, addresses, token, timeout):
        self.addresses, self.timeout = tuple(addresses), timeout
        self.where = [_parse(address) for address in addresses]
        self.token, self.closed = token, False
        self.key = key_of(token)
        self.open, self.lock = set(), threading.Lock()

    def request(self, server, name, tensors):
        if not 0 <= server < len(self.addresses):
            raise ValueError(f"there is no server {server}, only 0 to {len(self.addresses) - 1}")
        if self.closed:
            raise CommError("this connection was closed")
        reply, message = Reply(self.addresses[server], name, self.timeout), packed(name, tensors)
        threading.Thread(target=self.ask, args=(server, message, reply), daemon=True).start()
        return reply

    def ask(self, server, message, reply):
        address = self.addresses[server]
        try:
            with socket.create_connection(self.where[server], timeout=self.timeout) as connection:
                with self.lock:
                    self.open.add(connection)
                    if self.closed:
                        raise CommError("this connection was closed")
                introduce(connection, self.key, 0, 0, self.timeout)  # then the reply has a limit
                send(connection, message)
                text, tensors = unpacked(receive(connection, MAX_ANSWER))
                if text:
                    kind, _, reason = text.partition(": ")
                    raise RequestError(address, kind, reason)
                reply.succeed(tensors)
        except AccessError:
            reply.fail(RequestError(address, "PermissionError", "it has another secret"))
        except CommError as error:
            reply.fail(error)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reply.fail(
                CommError(f"{address}: it cannot be reached, or the connection is lost: {error}")
            )
        finally:
            with self.lock:
                self.open = {each for each in self.open if each.fileno() >= 0}

    def close(self):
        with self.lock:
            self.closed = True
            shut(self.open)

    def __reduce__(self):  # a copy in another process makes its own connections
        return type(self), (self.addresses, self.token, self.timeout)


def key_of(token):
    """A key derived from the secret; neither is sent."""
    return derive_key(checked_secret(token), "template")


def packed(text, tensors):
    """A message: a line of JSON, then the values of all tensors."""
    specs = [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in tensors]
    values = [raw_bytes(each.contiguous()).numpy().tobytes() for each in tensors]
    return b"\n".join([json.dumps([text, specs]).encode(), b"".join(values)])


def unpacked(message):
    head, _, values = bytes(message).partition(b"\n")
    text, specs = json.loads(head)
    tensors, at = [], 0
    for name, shape in specs:
        dtype = getattr(torch, str(name), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name!r} is no dtype")
        size = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.frombuffer(bytearray(values[at : at + size]) or bytearray(1), dtype=torch.uint8)
        tensors.append(raw[:size].view(dtype).view(shape))
        at += size
    return text, tensors


def send(connection, data):
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive(connection, limit):
    (size,) = LENGTH.unpack(exactly(connection, LENGTH.size))
    if size > limit:
        raise ValueError(f"{size} bytes are announced, {limit} are taken")
    return exactly(connection, size)


def exactly(connection, size):
    found = bytearray()
    while len(found) < size:
        more = connection.recv(min(size - len(found), 1 << 20))
        if not more:
            raise ConnectionResetError("it ended in the middle of a message")
        found += more
    return found


def shut(connections):
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _parse(address):
    found = ADDRESS.fullmatch(address)
    if not found or (found[2] != "*" and int(found[2]) > 65535):
        raise ValueError(f"an address is like tcp://host:5555 (got {address!r})")
    return found[1], 0 if found[2] == "*" else int(found[2])
