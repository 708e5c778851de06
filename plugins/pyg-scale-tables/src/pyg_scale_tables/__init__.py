"""Tables for `pyg-scale convert`. Imports nothing heavy, as it is imported to list names."""

from pyg_scale import hookimpl


@hookimpl
def pyg_scale_readers():
    return {
        "arrow": "pyg_scale_tables.columnar:ArrowReader",
        "csv": "pyg_scale_tables.text:CsvReader",
        "feather": "pyg_scale_tables.columnar:ArrowReader",
        "parquet": "pyg_scale_tables.columnar:ParquetReader",
        "tables": "pyg_scale_tables.relational:RelationalReader",
        "tsv": "pyg_scale_tables.text:CsvReader",
        "txt": "pyg_scale_tables.text:CsvReader",
    }
