"""Question 6: has 2^x one value, whichever compiler made the kernel?

Every finite fp32 up to 2^7 in magnitude, and both infinities, by CuTe's kernel and by Triton's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .tally import Tally

_BITS_OF_128 = 0x43000000
_PART = 1 << 24


def on_card() -> tuple[Callable, Callable]:
    """run(x, y) of CuTe and of Triton."""
    from . import sync_kernel, triton_kernel

    return sync_kernel.build_exp2(), triton_kernel.exp2


def run(
    build,
    *,
    device: str = "cuda",
    parts: int = _BITS_OF_128 // _PART,
    part: int = _PART,
    kernels: Callable[[], tuple[Callable, Callable]] = on_card,
) -> Iterator[dict]:
    """One record per sign, then the answer.  ``part`` values of each of ``parts`` are compared."""
    of_cute, of_triton = kernels()
    total = Tally()
    for sign in (0, -(1 << 31)):
        tally = Tally()
        for index in range(parts):
            step = _PART // part
            bits = torch.arange(index * _PART, (index + 1) * _PART, step, device=device)
            bits = (bits + sign).to(torch.int32)
            bits[-1] = 0x7F800000 + sign  # infinity
            x = bits.view(torch.float32)
            got, want = (torch.full_like(x, float("nan")) for _ in range(2))
            of_cute(x, want)
            of_triton(x, got)
            tally.add(got[None], want[None], f"from {float(x[0])}")
        total.merge(tally)
        yield {"case": "negative" if sign else "positive"} | tally.items()
    yield {"case": "answer"} | total.items()
