"""Keyed draws: every random number is a function of integers, never of execution order.

This is the plain-torch meaning of ``csrc/keys.h``; ``docs/draws.md`` specifies both to the bit. The
64-bit mixer is the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom
number generators", OOPSLA 2014). Numbers of a range are drawn without bias by multiplication
(Lemire: "Fast random integer generation in an interval", TOMACS 2019).

Torch has no unsigned 64-bit arithmetic, so a word is the ``int64`` with the same bits:
addition and multiplication wrap, and shifts to the right are made logical.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from pyg_scale.ops import library
from pyg_scale.ops.library import to_signed as to_signed

GOLDEN = 0x9E3779B97F4A7C15
"""The odd constant of SplitMix64: 2**64 divided by the golden ratio."""

_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1

# Purposes of keys. The numbers are part of the specification.
NEIGHBOR = 1
SHUFFLE = 2
NEGATIVE_SRC = 3
NEGATIVE_DST = 4
TRANSFORM = 5
CALL = 6
FOREIGN = 7
HGT = 8
PARTITION = 9
MULTILEVEL = 16
SPECTRAL = 17
RANDOM_WALK = 18
CLUSTERING = 19
ATTENTION_DROPOUT = 20
PIECE = 21
WALK = 22
SAINT = 23
FIXED = 24
SOURCE = 25
EVENT_NEGATIVE = 26
EMBEDDING = 32


def mix(word: int) -> int:
    """Scramble an unsigned 64-bit integer (the finaliser of SplitMix64)."""
    word &= _MASK
    word = ((word ^ (word >> 30)) * _MIX1) & _MASK
    word = ((word ^ (word >> 27)) * _MIX2) & _MASK
    return word ^ (word >> 31)


def fold(key: int, *values: int) -> int:
    """Absorb integers into a key, one after the other: ``key = mix(key ^ value * GOLDEN)``."""
    for value in values:
        key = mix((key ^ ((value & _MASK) * GOLDEN)) & _MASK)
    return key


def batch_key(seed: int, epoch: int, batch: int) -> int:
    """The key of batch number ``batch`` of epoch ``epoch``, an unsigned 64-bit integer."""
    return fold(0, seed, epoch, batch)


def edge_type_hash(edge_type: tuple[str, str, str] | None) -> int:
    """The number of an edge type in keys: 0 for the homogeneous one, else a hash of its names."""
    if edge_type is None:
        return 0
    text = "\0".join(edge_type).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix_tensor(x: Tensor) -> Tensor:
    """:func:`mix` of every element of an ``int64`` tensor."""
    x = (x ^ _shift(x, 30)) * to_signed(_MIX1)
    x = (x ^ _shift(x, 27)) * to_signed(_MIX2)
    return x ^ _shift(x, 31)


def fold_tensor(key: int | Tensor, value: Tensor) -> Tensor:
    """:func:`fold` of one value per element. Broadcasts; returns ``int64``."""
    if not isinstance(key, Tensor):
        key = torch.tensor(to_signed(key), device=value.device)
    return mix_tensor(key ^ (value.to(torch.int64) * to_signed(GOLDEN)))


def draw(key: Tensor, index: int | Tensor) -> Tensor:
    """Word number ``index`` of the stream of each key: ``mix(key + (index + 1) * GOLDEN)``."""
    if isinstance(index, Tensor):
        return mix_tensor(key + (index.to(torch.int64) + 1) * to_signed(GOLDEN))
    return mix_tensor(key + to_signed((index + 1) * GOLDEN))


def _multiply_high(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and lower 64 bits of the unsigned product."""
    low = (1 << 32) - 1
    a0, a1, b0, b1 = a & low, _shift(a, 32), b & low, _shift(b, 32)
    mid = a1 * b0 + _shift(a0 * b0, 32)
    mid2 = a0 * b1 + (mid & low)
    return a1 * b1 + _shift(mid, 32) + _shift(mid2, 32), a * b


def bounded(key: Tensor, index: int | Tensor, size: Tensor) -> Tensor:
    """Draw uniformly from ``{0, ..., size - 1}`` with word ``index`` of each key's stream.

    Lemire's method: the upper half of ``word * size``; where the lower half is below
    ``2**64 mod size`` the word is replaced by ``mix(word + GOLDEN)`` and the step repeated.

    Args:
        key: ``int64`` keys, any shape.
        index: Index of the word in the stream, one number or one per key.
        size: ``int64`` sizes, at least 1, broadcastable to ``key``.
    """
    word = draw(key, index)
    size = size.to(torch.int64).expand_as(word)
    # 2**64 mod size, without 64-bit unsigned division: (2**63 mod size) * 2 mod size.
    half = ((1 << 63) - 1) % size + 1
    half = torch.where(half == size, 0, half)
    threshold = torch.where(half >= size - half, half - (size - half), half + half)
    high, low = _multiply_high(word, size)
    flip = to_signed(1 << 63)
    while bool((again := (low ^ flip) < (threshold ^ flip)).any()):
        word = torch.where(again, mix_tensor(word + to_signed(GOLDEN)), word)
        high, low = _multiply_high(word, size)
    return high


def draws(key: int, count: int, size: int) -> Tensor:
    """The first draws of a key from ``{0, ..., size - 1}``, ``int64`` ``[count]``.

    Args:
        key: Unsigned.
        count: Number of draws.
        size: From 1 to ``2**63 - 1``.
    """
    index, sizes = torch.arange(count), torch.full((count,), size)
    if library.compiled():
        return torch.ops.pyg_scale.keyed_draws(to_signed(key), index, sizes)
    return bounded(torch.full((count,), to_signed(key)), index, sizes)


def draws_each(key: int, count: int, size: int) -> Tensor:
    """A draw from ``{0, ..., size - 1}`` with each of the keys ``fold(key, i)``, ``int64``.

    Args:
        key: Unsigned.
        count: Number of draws.
        size: From 1 to ``2**63 - 1``.
    """
    if library.compiled():
        return torch.ops.pyg_scale.keyed_draws_each(to_signed(key), count, size)
    return bounded(fold_tensor(key, torch.arange(count)), 0, torch.tensor(size))


def source_number(key: int, source: Tensor) -> Tensor:
    """The random numbers of 32 bits that sources of edges have for a key, ``int64`` in range.

    A multiplicative hash of 32 bits, which processors compute for many sources at a time. It is
    "lowbias32" (Wellons: hash-prospector), with the lower half of the key before the first of its
    two rounds, and the upper half before the second. Ids of 33 bits and more fold their upper
    half into the key.

    Args:
        key: Unsigned, 64 bits.
        source: Ids of nodes, any shape.
    """
    low = (1 << 32) - 1
    source = source.to(torch.int64)
    high = source >> 32
    wide = torch.where(high > 0, fold_tensor(key, high), to_signed(key))
    x = (source & low) ^ (wide & low)
    x = (((x ^ (x >> 16)) * 0x7FEB352D) & low) ^ _shift(wide, 32)
    x = ((x ^ (x >> 15)) * 0x846CA68B) & low
    return x ^ (x >> 16)


def permutation(key: int, size: int) -> Tensor:
    """A random order of ``size`` positions: the stable argsort of keyed hashes.

    Position ``i`` sorts by ``fold(key, i) >> 1`` (63 bits, so that signed and unsigned
    comparison agree), equal hashes by position.
    """
    return _shift(fold_tensor(key, torch.arange(size)), 1).argsort(stable=True)


FEISTEL_ROUNDS = 12
"""Number of rounds, with which all orders of 4, 5 and 6 positions were found equally likely."""


def permuted(key: int, size: int, position: Tensor) -> Tensor:
    """The elements at some positions of a random order of ``size`` elements.

    The order is not that of :func:`permutation`. Each position is computed on its own, in constant
    memory, by a generalised Feistel network (Black and Rogaway: "Ciphers with arbitrary finite
    domains", CT-RSA 2002). ``x`` is ``left + a * right`` with ``a = ceil(sqrt(size))`` and
    ``b = ceil(size / a)``. Round ``r`` adds to ``left`` (modulo ``a``; in odd rounds to ``right``,
    modulo ``b``) the number ``h * a >> 31`` (``b``), where ``h`` is the upper 31 bits of
    ``fold(key, r, the other half)``. An ``x`` of ``size`` or more goes through the network again.

    Args:
        key: Key of the order.
        size: Number of elements, below ``2**62``.
        position: ``int64``, any shape, each from 0 to ``size - 1``.

    Returns:
        ``int64`` of the shape of ``position``; all positions together give each element once.
    """
    a = math.isqrt(max(size - 1, 0)) + 1
    b = -(-size // a)
    round_keys = [fold(key, r) for r in range(FEISTEL_ROUNDS)]

    def once(x: Tensor) -> Tensor:
        half, other = x % a, x // a
        for r, round_key in enumerate(round_keys):
            count = b if r % 2 else a
            half = half + (_shift(fold_tensor(round_key, other), 33) * count >> 31)
            half, other = other, torch.where(half >= count, half - count, half)
        return half + a * other

    out = once(position.reshape(-1))
    outside = (out >= size).nonzero().view(-1)
    while outside.numel():
        again = once(out[outside])
        out[outside] = again
        outside = outside[again >= size]
    return out.view(position.shape)
