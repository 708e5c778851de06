"""Scripts and files of other libraries. Imports nothing heavy, as it is imported to list names."""

from __future__ import annotations

from pyg_scale import hookimpl


@hookimpl
def pyg_scale_readers() -> dict[str, str]:
    return {"glt": "pyg_scale_migrate.glt.reader:GLTReader"}
