"""The edges of one type, from the reader to the files of a graph directory."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.convert.array_file import save_array
from pyg_scale.convert.bucket_files import BucketFiles, scatter
from pyg_scale.convert.edge_stream import EdgeStream, StreamPosition
from pyg_scale.convert.group import EdgePiece, GroupedFiles, group, sorted_pointers
from pyg_scale.convert.journal import ConversionWorkspace
from pyg_scale.convert.node_time import NodeTime
from pyg_scale.convert.plan import BucketPlan, make_plan, too_large
from pyg_scale.convert.scan import Scan, refine, scan, widened
from pyg_scale.ops import memory as pool
from pyg_scale.store.directory.meta import edge_dir

_CHECKPOINT = 1 << 26  # edges between two entries in the journal


@dataclass
class EdgeWork:
    """One edge type while it is converted.

    Attributes:
        stream: Its edges.
        key: What its temporary files and steps are called.
        work: Journal, temporary folder and memory.
        time_attr: The attribute of these edges that they are ordered by.
        weight_attr: The attribute of these edges that is their weight.
        float_time: Whether times of the graph are floating point numbers.
    """

    stream: EdgeStream
    key: str
    work: ConversionWorkspace
    time_attr: str | None = None
    weight_attr: str | None = None
    float_time: bool = False

    @property
    def rows(self) -> int:
        """Edges to read at a time."""
        extra = (self.time_attr is not None) + (self.weight_attr is not None)
        return max(1 << 10, min(1 << 20, self.work.memory // (100 + 50 * extra)))

    @property
    def extra(self) -> dict[str, str]:
        """Columns of a bucket beside the edges themselves."""
        columns = {} if self.time_attr is None else {"time": "i8"}
        if self.weight_attr is not None:
            single = self.stream.edges.attributes[self.weight_attr].dtype in _SINGLE
            columns["weight"] = "f4" if single else "f8"
        return columns

    # First pass ############################################################################

    def scan(self, num_src: int | None, num_dst: int | None) -> Scan:
        """Read and check the edges; done once."""

        def run() -> dict[str, Any]:
            found = self._scan(num_src, num_dst)
            save_array(self._bins_file, np.array(found.bins, dtype=np.int64))
            return found._replace(bins=[])._asdict()

        return Scan(**self.work.journal.once(f"scan {self.key}", run))

    def _scan(self, num_src: int | None, num_dst: int | None) -> Scan:
        with self._bar("Reading edges") as bar:
            return scan(
                self.stream,
                num_src,
                num_dst,
                self.rows,
                bar,
                time_attr=self.time_attr,
                weight_attr=self.weight_attr,
                most_bins=self._most_bins,
            )

    @property
    def _most_bins(self) -> int:
        return max(1 << 6, min(1 << 18, self.work.memory // 256))

    def _bins(self, found: Scan, num_dst: int) -> tuple[Tensor, int]:
        """The edges of every so many destinations, few also where there are more than edges name.

        Returns:
            The bins, and the width of one: ``2**shift`` destinations.
        """
        bins = torch.from_numpy(np.load(self._bins_file, allow_pickle=False))
        return widened(bins, found.shift, num_dst, self._most_bins)

    @property
    def _bins_file(self) -> Path:
        return self.work.folder / f"{self.key}.bins"

    def _bar(self, what: str) -> Any:
        known = self.stream.edges.num_edges
        total = None if known is None else known
        return self.work.progress(what, total, "edges")

    # Grouping ##############################################################################

    def write(
        self, found: Scan, num_src: int, num_dst: int, node_time: NodeTime | None, root: Path
    ) -> str | None:
        """Write what the sampler reads of these edges; done once.

        Args:
            found: What the first pass found.
            num_src: Number of source nodes.
            num_dst: Number of destination nodes.
            node_time: The times of the source nodes, if edges are ordered by these.
            root: The graph directory to be.

        Returns:
            The dtype of ``edge_id.npy``, ``None`` if there is none.
        """
        out = GroupedFiles(
            folder=root / edge_dir(self.stream.edge_type, 0),
            num_src=num_src,
            num_dst=num_dst,
            num_edges=found.num_edges,
            by_time=self.time_attr is not None or node_time is not None,
            node_time=node_time,
            has_time=self.time_attr is not None,
            has_weight=self.weight_attr is not None,
        )
        journal = self.work.journal
        if found.is_sorted and not out.by_time and not out.has_weight:
            journal.once(f"group {self.key}", lambda: self._copy_sorted(out))
            return None
        plan = BucketPlan(
            **journal.once(f"plan {self.key}", lambda: self._plan(found, out)._asdict())
        )
        files = self._files(plan, out)
        journal.once(f"distribute {self.key}", lambda: self._scatter(files, found))
        pool.trim()
        step = f"group {self.key}"
        identity = journal.once(step, lambda: group(files, out, self.work, step))
        for bucket in range(len(plan.edges)):
            files.remove(bucket)
        files.blocks_file.unlink(missing_ok=True)
        pool.trim()
        return None if identity else out.edge_id_dtype

    def _files(self, plan: BucketPlan, out: GroupedFiles) -> BucketFiles:
        wide = out.indices_dtype == "int64"
        return BucketFiles(self.work.folder, self.key, plan, wide, self.extra)

    def _plan(self, found: Scan, out: GroupedFiles) -> BucketPlan:
        bins, shift = self._bins(found, out.num_dst)
        cost = out.cost(self._files(BucketPlan([0, 0], [0], [False]), out).edge_bytes)
        large = too_large(bins, shift, cost, self.work.memory)
        refined = {}
        if large.numel():
            with self._bar("Looking closer at large destinations") as bar:
                refined = refine(self.stream, large, shift, self.rows, bar)
        return make_plan(bins, shift, refined, out.num_dst, cost, self.work.memory)

    def _scatter(self, files: BucketFiles, found: Scan) -> None:
        _, shift = self._bins(found, files.plan.bounds[-1])
        extra = []
        if self.time_attr is not None:
            extra.append(("time", self.time_attr))
        if self.weight_attr is not None:
            extra.append(("weight", self.weight_attr))
        step = f"distribute {self.key}"
        scatter(
            self.stream, files, shift, self.rows, extra, self.work, step, float_time=self.float_time
        )

    def _copy_sorted(self, out: GroupedFiles) -> None:
        """Edges that are sorted by destination already are written as they come."""
        step = f"group {self.key}"
        reached = self.work.journal.reached(step)
        at, seen = (
            (StreamPosition(), 0) if reached is None else (StreamPosition(*reached[0]), reached[1])
        )
        last = at.edges
        with ExitStack() as stack:
            bar = stack.enter_context(
                self.work.progress("Copying sorted edges", out.num_edges, "edges", at.edges)
            )
            out.open(["indptr", "indices"], reached is None, stack)
            for chunk in self.stream.chunks(self.rows, begin=at):
                if chunk.dst.numel():
                    for first, pointers in sorted_pointers(chunk.dst, chunk.first, seen, 1 << 16):
                        out.writers["indptr"].write(first, pointers)
                    seen = int(chunk.dst[-1]) + 1
                    out.write(chunk.first, EdgePiece(chunk.src, chunk.src))
                    bar.update(chunk.dst.numel())
                if chunk.after.edges - last >= _CHECKPOINT:
                    last = chunk.after.edges
                    out.sync()
                    self.work.journal.reach(step, [chunk.after, seen])
            for first in range(seen, out.num_dst + 1, 1 << 16):
                size = min(1 << 16, out.num_dst + 1 - first)
                out.writers["indptr"].write(first, torch.full((size,), out.num_edges))
            out.sync()


_SINGLE = ("float16", "bfloat16", "float32")
