"""A graph whose nodes have a ``TensorFrame`` with columns of every stype that a directory holds."""

import torch
from torch_frame import TensorFrame, stype
from torch_frame.data import MultiEmbeddingTensor, MultiNestedTensor
from torch_geometric.data import HeteroData

SIZES = {"u": 50, "v": 30}


def frame(size: int, generator: torch.Generator) -> TensorFrame:
    def lists() -> torch.Tensor:
        count = int(torch.randint(0, 4, (1,), generator=generator))
        return torch.randint(-1, 9, (count,), generator=generator)

    nested = MultiNestedTensor.from_tensor_mat([[lists(), lists()] for _ in range(size)])
    vectors = [torch.randn(size, k, generator=generator) for k in (3, 2)]
    numbers = torch.randn(size, 2, generator=generator)
    numbers[::5, 1] = torch.nan
    return TensorFrame(
        {
            stype.numerical: numbers,
            stype.categorical: torch.randint(-1, 5, (size, 1), generator=generator),
            stype.timestamp: torch.randint(0, 9, (size, 1, 7), generator=generator),
            stype.multicategorical: nested,
            stype.embedding: MultiEmbeddingTensor.from_tensor_list(vectors),
        },
        {
            stype.numerical: ["a", "b"],
            stype.categorical: ["c"],
            stype.timestamp: ["t"],
            stype.multicategorical: ["m", "n"],
            stype.embedding: ["e", "f"],
        },
        y=torch.randn(size, generator=generator),
    )


def framed() -> HeteroData:
    generator = torch.Generator().manual_seed(0)
    out = HeteroData()
    for name, size in SIZES.items():
        out[name].tf = frame(size, generator)
    edges = [torch.randint(0, size, (200,), generator=generator) for size in SIZES.values()]
    out["v"].time = torch.arange(SIZES["v"])
    out["u", "to", "v"].edge_index = torch.stack(edges)
    out["v", "back", "u"].edge_index = torch.stack(edges[::-1])
    return out
