"""The hooks of plugins: one per kind, all of the same form.

A hook has no arguments and returns ``{name: target}``: users type the name, the target is
``"module:attribute"``. It is a string so that listing plugins imports nothing; it is imported when
the name is used. For the same reason the module with the hooks should import only
:data:`pyg_scale.hookimpl`.

A distribution registers that module by an entry point of the group ``pyg_scale``::

    [project.entry-points.pyg_scale]
    mine = "pyg_scale_mine"

In a notebook or a script, ``pyg_scale.plugins.register(module_or_object)`` does the same, and
the target may be the object itself.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from typing import Any, NamedTuple

import pluggy

hookspec = pluggy.HookspecMarker("pyg_scale")

Targets = dict[str, Any]
"""Names and their targets: ``"module:attribute"``, or the object itself."""


class Check(NamedTuple):
    """The result of one check of ``pyg-scale doctor``.

    Attributes:
        ok: ``True``, ``False`` (something is broken), or ``None`` (something optional is absent).
        detail: The result, in one line.
        fix: The remedy; a command line if there is one.
    """

    ok: bool | None
    detail: str
    fix: str = ""


@hookspec
def pyg_scale_samplers() -> Targets:
    """Neighbour samplers: ``NeighborLoader(..., neighbor_sampler="mine")``.

    A target is a subclass of :class:`pyg_scale.sampler.base.NeighborSampler` (or, without keyed
    draws, of :class:`torch_geometric.sampler.BaseSampler`) that can be built without arguments
    and passes :class:`pyg_scale.testing.SamplerTests`.

    Example::

        from pyg_scale import hookimpl

        @hookimpl
        def pyg_scale_samplers():
            return {"mine": "pyg_scale_mine.sampler:MySampler"}
    """


@hookspec
def pyg_scale_feature_stores() -> Targets:
    """Feature stores, from which the features of nodes and edges are read.

    A target is a subclass of :class:`torch_geometric.data.FeatureStore` that passes
    :class:`pyg_scale.testing.FeatureStoreTests`.

    Example::

        from pyg_scale import hookimpl

        @hookimpl
        def pyg_scale_feature_stores():
            return {"mine": "pyg_scale_mine.feature_store:MyFeatureStore"}
    """


@hookspec
def pyg_scale_graph_stores() -> Targets:
    """Graph stores, from which edges are read.

    A target is a subclass of :class:`torch_geometric.data.GraphStore` that passes
    :class:`pyg_scale.testing.GraphStoreTests`.

    Example::

        from pyg_scale import hookimpl

        @hookimpl
        def pyg_scale_graph_stores():
            return {"mine": "pyg_scale_mine.graph_store:MyGraphStore"}
    """


@hookspec
def pyg_scale_partitioners() -> Targets:
    """Partitioners: ``pyg_scale.partition(data, 4, method="mine")``.

    A target is a subclass of :class:`pyg_scale.partitioner.base.Partitioner` that can be built
    without arguments and passes :class:`pyg_scale.testing.PartitionerTests`.

    Example::

        from pyg_scale import hookimpl

        @hookimpl
        def pyg_scale_partitioners():
            return {"mine": "pyg_scale_mine.partitioner:MyPartitioner"}
    """


@hookspec
def pyg_scale_readers() -> Targets:
    """Readers, for input formats of ``pyg-scale convert``.

    A target is a subclass of :class:`pyg_scale.convert.base.Reader`; its name is the suffix of the
    files that it reads (``parquet``) or the part before the colon (``ogb:ogbn-products``).

    Example::

        from pyg_scale import hookimpl

        @hookimpl
        def pyg_scale_readers():
            return {"mine": "pyg_scale_mine.reader:MyReader"}
    """


@hookspec
def pyg_scale_comm_backends() -> Targets:
    """Communicators: ``pyg_scale.comm.connect("mine")``.

    A target is a subclass of :class:`pyg_scale.comm.Communicator` with a class method
    ``join(group)`` that passes :class:`pyg_scale.testing.CommTests`; or one with class methods
    ``listen`` and ``connect``, for servers and clients that are not ranks of a group; or both.

    Example::

        from pyg_scale import hookimpl

        @hookimpl
        def pyg_scale_comm_backends():
            return {"mine": "pyg_scale_mine.comm:MyCommunicator"}
    """


@hookspec
def pyg_scale_parallel_wrappers() -> Targets:
    """Ways to train one model on many ranks: ``parallel.wrap(model, "mine")``.

    A target is a subclass of :class:`pyg_scale.parallel.Parallel` that can be built without
    arguments and passes :class:`pyg_scale.testing.ParallelTests`; or of
    :class:`pyg_scale.parallel.GraphParallel`, which gets ``graph=`` and ``mesh=`` of ``wrap``, and
    passes :class:`pyg_scale.testing.GraphParallelTests`.

    Example::

        from pyg_scale import hookimpl

        @hookimpl
        def pyg_scale_parallel_wrappers():
            return {"mine": "pyg_scale_mine.parallel:MyParallel"}
    """


@hookspec
def pyg_scale_convs() -> Targets:
    """Fused layers, which replace PyG's layers in ``pyg_scale.nn.accelerate(model)``.

    A target is a subclass of :class:`pyg_scale.nn.FusedConv` and of the class of PyG that its
    ``replaces`` names, and passes :class:`pyg_scale.testing.ConvTests`.

    Example::

        from pyg_scale import hookimpl

        @hookimpl
        def pyg_scale_convs():
            return {"mine": "pyg_scale_mine.conv:MyConv"}
    """


@hookspec
def pyg_scale_commands() -> Targets:
    """Subcommands: ``pyg-scale mine ...``.

    A target is a function that takes the remaining arguments (a list of strings) and returns the
    exit status: 0 for success, 1 for failure, 2 for wrong usage. ``pyg-scale --help`` shows the
    first line of its module's docstring, which is read without importing the module.

    Example::

        from pyg_scale import hookimpl

        @hookimpl
        def pyg_scale_commands():
            return {"mine": "pyg_scale_mine.command:main"}
    """


@hookspec
def pyg_scale_checks() -> Targets:
    """Checks that ``pyg-scale doctor`` runs and prints.

    A target is a function without arguments that returns a :class:`Check`.

    Example::

        from pyg_scale import hookimpl

        @hookimpl
        def pyg_scale_checks():
            return {"mine": "pyg_scale_mine.check:check"}
    """
