"""A forward cut into stages, and one stage as torch's pipelining wants it.

The forward is traced by torch.fx; layers stay whole. What a stage computes and later ones use goes
from rank to rank. Inputs do not: a stage that uses an input has it from the rank whose batch it is.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch_geometric import nn as pyg
from torch_geometric.nn.conv import MessagePassing

from pyg_scale.parallel.calls import by_parameter, keys_of, named, names_of

_WHOLE = ("aggr", "conv", "dense", "encoding", "kge", "norm", "pool", "unpool")

_BY_TYPE = (pyg.HeteroConv, pyg.HeteroDictLinear)
"""Modules that have a layer for each type, and no more."""

_OF_NUMPY = (np.bool_, np.integer, np.floating)
_CONSTANT = (bool, int, float, str, *_OF_NUMPY)
_LISTED = 100  # entries of a list; longer ones are data


def settings_of(module: nn.Module) -> dict[str, str]:
    """Attributes that a trace has as constants, by name, as JSON.

    Those are numbers, texts, ``None`` and short lists of these, of modules that are no layers.
    """
    found: dict[str, str] = {}
    for prefix, each in _entered(module, ""):
        for name, value in vars(each).items():
            if name not in _OF_MODULES and _is_plain(value):
                found[prefix + name] = json.dumps(value, default=lambda number: number.item())
    return found


def set_setting(module: nn.Module, name: str, text: str) -> None:
    """Set an attribute of :func:`settings_of`.

    Raises:
        ValueError: If the module has no such part, or it has a method, layer, parameter or mode of
            that name.
    """
    path, _, attribute = name.rpartition(".")
    owner, value = dict(_entered(module, "")).get(f"{path}." if path else ""), json.loads(text)
    if (
        owner is None
        or attribute in _OF_MODULES
        or (attribute not in vars(owner) and not _is_plain(getattr(owner, attribute, None)))
    ):
        raise ValueError(
            f"another rank has set {name!r}, which cannot be set here: make the same model on all "
            "ranks, and give the attribute a name that no method, layer or parameter has"
        )
    was_tuple = isinstance(vars(owner).get(attribute), tuple)
    setattr(owner, attribute, tuple(value) if was_tuple and isinstance(value, list) else value)


_OF_MODULES = frozenset(vars(nn.Module()))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= _LISTED and all(map(_is_plain, value))
    if isinstance(value, dict):
        return len(value) <= _LISTED and all(
            isinstance(key, str) and _is_plain(each) for key, each in value.items()
        )
    return value is None or isinstance(value, _CONSTANT)


def _entered(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose forward is traced, and what begins the names of their attributes."""
    yield prefix, module
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict) or not _is_layer(child):
            yield from _entered(child, f"{prefix}{name}.")


def _is_layer(module: nn.Module) -> bool:
    """True if a module stays whole."""
    if isinstance(module, _BY_TYPE):
        return False
    package = type(module).__module__.split(".")
    known = package[:2] == ["torch_geometric", "nn"] and package[2:3] != ["models"]
    whole = known and (package[2:3] or [""])[0] in _WHOLE
    return isinstance(module, MessagePassing) or whole or _OF_TORCH.is_leaf_module(module, "")


_OF_TORCH = fx.Tracer()


class _Buffer(fx.Proxy):
    """A buffer in a trace: its shape is known, its values are not.

    Args:
        node: Gets it.
        tracer: Traces.
        buffer: It.
    """

    def __init__(self, node: fx.Node, tracer: fx.Tracer, buffer: Tensor) -> None:
        super().__init__(node, tracer)
        self._buffer = buffer

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "size", "dim", "ndim", "numel"):
            return getattr(self._buffer, name)
        return super().__getattr__(name)

    def __len__(self) -> int:
        return len(self._buffer)


class _Tracer(fx.Tracer):
    """Traces a forward with known arguments.

    Args:
        described: The arguments, see :func:`~pyg_scale.parallel.calls.described_by`.
    """

    def __init__(self, described: Any) -> None:
        super().__init__()
        self._described, self._keys = described, keys_of(described)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Give each tensor a placeholder, also in dictionaries and of variadic parameters."""
        # Every `Sequential` has one, and that of its class is the one that was made last.
        own: Any = vars(self.root).get("forward")
        if getattr(own, "__self__", None) is self.root:
            root_fn = own.__func__
        function, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        call = by_parameter(self.root, names_of(self._described), self._given)
        for place, arg in enumerate(args):
            name = str(arg.node.target).lstrip("*") if isinstance(arg, fx.Proxy) else ""
            if name:
                args[place] = call.arguments[name]
        return function, args

    def _given(self, name: str) -> Any:
        """The value of an argument while it is traced."""
        if name in self._described["fixed"]:
            return self._described["fixed"][name]
        if name not in self._keys:
            return self._placeholder(name)
        return {key: self._placeholder(named(name, key)) for key in self._keys[name]}

    def _placeholder(self, name: str) -> fx.Proxy:
        return self.create_proxy("placeholder", name, (), {})

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Take buffers as they are in each step: what is computed with one is no constant."""
        for name, buffer in self.root.named_buffers():
            if buffer is attr_val:
                if name not in parameter_proxy_cache:
                    node = self.create_node("get_attr", name, (), {})
                    parameter_proxy_cache[name] = _Buffer(node, self, buffer)
                return parameter_proxy_cache[name]
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        """Take numbers of NumPy, too."""
        return super().create_arg(a.item() if isinstance(a, _OF_NUMPY) else a)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Let the result of a layer of all types be a dictionary with known keys."""
        out: Any = super().call_module(m, forward, args, kwargs)
        if isinstance(m, pyg.HGTConv):
            return {kind: out[kind] for kind in args[0] if kind in m.dst_node_types}
        return out

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_layer(m)


class Crossing(NamedTuple):
    """A tensor that goes from a stage to the next one.

    Attributes:
        per: ``"node"`` or ``"edge"``, and the type if there are any: it has a row for each of those
            of a batch. There are several if all batches that were measured had as many of each.
        shape: The shape of a row.
        dtype: Its dtype, such as ``"float32"``.
    """

    per: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    def rows(self, sizes: Mapping[str, int]) -> int:
        """Number of rows of a batch of these sizes."""
        return sizes[self.per[0]]

    def is_open(self, sizes: Mapping[str, int]) -> bool:
        """Return True if a batch of these sizes must be measured to know its number of rows."""
        return len(self.per) > 1 and len({sizes[kind] for kind in self.per}) > 1


def traced(module: nn.Module, described: Any) -> fx.Graph:
    """The forward of a module, with layers as single steps.

    Args:
        module: The module.
        described: The arguments, see :func:`~pyg_scale.parallel.calls.described_by`.

    Raises:
        ValueError: If it cannot be traced.
    """
    try:
        graph = _Tracer(described).trace(module, dict(described["fixed"]))
    except (fx.proxy.TraceError, TypeError, RuntimeError, AssertionError) as error:
        raise ValueError(
            f"the forward of {type(module).__name__} cannot be cut into stages ({error}): it must "
            "not decide by values or shapes of tensors outside of layers"
        ) from error
    # Of arguments that are fixed, torch.fx checks the value.
    for node in reversed(list(graph.nodes)):
        checks = "_assert" in getattr(node.target, "__name__", "")
        compares = node.target is operator.eq and not node.users
        if node.op == "call_function" and (checks or compares):
            graph.erase_node(node)
    return graph


class Program:
    """The forward of a module with some fixed arguments, in stages.

    Args:
        module: The module.
        graph: See :func:`traced`.
        stages: The stage of modules, by name; one that is not there has that of what is before it.
        number: Number of stages.
        strict: Whether a module of an earlier stage after one of a later one is an error.

    Raises:
        ValueError: If it is, or the module returns something else than tensors.

    Attributes:
        crossings: What goes from each stage to the next one; ``None`` if not known yet.
        out_keys: The keys of a result that is a dictionary, else ``None``.
        is_for_once: Whether it is for one step, as the forward sets attributes of its modules.
    """

    def __init__(
        self,
        module: nn.Module,
        graph: fx.Graph,
        stages: Mapping[str, int],
        number: int,
        strict: bool,
    ) -> None:
        self.crossings: list[list[Crossing]] | None = None
        self.is_for_once = False
        self._steps: list[list[fx.Node]] = [[] for _ in range(number)]
        self._inputs = [node for node in graph.nodes if node.op == "placeholder" and node.users]
        self._module, self._graph = module, graph
        stage, of = 0, {}
        alone = _of_buffers(module, graph)
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr") or node in alone:
                continue
            found = stage_of(node, stages)
            if found is not None and found < stage and strict:
                raise ValueError(
                    f"device_map: {node.target!r} is on rank {found} and is used after a layer of "
                    f"rank {stage}: ranks must follow the forward"
                )
            stage = number - 1 if node.op == "output" else max(stage, found or 0)
            of[node] = stage
            self._steps[stage].append(node)
        for node in graph.nodes:
            _check_writes(node, of)
        self._first = [_first_of(graph, alone, each) for each in self._steps]
        (out,) = next(node for node in graph.nodes if node.op == "output").args
        self.out_keys = list(out) if isinstance(out, dict) else None
        self._results = list(out.values()) if isinstance(out, dict) else [out]
        if not self._results or not all(isinstance(each, fx.Node) for each in self._results):
            raise ValueError("the model must return a tensor, or a dictionary of tensors by type")
        self._crossing: list[list[fx.Node]] = []
        for edge in range(1, number):
            self._crossing.append(
                [n for n in of if of[n] < edge and any(of[user] >= edge for user in n.users)]
            )

    def needed(self, stage: int) -> list[str]:
        """The names of the inputs that a stage uses."""
        steps = set(self._steps[stage])
        return [str(node.target) for node in self._inputs if steps & node.users.keys()]

    def run(
        self, stage: int, tensors: Sequence[Tensor], inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """The tensors that go to the next stage, or of the last stage the results.

        Args:
            stage: The stage.
            tensors: What came from the stage before.
            inputs: Those of :meth:`needed`.
        """
        run = fx.Interpreter(self._module, garbage_collect_values=False, graph=self._graph)
        for node in self._first[stage]:
            run.env[node] = run.run_node(node)
        run.env |= {n: inputs[str(n.target)] for n in self._inputs if str(n.target) in inputs}
        if stage:
            run.env |= dict(zip(self._crossing[stage - 1], tensors, strict=True))
        for node in self._steps[stage]:
            if node.op == "output":
                return tuple(run.env[each] for each in self._results)
            run.env[node] = run.run_node(node)
        return tuple(run.env[node] for node in self._crossing[stage])

    def measure(self, inputs: Mapping[str, Tensor], sizes: Mapping[str, int]) -> list[list[Any]]:
        """Everything that goes from stage to stage, as JSON knows it; see :class:`Crossing`.

        Args:
            inputs: All inputs.
            sizes: Number of nodes and edges of the batch, by type.

        Raises:
            ValueError: If it is no floating-point tensor with a row for each node or edge.
        """
        per: dict[int, list[str]] = {}
        for kind, number in sizes.items():
            per.setdefault(number, []).append(kind)
        found: list[list[Any]] = []
        tensors: tuple[Tensor, ...] = ()
        for stage, crossing in enumerate(self._crossing):
            tensors = self.run(stage, tensors, inputs)
            if not tensors:
                raise ValueError(f"nothing goes from rank {stage} to rank {stage + 1}")
            found.append([])
            for node, tensor in zip(crossing, tensors, strict=True):
                rows = tensor.size(0) if isinstance(tensor, Tensor) and tensor.dim() else -1
                if rows not in per or not tensor.is_floating_point():
                    raise ValueError(
                        f"{node.name!r} goes from rank {stage} to rank {stage + 1}, and is no "
                        "floating-point tensor with a row for each node or edge: put the cut "
                        "elsewhere, device_map="
                    )
                found[-1].append([per[rows], list(tensor.shape[1:]), str(tensor.dtype)[6:]])
        return found

    def is_open(self, sizes: Mapping[str, int]) -> bool:
        """Return True if a batch of these sizes must be measured: :meth:`measure`, :meth:`learn`.

        Only then can its number of rows be another than :attr:`crossings` says.
        """
        known = self.crossings
        return known is None or any(c.is_open(sizes) for each in known for c in each)

    def learn(self, measured: list[list[Any]]) -> None:
        """Set :attr:`crossings`, or leave out what a tensor has no rows of after all.

        Args:
            measured: What :meth:`measure` found.

        Raises:
            ValueError: If a tensor has rows of something else in every batch.
        """
        found = [[Crossing(tuple(p), tuple(s), d) for p, s, d in each] for each in measured]
        if self.crossings is not None:
            found = [
                [new._replace(per=tuple(kind for kind in old.per if kind in new.per))
                 for old, new in zip(*both, strict=True)]
                for both in zip(self.crossings, found, strict=True)
            ]  # fmt: skip
        for stage, each in enumerate(found):
            if any(not crossing.per for crossing in each):
                raise ValueError(
                    f"a tensor goes from rank {stage} to rank {stage + 1} that has no row for each "
                    "node or edge: put the cut elsewhere, device_map="
                )
        self.crossings = found


def _check_writes(node: fx.Node, stages: Mapping[fx.Node, int]) -> None:
    """Check that a buffer that the forward itself writes in place is used on that rank alone.

    Raises:
        ValueError: If it is not.
    """
    used = sorted({stages[user] for user in node.users if user in stages})
    if node.op == "get_attr" and len(used) > 1 and _is_written(node):
        raise ValueError(
            f"{node.target!r} is written by the forward and used on ranks {used[0]} and {used[1]}: "
            "put what uses it on one rank, device_map="
        )


def _is_written(node: fx.Node) -> bool:
    """True if a method writes into it in place."""
    methods = [user for user in node.users if user.op == "call_method" and user.args[0] is node]
    return any(str(user.target).endswith("_") for user in methods)


_RANDOM = ("bernoulli", "dropout", "exponential", "multinomial", "normal", "poisson", "rand")


def _of_buffers(module: nn.Module, graph: fx.Graph) -> set[fx.Node]:
    """Steps that follow from buffers alone: each rank computes those that it needs itself."""
    buffers, found = {name for name, _ in module.named_buffers()}, set[fx.Node]()
    for node in graph.nodes:
        inputs, name = node.all_input_nodes, getattr(node.target, "__name__", str(node.target))
        if node.op not in ("call_function", "call_method") or not inputs:
            continue
        known = all(
            each in found
            or (each.op == "get_attr" and each.target in buffers and not _is_written(each))
            for each in inputs
        )
        repeats = not name.endswith("_") and not any(word in name for word in _RANDOM)
        if known and repeats and not _is_written(node):
            found.add(node)
    return found


def _first_of(graph: fx.Graph, alone: set[fx.Node], steps: list[fx.Node]) -> list[fx.Node]:
    """The steps of :func:`_of_buffers`, parameters and buffers that some steps need."""
    needed = set(steps)
    for node in reversed(list(graph.nodes)):
        if (node.op == "get_attr" or node in alone) and needed & node.users.keys():
            needed.add(node)
    return [node for node in graph.nodes if node in needed and node not in steps]


def stage_of(node: fx.Node, stages: Mapping[str, int]) -> int | None:
    """The stage of a module that is called, or of one that it is in; ``None`` if it has none."""
    parts = str(node.target).split(".") if node.op == "call_module" else []
    for size in range(len(parts), 0, -1):
        if (name := ".".join(parts[:size])) in stages:
            return stages[name]
    return None


def even_stages(module: nn.Module, graph: fx.Graph, number: int) -> dict[str, int]:
    """Stages with equal numbers of layers that follow edges, in the order of the forward.

    Raises:
        ValueError: If there are fewer layers than stages.
    """
    modules = dict(module.named_modules())
    names = dict.fromkeys(
        str(node.target)
        for node in graph.nodes
        if node.op == "call_module" and isinstance(modules[str(node.target)], MessagePassing)
    )
    if len(names) < number:
        raise ValueError(
            f"the model has {len(names)} layers that follow edges for {number} ranks: say which "
            "modules each rank has, device_map={'name': rank}, or use fewer ranks"
        )
    return {name: place * number // len(names) for place, name in enumerate(names)}


class Work:
    """A micro-batch on one rank.

    Attributes:
        owner: The rank whose batch it is.
        program: Computes it.
        sizes: Number of nodes and of edges, by type.
        inputs: What the stage of this rank uses.
        random: The state of random numbers before it was computed.
        outs: On the last rank its results.
        grads: On the last rank the gradients of the loss by these.
    """

    def __init__(self, owner: int, program: Program, sizes: dict[str, int]) -> None:
        self.owner, self.program, self.sizes = owner, program, sizes
        self.inputs: dict[str, Tensor] = {}
        self.random: list[Tensor] = []
        self.outs: tuple[Tensor, ...] = ()
        self.grads: list[Tensor] = []


class _Anchored(torch.autograd.Function):
    """Tensors that take part in the backward pass, also if nothing before them does."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.zeros(()), *grads


class Stage(nn.Module):
    """A stage of a pipeline: micro-batches by number, tensors padded to one size.

    Args:
        stage: The number of the stage.
        last: Whether it is the last one.
        padded: The shapes of what it passes on.
        work: The micro-batches of a step, by number.
    """

    def __init__(
        self,
        stage: int,
        last: bool,
        padded: list[tuple[int, ...]],
        work: Callable[[], list[Work]],
    ) -> None:
        super().__init__()
        self._stage, self._last, self._padded, self._work = stage, last, padded, work
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, *tensors: Tensor, number: Tensor | None = None) -> Any:
        """Of the last stage the loss ``[1]``, of others what goes on, padded.

        Args:
            *tensors: What came from the stage before; of the first stage the number.
            number: The number ``[1]`` of the micro-batch.
        """
        if number is None:
            number, tensors = tensors[0], ()
        work = self._work()[int(number)]
        crossings = work.program.crossings
        assert crossings is not None
        if self._stage:
            rows = [each.rows(work.sizes) for each in crossings[self._stage - 1]]
            tensors = tuple(each[:n] for each, n in zip(tensors, rows, strict=True))
        gpus = [number.device] if number.device.type == "cuda" else []
        if not torch.is_grad_enabled():
            work.random = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]
            return self._passed_on(work, work.program.run(self._stage, tensors, work.inputs))
        with torch.random.fork_rng(devices=gpus):
            torch.set_rng_state(work.random[0])
            for state, gpu in zip(work.random[1:], gpus, strict=True):
                torch.cuda.set_rng_state(state, gpu)
            found = work.program.run(self._stage, tensors, work.inputs)
        return self._passed_on(work, found)

    def _passed_on(self, work: Work, found: tuple[Tensor, ...]) -> Any:
        if self._last:
            if not torch.is_grad_enabled() or not work.grads:
                work.outs = found
                return found[0].new_zeros(1)
            pairs = zip(_Anchored.apply(self._anchor, *found), work.grads, strict=True)
            losses = [(out * grad).sum() for out, grad in pairs]
            return torch.stack(losses).sum().reshape(1)
        padded = []
        for each, shape in zip(found, self._padded, strict=True):
            if each.shape[1:] != shape[1:] or each.size(0) > shape[0]:
                raise ValueError(f"a batch has {list(each.shape)} where others have {list(shape)}")
            behind = [0] * (2 * each.dim() - 1) + [shape[0] - each.size(0)]
            padded.append(F.pad(each, behind))
        if torch.is_grad_enabled():
            padded = list(_Anchored.apply(self._anchor, *padded))
        return tuple(padded)
