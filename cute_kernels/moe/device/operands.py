"""Fake operands that the kernels of y = x W[e]ᵀ are compiled against."""

import cutlass
from cutlass import cute

from ...compile import fake


def fakes(dtype: str, weight_major: str, bias: bool) -> tuple:
    """(x [T, K], W [N, K, E], y [T, N], offsets [E + 1], bias [E, N] or None, number of CTAs)."""
    t, n, k, experts = fake.size(), fake.size(), fake.size(), fake.size()
    # [N, K, E] whose strides, but for one of 1, are multiples of 16 bytes.
    element = fake.DTYPES[dtype]
    step = fake.TMA_ALIGN * 8 // element.width
    lead, outer = (cute.sym_int64(divisibility=step) for _ in range(2))
    stride = (lead, 1, outer) if weight_major == "k" else (1, lead, outer)
    return (
        fake.matrix(dtype, t, k, "k"),
        fake.make_fake_tensor(
            element, (n, k, experts), stride, assumed_align=fake.TMA_ALIGN
        ),
        fake.matrix(dtype, t, n, "k"),
        fake.compact(cutlass.Int32, (fake.size(),)),
        fake.rows(dtype, experts, n) if bias else None,
        cutlass.Int32(1),
    )  # fmt: skip


def leaves(rows: cutlass.Int32, columns: cutlass.Int32) -> cute.Tensor:
    """Leaves of y in fp32, [T, N, leaves]."""
    step = fake.TMA_ALIGN // 4
    lead, outer = (cute.sym_int64(divisibility=step) for _ in range(2))
    shape = (rows, columns, fake.size())
    return fake.make_fake_tensor(
        cutlass.Float32, shape, (lead, 1, outer), assumed_align=fake.TMA_ALIGN
    )
