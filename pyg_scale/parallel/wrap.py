"""From a name or an instance to a wrapped module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from pyg_scale import plugins
from pyg_scale.parallel.base import GraphParallel, Parallel, is_parallel_module


def wrap(
    module: nn.Module,
    method: str | Parallel = "ddp",
    *,
    group: Any = None,
    graph: Any = None,
    inputs: Sequence[str] | None = None,
    mesh: Any = None,
    **options: Any,
) -> Any:
    """Make a module one of many. Every rank calls it.

    Args:
        module: The model, on the device where it is to be trained.
        method: A name of the kind ``parallel``, or an instance that holds its options.
        group: The ranks, by default all of them; see :meth:`Parallel.wrap`.
        graph: What :func:`pyg_scale.open` returned, for methods that divide a graph; see
            :meth:`GraphParallel.wrap`.
        inputs: The attributes of the graph that are the arguments of the module, likewise.
        mesh: A ``DeviceMesh`` instead of ``group``, likewise.
        **options: Of the method, if it is a name.

    Returns:
        A module that is called as ``module`` is, with ``backward``, ``join``, ``no_sync`` and
        ``module``: see :class:`ParallelModule`; with a graph, see :class:`GraphParallelModule`.

    Raises:
        TypeError: If ``module`` is no module, ``method`` neither a name nor an instance, it has no
            such option, or it needs a graph and has none, or the other way round.
        ValueError: If options are given for an instance, or the module cannot be wrapped.
        UnknownPluginError: If there is no such method.
        RuntimeError: If the ranks have not met.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module (got {type(module).__name__})")
    if isinstance(method, str):
        method = plugins.get("parallel", method)(**options)
    elif options:
        raise ValueError(
            f"{', '.join(options)}: options of an instance are arguments of its constructor"
        )
    if not isinstance(method, Parallel):
        raise TypeError(
            f"method must be a name, such as 'ddp', or an instance of "
            f"pyg_scale.parallel.Parallel (got {type(method).__name__})"
        )
    wrapped = _wrap(method, module, group, graph, inputs, mesh)
    if not is_parallel_module(wrapped):
        raise TypeError(
            f"{type(method).__name__}.wrap returned a {type(wrapped).__name__} without module, "
            f"backward, join and no_sync"
        )
    return wrapped


def _wrap(
    method: Parallel,
    module: nn.Module,
    group: Any,
    graph: Any,
    inputs: Sequence[str] | None,
    mesh: Any,
) -> nn.Module:
    if isinstance(method, GraphParallel):
        if graph is None:
            raise TypeError(
                f"{type(method).__name__} divides a graph: give it one, "
                f"graph=pyg_scale.open('parts'), on every rank"
            )
        return method.wrap(module, group, graph=graph, inputs=inputs, mesh=mesh)
    given = {"graph": graph, "inputs": inputs, "mesh": mesh}
    names = [f"{name}=" for name, value in given.items() if value is not None]
    if names:
        raise TypeError(
            f"{type(method).__name__} takes batches, not a graph: leave out {', '.join(names)}"
        )
    return method.wrap(module, group)
