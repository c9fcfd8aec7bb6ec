"""One element-wise PTX instruction on arrays: thread i works on element i."""

from __future__ import annotations

import numpy as np

from .harness import entry, launch

N = 300  # elements: two CTAs full and one in part
_STORES = {
    "h": "cvt.u64.u16 %d10, %h10; st.global.u64 [%d20], %d10;",
    "r": "cvt.u64.u32 %d10, %r10; st.global.u64 [%d20], %d10;",
    "d": "st.global.u64 [%d20], %d10;",
    "p": "selp.u64 %d10, 1, 0, %p1; st.global.u64 [%d20], %d10;",
    "f": "mov.b32 %r10, %f10; cvt.u64.u32 %d10, %r10; st.global.u64 [%d20], %d10;",
    "g": "mov.b64 %d10, %g10; st.global.u64 [%d20], %d10;",
}


def run_lanes(code: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, result: str) -> np.ndarray:
    """Runs `code` and returns its result as uint64.

    a, b, c: uint64.  Registers 1, 2 and 3 of every kind hold their low bits: %d1, %r1, %h1, %f1
    and %g1 come from a, and so on.
    result: kind of the register, d, r, h, f or g (register 10) or p (predicate 1).
    """
    body = f"""
mov.u32 %r200, %tid.x; mov.u32 %r201, %ctaid.x; mad.lo.s32 %r200, %r201, 128, %r200;
setp.ge.u32 %p20, %r200, %r384; @%p20 bra DONE;
mul.wide.u32 %d30, %r200, 8;
add.u64 %d31, %d50, %d30; ld.global.u64 %d1, [%d31];
add.u64 %d31, %d51, %d30; ld.global.u64 %d2, [%d31];
add.u64 %d31, %d52, %d30; ld.global.u64 %d3, [%d31];
cvt.u32.u64 %r1, %d1; cvt.u32.u64 %r2, %d2; cvt.u32.u64 %r3, %d3;
cvt.u16.u64 %h1, %d1; cvt.u16.u64 %h2, %d2; cvt.u16.u64 %h3, %d3;
mov.b32 %f1, %r1; mov.b32 %f2, %r2; mov.b32 %f3, %r3;
mov.b64 %g1, %d1; mov.b64 %g2, %d2; mov.b64 %g3, %d3;
add.u64 %d20, %d53, %d30;
{code}
{_STORES[result]}
DONE:
"""
    out = np.zeros(len(a), np.uint64)
    text = entry(body, ["u64", "u64", "u64", "u64", "u32"])
    grid = (-(-len(a) // 128), 1, 1)
    launch(text, [a, b, c, out, np.uint32(len(a))], grid=grid, block=(128, 1, 1))
    return out
