"""Question 1: are WGMMA bits the same for every instruction N, tile shape and operand order?

Every variant multiplies the operands of the m64n64k16 chain and is compared with it bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import inputs
from .tally import Answer, product
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
    answer, operands = Answer(), inputs.every(*size, device=device)
    reference = build(REFERENCE, with_c=True)
    want = {kind: product(reference, *three) for kind, three in operands.items()}
    for chain in (*(Chain(width) for width in widths), *tiles):
        call = build(chain, with_c=True)
        for swap in (False, True):
            results = (
                (kind, product(call, *three, swap=swap), want[kind])
                for kind, three in operands.items()
            )
            yield {"case": f"{chain}, swap={swap}", "k": size[2]} | answer.add(results).items()
    yield answer.items()
