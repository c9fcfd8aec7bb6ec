"""Operands of products that TMA can address."""

from __future__ import annotations

import tempfile

import torch

from cute_kernels.runtime.operands import padded_empty


def operand(rows: int, columns: int, dtype: torch.dtype, major: str, seed: int) -> torch.Tensor:
    """Random [rows, columns], row-major (``"k"``) or column-major (``"mn"``), TMA-addressable."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator).to(dtype)
    shape = (rows, columns) if major == "k" else (columns, rows)
    storage = padded_empty(values, *shape)
    storage.copy_(values if major == "k" else values.mT)
    return storage if major == "k" else storage.mT


def cancelling(rows: int, n: int, k: int, dtype: torch.dtype, seed: int):
    """[rows, k] and [n, k] whose products cancel: 16-bit outputs show the order of a sum.

    The second half of K takes back what the first has added, in another sequence.  What is left is
    what was lost on the way.
    """
    generator = torch.Generator().manual_seed(seed)
    half = k // 2
    a, b = (torch.randn(size, k, generator=generator) for size in (rows, n))
    a[:, 2 * half :] = 0
    sequence = torch.randperm(half, generator=generator)
    a[:, half : 2 * half], b[:, half : 2 * half] = -a[:, sequence], b[:, sequence]
    return operand_of(a.to(dtype)), operand_of(b.to(dtype))


def operand_of(values: torch.Tensor) -> torch.Tensor:
    """``values`` as TMA can address them, row-major."""
    storage = padded_empty(values, *values.shape)
    return storage.copy_(values)


def far_apart(t: torch.Tensor, strides: tuple[int, ...] = (2**30, 1)) -> torch.Tensor:
    """The values of a tensor in a sparse file, element 2³¹ among them."""
    size = sum(s * (n - 1) for s, n in zip(strides, t.shape, strict=True)) + 1
    with tempfile.NamedTemporaryFile() as file:
        storage = torch.from_file(file.name, shared=True, size=size, dtype=t.dtype)
    return storage.as_strided(t.shape, strides).copy_(t)
