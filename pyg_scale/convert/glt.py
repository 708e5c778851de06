"""Moved to ``pyg_scale_migrate.glt``, of pyg-scale-migrate; its names can be imported from here."""

from pyg_scale import lazy

__getattr__, __dir__ = lazy.names(
    __name__, {}, dict.fromkeys(("GLTReader", "assignment"), "pyg_scale_migrate.glt")
)
