"""Question 5: are the bits of a product those of every instruction that a kernel may take for it?

WGMMA with A from registers, CuTe's ``mma.sync`` and Triton's ``tl.dot`` (which takes ``mma.sync``
below 64 rows, and WGMMA from there) are compared with WGMMA from shared memory, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import inputs
from .tally import Tally, poisoned
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
    import functools

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
    m, n, k = size
    ordinary, extreme = Tally(), Tally()
    calls = {name(chain): build(chain, with_c=True) for chain in chains} | others()
    kinds = inputs.ORDINARY | inputs.EXTREME
    operands = {kind: inputs.make(kind, m, n, k, device=device) for kind in kinds}
    want = {kind: poisoned(m, n, device) for kind in kinds}
    reference = build(REFERENCE, with_c=True)
    for kind, (a, b, c) in operands.items():
        reference(a, b, want[kind], c)
    for case, call in calls.items():
        of_call = Tally()
        for kind, (a, b, c) in operands.items():
            got, tally = poisoned(m, n, device), Tally()
            call(a, b, got, c)
            tally.add(got, want[kind], kind)
            of_call.merge(tally)
            (ordinary if kind in inputs.ORDINARY else extreme).merge(tally)
        yield {"case": case, "k": k} | of_call.items()
    yield {"case": "answer"} | ordinary.items() | {"extreme": extreme.items()}
