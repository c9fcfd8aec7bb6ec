"""What the tests of other libraries' kernels share: timings and comparisons."""

from __future__ import annotations

from ptxsim import skips

torch = skips.import_module("torch")

LATE = {"async_mode": 1, "wgmma_mode": 1}
RANDOM = {"async_mode": 2, "wgmma_mode": 2, "warp_order": 1, "cta_order": 1}
SCHEDULES = {
    "default": {},
    "one": {"resident_ctas": 1},
    "two": {"resident_ctas": 2},
    "late": LATE,
    "random": RANDOM | {"seed": 11},
    "random-two": RANDOM | {"seed": 12, "resident_ctas": 2},
    "late-descending": LATE | {"cta_order": 2, "warp_order": 1, "seed": 13},
    "two-random-warps": RANDOM | {"cta_order": 0, "resident_ctas": 2, "seed": 14},
}


def relative(found, exact) -> float:
    """Frobenius norm of the difference over that of the reference."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def bf16(*shape):
    return torch.randn(*shape).bfloat16()


def same_bytes(a, b) -> bool:
    return bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all())
