"""Data parallelism: every rank has the whole model and its own batches.

It is torch's ``DistributedDataParallel`` (Li et al., "PyTorch Distributed", VLDB 2020) with three
things that neighbour sampling needs: the mean is over seeds and not over ranks, ranks may run out
of batches, and a rank may have an empty one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn.parallel import DistributedDataParallel

from pyg_scale.parallel.base import Parallel, differentiate, differentiating
from pyg_scale.parallel.compression import Compression, Compressor, compression_of
from pyg_scale.parallel.replica import (
    check_module,
    check_no_gradients,
    checked_group,
    checked_seeds,
    functions_of,
    is_forgotten,
    versions_of,
)
from pyg_scale.parallel.seed_weights import SeedWeights, reduce

_joined: list[DataParallel] = []
"""The module whose ``join`` is under way, if there is one."""


class DDP(Parallel):
    """Averages gradients over the seeds of all ranks, over gloo or NCCL.

    Exact, but for layers that look at a whole batch: ``BatchNorm`` and PyG's normalisations over
    nodes see one rank's batch, as in torch. ``sync_batchnorm`` makes ``BatchNorm`` see all.

    Args:
        find_unused_parameters: Must be ``True`` if some parameters may get no gradient in some
            step, as in heterogeneous models whose batches lack a type; see torch.
        sync_batchnorm: Whether to make ``BatchNorm`` layers ``SyncBatchNorm``, which torch has on
            CUDA only.
        bucket_cap_mb: MiB of gradients that are sent at a time; torch's default if ``None``.
        gradient_as_bucket_view: See torch.
        static_graph: See torch.
        compress: Sends gradients in fewer bytes, which is not exact: ``"topk"``, ``"fp16"``,
            ``"bf16"``, ``"powersgd"``, or an instance of what
            :mod:`pyg_scale.parallel.compression` has, such as ``TopK(ratio=0.05)``.
        ratio: The share of gradients that ``compress="topk"`` sends, 0.01 if ``None``.

    Raises:
        TypeError: If ``compress`` is neither a name nor an instance.
        ValueError: If there is no such compression, or ``ratio`` is not for it.
    """

    def __init__(
        self,
        find_unused_parameters: bool = False,
        sync_batchnorm: bool = False,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        compress: str | Compression | None = None,
        ratio: float | None = None,
    ) -> None:
        if compress is None and ratio is not None:
            raise ValueError("ratio is for compress='topk' (got no compress)")
        self.compression = None if compress is None else compression_of(compress, ratio)
        self.exact = compress is None
        self.find_unused_parameters = find_unused_parameters
        self.sync_batchnorm = sync_batchnorm
        self.bucket_cap_mb = bucket_cap_mb
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph

    def wrap(self, module: nn.Module, group: Any = None) -> DataParallel:
        """Wrap a module; see :meth:`Parallel.wrap`.

        Raises:
            NotImplementedError: If ``sync_batchnorm`` is asked for on a device that has it not.
            RuntimeError: If ``torch.distributed`` was not initialised.
            TypeError: If ``group`` is no process group.
            ValueError: If a parameter has no shape yet, or none needs a gradient.
        """
        group = checked_group(group)
        check_module(module)
        if self.sync_batchnorm:
            devices = {p.device.type for p in module.parameters()} - {"cuda"}
            if devices:
                raise NotImplementedError(
                    f"sync_batchnorm: torch has no SyncBatchNorm on {', '.join(sorted(devices))}"
                )
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module, group)
        if self.compression is not None:
            for name, layer in module.named_modules():
                if getattr(layer, "sparse", False) and isinstance(layer, nn.Embedding):
                    raise NotImplementedError(
                        f"compress: the gradients of {name!r} are sparse, and only dense ones are "
                        f"compressed: give the layer sparse=False"
                    )
        return DataParallel(
            module,
            self.compression,
            process_group=group,
            find_unused_parameters=self.find_unused_parameters,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )


class DataParallel(DistributedDataParallel):
    """Torch's ``DistributedDataParallel`` with the gradient of the mean over all seeds.

    ``loss.backward()`` works, too, and gives the mean over the ranks that have a batch; all ranks
    must do the same in a step. Models that train together are wrapped as one: ``backward`` within
    the ``join`` of another one, or of a loss that comes from two of them, is a ``RuntimeError``.
    """

    def __init__(
        self, module: nn.Module, compression: Compression | None = None, **options: Any
    ) -> None:
        self._reduced: list[nn.Parameter] = []  # in the order of the reducer
        super().__init__(module, **options)
        compressor = None if compression is None else compression.compressor(self.process_group)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._weights = SeedWeights(self.process_group, compressor, names)
        self._globally_unused: list[Tensor] = []
        self._versions: list[int | None] = []
        self.register_comm_hook(self._weights, reduce)
        # Torch makes other buckets after the first backward, in the order in which gradients came.
        # In which order gloo and NCCL add up ranks depends on the place in a bucket, so the first
        # step of a process that resumes would differ from that of one that went on. So buckets
        # are made as if that had happened, in the order of `_ddp_init_helper`.
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _ddp_init_helper(
        self,
        parameters: list[nn.Parameter],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        # Gradients come about in the reverse order of parameters. Torch reverses its first
        # buckets itself, but has only those where it has to look for unused parameters.
        if static_graph or not self.find_unused_parameters:
            last = len(parameters) - 1
            parameters = parameters[::-1]
            expect_sparse_gradient = expect_sparse_gradient[::-1]
            param_to_name_mapping = {last - i: name for i, name in param_to_name_mapping.items()}
        self._reduced = parameters
        super()._ddp_init_helper(
            parameters, expect_sparse_gradient, param_to_name_mapping, static_graph
        )

    @property
    def rank_state(self) -> Compressor | None:
        """See :class:`HasRankState`: what this rank has left out of the gradients it sent."""
        return self._weights.compressor

    @property
    def seconds_waited(self) -> float:
        """Seconds in which this rank waited for others: for gradients, and for rank 0's buffers.

        Those of gradients are counted on the CPU; a CUDA device waits by itself.
        """
        return self._weights.waited.seconds

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._weights.waited.counting():  # buffers are sent
            return super()._pre_forward(*inputs, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As of the module."""
        with self._weights.roll_call.explained():  # buffers are sent, and who has a batch
            return super().forward(*inputs, **kwargs)

    def backward(self, loss: Tensor, num_seeds: int) -> None:
        """See :meth:`ParallelModule.backward`."""
        num_seeds = checked_seeds(loss, num_seeds)
        if not self._weights.is_first and is_forgotten(self.module, self._versions):
            self._weights.forget()
        if self._weights.is_first:
            check_no_gradients(self.module)
        self._check_not_beside()
        self._weights.add(num_seeds)
        # DDP counts the gradients that it waits for: an empty batch must send some, all zero.
        with self._weights.roll_call.explained(), differentiating(self._weights):
            differentiate(loss, num_seeds)
        if not self._weights.is_first:  # within no_sync()
            self._versions = versions_of(self.module)

    @contextmanager
    def join(self, *steps: Any) -> Iterator[None]:
        """See :meth:`ParallelModule.join`."""
        functions = functions_of(steps)
        if self in _joined:
            raise RuntimeError("join() is under way already: enter it once for each epoch")
        self._check_not_beside()
        _joined.append(self)
        try:
            with (
                self._weights.roll_call.explained(),
                Join([self], divide_by_initial_world_size=False, steps=functions),
            ):
                yield
        finally:
            _joined.remove(self)

    def _check_not_beside(self) -> None:
        # A rank without batches takes part for the joined module only: the sums of another one
        # would meet those, which gloo ends the process for, or adds up if sizes are equal.
        if _joined and _joined[0] is not self:
            raise RuntimeError(
                "this is within join() of another wrapped module, and a rank without batches takes "
                "part in the steps of one module only: wrap one module that holds both, or give "
                'the loader uneven="drop" or "repeat" and leave join() out'
            )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook of a rank without batches: torch's, then the steps."""
        return _Shadow(
            self,
            super().join_hook(**kwargs),
            kwargs.get("steps", ()),
            int(kwargs.get("divide_by_initial_world_size", True)),
        )

    def _match_unused_params_allreduce(self) -> None:
        # Torch's own does not wait, and brings what the last step left in the map: a parameter
        # that nobody uses would count as used.
        used = self.reducer._get_local_used_map().zero_()
        self.process_group.allreduce(used).wait()
        self._globally_unused = [p for p, n in zip(self._reduced, used.tolist()) if not n]


class _Shadow(JoinHook):
    """Takes part in every step of the others: brings zeros, and takes what they get."""

    def __init__(
        self, module: DataParallel, hook: JoinHook, steps: Any, plain_if_joined: int
    ) -> None:
        self._module, self._hook, self._steps = module, hook, steps
        self._plain = plain_if_joined

    def main_hook(self) -> None:
        weights, module = self._module._weights, self._module
        if module.static_graph and not weights.exchanged:
            # Torch learns what is used in the first step, by sums that nobody can make for a rank.
            raise RuntimeError(
                "static_graph=True: every rank needs a batch in the first step, and this one has "
                'none: leave static_graph out, or give the loader uneven="drop" or "repeat"'
            )
        weights.joined, weights.plain_if_joined = True, self._plain
        try:
            self._hook.main_hook()
        finally:
            weights.joined = False
        if weights.shadowed:
            try:
                weights.finish()
            except FloatingPointError:
                weights.shadowed = []
                raise
        shadowed, weights.shadowed = weights.shadowed, []
        if not shadowed or not self._steps:  # the others add up gradients for now
            return
        for parameters, gradients in shadowed:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
        for parameter in module._globally_unused:
            parameter.grad = None
        for step in self._steps:
            step()
        for parameter in module.parameters():
            parameter.grad = None

    def post_hook(self, is_last_joiner: bool) -> None:
        self._hook.post_hook(is_last_joiner)
