"""Question 1: are WGMMA bits the same for every instruction N, tile shape and operand order?

Every variant multiplies the operands of the m64n64k16 chain and is compared with it bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import inputs
from .tally import Tally, poisoned
from .wgmma_kernel import Chain

REFERENCE = Chain(64)
WIDTHS = tuple(range(8, 257, 8))
TILES = (
    *(Chain(n, warpgroups=2) for n in (64, 128, 192, 256)),
    *(Chain(n, block_k=block_k) for n in (64, 256) for block_k in (16, 32, 128)),
)


def run(
    build,
    *,
    device: str = "cuda",
    size: tuple[int, int, int] = (1024, 1024, 256),
    widths: tuple[int, ...] = WIDTHS,
    tiles: tuple[Chain, ...] = TILES,
) -> Iterator[dict]:
    """One record per variant, then the answer."""
    m, n, k = size
    ordinary, extreme = Tally(), Tally()
    operands = {
        kind: inputs.make(kind, m, n, k, device=device) for kind in inputs.ORDINARY | inputs.EXTREME
    }
    reference = build(REFERENCE, with_c=True)
    want = {}
    for kind, (a, b, c) in operands.items():
        want[kind] = poisoned(m, n, device)
        reference(a, b, want[kind], c)
    for chain in (*(Chain(width) for width in widths), *tiles):
        call = build(chain, with_c=True)
        for swap in (False, True):
            variant_tally = Tally()
            for kind, (a, b, c) in operands.items():
                got = poisoned(m, n, device)
                call(a, b, got, c, swap=swap)
                tally = Tally()
                tally.add(got, want[kind], kind)
                variant_tally.merge(tally)
                (ordinary if kind in inputs.ORDINARY else extreme).merge(tally)
            yield {"case": f"{chain}, swap={swap}", "k": k} | variant_tally.items()
    yield {"case": "answer"} | ordinary.items() | {"extreme": extreme.items()}
