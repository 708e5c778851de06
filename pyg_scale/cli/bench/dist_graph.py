"""The partitioned graph of ``pyg-scale bench dist``, made in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyg_scale
from pyg_scale.datasets import planted_communities, read_npz


def make(given: dict[str, Any]) -> dict[str, Any]:
    """Write ``root/whole`` and parts of it by each method; what it is, as plain values."""
    root = Path(given["root"])
    if given["npz"]:
        data: Any = read_npz(given["npz"])
        for name in list(data.keys()):
            if name not in ("x", "y", "edge_index"):
                del data[name]
        data.x = data.x.float()
    else:
        data = planted_communities(given["nodes"], given["edges"], 16, given["features"])
    pyg_scale.save(data, root / "whole", overwrite=True)
    for method in given["methods"]:
        pyg_scale.partition(root / "whole", given["parts"], method, root / method)
    return {
        "name": Path(given["npz"]).stem if given["npz"] else "generated, power law",
        "nodes": data.num_nodes,
        "edges": data.num_edges,
        "features": data.x.size(1),
        "classes": int(data.y.max()) + 1,
        "parts": given["parts"],
        "methods": given["methods"],
    }


if __name__ == "__main__":
    print(json.dumps(make(json.loads(sys.argv[1]))), flush=True)
