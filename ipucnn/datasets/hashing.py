"""Random numbers that are a pure function of their purpose: a counter-based 32-bit hash.

The order of an epoch and each sample's augmentation must not depend on earlier draws, on the number of threads, or
on the sample at which a run starts.  So every number is ``hash(seed, stream, epoch, round, index, k)``.
Words are chained through the finaliser of MurmurHash3 (Austin Appleby, public domain), a bijection of 32
bits: after the same earlier words, different last words give different hashes.

The same expressions run on Python integers, on NumPy ``uint64`` arrays, and on TensorFlow ``int64`` tensors
(whose products wrap around; the low 32 bits are the same).  :func:`chain` takes the right-shift function of the type.
"""

import functools
import operator
from typing import Callable

import numpy as np

from ipucnn.aliases import Numbers

MASK = 0xFFFFFFFF
ORDER, AUGMENT, LIMIT, ERASE, MIX = 1, 2, 3, 4, 5
"""Streams: one per purpose, so that the random numbers of different purposes are independent."""


def mix(word: Numbers, shift: Callable[[Numbers, Numbers], Numbers] = operator.rshift) -> Numbers:
    """Applies MurmurHash3's 32-bit finaliser to words in [0, 2**32)."""
    word = word ^ shift(word, 16)
    word = (word * 0x85EBCA6B) & MASK
    word = word ^ shift(word, 13)
    word = (word * 0xC2B2AE35) & MASK
    return word ^ shift(word, 16)


def chain(
    state: Numbers, word: Numbers, shift: Callable[[Numbers, Numbers], Numbers] = operator.rshift
) -> Numbers:
    """Returns the state after one more word, both in [0, 2**32).  It is also the hash of all words so far."""
    return mix(((state ^ word) + 0x9E3779B9) & MASK, shift)


@functools.lru_cache(maxsize=64)
def stream_state(seed: int, stream: int) -> int:
    """Returns the initial state of all chains of ``stream``.  ``seed`` is any integer, taken modulo 2**64."""
    seed %= 2**64
    return chain(chain(chain(0, seed & MASK), seed >> 32), stream)


def draw(seed: int, stream: int, *words: Numbers) -> Numbers:
    """Returns the hash in [0, 2**32) of non-negative words below 2**32, or an array of hashes for uint64 arrays."""
    state: Numbers = stream_state(seed, stream)
    for word in words:
        state = chain(state, word)
    return state


def uniform(state: int, word: int) -> float:
    """Returns a number in [0, 1), a multiple of 2**-32: the hash of one more word after ``state`` of :func:`draw`."""
    return chain(state, word) / 2.0**32


def permutation(size: int, seed: int, stream: int, *words: int) -> np.ndarray:
    """Returns 0 .. size - 1 in the order of their hashes: int64 [size]."""
    # An array, because Python integers combined with uint64 arrays (not NumPy scalars) give uint64 in every NumPy.
    state = draw(seed, stream, *words)
    keys = chain(state, np.arange(size, dtype=np.uint64))
    return np.argsort(keys, kind="stable").astype(np.int64)
