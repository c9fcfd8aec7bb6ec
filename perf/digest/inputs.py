"""Inputs that every machine draws alike: whole-number arithmetic, no generator of any library.

Element i of a tensor, in C order, comes from the i-th word of SplitMix64, with everything mod 2^64:

    key    the first 8 bytes of SHA-256("<case>/<tensor>/<seed>"), little-endian
    z    = key + (i + 1) * 0x9E3779B97F4A7C15
    z    = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
    z    = (z ^ z >> 27) * 0x94D049BB133111EB
    word = z ^ z >> 31

A number takes its sign from bit 63, its power of two (1, 0, ... -6) from bits 60 to 62, and its
fraction from the lowest 7 (bf16), 10 (fp16) or 23 (fp32) bits; where bits 54 to 59 are 0 it is a
zero of that sign.  So no value is rounded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SEED = 20_261_120
_TOP = 1  # the largest power of two: values lie below 4, their root mean square is 1.2
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Format:
    """A floating-point format: its width, bits of fraction and bias; a whole number as wide."""

    width: int
    fraction: int
    bias: int
    whole: type

    def bits(self, word: np.ndarray) -> np.ndarray:
        """The bit patterns of the numbers that these words stand for, uint64."""
        octave = word >> np.uint64(60) & np.uint64(7)
        patterns = np.uint64(self.bias + _TOP) - octave << np.uint64(self.fraction)
        patterns |= word & np.uint64((1 << self.fraction) - 1)
        patterns[(word >> np.uint64(54) & np.uint64(63)) == 0] = 0
        return patterns | word >> np.uint64(63) << np.uint64(self.width - 1)


FORMATS = {
    torch.bfloat16: Format(16, 7, 127, np.int16),
    torch.float16: Format(16, 10, 15, np.int16),
    torch.float32: Format(32, 23, 127, np.int32),
}


def words(key: int, count: int, start: int = 0) -> np.ndarray:
    """Words start .. start + count - 1 of SplitMix64 from `key`, uint64."""
    z = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(key)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def key_of(case: str, tensor: str, seed: int) -> int:
    """Key from which the words of one tensor are counted."""
    text = f"{case}/{tensor}/{seed}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


@dataclass(frozen=True)
class Draw:
    """The tensors of one case, by name, on the CPU."""

    case: str
    seed: int = SEED

    def numbers(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of bf16, fp16 or fp32."""
        kind = FORMATS[dtype]
        raw = self._filled(name, math.prod(shape), kind.bits, kind.whole)
        return raw.view(dtype).reshape(shape)

    def below(self, name: str, limit: int, shape: tuple[int, ...]) -> Tensor:
        """Numbers of 0 .. limit - 1 as int32: the upper half of each word, mod `limit`."""

        def bits(word: np.ndarray) -> np.ndarray:
            return (word >> np.uint64(32)) % np.uint64(limit)

        return self._filled(name, math.prod(shape), bits, np.int32).reshape(shape)

    def _filled(self, name: str, count: int, bits: Callable, dtype: type) -> Tensor:
        """`bits` of each word of a tensor as whole numbers, a cache's worth of words at a time."""
        key, out = key_of(self.case, name, self.seed), np.empty(count, dtype)
        for start in range(0, count, _CHUNK):
            chunk = out[start : start + _CHUNK]
            chunk[:] = bits(words(key, len(chunk), start)).astype(dtype)
        return torch.from_numpy(out)
