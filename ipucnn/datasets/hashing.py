"""Random numbers that are a pure function of what they are for: a counter-based 32-bit hash.

The order of an epoch and each sample's augmentation must not depend on what was drawn before, on how many
threads draw, or on where a run starts.  So every number is ``hash(seed, stream, epoch, round, index, k)``.
Words are chained through the finaliser of MurmurHash3 (Austin Appleby, public domain), a bijection of 32
bits: for the same earlier words, different last words give different hashes.

The same expressions run on Python integers, on NumPy ``uint64`` arrays, and on TensorFlow ``int64`` tensors
(whose products wrap around; the low 32 bits are the same): :func:`chain` takes the shift of the three.
"""

import functools
import operator
from typing import Callable

import numpy as np

from ipucnn.aliases import Numbers

MASK = 0xFFFFFFFF
ORDER, AUGMENT, LIMIT, ERASE, MIX = 1, 2, 3, 4, 5
"""Streams: numbers drawn for one purpose say nothing about another."""


def mix(word: Numbers, shift: Callable[[Numbers, Numbers], Numbers] = operator.rshift) -> Numbers:
    """MurmurHash3's 32-bit finaliser of words in [0, 2**32)."""
    word = word ^ shift(word, 16)
    word = (word * 0x85EBCA6B) & MASK
    word = word ^ shift(word, 13)
    word = (word * 0xC2B2AE35) & MASK
    return word ^ shift(word, 16)


def chain(
    state: Numbers, word: Numbers, shift: Callable[[Numbers, Numbers], Numbers] = operator.rshift
) -> Numbers:
    """The state after one more word; both in [0, 2**32).  The state is also the hash of all words so far."""
    return mix(((state ^ word) + 0x9E3779B9) & MASK, shift)


@functools.lru_cache(maxsize=64)
def stream_state(seed: int, stream: int) -> int:
    """The state every chain of ``stream`` starts from.  ``seed`` is any integer, taken modulo 2**64."""
    seed %= 2**64
    return chain(chain(chain(0, seed & MASK), seed >> 32), stream)


def draw(seed: int, stream: int, *words: Numbers) -> Numbers:
    """One hash in [0, 2**32) of non-negative words below 2**32; of arrays of words, uint64, an array of hashes."""
    state: Numbers = stream_state(seed, stream)
    for word in words:
        state = chain(state, word)
    return state


def uniform(state: int, word: int) -> float:
    """The hash of one more word after ``state``, which :func:`draw` gave, in [0, 1), a multiple of 2**-32."""
    return chain(state, word) / 2.0**32


def permutation(size: int, seed: int, stream: int, *words: int) -> np.ndarray:
    """int64 [size]: 0 .. size - 1 in the order of their hashes."""
    # Arrays, not NumPy scalars: Python integers beside uint64 arrays stay uint64 on every NumPy.
    state = draw(seed, stream, *words)
    keys = chain(state, np.arange(size, dtype=np.uint64))
    return np.argsort(keys, kind="stable").astype(np.int64)
