"""METIS, through pymetis.

Karypis and Kumar: "A fast and high quality multilevel scheme for partitioning irregular graphs",
SIAM J. Sci. Comput. 1998; "Multilevel k-way partitioning scheme for irregular graphs", JPDC 1998.
"""

from __future__ import annotations

import numpy as np
import pymetis
import torch
from torch import Tensor

from pyg_scale.ops import keys
from pyg_scale.ops.refine_partition import refine_partition
from pyg_scale.partitioner.base import Partitioner, PartitionGraph
from pyg_scale.partitioner.bisection import least_of_parts

_ALGORITHMS = ("auto", "recursive", "k-way")
_OBJECTIVES = ("cut", "volume")


class MetisPartitioner(Partitioner):
    """Cuts few edges by METIS, in memory.

    METIS gets one weight per node. With several columns to balance, it is the sum of the node's
    shares of each column; parts that are then out of bounds are repaired with few moves.

    Args:
        algorithm: ``"recursive"`` bisection, ``"k-way"``, or ``"auto"``: recursive up to 8 parts.
        objective: The quantity to minimise: ``"cut"`` edges, or the communication ``"volume"``
            (``"k-way"`` only).
        max_imbalance: A part may hold this many times its fair share.
        ncuts: Number of partitions that METIS makes, of which the best is taken.
        niter: Number of passes of refinement on each level.

    Raises:
        ValueError: If an option is none of these, or out of range.
    """

    minimises_cut = True

    def __init__(
        self,
        *,
        algorithm: str = "auto",
        objective: str = "cut",
        max_imbalance: float = 1.1,
        ncuts: int = 1,
        niter: int = 10,
    ) -> None:
        if algorithm not in _ALGORITHMS:
            raise ValueError(
                f"algorithm must be one of {', '.join(_ALGORITHMS)} (got {algorithm!r})"
            )
        if objective not in _OBJECTIVES:
            raise ValueError(
                f"objective must be one of {', '.join(_OBJECTIVES)} (got {objective!r})"
            )
        if objective == "volume" and algorithm != "k-way":
            raise ValueError("objective='volume' needs algorithm='k-way', as in METIS")
        if not 1.001 <= max_imbalance < 1000:
            raise ValueError(
                f"max_imbalance must be at least 1.001, the smallest value of METIS, and below "
                f"1000 (got {max_imbalance!r})"
            )
        for name, value in {"ncuts": ncuts, "niter": niter}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a number of at least 1 (got {value!r})")
        self.algorithm = algorithm
        self.objective = objective
        self.max_imbalance = max_imbalance
        self.ncuts = ncuts
        self.niter = niter

    def assign(self, graph: PartitionGraph, num_parts: int, *, seed: int, shares: Tensor) -> Tensor:
        """See :meth:`pyg_scale.partitioner.base.Partitioner.assign`.

        Raises:
            ValueError: If METIS was compiled with numbers too small for the graph.
        """
        dtype = pymetis.zero_copy_dtype()
        most = int(np.iinfo(dtype).max)
        needed = max(graph.indices.numel(), graph.num_nodes)
        if needed > most:
            raise ValueError(
                f"METIS was compiled with {dtype.itemsize * 8}-bit numbers, and the graph has "
                f"{graph.indices.numel()} directed edges, more than {most}: install a pymetis with "
                "64-bit numbers (IDXTYPEWIDTH=64), or use method='multilevel' or 'fennel'"
            )
        adjacency = pymetis.CSRAdjacency(
            graph.indptr.numpy().astype(dtype, copy=False),
            np.ascontiguousarray(graph.indices.numpy(), dtype=dtype),
        )
        weights = _one_weight(graph.weights, most)
        target = (shares / shares.sum()).tolist()
        _, part = pymetis.part_graph(
            num_parts,
            adjacency,
            vweights=None if weights is None else weights.numpy().astype(dtype),
            tpwgts=target,
            recursive={"auto": None, "recursive": True, "k-way": False}[self.algorithm],
            options=self._options(seed),
        )
        return refine_partition(
            graph.indptr,
            graph.indices,
            torch.from_numpy(np.asarray(part).astype(np.int32)),
            self.capacity(graph, shares),
            node_weights=graph.weights,
            minimum=least_of_parts(graph.weights, shares, self.max_imbalance),
            passes=0,
            key=keys.fold(0, seed, keys.PARTITION),
        )

    def _options(self, seed: int) -> pymetis.Options:
        options = {
            "seed": keys.fold(0, seed, keys.PARTITION) >> 33,
            "ufactor": round((self.max_imbalance - 1) * 1000),
            "ncuts": self.ncuts,
            "niter": self.niter,
        }
        if self.objective == "volume":
            options["objtype"] = int(pymetis.ObjType.VOL)
        return pymetis.Options(**options)


def _one_weight(weights: Tensor, most: int) -> Tensor | None:
    """One weight per node, with a sum that fits METIS's integers; ``None`` if all are equal."""
    total = weights.sum(0)
    if weights.size(1) == 1 and int(total[0]) <= most:
        column = weights[:, 0]
        return None if bool((column == 1).all()) else column
    whole = min(most, 2**50) // 4
    part = weights.to(torch.float64) / total.clamp(min=1)
    return (part.mean(1) * whole).to(torch.int64)
