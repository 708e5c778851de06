"""Operations on tensors: each has a plain-torch meaning, and a compiled one where that is faster.

A module holds one operation and is imported by its name, ``from pyg_scale.ops import keys``.
"""
