"""Registers of the CUDA kernels that the compiler may spill."""

MOST_SPILLED = {"attention.cu": 112, "attention_grad.cu": 456}
"""Bytes of a thread; 96 in other files: what is outside of the loops, not the rows under way. GAT
has few registers for many threads, as it waits for memory. The most are of double, backward; other
types have 152."""


def most_spilled(file: str) -> int:
    return MOST_SPILLED.get(file, 96)
