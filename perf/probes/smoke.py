"""Does the toolchain work on this card at all?  One compile, one launch, one library call."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..core.watch import words
from ..gemm import check
from . import inputs
from .tally import product
from .wgmma_kernel import Chain

SIZE = (192, 136, 256)


def run(build, *, device: str = "cuda") -> Iterator[dict]:
    """A WGMMA chain and `ck.linear`, each within the error bound of float64; then the answer."""
    m, n, k = SIZE
    a, b, _ = inputs.make("normal", m, n, k, device=device)
    t = {"x": a, "w": b}

    def chain(t):
        return product(build(Chain(64)), t["x"], t["w"])

    def library(t):
        import cute_kernels as ck

        return ck.linear(t["x"], t["w"])

    good = True
    for name, call in (("wgmma chain", chain), ("ck.linear", library)):
        try:
            outcome = check.check(call, "fwd", t, promised=True)
            body = {"ok": outcome.ok} | outcome.items()
        except Exception as error:
            # The reason is the result of a smoke test.
            body = {"ok": False, "why": words(error)}
        good = good and body["ok"]
        yield {"case": name} | body
    yield {"case": "answer", "verdict": "yes" if good else "no", "torch": torch.__version__}
