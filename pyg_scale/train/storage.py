"""The storage of ``torch.distributed.checkpoint``: plain bytes and JSON.

Its own file storage writes pickles (``.metadata``, and every value that is no tensor) and runs
them when it reads. Here a rank has two files: ``rank-0.bin``, its tensors one after another, and
``rank-0.json``, which says where each one lies, and holds what is no tensor. Both are storage of
``torch.distributed.checkpoint``: ``dcp.load(state, storage_reader=Reader(folder))`` works as well.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from pyg_scale.errors import CheckpointError, GraphDirectoryError
from pyg_scale.files.npy import open_regular
from pyg_scale.files.place import flush
from pyg_scale.ops.raw_bytes import raw_bytes
from pyg_scale.train.tree import Piece

FORMAT = 1
_BLOCK = 1 << 24  # bytes that are read at a time


@dataclass(frozen=True)
class TensorPlace:
    """The place of a piece of a tensor."""

    file: str
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: torch.Size


class Writer(StorageWriter):
    """Writes the part of one rank, all of it on disk when ``finish`` returns.

    Args:
        folder: Must be there.
        rank: Whose part it is.
        states: What is no tensor, as JSON has it.

    Attributes:
        files: ``{name: {"bytes": ..., "crc32": ...}}`` of what was written.
    """

    def __init__(self, folder: str | os.PathLike, rank: int, states: Any = None) -> None:
        self.folder, self.rank, self.states = Path(folder), rank, states
        self.files: dict[str, dict[str, int]] = {}

    def write(self, pieces: Mapping[str, Piece]) -> None:
        """Write tensors and pieces of tensors, and what is no tensor; all is on disk afterwards.

        No planner of torch is asked: it would want every piece of a tensor to be of this rank.
        """
        items, metadata = [], Metadata(state_dict_metadata={})
        for name, piece in pieces.items():
            properties = TensorProperties(dtype=piece.values.dtype)
            chunk = ChunkStorageMetadata(piece.offsets, piece.values.shape)
            index = MetadataIndex(name, piece.offsets)
            about = TensorWriteData(chunk, properties, piece.size)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=about))
            whole = TensorStorageMetadata(properties, piece.size, [chunk])
            metadata.state_dict_metadata[name] = whole
        planner = _Given({name: piece.values for name, piece in pieces.items()})
        self.finish(metadata, [self.write_data(SavePlan(items), planner).wait()])

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name, results, offset, crc = f"rank-{self.rank}.bin", [], 0, 0
        with open(self.folder / name, "wb") as out:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                if item.type == WriteItemType.BYTE_IO or not isinstance(tensor, Tensor):
                    raise TypeError(f"{item.index.fqn} is no tensor: it belongs into states")
                tensor = tensor.detach().cpu().contiguous()
                data = raw_bytes(tensor).numpy().data
                out.write(data)
                crc = zlib.crc32(data, crc)
                place = TensorPlace(name, offset, data.nbytes, tensor.dtype, tensor.shape)
                results.append(WriteResult(item.index, data.nbytes, place))
                offset += data.nbytes
            flush(out)
        self.files[name] = {"bytes": offset, "crc32": crc}
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tensors: dict[str, Any] = {}
        for result in (result for each in results for result in each):
            name, place = result.index.fqn, result.storage_data
            whole = metadata.state_dict_metadata[name]
            assert isinstance(whole, TensorStorageMetadata)
            entry = {"dtype": str(place.dtype).removeprefix("torch."), "size": list(whole.size)}
            chunk = {
                "offsets": list(result.index.offset or [0] * len(whole.size)),
                "shape": list(place.shape),
                "file": place.file,
                "offset": place.offset,
                "bytes": place.num_bytes,
            }
            tensors.setdefault(name, {**entry, "chunks": []})["chunks"].append(chunk)
        content = {"format": FORMAT, "tensors": tensors, "states": self.states}
        name = f"rank-{self.rank}.json"
        self.files[name] = write_json(self.folder / name, content)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return Path(checkpoint_id).is_dir()


class _Given(DefaultSavePlanner):
    """Resolves items to tensors that are on the CPU already."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index.fqn]


class Reader(StorageReader):
    """Reads what the :class:`Writer` of every rank wrote.

    Attributes:
        states: What each rank had that is no tensor.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = Path(folder)
        self.states: dict[int, Any] = {}
        self._places: dict[MetadataIndex, TensorPlace] = {}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found: dict[str, TensorStorageMetadata] = {}
        for path in sorted(self.folder.glob("rank-*.json")):
            content = read_json(path)
            if content.get("format") != FORMAT:
                raise CheckpointError(
                    f"{path} has format {content.get('format')!r}, this is format {FORMAT}"
                )
            self.states[int(path.stem.removeprefix("rank-"))] = content["states"]
            for name, entry in content["tensors"].items():
                dtype = _dtype(entry["dtype"], path)
                size = torch.Size(entry["size"])
                whole = found.setdefault(
                    name, TensorStorageMetadata(TensorProperties(dtype=dtype), size, [])
                )
                for chunk in entry["chunks"]:
                    self._add(whole, name, chunk, dtype, path)
        for name, whole in found.items():
            self._require_all(name, whole)
        return Metadata(state_dict_metadata=dict(found), storage_data=self._places)

    def _add(
        self, whole: TensorStorageMetadata, name: str, chunk: Any, dtype: torch.dtype, path: Path
    ) -> None:
        offsets, shape = torch.Size(chunk["offsets"]), torch.Size(chunk["shape"])
        index = MetadataIndex(name, offsets)
        place = TensorPlace(chunk["file"], chunk["offset"], chunk["bytes"], dtype, shape)
        if place.num_bytes != math.prod(shape) * dtype.itemsize or Path(place.file).name != (
            place.file
        ):
            raise CheckpointError(f"{path}: the place of {name} cannot be")
        if index not in self._places:  # replicas are written by several ranks
            self._places[index] = place
            whole.chunks.append(ChunkStorageMetadata(offsets, shape))

    def _require_all(self, name: str, whole: TensorStorageMetadata) -> None:
        """Refuse a tensor of which a piece is nowhere: it would keep what was in its memory."""
        zero = torch.Size([0] * len(whole.size))
        complete = [(each.offsets, each.sizes) for each in whole.chunks] == [(zero, whole.size)]
        if not complete and all(each.sizes[1:] == whole.size[1:] for each in whole.chunks):
            spans = sorted((each.offsets[0], each.sizes[0]) for each in whole.chunks)
            ends = list(itertools.accumulate((size for _, size in spans), initial=0))
            complete = [begin for begin, _ in spans] + [whole.size[0]] == ends
        elif not complete:
            seen = torch.zeros(whole.size, dtype=torch.bool)
            for each in whole.chunks:
                ends = [a + b for a, b in zip(each.offsets, each.sizes, strict=True)]
                if any(end > size for end, size in zip(ends, whole.size, strict=True)):
                    break
                seen[tuple(map(slice, each.offsets, ends))] = True
            complete = bool(seen.all())
        if not complete:
            raise CheckpointError(
                f"{self.folder} lacks a piece of {name!r}, of shape {list(whole.size)}: the file "
                "of a rank is missing or damaged"
            )

    def rows_of(self, name: str, metadata: Metadata) -> StoredRows:
        """The rows of a tensor whose pieces are ranges of rows.

        Raises:
            CheckpointError: If there is no such tensor.
        """
        about = metadata.state_dict_metadata.get(name)
        if not isinstance(about, TensorStorageMetadata) or not about.size:
            raise CheckpointError(f"{self.folder} has no rows {name!r}")
        pieces = []
        for chunk in sorted(about.chunks, key=lambda each: each.offsets[0]):
            place = self._places[MetadataIndex(name, chunk.offsets)]
            if chunk.sizes[1:] != about.size[1:] or place.dtype != about.properties.dtype:
                raise CheckpointError(
                    f"{self.folder}: the pieces of {name!r} are not rows of one table"
                )
            pieces.append((chunk.offsets[0], place))
        return StoredRows(self.folder, name, about.size, about.properties.dtype, pieces)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, list[Any]] = {}
        for item in plan.items:
            files.setdefault(self._places[item.storage_index].file, []).append(item)
        for name, items in files.items():
            with opened(self.folder / name) as source:
                for item in items:
                    tensor = _read(source, self._places[item.storage_index], self.folder / name)
                    for dim, (start, length) in enumerate(
                        zip(item.storage_offsets, item.lengths, strict=True)
                    ):
                        tensor = tensor.narrow(dim, start, length)
                    target = planner.resolve_tensor(item)
                    target.detach().copy_(tensor)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return Path(checkpoint_id).is_dir()


@dataclass(frozen=True)
class StoredRows:
    """Rows of a tensor in files, which are read a block at a time.

    Attributes:
        folder: The checkpoint.
        name: Of the tensor.
        size: Its shape.
        dtype: Its dtype.
        pieces: The number of the first row and the place of each piece, ascending.
    """

    folder: Path
    name: str
    size: torch.Size
    dtype: torch.dtype
    pieces: list[tuple[int, TensorPlace]]

    def blocks(self, wanted: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        """The number of the first row and the rows of each block.

        Args:
            wanted: Rows, ascending, ``int64`` ``[n]``: blocks without any of them are left out.
        """
        row_bytes = math.prod(self.size[1:]) * self.dtype.itemsize
        step = max(1, _BLOCK // max(1, row_bytes))
        for first, place in self.pieces:
            with opened(self.folder / place.file) as source:
                for begin in range(0, place.shape[0], step):
                    count = min(step, place.shape[0] - begin)
                    if wanted is not None:
                        ends = torch.tensor([first + begin, first + begin + count])
                        low, high = torch.searchsorted(wanted, ends).tolist()
                        if low == high:
                            continue
                    block = TensorPlace(
                        place.file,
                        place.offset + begin * row_bytes,
                        count * row_bytes,
                        self.dtype,
                        torch.Size([count, *self.size[1:]]),
                    )
                    yield first + begin, _read(source, block, self.folder / place.file)

    def at(self, rows: Tensor) -> Tensor:
        """Some rows by their number, ``int64`` ``[n]``, which exist."""
        ordered, order = rows.sort()
        out = torch.empty(rows.numel(), *self.size[1:], dtype=self.dtype)
        for begin, values in self.blocks(ordered):
            ends = torch.tensor([begin, begin + values.size(0)])
            low, high = torch.searchsorted(ordered, ends).tolist()
            out[order[low:high]] = values[ordered[low:high] - begin]
        return out


def _read(source: Any, place: TensorPlace, path: Path) -> Tensor:
    source.seek(place.offset)
    data = bytearray(place.num_bytes)
    if source.readinto(data) != place.num_bytes:
        raise CheckpointError(f"{path} is too short")
    if not data:
        return torch.empty(place.shape, dtype=place.dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(place.dtype).view(place.shape)


def _dtype(name: str, path: Path) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{path} has tensors of dtype {name!r}, which torch has not")
    return found


def write_json(path: Path, content: Any) -> dict[str, int]:
    """Write a file that is on disk when this returns; its size and checksum."""
    data = json.dumps(content, allow_nan=False).encode()
    with open(path, "wb") as out:
        out.write(data)
        flush(out)
    return {"bytes": len(data), "crc32": zlib.crc32(data)}


def opened(path: Path) -> BinaryIO:
    """A file of a checkpoint, to read it.

    Raises:
        CheckpointError: If it is no file, or a link leads out of the checkpoint.
        OSError: If it is not there.
    """
    try:
        return os.fdopen(open_regular(path.name, path.parent), "rb")
    except GraphDirectoryError as error:
        raise CheckpointError(str(error)) from None


def read_json(path: Path) -> Any:
    """Read a file.

    Raises:
        CheckpointError: If it is not there, or no JSON object.
    """
    try:
        with opened(path) as source:
            found = json.loads(source.read())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a file of a checkpoint")
    return found


def checksum(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file."""
    crc, size = 0, 0
    with opened(path) as source:
        while chunk := source.read(1 << 20):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return {"bytes": size, "crc32": crc}
