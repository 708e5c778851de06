"""Parquet files for `pyg-scale convert`. Imports nothing heavy: this is read to list names."""

from pyg_scale import hookimpl


@hookimpl
def pyg_scale_readers():
    return {"parquet": "pyg_scale_parquet.reader:ParquetReader"}
