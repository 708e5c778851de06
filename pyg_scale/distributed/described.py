"""A sampler as a record, from which another rank builds one that chooses the same edges."""

from __future__ import annotations

import weakref
from typing import Any

from pyg_scale import plugins
from pyg_scale.errors import CommError, PluginError
from pyg_scale.sampler.base import NeighborSampler
from pyg_scale.sampler.hop import HopSampler

_NOT_SENT = {
    "topology",
    "_num_neighbors",
    "_disjoint",
    "subgraph_type",
    "sample_direction",
    "share_memory",
    "is_sorted",
    "time_attr",
    "weight_attr",
    "time_window",
    "strictly_earlier",
}
"""Fields that do not affect the choice of edges, or that the graph or the asks have."""


def describe(sampler: HopSampler) -> dict[str, Any]:
    """The name and the options of a sampler, as JSON.

    Raises:
        NotImplementedError: If it is not a plugin, or an option is not a number, string or boolean,
            or a list or tuple of these; names it.
    """
    kind = type(sampler)
    options = {k: v for k, v in vars(sampler).items() if k not in _NOT_SENT}
    for name, value in options.items():
        items = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(item, bool | int | float | str | None) for item in items):
            raise NotImplementedError(
                f"{kind.__name__} has {name}={value!r}, which cannot be sent to other ranks: "
                "options of samplers must be numbers, strings or lists of them"
            )
    tuples = [name for name, value in options.items() if isinstance(value, tuple)]
    return {"name": _name_of(kind), "options": options, "tuples": tuples}


_names: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()


def _name_of(kind: type) -> str:
    if kind in _names:
        return _names[kind]
    home = f"{kind.__module__}:{kind.__qualname__}"
    for entry in plugins.entries("sampler"):
        if entry.target is kind or entry.target == home:
            return _names.setdefault(kind, f"{entry.provider}:{entry.name}")
    raise NotImplementedError(
        f"{kind.__name__} is not a plugin, so other ranks cannot create one by name: have the hook "
        "pyg_scale_samplers return it"
    )


def from_description(description: Any) -> HopSampler:
    """The sampler that a record describes.

    Raises:
        CommError: If it does not describe a sampler.
        PluginError: If this rank does not have the plugin.
    """
    try:
        name, options = description["name"], dict(description["options"])
        tuples = list(description["tuples"])
        if not isinstance(name, str) or not all(each in options for each in tuples):
            raise TypeError("name or tuples")
    except (TypeError, KeyError, ValueError) as error:
        raise CommError(f"the message does not describe a sampler ({error})") from None
    try:
        kind = plugins.get("sampler", name)
    except PluginError as error:
        error.add_note("(of a sampler that another rank has)")
        raise
    if not (isinstance(kind, type) and issubclass(kind, HopSampler)):
        raise CommError(f"the sampler {name!r} does not sample hop by hop")
    sampler = kind.__new__(kind)
    NeighborSampler.__init__(sampler)
    for each in tuples:
        options[each] = tuple(options[each])
    sampler.__dict__.update(options)
    return sampler
