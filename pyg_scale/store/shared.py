"""Features in named shared memory: one copy on a machine for all of its processes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch_geometric.data import FeatureStore, TensorAttr

from pyg_scale.files.segment import Segment, memory_root
from pyg_scale.files.tensor_directory import TensorDirectory, file_lock
from pyg_scale.store.mmap import DirectoryTensors, Mmap


class Shared(Mmap):
    """Tensors in shared memory, common to all processes that pass the same name.

    The first process calls ``make`` and stores its result; the others wait for it and map the
    result. All processes see tensors that any of them puts or replaces later.

    The memory is a directory in ``/dev/shm`` that exists as long as a process uses it, by locks
    that the kernel drops however a process ends. The last process to end removes it. If that one is
    killed (``SIGKILL``), it is removed when the next store of the same user is opened.

    Args:
        name: The name of the store on this machine; ``None`` for one that is shared only with
            processes that get it pickled or by a fork.
        make: Called without arguments in one of the processes. Returns a ``FeatureStore``, or a
            mapping of ``(group, name)`` to tensors ``[n, ...]``.
        root: The directory of the memory, in a ``tmpfs``; ``None`` for ``/dev/shm``.
        timeout: Seconds to wait for another process to fill it.

    Raises:
        TimeoutError: If another process takes longer than ``timeout`` to fill it; names the
            process.
        PermissionError: If it belongs to another user.
        OSError: If there is not enough shared memory (``--shm-size`` of a container).

    Example::

        store = Shared("products", lambda: {(None, "x"): torch.load("x.pt")})
        loader = NeighborLoader(data, [15, 10], feature_store=store)
    """

    read_only = False

    def __init__(
        self,
        name: str | None = None,
        make: Callable[[], Any] | None = None,
        *,
        root: str | Path | None = None,
        timeout: float = 600.0,
    ) -> None:
        if name is None and make is not None:
            raise ValueError("make= needs a name: without one no other process finds the store")
        FeatureStore.__init__(self)
        segment = Segment(name, memory_root() if root is None else Path(root))
        directory = TensorDirectory(segment.path, durable=False)
        self.__dict__.update(
            path=segment.path,
            readahead=True,
            _tensors=DirectoryTensors(directory),
            _segment=segment,
        )
        if make is not None:
            make_once(directory, "features", lambda: self._fill(make()), timeout)

    @property
    def name(self) -> str:
        """The name of the store on this machine."""
        return self._segment.name

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        """See :meth:`MemoryFeatureStore._put_tensor`.

        Raises:
            OSError: If there is not enough shared memory; the old tensor is kept.
        """
        with room(self.path):
            return super()._put_tensor(tensor, attr)

    def _fill(self, made: Any) -> None:
        if isinstance(made, FeatureStore):
            for attr in made.get_all_tensor_attrs():
                attr.index = None
                if not attr.is_set("group_name"):
                    attr.group_name = None
                self.put_tensor(made.get_tensor(attr), attr.group_name, attr.attr_name, None)
            return
        if not hasattr(made, "items"):
            raise TypeError(
                "make must return a FeatureStore or {(group, name): tensor} "
                f"(got {type(made).__name__})"
            )
        for (group, attr_name), value in made.items():
            self.put_tensor(value, group, attr_name, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (type(self), self._segment)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def _attached(cls: type[Shared], segment: Segment) -> Shared:
    return cls(segment.name, root=segment.root)


@contextlib.contextmanager
def room(path: Path) -> Iterator[None]:
    """Turn an error for lack of shared memory into one that says how to get more."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage(path).free
        raise OSError(
            errno.ENOSPC,
            f"there is not enough shared memory, {free >> 20} MiB are free: make {path.parent} "
            "larger (docker run --shm-size), or pass root= in another tmpfs",
        ) from None


def make_once(
    directory: TensorDirectory, what: str, make: Callable[[], Any], timeout: float
) -> None:
    """Let one process fill a directory; the others wait until it is done.

    Raises:
        TimeoutError: If it takes longer than ``timeout`` seconds; names the process.
    """
    key = ["made", what]
    if directory.find(key) is not None:
        return
    lock = directory.path / f".make-{what}"
    with file_lock(lock, f"another process makes the {what} of {directory.path}", timeout):
        if directory.find(key) is None:
            make()
            directory.write(key, {}, {"process": os.getpid()})
