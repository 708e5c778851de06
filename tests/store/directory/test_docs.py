"""docs/graph-directory.md says what is so."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path

import numpy as np
import pytest

import pyg_scale
from pyg_scale.store.directory import EdgeMeta, Meta, NodeMeta, PartitionMeta
from pyg_scale.testing import graphs

TEXT = Path(pyg_scale.__file__).parents[1] / "docs" / "graph-directory.md"
pytestmark = pytest.mark.skipif(not TEXT.is_file(), reason="needs a checkout")


@pytest.mark.parametrize("is_sorted", [False, True])
def test_numpy_alone_reads_it(tmp_path: Path, is_sorted: bool) -> None:
    data = graphs.hostile()
    data = data.sort(sort_by_row=False) if is_sorted else data
    path = pyg_scale.save(data, tmp_path / "graph")
    code = re.findall(r"```python\n(import json\nimport numpy.*?)```", TEXT.read_text(), re.DOTALL)
    names = {"path": str(path)}
    exec(code[0], names)
    assert np.array_equal(names["edge_index"], data.edge_index.numpy())
    assert np.array_equal(names["x"], data.x.numpy())
    neighbors = data.edge_index[0][data.edge_index[1] == 7]
    assert sorted(names["in_neighbors"].tolist()) == sorted(neighbors.tolist())


def test_the_checksum_of_meta_is_as_described(tmp_path: Path) -> None:
    path = pyg_scale.save(graphs.hetero(), tmp_path / "graph")
    meta = json.loads((path / "META.json").read_text(encoding="utf-8"))
    said = meta.pop("checksum")
    text = json.dumps(meta, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert zlib.crc32(text.encode("ascii")) == said


def test_every_entry_of_meta_is_described() -> None:
    text = TEXT.read_text()
    for cls in (Meta, NodeMeta, EdgeMeta, PartitionMeta):
        for name in cls.__dataclass_fields__:
            assert f"`{name}`" in text, name
