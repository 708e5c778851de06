"""Features in Redis: a hash per tensor, with a field per row, and one hash of descriptions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from os import PathLike
from typing import Any

import redis
from torch import Tensor
from torch_geometric.data import FeatureStore, TensorAttr
from tqdm import tqdm

from pyg_scale_redis.connection import Connection, default_url
from pyg_scale_redis.tensors import (
    Key,
    Spec,
    dense,
    empty_rows,
    key_text,
    row_numbers,
    rows_of,
    text_key,
)

_MAX_ROWS = 50_000  # of one command, during which Redis does nothing else
_ATTEMPTS = 20
_ABANDONED_AFTER = 3600
"""Seconds after which the server drops rows of a writer that died."""

Chunk = tuple[Tensor | range, Tensor]
"""Row numbers and the rows."""


class Redis(FeatureStore):
    """Tensors by group and name on a Redis server, for all machines that can reach it.

    Rows are fetched by their numbers, in commands of bounded size, by any number of threads. In a
    worker process, or unpickled on another machine, the store connects anew. Putting a tensor
    replaces the previous one in one step: readers see either the old or the new one. Rows written
    to a tensor also change in one step, but a read of several commands (``batch_bytes``) may see
    some rows before and some after the change. If a writer dies, the previous tensor remains.

    The server keeps, for each tensor, a hash ``{prefix}:rows:{version}`` with a field per row
    (its number) of raw bytes, little-endian as in memory, and in the hash ``{prefix}:meta`` its
    dtype and shape as JSON. Nothing is pickled.

    Args:
        url: ``redis://[user:password@]host:port/db``, ``rediss://...`` (TLS) or
            ``unix:///path/of/the.socket``; ``None`` for the variable ``PYG_SCALE_REDIS_URL``, or
            this machine. Redis clusters are not supported.
        prefix: Prefix of all keys. Graphs with different prefixes are independent.
        timeout: Seconds to wait for a connection and for each reply.
        batch_bytes: Largest size of the rows of one command in bytes (a larger row is sent alone).
        max_connections: Largest number of connections of this process; further threads wait.

    Raises:
        ValueError: If an argument is out of range.

    Example::

        store = Redis("redis://features:6379/0", prefix="papers")
        store.load("papers.graph")
        loader = NeighborLoader(data, [15, 10], feature_store=store, num_workers=4)
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str = "pyg_scale",
        timeout: float = 10.0,
        batch_bytes: int = 4 << 20,
        max_connections: int = 32,
    ) -> None:
        super().__init__()
        if not prefix or not isinstance(prefix, str):
            raise ValueError(f"prefix must be a name that is not empty (got {prefix!r})")
        if batch_bytes < 1:
            raise ValueError(f"batch_bytes must be at least 1 (got {batch_bytes})")
        self.connection = Connection(url or default_url(), timeout, max_connections)
        self.prefix = prefix
        self.batch_bytes = batch_bytes
        self._specs: dict[Key, Spec] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_specs": {}}

    def __repr__(self) -> str:
        return f"Redis({self.connection.shown!r}, prefix={self.prefix!r})"

    def load(self, graph: Any, *, progress: bool = True) -> None:
        """Put all features of a graph.

        Args:
            graph: The path of a graph directory with all parts on this machine; or ``Data`` or
                ``HeteroData``.
            progress: If True, show a progress bar on a terminal.

        Raises:
            GraphDirectoryError: If it is not a graph directory, or a part is missing.
        """
        from pyg_scale_redis.load import tensors_of

        is_path = isinstance(graph, str | PathLike)
        tensors = tensors_of(graph) if is_path else None
        if tensors is None:
            from pyg_scale.loader.batch.source import filled

            filled(self, graph)
            return
        for key, spec, chunks in tensors:
            self._write(key, spec, chunks, progress)

    # Reading ###############################################################################

    def _get_tensor(self, attr: TensorAttr) -> Tensor:
        """Read rows of a tensor.

        Raises:
            KeyError: If the tensor does not exist.
            IndexError: If a row does not exist; names it and the number of rows.
            RuntimeError: If the server lost rows.
        """
        key, name = _key(attr), _name(attr)
        spec = self._specs.get(key) or self._spec(key)
        for _ in range(_ATTEMPTS):
            try:
                rows, single = row_numbers(attr.index, spec.rows, name)
                out = self._read(spec, rows) if rows.numel() else None
            except IndexError:
                out = None
                if spec == self._spec(key):  # read again, as the tensor may have been replaced
                    raise
            if out is not None:
                return out[0] if single else out
            now = self._spec(key)
            if now == spec:
                if not rows.numel():
                    return empty_rows(spec, 0)[0]
                raise RuntimeError(
                    f"{name}: {self!r} has lost rows: they were deleted or evicted (its setting "
                    f"maxmemory-policy must be noeviction); put the tensor again"
                )
            spec = now
        raise RuntimeError(f"{name}: it was replaced {_ATTEMPTS} times while it was read")

    def _read(self, spec: Spec, rows: Tensor) -> Tensor | None:
        """The rows of one version of a tensor; ``None`` if some are missing."""
        out, raw = empty_rows(spec, rows.numel())
        size, key = spec.row_bytes, self._rows_key(spec)
        with self.connection.client() as client:
            for begin, end in _batches(rows.numel(), size, self.batch_bytes):
                found = client.execute_command("HMGET", key, *rows[begin:end].tolist())
                if None in found:
                    return None
                if any(len(row) != size for row in found):
                    raise RuntimeError(f"{key!r} of {self!r} holds rows that are not {size} bytes")
                raw[begin * size : end * size] = b"".join(found)
        return out

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        try:
            spec = self._spec(_key(attr))
        except KeyError:
            return None
        return (spec.rows, *spec.row)

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """The tensors on the server, in the order in which they were put."""
        specs = self._all_specs()
        order = sorted(specs, key=lambda key: specs[key].version)
        return [self._tensor_attr_cls(group, name) for group, name in order]

    def _all_specs(self) -> dict[Key, Spec]:
        with self.connection.client() as client:
            found = client.hgetall(self._meta_key)
        specs = {}
        for text, value in found.items():
            key = text_key(text)
            specs[key] = Spec.from_json(value, str(key))
        self._specs = specs
        return specs

    def _spec(self, key: Key) -> Spec:
        """The current description on the server."""
        with self.connection.client() as client:
            text = client.hget(self._meta_key, key_text(key))
        if text is None:
            known = ", ".join(f"{name!r} of {group!r}" for group, name in self._all_specs())
            raise KeyError(f"{key[1]!r} of {key[0]!r} is not in {self!r}, only: {known or '-'}")
        spec = Spec.from_json(text, str(key))
        self._specs = {**self._specs, key: spec}
        return spec

    # Writing ###############################################################################

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        """Store a tensor or an array ``[n, ...]``, or rows of an existing one.

        Raises:
            TypeError: If it is neither a dense tensor nor an array of numbers.
            ValueError: If it has no dimensions, or rows have another shape or dtype than the
                tensor.
            KeyError: If rows of a tensor that does not exist are given.
            IndexError: If a row does not exist.
            MemoryError: If the server has no memory left; the previous tensor remains.
            OSError: If the server does not answer: it then has the previous tensor, or the whole
                new one if it executed the command before it failed.
        """
        value = dense(tensor, _name(attr))
        if attr.index is not None:
            return self._write_rows(value, attr)
        spec = Spec(value.dtype, tuple(value.shape[1:]), value.size(0))
        self._write(_key(attr), spec, [(range(value.size(0)), value)])
        return True

    def update_tensor(self, tensor: Any, *args: Any, **kwargs: Any) -> bool:
        """Replace a tensor, or rows of it.

        Raises:
            KeyError: If the tensor does not exist.
        """
        attr = self._tensor_attr_cls.cast(*args, **kwargs)
        self._spec(_key(attr))
        return self.put_tensor(tensor, attr)

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        return self._replace(_key(attr), None)

    def _write(self, key: Key, spec: Spec, chunks: Iterable[Chunk], progress: bool = True) -> None:
        """Write the rows under a new version, then make it the current one in one step."""
        with self.connection.client() as client:
            spec = Spec(spec.dtype, spec.row, spec.rows, int(client.incr(f"{self.prefix}:version")))
        target = self._rows_key(spec)
        bar = tqdm(
            total=spec.rows,
            desc=f"Putting {key[1]}",
            unit="row",
            unit_scale=True,
            leave=False,
            delay=1,
            disable=None if progress else True,
        )
        try:
            with bar, self.connection.client() as client:
                for fields in self._commands(spec, chunks):
                    pipeline = client.pipeline(transaction=False)
                    pipeline.execute_command("HSET", target, *fields)
                    pipeline.expire(target, _ABANDONED_AFTER)
                    pipeline.execute()
                    bar.update(len(fields) // 2)
            self._replace(key, spec)
        except BaseException:
            self._specs.pop(key, None)
            self._drop(key, spec)
            raise

    def _write_rows(self, value: Tensor, attr: TensorAttr) -> bool:
        key, name = _key(attr), _name(attr)
        for _ in range(_ATTEMPTS):
            spec = self._spec(key)
            rows, single = row_numbers(attr.index, spec.rows, name)
            shape = spec.row if single else (rows.numel(), *spec.row)
            if tuple(value.shape) != shape or value.dtype != spec.dtype:
                raise ValueError(
                    f"{name} takes {spec.dtype} of shape {list(shape)} there "
                    f"(got {value.dtype} of shape {list(value.shape)})"
                )
            if not rows.numel():
                return True
            chunk = (rows, value[None] if single else value)
            with self.connection.client() as client, client.pipeline() as pipeline:
                try:
                    pipeline.watch(self._meta_key)
                    text = pipeline.hget(self._meta_key, key_text(key))
                    if text != spec.to_json().encode():
                        continue
                    pipeline.multi()
                    for fields in self._commands(spec, [chunk]):
                        pipeline.execute_command("HSET", self._rows_key(spec), *fields)
                    pipeline.execute()
                    return True
                except redis.exceptions.WatchError:
                    continue
        raise RuntimeError(f"{name}: {self!r} was changed by others {_ATTEMPTS} times meanwhile")

    def _replace(self, key: Key, spec: Spec | None) -> bool:
        """Make a version the current one, or remove the tensor; return True if it existed."""
        # Also watch the rows: commands that arrive after they are dropped must fail.
        watched = [self._meta_key] if spec is None else [self._meta_key, self._rows_key(spec)]
        for _ in range(_ATTEMPTS):
            with self.connection.client() as client, client.pipeline() as pipeline:
                try:
                    pipeline.watch(*watched)
                    text = pipeline.hget(self._meta_key, key_text(key))
                    # redis-py also raises WatchError for a lost reply, after which the change may
                    # be done.
                    if spec is None or text != spec.to_json().encode():
                        self._exchange(pipeline, key, text, spec)
                except redis.exceptions.WatchError:
                    continue
            self._specs = {k: v for k, v in self._specs.items() if k != key}
            return text is not None
        raise RuntimeError(f"{key}: {self!r} was changed by others {_ATTEMPTS} times meanwhile")

    def _exchange(self, pipeline: Any, key: Key, text: bytes | None, spec: Spec | None) -> None:
        field = key_text(key)
        old = None if text is None else self._rows_key(Spec.from_json(text, str(key)))
        new = None if spec is None else self._rows_key(spec)
        if spec is not None and (there := int(pipeline.hlen(new))) != spec.rows:
            raise RuntimeError(
                f"{self!r} holds {there} of the {spec.rows} rows of {key[1]!r}: they were evicted, "
                "or replaced by another writer already"
            )
        pipeline.multi()
        if old is not None and old != new:
            pipeline.unlink(old)
        if spec is None:
            pipeline.hdel(self._meta_key, field)
        else:
            pipeline.persist(new)
            pipeline.hset(self._meta_key, field, spec.to_json())
        pipeline.execute()

    def _commands(self, spec: Spec, chunks: Iterable[Chunk]) -> Iterator[list[Any]]:
        """The fields and values of one command each."""
        for numbers, value in chunks:
            for begin, end in _batches(len(numbers), spec.row_bytes, self.batch_bytes):
                part = numbers[begin:end]
                fields: list[Any] = [None] * (2 * (end - begin))
                fields[::2] = part.tolist() if isinstance(part, Tensor) else part
                fields[1::2] = rows_of(value[begin:end])
                yield fields

    def _drop(self, key: Key, spec: Spec) -> None:
        """Free the rows of a version unless it is the current one.

        If the server cannot be reached they stay: it drops unpublished rows by itself.
        """
        for _ in range(_ATTEMPTS):
            try:
                with self.connection.client() as client, client.pipeline() as pipeline:
                    pipeline.watch(self._meta_key)
                    text = pipeline.hget(self._meta_key, key_text(key))
                    if text != spec.to_json().encode():
                        pipeline.multi()
                        pipeline.unlink(self._rows_key(spec))
                        pipeline.execute()
                    return
            except redis.exceptions.WatchError:
                continue
            except (OSError, RuntimeError):
                return

    @property
    def _meta_key(self) -> str:
        return f"{self.prefix}:meta"

    def _rows_key(self, spec: Spec) -> str:
        return f"{self.prefix}:rows:{spec.version}"


def _batches(rows: int, row_bytes: int, batch_bytes: int) -> Iterator[tuple[int, int]]:
    step = min(_MAX_ROWS, max(1, batch_bytes // max(1, row_bytes)))
    for begin in range(0, rows, step):
        yield begin, min(rows, begin + step)


def _key(attr: TensorAttr) -> Key:
    group = attr.group_name if attr.is_set("group_name") else None
    return (tuple(group) if isinstance(group, list) else group), attr.attr_name


def _name(attr: TensorAttr) -> str:
    group, name = _key(attr)
    return f"{name!r}" if group is None else f"{name!r} of {group!r}"
