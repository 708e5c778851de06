"""Parameters in shards: torch's ``fully_shard`` with the mean over all seeds.

Zhao et al., "PyTorch FSDP", VLDB 2023; Rajbhandari et al., "ZeRO", SC 2020. Each rank has its own
batches and a slice of every parameter, of its gradient and of the moments of the optimizer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.models.tgn import TGNMemory

from pyg_scale.parallel.base import Parallel, differentiate, differentiating, nodes_before
from pyg_scale.parallel.calls import bound_to, by_parameter, described_by, smallest_like
from pyg_scale.parallel.mean import MeanModule
from pyg_scale.parallel.peers import Peers
from pyg_scale.parallel.replica import check_module, checked_seeds, functions_of


class FSDP(Parallel):
    """Divides parameters among ranks, for models that are too wide for one.

    Exact, as with :class:`~pyg_scale.parallel.ddp.DDP`: layers that look at a whole batch see that
    of one rank. Every layer that follows edges is gathered when it is computed, and the rest of the
    model once, with layers that share parameters with other modules.

    Args:
        find_unused_parameters: Must be ``True`` if some parameters may get no gradient in some
            step. The model is then gathered as a whole.
        shards: Number of ranks that divide parameters, neighbours by number; others have copies of
            their shards, as in HSDP (Zhao et al., section 3.2.2). It must divide the number of
            ranks, which is the default.
        **options: Those of torch's ``fully_shard``, such as ``mp_policy``, ``offload_policy`` and
            ``reshard_after_forward``.

    Raises:
        TypeError: If ``fully_shard`` has no such option, or it is an argument of ``wrap``.
        ValueError: If ``shards`` is below 1.
    """

    def __init__(
        self, find_unused_parameters: bool = False, shards: int | None = None, **options: Any
    ) -> None:
        known = {"reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy"}
        if unknown := sorted(options.keys() - known):
            raise TypeError(
                f"fully_shard has no option {', '.join(unknown)} that can be given here: there are "
                f"{', '.join(sorted(known))}"
            )
        if shards is not None and operator.index(shards) < 1:
            raise ValueError(f"shards must be at least 1 (got {shards})")
        self.find_unused_parameters, self.shards = find_unused_parameters, shards
        self.options = options

    def wrap(self, module: nn.Module, group: Any = None) -> ShardedModule:
        """Wrap a module; see :meth:`Parallel.wrap`.

        Make the optimizer afterwards: parameters are other objects then.

        Raises:
            RuntimeError: If ``torch.distributed`` was not initialised.
            TypeError: If ``group`` is no process group.
            ValueError: If a parameter has no shape yet, none needs a gradient, the model is sharded
                already, or ``shards`` does not divide all ranks. The same on all ranks.
            CommError: If a rank is gone or late; names it.
        """
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        peers = Peers(group, device)
        with peers.together():
            check_module(module)
            if any(isinstance(layer, FSDPModule) for layer in module.modules()):
                raise ValueError("the model is sharded already: give it as it was before")
            if self.shards is not None and peers.size % self.shards:
                raise ValueError(f"shards={self.shards} does not divide {peers.size} ranks")
            if self.shards is not None and peers.size != dist.get_world_size():
                raise ValueError("shards= is of all ranks: leave out group=")
        if any(each != self.shards for each in peers.gather(self.shards)):
            raise ValueError("ranks have different shards=")
        return ShardedModule(
            module, peers, self.find_unused_parameters, self._mesh(peers), self.options
        )

    def _mesh(self, peers: Peers) -> DeviceMesh:
        """All ranks, or copies x shards."""
        device = peers.device.type
        if self.shards is None:
            return DeviceMesh.from_group(peers.group, device)
        ranks = torch.arange(peers.size).view(-1, self.shards)
        with peers.explained():
            return DeviceMesh(device, ranks, mesh_dim_names=("copy", "shard"))


class ShardedModule(MeanModule):
    """A wrapped module; see :class:`~pyg_scale.parallel.ParallelModule`.

    Its parameters are ``DTensor``; ``parameter.full_tensor()``, on all ranks, is the whole.
    """

    def __init__(
        self,
        module: nn.Module,
        peers: Peers,
        find_unused: bool,
        mesh: DeviceMesh,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.peers = peers
        peers.broadcast([*module.parameters(), *module.buffers()])
        self._names: dict[int, str] = {}
        if find_unused:  # before torch's own, after which parameters are in shards again
            module.register_forward_hook(self._note_names)
        self._find_unused = find_unused
        with peers.explained():
            for layer in reversed(list(module.modules())):  # what is within a layer comes first
                alone = isinstance(layer, MessagePassing) and layer is not module
                if alone and not find_unused and _has_its_own(layer, module):
                    fully_shard(layer, mesh=mesh, **options)
            sharded = fully_shard(module, mesh=mesh, **options)
        for layer in module.modules():
            if isinstance(layer, FSDPModule):
                layer.set_gradient_divide_factor(1.0)
                layer.set_force_sum_reduction_for_comms(True)
                layer.set_reduce_scatter_unused_params(find_unused)
            if isinstance(layer, TGNMemory):
                self._gather_for(layer, module)
        self.module: Any = sharded
        # Between a forward and a backward the module has other parameters, which are whole.
        self._shards = dict(module.named_parameters())
        self._sums = _sums_of(module, self._shards)
        self._marks: dict[str, int] = {}
        self._used: set[str] = set()
        self._joins = False

    def _gather_for(self, memory: Any, module: nn.Module) -> None:
        """Have the parameters of a memory whole when it is updated.

        PyG updates it in ``eval()`` and ``update_state``, too, where torch gathers nothing.
        """
        update, within = memory._update_memory, set(memory.modules())
        holders = [
            layer
            for layer in module.modules()
            if isinstance(layer, FSDPModule) and (layer in within or memory in layer.modules())
        ]

        def updated(n_id: Tensor) -> None:
            if not any(isinstance(each, DTensor) for each in memory.parameters()):
                update(n_id)
                return
            with self.peers.announced(), self.peers.explained():
                for layer in holders:
                    layer.unshard()
                try:
                    update(n_id)
                finally:
                    for layer in holders:
                        layer.reshard()

        memory._update_memory = updated

    def _note_names(self, module: nn.Module, inputs: Any, out: Any) -> None:
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As of the module. Every rank calls it.

        Raises:
            CommError: If a rank is gone or late; names it.
        """
        if self._joins:
            error: Exception | None = None
            said: Any = None
            try:
                said = described_by(bound_to(self.module, args, kwargs))
            except (TypeError, ValueError) as found:
                error = found
            training = [layer.training for layer in self.module.modules()]
            said = [said, torch.is_grad_enabled(), training]
            self.peers.meet("forward", said, error)
        return self._forward(args, kwargs)

    def _forward(self, args: Any, kwargs: Any) -> Any:
        self.peers.broadcast(list(self.module.buffers()))
        with self.peers.announced(), self.peers.explained():
            out = self.module(*args, **kwargs)
            if not torch.is_grad_enabled():  # no backward will give parameters back
                self.module.reshard()
            return out

    def backward(self, loss: Tensor, num_seeds: int) -> None:
        """See :meth:`~pyg_scale.parallel.ParallelModule.backward`."""
        error: Exception | None = None
        forgets = self._seeds is not None and self._forget(self._forgotten())
        try:
            num_seeds = checked_seeds(loss, num_seeds)
            if self._seeds is None:
                self._check_no_gradients()
        except (TypeError, ValueError, RuntimeError) as found:
            error = found
        if self._joins:
            self.peers.meet("backward", [self._exchanges, forgets], error)
        elif error is not None:
            raise error
        self._backward(loss, num_seeds)

    def _backward(self, loss: Tensor, num_seeds: int) -> None:
        self.module.set_requires_gradient_sync(self._exchanges)
        if self._find_unused:
            nodes = nodes_before([get_gradient_edge(loss).node])
            leaves = {id(getattr(node, "variable", None)) for node in nodes}
            self._used |= {name for each, name in self._names.items() if each in leaves}
        if self._exchanges:
            for name in self._marks:
                self._shards[name].grad = None
            self._marks = {}
        with self.peers.announced(), self.peers.explained(), differentiating(self):
            differentiate(loss, num_seeds)
        self._seeds = (self._seeds or 0) + num_seeds
        if not self._exchanges:
            self._mark()
            return
        used = [float(not self._find_unused or name in self._used) for name in self._shards]
        counts = [float(self._seeds), *used]
        device = self.peers.device
        total, *anywhere = self.peers.sum(
            torch.tensor(counts, dtype=torch.float64, device=device)
        ).tolist()
        self._seeds, self._used = None, set()
        self.all_seeds = max(1.0, total)
        for parameter, n in zip(self._shards.values(), anywhere, strict=True):
            if not n:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.div_(self.all_seeds)

    # Torch keeps what is added up with the whole parameters, where no optimizer sees it. So a
    # gradient stands for it where optimizers look. Once it is gone, so is what it stands for; and
    # before gradients are exchanged it goes. Its entries are not 0, but so small that neither a
    # norm nor a step notices them.

    def _mark(self) -> None:
        """Set a gradient for all that was added up."""
        for name, parameter in self._shards.items():
            if name not in self._marks and self._sums[name].there:
                entry = max(_MARK, torch.finfo(parameter.dtype).tiny)
                parameter.grad = torch.full_like(parameter, entry)
                self._marks[name] = parameter.grad._version

    def _forgotten(self) -> list[str]:
        """The names of parameters whose mark is gone, as ``zero_grad`` was called."""
        grads = {name: self._shards[name].grad for name in self._marks}
        there = {name: grad for name, grad in grads.items() if grad is not None}
        # Their versions do not tell: torch sets several to 0 at once without counting it.
        filled = {name: _local(grad) for name, grad in there.items() if _local(grad).numel()}
        some = torch.stack([each.any() for each in filled.values()]).tolist() if filled else []
        left = dict(zip(filled, some, strict=True))
        for name in there.keys() - filled.keys():  # where 0 and 1 are the same
            left[name] = any(some) if some else there[name]._version == self._marks[name]
        return [name for name in grads if not left.get(name)]

    def _forget(self, names: list[str]) -> bool:
        """Drop what was added up for some parameters; return True if nothing is left."""
        for name in names:
            self._sums[name].clear()
            del self._marks[name]
        self._used.difference_update(names)
        if names and not self._marks:
            self._seeds = None
            return True
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of torch, also between a forward and a backward, where the module has whole ones."""
        for parameter in self._shards.values():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def _check_no_gradients(self) -> None:
        for parameter in self._shards.values():
            if _any(parameter.grad):
                raise RuntimeError(
                    "gradients of an earlier step are still there: call optimizer.zero_grad() "
                    "first; to add up gradients of several batches use no_sync()"
                )

    @contextmanager
    def join(self, *steps: Any) -> Iterator[None]:
        """See :meth:`~pyg_scale.parallel.ParallelModule.join`.

        Raises:
            TypeError: Also of a forward within it, if an argument is neither a tensor, a dictionary
                of tensors by type, a number, a text nor ``None``: other ranks must be able to call
                it.
        """
        functions = functions_of(steps)
        self._joins = True
        try:
            yield
        finally:
            self._joins = False
        loss, before = torch.zeros(()), [each.clone() for each in self.module.buffers()]
        while True:
            act, records = self.peers.meet("join", None)
            said = next((each for each in records if each is not None), None)
            if act != "backward":  # which may need them as they are
                self._restore(before)
            if act == "join":
                return
            if act == "forward":
                assert said is not None
                described, grad, training = said
                loss = self._shadow(described, grad, training)
                continue
            exchanges = said is not None and said[0]
            if any(each[1] for each in records if each):
                self._forget(list(self._marks))
            if self._seeds is None:
                self.zero_grad()
            was, self._exchanges = self._exchanges, exchanges
            self._backward(loss, 0)
            self._exchanges = was
            if exchanges:
                for step in functions:
                    step()

    def _shadow(self, described: Any, grad: bool, training: list[bool]) -> Tensor:
        """Compute a batch of two nodes, which counts for nothing; return a loss of it."""
        values, layers = smallest_like(described, self.peers.device), list(self.module.modules())
        call = by_parameter(self.module, values, values.__getitem__)
        was = [layer.training for layer in layers]
        _set_modes(layers, training)
        with torch.set_grad_enabled(grad):
            out = self._forward(call.args, call.kwargs)
            found = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
            sums = [each.sum().to(torch.float64) for each in found if each.requires_grad]
            loss = torch.stack(
                [torch.zeros((), dtype=torch.float64, device=self.peers.device), *sums]
            ).sum()
        _set_modes(layers, was)
        return loss

    def _restore(self, before: list[Tensor]) -> None:
        for value, buffer in zip(before, self.module.buffers(), strict=True):
            if not torch.equal(value, buffer):
                buffer.detach().copy_(value)


_MARK = 1e-30  # half precision begins at 6e-5


class _Sum:
    """The gradients of a parameter that torch has added up and not exchanged.

    Args:
        parameter: Torch's state of the parameter.
    """

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter

    @property
    def there(self) -> bool:
        """True if there is anything."""
        whole = getattr(self._parameter, "_unsharded_param", None)
        in_whole = whole is not None and whole.grad is not None
        return in_whole or self._parameter.unsharded_accumulated_grad is not None

    def clear(self) -> None:
        """Drop it."""
        self._parameter.unsharded_accumulated_grad = None
        if (whole := getattr(self._parameter, "_unsharded_param", None)) is not None:
            whole.grad = None


def _sums_of(module: nn.Module, shards: Mapping[str, nn.Parameter]) -> dict[str, _Sum]:
    """The sums of all parameters of a sharded module, by name."""
    found: dict[int, _Sum] = {}
    for layer in module.modules():
        if isinstance(layer, FSDPModule):
            state: Any = layer._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one at most
            for group in [state._fsdp_param_group] if groups is None else groups:
                for each in [] if group is None else group.fsdp_params:
                    found[id(each.sharded_param)] = _Sum(each)
    return {name: found[id(parameter)] for name, parameter in shards.items()}


def _has_its_own(layer: nn.Module, module: nn.Module) -> bool:
    """True if a layer has parameters, and no other part of a module has one of them."""
    own, seen, left = set(layer.parameters()), {layer}, [module]
    while left:
        part = left.pop()
        if part not in seen:
            seen.add(part)
            if not own.isdisjoint(part.parameters(recurse=False)):
                return False
            left.extend(part.children())
    return bool(own)


def _local(grad: Any) -> Tensor:
    local: Tensor = grad.to_local() if isinstance(grad, DTensor) else grad
    return local


def _any(grad: Any) -> bool:
    """True if this rank's share of a gradient is there, and not 0."""
    return grad is not None and bool(_local(grad).any())


def _set_modes(layers: list[nn.Module], training: list[bool]) -> None:
    for layer, mode in zip(layers, training, strict=True):
        layer.training = mode
