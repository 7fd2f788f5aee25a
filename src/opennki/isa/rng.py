"""Counter-based random numbers: Philox4x32-10, the same under every executor and in any order of evaluation.

The numbers of one call are a pure function of (seed, stream, element index). The stream is a tuple of
integers (call site, program id, iteration vector). It and the seed are hashed into 128 bits: 64 are the
Philox key, 64 the upper half of the counter; the lower half counts blocks of four numbers, so element i is
word i mod 4 of block i div 4. The hash is the finaliser of SplitMix64, chained, which a native executor
repeats in a few instructions. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2,
3" (SC 2011).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

UInt32Array = npt.NDArray[np.uint32]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)
_MASK64 = (1 << 64) - 1
ROUNDS = 10


def philox4x32(counter: Iterable[npt.ArrayLike], key: tuple[int, int]) -> UInt32Array:
    """Philox4x32-10 of counters under one key.

    counter: four words, each an integer or an array of 32-bit values, broadcast to one shape (...); key: two
    32-bit words. Returns uint32 (..., 4).
    """
    words: list[Any] = [np.asarray(word, np.uint64) for word in counter]
    c0, c1, c2, c3 = np.broadcast_arrays(*words)
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0 = (p1 >> _SHIFT32) ^ c1 ^ np.uint64(k0)
        c2 = (p0 >> _SHIFT32) ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & _LOW32, p0 & _LOW32
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def _mix(h: int) -> int:
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK64
    return h ^ (h >> 31)


def stream_key(seed: int, stream: Iterable[int]) -> tuple[int, int]:
    """128 bits (key, upper counter half), 64 each, from a seed and a tuple of integers of any sign, taken mod
    2**64.

    Tuples of different length differ, (1,) from (1, 0) too. Raises TypeError for what is no integer.
    """
    values = [operator.index(value) for value in stream]
    key, upper = 0x243F6A8885A308D3, 0x13198A2E03707344
    for value in (operator.index(seed), len(values), *values):
        key = _mix((key + 0x9E3779B97F4A7C15) & _MASK64 ^ value & _MASK64)
        upper = _mix((upper + 0xD1B54A32D192ED03) & _MASK64 ^ value & _MASK64)
    return key, upper


def bits(seed: int, stream: Iterable[int], n: int) -> UInt32Array:
    """The first n 32-bit numbers of a stream: uint32 (n,). A longer call begins with a shorter one's."""
    if n < 0:
        raise ValueError(f"cannot draw {n} random numbers")
    key, upper = stream_key(seed, stream)
    block = np.arange((n + 3) // 4, dtype=np.uint64)
    counter = (block & _LOW32, block >> _SHIFT32, upper & 0xFFFFFFFF, upper >> 32)
    return philox4x32(counter, (key & 0xFFFFFFFF, key >> 32)).reshape(-1)[:n]


_UNIT = np.float32(2.0**-24)


def uniform(seed: int, stream: Iterable[int], shape: tuple[int, ...] | int) -> npt.NDArray[np.float32]:
    """Uniform float32 in [0, 1), multiples of 2**-24, of the given shape; element index is row-major."""
    shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    n = 1
    for size in shape:
        n *= int(size)
    value = (bits(seed, stream, n) >> np.uint32(8)).astype(np.float32)
    value *= _UNIT
    return value.reshape(shape)
