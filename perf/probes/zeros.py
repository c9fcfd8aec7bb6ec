"""Question 2: do whole zero k16 groups leave bits unchanged, -0 included?

Zero groups are put before, between and after the groups of ordinary operands, with zeros of either
sign on one side or both, and the result is compared with that of the operands alone.  A last case
starts from C = -0 and adds nothing but zero groups.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import inputs
from .tally import Answer, Tally, product
from .wgmma_kernel import GROUP_K, Chain

CHAINS = (Chain(64, block_k=16), Chain(256, block_k=16), Chain(8, block_k=16))
#: What stands in a zero group: (A, B); None keeps random numbers there.
FILLERS = {
    "+0 x +0": (0.0, 0.0),
    "-0 x -0": (-0.0, -0.0),
    "+0 x random": (0.0, None),
    "-0 x random": (-0.0, None),
    "random x +0": (None, 0.0),
    "random x -0": (None, -0.0),
}
PLACES = ("before", "between", "after")


def padded(
    a: torch.Tensor, b: torch.Tensor, filler: tuple[float | None, float | None], place: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B with zero groups at one place; "between" doubles K, the others add two groups."""

    def fill(t: torch.Tensor, value: float | None) -> torch.Tensor:
        return t.roll(1, 0) if value is None else torch.full_like(t, value)

    def insert(t: torch.Tensor, value: float | None) -> torch.Tensor:
        if place == "between":
            groups = t.unflatten(1, (-1, GROUP_K))
            return torch.stack([groups, fill(groups, value)], 2).flatten(1).contiguous()
        extra = fill(t[:, : 2 * GROUP_K], value)
        return torch.cat([extra, t] if place == "before" else [t, extra], 1).contiguous()

    return insert(a, filler[0]), insert(b, filler[1])


def run(
    build,
    *,
    device: str = "cuda",
    size: tuple[int, int, int] = (512, 512, 128),
    chains: tuple[Chain, ...] = CHAINS,
) -> Iterator[dict]:
    """One record per chain, filler and place, then the answer."""
    answer, operands = Answer(), inputs.every(*size, device=device)
    for chain in chains:
        call = build(chain, with_c=True)
        want = {kind: product(call, *three) for kind, three in operands.items()}
        for name, filler in FILLERS.items():
            for place in PLACES:
                results = (
                    (kind, product(call, *padded(a, b, filler, place), c), want[kind])
                    for kind, (a, b, c) in operands.items()
                )
                yield {"case": f"{chain}, {name} {place}"} | answer.add(results).items()
            a, b, _ = operands["normal"]
            a, b = (t[:, : 2 * GROUP_K].contiguous() for t in (a, b))
            a, b = (t if v is None else t * 0 + v for t, v in zip((a, b), filler, strict=True))
            minus, tally = torch.full((len(a), len(b)), -0.0, device=device), Tally()
            tally.add(product(call, a, b, minus), minus, "C = -0")
            answer.ordinary.merge(tally)
            yield {"case": f"{chain}, {name} on C = -0"} | tally.items()
    yield answer.items()
