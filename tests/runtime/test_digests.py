"""Digests of tensors: the formula, what they see and what they do not, and mutants."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.runtime import digests

SIZES = [0, 1, 5, digests.BLOCK, digests.BLOCK + 1, 3 * digests.BLOCK + 7]
DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int8, torch.complex64]


def multiplier(i: int) -> int:
    """SplitMix64 of i + 1, made odd."""
    z = (i + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) | 1


def formula(values: list[int]) -> int:
    """The digest of integers in Python, without wraparound before the end of a block."""
    n, size = len(values), digests.BLOCK
    while True:
        blocks = [values[i : i + size] for i in range(0, max(1, len(values)), size)]
        sums = [sum(multiplier(i) * v for i, v in enumerate(block)) % 2**64 for block in blocks]
        if len(sums) == 1:
            return (sums[0] + n + 1) % 2**64
        halves = [half for s in sums for half in (s % 2**32, s >> 32)]
        values = [half - 2**32 if half >= 2**31 else half for half in halves]


def drawn(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size + seed)
    return torch.randint(-(2**31), 2**31, (size,), generator=generator, dtype=torch.int32)


def of(t: torch.Tensor | None) -> int:
    return digests.digests([t])[0]


@pytest.mark.parametrize("size", SIZES)
def test_the_formula(size):
    values = drawn(size)
    assert of(values) % 2**64 == formula(values.tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_of_the_values_not_of_the_layout(dtype):
    t = drawn(2 * 3 * 8).view(dtype) if dtype.itemsize <= 4 else drawn(2 * 3 * 8).to(dtype)
    t = t[: len(t) // 6 * 6].view(6, -1)
    strided = torch.zeros(6, 3 * t.shape[1], dtype=dtype)[:, 1::3]
    strided.copy_(t)
    assert of(t) == of(strided) == of(t.mT.contiguous().mT)
    assert of(t) != of(t.mT) and of(t) != of(t.flip(0))


def test_zeros_views_and_several_at_once():
    zeros, t = torch.zeros(5), torch.randn(7, dtype=torch.complex64)
    assert of(zeros) not in (of(-zeros), of(zeros[:4]), of(None))
    assert of(None) == 0 and of(torch.zeros(0)) != 0
    assert of(t.conj()) == of(t.conj().resolve_conj()) != of(t)
    assert of(t.conj().imag) == of(-t.imag)
    some = [drawn(5), None, torch.ones(3, dtype=torch.bool), torch.zeros(0)]
    assert digests.digests(some) == [of(t) for t in some] and digests.digests([]) == []


def unseen(size: int) -> list[str]:
    """Changes of random values that leave the digest as it was."""
    values = drawn(size).tolist()
    i, j = 1, size - 2
    swapped = values[:]
    swapped[i], swapped[j] = values[j], values[i]
    changed = {
        "one bit": [v ^ (k == j) for k, v in enumerate(values)],
        "two signs": [v ^ -(2**31) if k in (i, j) else v for k, v in enumerate(values)],
        "swapped": swapped,
        "reversed": values[::-1],
        "rotated": values[1:] + values[:1],
        # Σ i v_i of these is that of the values: multipliers that are linear in i do not see it.
        "balanced": [v + {0: 1, 1: -2, 2: 1}.get(k, 0) for k, v in enumerate(values)],
    }
    before = of(drawn(size))
    return [
        name
        for name, after in changed.items()
        if of(torch.tensor(after, dtype=torch.int64).to(torch.int32)) == before
    ]


@pytest.mark.parametrize("size", SIZES[2:])
def test_every_change_is_seen(size):
    assert not unseen(size)


@pytest.mark.parametrize(
    ("multipliers", "survivors"),
    [
        (torch.ones(digests.BLOCK, dtype=torch.int64), ["swapped", "reversed", "rotated"]),
        (torch.arange(digests.BLOCK) * 2 + 1, ["balanced"]),
    ],
    ids=["without positions", "linear in the position"],
)
def test_a_mutant_is_killed(monkeypatch, multipliers, survivors):
    monkeypatch.setattr(digests, "_multipliers", lambda device: multipliers)
    assert set(survivors) <= set(unseen(5))
