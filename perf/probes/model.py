"""Question 3: does the truncation model predict every bit?

The card's D is compared with `truncation.chain` (run on the card too, in float64) for chains from
zero and from C, with and without promotion, short and long K.  Kinds that the model predicts in
full become golden vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from . import golden, inputs, truncation
from .tally import Answer, product
from .wgmma_kernel import Chain

#: (chain, starts from C, (M, N, K)): 4 + 4 + 1 + 2 million outputs for each kind.
CASES = (
    (Chain(256), False, (2048, 2048, 128)),
    (Chain(256), True, (2048, 2048, 128)),
    (Chain(256), True, (1024, 1024, 4096)),
    (Chain(128, promote_every=4), True, (2048, 1024, 512)),
)


def run(
    build,
    *,
    device: str = "cuda",
    cases=CASES,
    golden_path: Path | None = None,
    about: dict | None = None,
) -> Iterator[dict]:
    """One record per case and kind, then the answer; writes `golden_path` if it is given."""
    answer, exact = Answer(), set(inputs.ORDINARY | inputs.EXTREME)
    for chain, with_c, (m, n, k) in cases:
        call = build(chain, with_c=with_c)
        for kind, (a, b, c) in inputs.every(m, n, k, device=device, seed=k).items():
            c = c if with_c else None
            want = truncation.chain(a, b, c, promote_every=chain.promote_every)
            tally = answer.add([(kind, product(call, a, b, c), want)])
            if tally.differ:
                exact.discard(kind)
            head = {"case": f"{chain}, from {'C' if with_c else 'zero'}, {kind}", "k": k}
            yield head | tally.items()
    last = answer.items()
    if golden_path is not None and exact:
        write_golden(build, golden_path, sorted(exact), device, about or {})
        last |= {"golden": golden_path.name, "golden_kinds": sorted(exact)}
    yield last


def write_golden(build, path: Path, kinds: list[str], device: str, about: dict) -> None:
    """Small operands of each kind and what the card makes of them."""
    m, n, k = golden.SIZE
    call = build(Chain(n, block_k=32), with_c=True)
    vectors = {}
    for kind in kinds:
        a, b, c = inputs.make(kind, m, n, k, device=device, seed=1)
        vectors[kind] = (a, b, c, product(call, a, b, c))
    golden.write(path, vectors, about)
