"""An inference that several ranks make together: each computes a range of nodes.

Every rank writes the rows of its nodes to files of its own, and reads those of all ranks as the
input of the next layer; between two layers the ranks wait for each other. The result is put
together in one file. All ranks must see the directory.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_scale.comm import Communicator, Group
from pyg_scale.files.npy import as_array, map_array, npy_header, num_bytes
from pyg_scale.files.place import naming, replace_file
from pyg_scale.inference.progress import FORMAT, JOURNAL, RESULT, VERSION, InferenceProgress
from pyg_scale.loader.seeds.agreement import Agreement
from pyg_scale.loader.seeds.split import communicator_of
from pyg_scale.ops.gather import gather
from pyg_scale.store.directory.page_faults import read_soon

NOTE = "RANKS.json"
_CHUNK = 1 << 26
_SEEN_WITHIN = 15.0  # seconds that a network file system may take to show a file


class RankRows:
    """Rows that several ranks wrote, read as one tensor.

    Args:
        pieces: Of each rank, ``[n, ...]``.
    """

    def __init__(self, pieces: list[Tensor]) -> None:
        self.pieces = pieces
        self._ends = torch.tensor([piece.size(0) for piece in pieces]).cumsum(0)
        self.shape = (int(self._ends[-1]), *pieces[0].shape[1:])

    def __getitem__(self, index: Tensor) -> Tensor:
        index = index.to("cpu", torch.int64)
        piece_of = torch.searchsorted(self._ends, index, right=True)
        out = self.pieces[0].new_empty((index.numel(), *self.shape[1:]))
        begin = 0
        for number, piece in enumerate(self.pieces):
            at = (piece_of == number).nonzero().view(-1)
            if at.numel():
                out[at] = gather(piece, index[at] - begin)
            begin += piece.size(0)
        return out

    def read(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Rows ``begin`` to ``end - 1`` in memory, read one after the other."""
        out = torch.empty((end - begin, *self.shape[1:]), dtype=dtype)
        first = 0
        for piece in self.pieces:
            low, high = max(begin, first), min(end, first + piece.size(0))
            if low < high:
                rows = piece[low - first : high - first]
                read_soon(rows)
                out[low - begin : high - begin] = rows
            first += piece.size(0)
        return out


class InferenceRanks:
    """The ranks of an inference.

    Args:
        group: More than one.
        out: The directory, the same for all.
        num_nodes: Of the graph.
    """

    def __init__(self, group: Group, out: Path, num_nodes: int) -> None:
        self._out, self._num_nodes = out, num_nodes
        self.rank, self.world_size = group.rank, group.world_size
        ends = [num_nodes * r // group.world_size for r in range(group.world_size + 1)]
        self._sizes = [ends[r + 1] - ends[r] for r in range(group.world_size)]
        self.begin, self.size = ends[group.rank], self._sizes[group.rank]
        self._agreement = Agreement(
            group, "inference", "but all ranks make it together; one alone passes comm='local'"
        )
        self._beats = 0

    def folder(self, rank: int | None = None) -> Path:
        """The folder of the files of a rank, by default of this one."""
        rank = self.rank if rank is None else rank
        return self._out / f"rank-{rank}-of-{self.world_size}"

    # Meeting ###############################################################################

    def meet(self, made_by: dict[str, Any], resume: bool) -> bool:
        """Agree on what is computed; whether it is there already.

        Raises:
            ValueError: If ranks compute different things, do not see one directory, or it holds
                something else.
            CommTimeoutError: If a rank does not come; names it.
        """
        self._agreement.publish("made_by", {"made_by": made_by, "resume": resume})
        for rank, other in enumerate(self._agreement.collect("made_by", "begin")):
            if rank == 0:
                first = other
            for name, value in first["made_by"].items():
                if other["made_by"].get(name) != value:
                    raise ValueError(
                        f"rank {rank} computes the inference of another {name} than rank 0: give "
                        "all ranks the same model (the same parameters), graph and arguments"
                    )
        if self.rank == 0:
            self._agreement.publish("verdict", self._examined(first["made_by"], first["resume"]))
        (verdict,) = self._agreement.collect("verdict", "begin", ranks=[0])
        if verdict["error"]:
            raise ValueError(verdict["error"])
        self._agreement.publish("seen", {"seen": self._sees(verdict["token"])})
        for rank, other in enumerate(self._agreement.collect("seen", "begin", patient=True)):
            if not other["seen"]:
                raise ValueError(
                    f"rank {rank} does not see in its out= what rank 0 wrote to {verdict['out']}: "
                    "all ranks need the same directory, on one machine or a shared file system"
                )
        return bool(verdict["done"])

    def _examined(self, made_by: dict[str, Any], resume: bool) -> dict[str, Any]:
        """The state of the directory as rank 0 finds it."""
        note = {"format": FORMAT, "version": VERSION, "ranks": self.world_size, "made_by": made_by}
        if self._out.exists() and not self._out.is_dir():
            return {"error": f"out={str(self._out)!r} is a file, expected a directory"}
        self._out.mkdir(parents=True, exist_ok=True)
        file = self._out / NOTE
        found: dict[str, Any] = {}
        if file.exists():
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
            except ValueError:
                return {"error": f"{file} is damaged: choose another directory"}
        else:
            others = sorted(p.name for p in self._out.iterdir() if not p.name.startswith("."))
            if JOURNAL in others:
                return {"error": f"{self._out} holds the inference of one process, not of ranks"}
            if others:
                return {"error": f"{self._out} holds {others[0]!r}: choose an empty directory"}
        if found and resume:
            for name, value in json.loads(json.dumps(note)).items():
                if found.get(name) != value:
                    return {
                        "error": f"{self._out} holds an inference of another {name} "
                        f"({found.get(name)!r}): pass resume=False to begin anew, or choose "
                        "another directory"
                    }
        done = resume and bool(found.get("done")) and (self._out / RESULT).is_file()
        if not done:
            (self._out / RESULT).unlink(missing_ok=True)
        token = secrets.token_hex(8)
        kept = {name: found[name] for name in ("dtype", "row")} if done else {}
        self._note({**note, **kept, "token": token, "done": done})
        return {"error": "", "done": done, "token": token, "out": str(self._out)}

    def _note(self, content: dict[str, Any]) -> None:
        replace_file(self._out / NOTE, json.dumps(content))

    def _sees(self, token: str) -> bool:
        """Return True if this rank has the directory that rank 0 wrote to."""
        deadline = time.monotonic() + _SEEN_WITHIN
        while True:
            try:
                found = json.loads((self._out / NOTE).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                found = {}
            if found.get("token") == token:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
            self.beat()

    # Steps #################################################################################

    def beat(self) -> None:
        """Say that this rank is at work, so that the others go on waiting."""
        self._beats += 1
        self._agreement.beat(self._beats)

    def wait(self, topic: str) -> None:
        """Wait until all ranks have come as far; as long as they are at work.

        Raises:
            CommTimeoutError: If one does nothing for the time limit; names it.
        """
        self._agreement.publish(topic, {})
        self._agreement.collect(topic, f"come to {topic!r} of", patient=True)

    def rows(self, state: InferenceProgress, step: int) -> RankRows:
        """The rows that all ranks wrote in a step."""
        return RankRows(
            [state.piece(step, self.folder(r), size) for r, size in enumerate(self._sizes)]
        )

    # The result ############################################################################

    def result(self, state: InferenceProgress, step: int) -> None:
        """Put the last step of all ranks together in one file."""
        dtype, row = state.kind(step)
        staged = self._out / f".{RESULT}.partial"
        if self.rank == 0:
            with naming(staged), staged.open("wb") as out:
                out.write(npy_header(dtype, (self._num_nodes, *row)))
                length = num_bytes(dtype, (self._num_nodes, *row))
                if length:
                    os.posix_fallocate(out.fileno(), out.tell(), length)
        self.wait("created")
        handle = os.open(staged, os.O_RDWR | os.O_CLOEXEC)
        try:
            width = num_bytes(dtype, row)
            at = os.fstat(handle).st_size - width * (self._num_nodes - self.begin)
            rows = max(1, _CHUNK // max(1, width))
            for chunk in state.array(step).split(rows):
                data = as_array(chunk.contiguous()).tobytes()
                with naming(staged):
                    while data:
                        written = os.pwrite(handle, data, at)
                        data, at = data[written:], at + written
                self.beat()
            with naming(staged):
                os.fsync(handle)
        finally:
            os.close(handle)
        self.wait("assembled")
        if self.rank == 0:
            staged.replace(self._out / RESULT)
            note = json.loads((self._out / NOTE).read_text(encoding="utf-8"))
            self._note({**note, "done": True, "dtype": dtype, "row": row})
        self.wait("named")

    def opened(self) -> Tensor:
        """The result, mapped; nothing else is left of this rank."""
        shutil.rmtree(self.folder(), ignore_errors=True)
        note = json.loads((self._out / NOTE).read_text(encoding="utf-8"))
        shape = (self._num_nodes, *note["row"])
        return map_array(self._out / RESULT, note["dtype"], shape)


def together_of(graph: Any, comm: Any, out: Path, num_nodes: int) -> InferenceRanks | None:
    """The ranks that make an inference, if there are several.

    Args:
        graph: What the user gave.
        comm: A communicator, ``"local"`` for this process alone, or ``None`` for that of the graph.
        out: The directory.
        num_nodes: Of the graph.

    Raises:
        TypeError: If ``comm`` is something else.
        ValueError: If the communicator does not say where its ranks met.
    """
    if isinstance(comm, str) and comm == "local":
        return None
    if comm is None:
        comm = communicator_of(graph)
        if comm is None:
            return None
    if not isinstance(comm, Communicator):
        raise TypeError(f"comm must be a Communicator or 'local' (got {comm!r})")
    if comm.world_size == 1:
        return None
    if comm.group is None:
        raise ValueError(f"{type(comm).__name__} does not say where its ranks met (`group`)")
    return InferenceRanks(comm.group, out, num_nodes)
