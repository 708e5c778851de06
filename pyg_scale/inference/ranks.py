"""An inference that several ranks make together: each computes a range of nodes.

Every rank writes the rows of its nodes to files of its own, and reads those of all ranks as the
input of the next layer; between two layers the ranks wait for each other. The result is put
together in one file. All ranks must see the directory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_scale.comm import Communicator, Group
from pyg_scale.files.npy import as_array, map_array, npy_header, num_bytes
from pyg_scale.files.place import naming, replace_file
from pyg_scale.inference.progress import FORMAT, JOURNAL, VERSION, InferenceProgress
from pyg_scale.loader.seeds.agreement import Agreement
from pyg_scale.loader.seeds.split import communicator_of
from pyg_scale.ops.gather import gather
from pyg_scale.store.directory.page_faults import read_soon

_log = logging.getLogger("pyg_scale")

NOTE = "RANKS.json"
_CHUNK = 1 << 26
_BEAT_SECONDS = 0.2
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
    """

    def __init__(self, group: Group, out: Path) -> None:
        self._out = out
        self.rank, self.world_size = group.rank, group.world_size
        self._agreement = Agreement(
            group, "inference", "but all ranks make it together; one alone passes comm='local'"
        )
        self._beats, self._beaten = 0, 0.0

    def share(self, num_rows: int, rank: int | None = None) -> range:
        """The rows of a rank, by default of this one, among ``num_rows``."""
        rank = self.rank if rank is None else rank
        return range(num_rows * rank // self.world_size, num_rows * (rank + 1) // self.world_size)

    def folder(self, rank: int | None = None) -> Path:
        """The folder of the files of a rank, by default of this one."""
        rank = self.rank if rank is None else rank
        return self._out / f"rank-{rank}-of-{self.world_size}"

    # Meeting ###############################################################################

    def meet(self, made_by: dict[str, Any], resume: bool, results: Collection[str]) -> bool:
        """Agree on what is computed; whether it is there already.

        Args:
            made_by: What must be the same on all ranks.
            resume: True to go on with what is there.
            results: The names of the files of results.

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
            verdict = self._examined(first["made_by"], first["resume"], results)
            self._agreement.publish("verdict", verdict)
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

    def _examined(
        self, made_by: dict[str, Any], resume: bool, results: Collection[str]
    ) -> dict[str, Any]:
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
            except (OSError, ValueError, RecursionError):
                return {"error": f"{file} is damaged: choose another directory"}
            if not isinstance(found, dict) or found.get("format") != FORMAT:
                return {"error": f"{file} is of something else: choose another directory"}
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
        made = found.get("results") or {}
        there = set(made) == set(results) and all((self._out / n).is_file() for n in results)
        done = resume and bool(found.get("done")) and there
        if not done:
            for old in self._out.glob("output*.npy"):
                old.unlink(missing_ok=True)
        token = secrets.token_hex(8)
        kept = {"results": made} if done else {}
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

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Within it, an error of this rank ends the waits of the others, which name it."""
        try:
            yield
        except Exception as error:
            self._agreement.leave_word(error)
            raise

    def agree_on_files(
        self, state: InferenceProgress, num_steps: int, kept: Callable[[int], set[int]]
    ) -> None:
        """Begin anew on all ranks if one needs rows again that were removed.

        Ranks remove the rows of a step when all have come far enough. A rank whose files were lost
        or damaged since then goes on with an earlier step.

        Args:
            state: The files of this rank.
            num_steps: Number of steps.
            kept: The steps whose rows are needed after a step.

        Raises:
            CommTimeoutError: If a rank does not come; names it.
        """
        said = {"first": state.first(num_steps), "removed": state.removed()}
        self._agreement.publish("files", said)
        found = self._agreement.collect("files", "begin", patient=True)
        first, rank = min((each["first"], rank) for rank, each in enumerate(found))
        gone = {step for each in found for step in each["removed"]}
        lost = [step for step in gone if step >= first or step in kept(first - 1)]
        if not lost:
            return
        if self.rank == 0:
            _log.warning(
                "inference: rank %d has files of %d steps in %s, and rows of step %d, which are "
                "needed then, were removed when it had more: all ranks begin anew",
                rank,
                first,
                self._out,
                min(lost),
            )
        state.begin()

    # Steps #################################################################################

    def beat(self) -> None:
        """Say that this rank is at work, so that the others go on waiting."""
        if time.monotonic() - self._beaten > _BEAT_SECONDS:
            self._beats, self._beaten = self._beats + 1, time.monotonic()
            self._agreement.beat(self._beats)

    def wait(self, topic: str) -> None:
        """Wait until all ranks have come as far; as long as they are at work.

        Raises:
            CommTimeoutError: If one does nothing for the time limit; names it.
            CommError: If one has failed; names it and its error.
        """
        self._agreement.publish(topic, {})
        self._agreement.collect(topic, f"come to {topic!r} of", patient=True)

    def rows(self, state: InferenceProgress, step: int, num_rows: int) -> RankRows:
        """The ``num_rows`` rows that all ranks wrote in a step."""
        sizes = [len(self.share(num_rows, rank)) for rank in range(self.world_size)]
        return RankRows([state.piece(step, self.folder(r), size) for r, size in enumerate(sizes)])

    # The results ###########################################################################

    def finish(self, state: InferenceProgress, results: Mapping[str, tuple[int, int]]) -> None:
        """Put the rows of all ranks together, each result in one file.

        Args:
            state: The files of this rank.
            results: The step and the number of rows, by the name of the file.
        """
        made = {name: self._assembled(state, name, *each) for name, each in results.items()}
        self.wait("assembled")
        if self.rank == 0:
            for name in results:
                self._staged(name).replace(self._out / name)
            note = json.loads((self._out / NOTE).read_text(encoding="utf-8"))
            self._note({**note, "done": True, "results": made})
        self.wait("named")

    def _assembled(
        self, state: InferenceProgress, name: str, step: int, num_rows: int
    ) -> dict[str, Any]:
        """Write the rows of this rank; returns the dtype and shape of all."""
        dtype, row = state.kind(step)
        staged, shape = self._staged(name), (num_rows, *row)
        if self.rank == 0:
            with naming(staged), staged.open("wb") as out:
                out.write(npy_header(dtype, shape))
                length = num_bytes(dtype, shape)
                if length:
                    os.posix_fallocate(out.fileno(), out.tell(), length)
        self.wait(f"created {name}")
        handle = os.open(staged, os.O_RDWR | os.O_CLOEXEC)
        try:
            width = num_bytes(dtype, row)
            at = os.fstat(handle).st_size - width * (num_rows - self.share(num_rows).start)
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
        return {"dtype": dtype, "shape": list(shape)}

    def _staged(self, name: str) -> Path:
        return self._out / f".{name}.partial"

    def opened(self, name: str) -> Tensor:
        """A result, mapped."""
        note = json.loads((self._out / NOTE).read_text(encoding="utf-8"))["results"][name]
        return map_array(self._out / name, note["dtype"], tuple(note["shape"]))

    def clear(self) -> None:
        """Remove all files of this rank but the results."""
        shutil.rmtree(self.folder(), ignore_errors=True)


def together_of(graph: Any, comm: Any, out: Path) -> InferenceRanks | None:
    """The ranks that make an inference, if there are several.

    Args:
        graph: What the user gave.
        comm: A communicator, ``"local"`` for this process alone, or ``None`` for that of the graph.
        out: The directory.

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
    return InferenceRanks(comm.group, out)
