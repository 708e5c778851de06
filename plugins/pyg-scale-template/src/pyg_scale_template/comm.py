"""A communicator: how tensors get from rank to rank. Send them over what you have instead."""

import time
from datetime import timedelta

import torch

from pyg_scale.comm import Communicator, Work
from pyg_scale.errors import CommError, CommTimeoutError


class TemplateCommunicator(Communicator):
    """Leaves messages in the store where the ranks meet: slow, and easy to read.

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
    values = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
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
