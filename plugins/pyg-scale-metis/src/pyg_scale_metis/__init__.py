"""METIS as a partitioner. Imports nothing heavy, as it is imported to list names."""

from pyg_scale import hookimpl


@hookimpl
def pyg_scale_partitioners():
    return {"metis": "pyg_scale_metis.partitioner:MetisPartitioner"}


@hookimpl
def pyg_scale_checks():
    return {"metis": "pyg_scale_metis.check:metis"}
