"""Question 5: are the bits of a product those of every instruction that a kernel may take for it?

WGMMA with A from registers, CuTe's ``mma.sync`` and Triton's ``tl.dot`` (which takes ``mma.sync``
below 64 rows, and WGMMA from there) are compared with WGMMA from shared memory, bit by bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from . import inputs
from .tally import Answer, product
from .wgmma_kernel import Chain

REFERENCE = Chain(64)
CHAINS = (Chain(64, registers=True), Chain(256, registers=True), Chain(128, 2, registers=True))
#: (rows, columns, K) of one ``tl.dot``.
DOTS = ((16, 16, 16), (16, 64, 64), (32, 64, 16), (64, 64, 16), (64, 64, 64), (128, 32, 32))


def name(chain: Chain) -> str:
    """The case of a chain."""
    return f"{chain}, A from registers"


def on_card() -> dict[str, Callable]:
    """Name -> run(a, b, d, c) of what is compared, but for chains of WGMMA."""
    from . import sync_kernel, triton_kernel

    dots = {
        f"tl.dot of {m} x {n} x {k}": functools.partial(
            triton_kernel.chain, block_m=m, block_n=n, block_k=k
        )
        for m, n, k in DOTS
    }
    return {"mma.sync": sync_kernel.build(with_c=True)} | dots


def run(
    build,
    *,
    device: str = "cuda",
    size: tuple[int, int, int] = (1024, 1024, 256),
    chains: tuple[Chain, ...] = CHAINS,
    others: Callable[[], dict[str, Callable]] = on_card,
) -> Iterator[dict]:
    """One record per instruction, then the answer."""
    answer, operands = Answer(), inputs.every(*size, device=device)
    calls = {name(chain): build(chain, with_c=True) for chain in chains} | others()
    reference = build(REFERENCE, with_c=True)
    want = {kind: product(reference, *three) for kind, three in operands.items()}
    for case, call in calls.items():
        results = ((kind, product(call, *three), want[kind]) for kind, three in operands.items())
        yield {"case": case, "k": size[2]} | answer.add(results).items()
    yield answer.items()
