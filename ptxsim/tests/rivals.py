"""What the tests of other libraries' kernels share: timings and comparisons."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import pytest

import ptxsim
from ptxsim import skips
from ptxsim.modes import ANY_CTA, LATE, RANDOM

torch = skips.import_module("torch")

#: Of a test module: minutes, of packages that are not ours.
MARKS = [
    pytest.mark.sim,
    pytest.mark.nightly,
    pytest.mark.usefixtures("no_fence_warnings"),
]
SCHEDULES = {
    "default": {},
    "one": {"resident_ctas": 1},
    "two": {"resident_ctas": 2},
    "late": LATE,
    "random": ANY_CTA | {"seed": 11},
    "random-two": ANY_CTA | {"seed": 12, "resident_ctas": 2},
    "late-descending": LATE | {"cta_order": "descending", "warp_order": "random", "seed": 13},
    "two-random-warps": RANDOM | {"resident_ctas": 2, "seed": 14},
}


@contextlib.contextmanager
def patched(package: str, distribution: str) -> Iterator[None]:
    """`patch`, and a seed, for a package; without it the test is skipped."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{distribution} is not installed")
    with ptxsim.patch():
        torch.manual_seed(0)
        yield


def relative(found, exact) -> float:
    """Frobenius norm of the difference over that of the reference."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def bf16(*shape):
    return torch.randn(*shape).bfloat16()


def same_bytes(a, b) -> bool:
    return bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all())
