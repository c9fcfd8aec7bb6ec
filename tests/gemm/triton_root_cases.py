"""Properties of the Triton kernel that adds leaves, for the simulator and the interpreter.

Each check takes ``add(out, sums, bias)``, and compares it with torch's adds on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from cute_kernels.gemm import op

from .triton_cases import differing

Add = Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor | None], torch.Tensor]
FP32 = torch.float32
#: Leaves of each tensor: one leaf, one tensor, and what ranks hold of eight.
SPLITS = ((1,), (8,), (1, 1), (1, 4), (6, 2), (2, 2, 4), (4, 2, 2), (1, 1, 6))
#: (M, N): one element, ragged tails of a program, several programs, multiples of 16.
SHAPES = ((1, 1), (3, 33), (2, 300), (5, 256), (1, 1040))


def leaves_of(count: int, m: int, n: int, nan: bool = True) -> torch.Tensor:
    """[count, M, N] of many magnitudes, with sums of -0, of subnormals, Inf, Inf - Inf and NaN."""
    generator = torch.Generator().manual_seed(1000 * count + n)
    parts = torch.randn(count, m * n, generator=generator)
    parts *= torch.exp2(torch.randint(-12, 13, parts.shape, generator=generator).float())
    parts[:, 0::11], parts[:, 1::11] = -0.0, parts[:, 1::11] * 1e-41
    parts[-1, 2::11] = torch.inf
    if nan:
        parts[0, 3::11], parts[0, 2::22] = torch.nan, -torch.inf
    return parts.view(count, m, n)


def bias_of(n: int) -> torch.Tensor:
    """A bias with elements of +0 and -0, by every third element of a longer tensor."""
    bias = torch.randn(n, 3, generator=torch.Generator().manual_seed(n))[:, 0]
    bias[::11] = -0.0
    return bias


def cut(parts: torch.Tensor, split: tuple[int, ...]) -> list[torch.Tensor]:
    """The leaves in tensors of their own; the second one's are rows in the middle of others."""
    sums = [part.clone() for part in parts.split(split)]
    if len(sums) > 1:
        count, m, n = sums[1].shape
        longer = torch.full((count, m + 5, n), torch.nan)
        longer[:, 2 : 2 + m] = sums[1]
        sums[1] = longer[:, 2 : 2 + m]
    return sums


def cases() -> Iterator[tuple[list[torch.Tensor], torch.Tensor | None]]:
    """Sums and biases: every split at a ragged size, and every shape."""
    for split in SPLITS:
        yield cut(leaves_of(sum(split), 3, 97), split), bias_of(97)
        yield cut(leaves_of(sum(split), 3, 97), split), None
    for m, n in SHAPES:
        yield cut(leaves_of(8, m, n), (2, 2, 4)), bias_of(n)
        yield cut(leaves_of(8, m, n), (2, 2, 4)), None


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Every byte agrees; of NaN, that it is one: its payload is the device's."""
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    assert differing(got[~nan], want[~nan]) == 0


def bytes_of_torch(add: Add, dtype: torch.dtype = FP32) -> None:
    for sums, bias in cases():
        bias = None if bias is None else bias.to(dtype)
        shape = sums[0].shape[1:]
        want = op.add_leaves_into(torch.empty(shape, dtype=dtype), sums, bias)
        same(add(torch.full(shape, torch.nan, dtype=dtype), sums, bias), want)


def in_place(add: Add) -> None:
    """A running sum and leaves -> a running sum, in the memory of the first."""
    for split in ((1,), (1, 2), (4,)):
        sums = cut(leaves_of(sum(split), 3, 97), split)
        want = op.add_leaves_into(torch.empty(3, 97), sums, None)
        rest = [part.clone() for part in (sums[0][1:], *sums[1:])]
        same(add(sums[0][0], sums, None), want)
        for part, before in zip((sums[0][1:], *sums[1:]), rest, strict=True):
            assert differing(part, before) == 0


def minus_zeros(add: Add) -> None:
    """Sums of -0 keep their sign, whatever tensor the leaves are in."""
    for split in SPLITS:
        sums = [torch.full((count, 2, 40), -0.0) for count in split]
        out = add(torch.full((2, 40), torch.nan), sums, None)
        assert torch.signbit(out).all() and not out.any()


def nothing_else_is_written(add: Add) -> None:
    """Rows around the result keep their bytes."""
    for bias in (None, bias_of(97)):
        whole = torch.full((9, 97), 7.0)
        add(whole[3:6], [leaves_of(8, 3, 97)], bias)
        assert (whole[:3] == 7).all() and (whole[6:] == 7).all()
