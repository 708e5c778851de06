"""Predictions over HTTP. Imports nothing heavy, as it is imported to list names."""

from pyg_scale import hookimpl


@hookimpl
def pyg_scale_commands():
    return {"predict": "pyg_scale_http.command:main"}
