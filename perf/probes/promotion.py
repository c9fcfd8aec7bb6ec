"""Question 4: what do fp32 promotion points cost?

The tensor cores run from one resident block of shared memory, on every SM, once as one chain and
once with a leaf of P k16 groups added to fp32 registers by CUDA cores.  There are no loads to hide
behind, so the extra time is the most that promotion can cost a mainloop of that tile.  A promoted
tile holds two accumulators, so 64 x 256 per warpgroup does not fit the register file.

The bits of promoted sums are compared with the model as well; and if gemm has the order "tree", its
dense kernel is timed against "chain".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..core import timing
from ..gemm import targets
from . import inputs, truncation
from .tally import Tally, poisoned, product
from .wgmma_kernel import Chain

PERIODS = (4, 8, 16, 32, 64)
TILES = ((128, 1), (128, 2), (192, 2))  # (n, warpgroups)
DENSE_SHAPE = "mlp_down"


@dataclass(frozen=True)
class Plan:
    """(n, warpgroups) tiles, timed over k with leaves of each period; the size of the bits."""

    tiles: tuple[tuple[int, int], ...] = TILES
    periods: tuple[int, ...] = PERIODS
    k: int = 1 << 17
    size: tuple[int, int, int] = (2048, 2048, 1024)
    rounds: int = timing.MIN_ROUNDS


def run(
    build, plan: Plan | None = None, *, device: str = "cuda", units: int | None = None, clock=None
) -> Iterator[dict]:
    """One record per tile and period with its time over the chain's, then the answer."""
    plan = plan or Plan()
    if units is None:
        units = torch.cuda.get_device_properties(0).multi_processor_count
    worst: dict[int, float] = {}
    for n, warpgroups in plan.tiles:
        chains = {
            p: Chain(n, warpgroups, promote_every=p, resident=True) for p in (0, *plan.periods)
        }
        for period, body in _times(build, chains, plan, device, units, clock).items():
            worst[period] = max(worst.get(period, body["cost"]), body["cost"])
            yield {"case": f"{64 * warpgroups}x{n}, leaf of {period} groups"} | body
    tally = Tally()
    for period in plan.periods:
        tally.merge(_bits(build, Chain(128, promote_every=period), device, plan.size))
    dense = _dense(plan.rounds, clock) if device == "cuda" else {"absent": "needs the card"}
    costs = {str(p): worst[p] for p in plan.periods}
    yield {"case": "answer", "costs": costs, "dense": dense} | tally.items()


def _times(build, chains, plan: Plan, device, units, clock) -> dict[int, dict]:
    """Median time of each chain on every SM, in turns; cost: time over the chain's, less 1."""
    reference_chain, k = chains[0], plan.k
    draw = inputs.Draw(4, device)

    def rows(count: int) -> torch.Tensor:
        # Only block 0 is read, so rows may share memory: row i starts block_k elements after i - 1.
        base = draw.normal(count * reference_chain.block_k + k).to(torch.bfloat16)
        return base.as_strided((count, k), (reference_chain.block_k, 1))

    a, b = rows(reference_chain.tile_m * units), rows(reference_chain.n)
    d = poisoned(a.shape[0], reference_chain.n, device)
    calls = {}
    for period, chain in chains.items():
        compiled = build(chain)
        calls[str(period)] = lambda _, compiled=compiled: compiled(a, b, d)
        calls[str(period)](0)
    times = timing.interleave(calls, rounds=plan.rounds, clock=clock)
    base = times["0"].median
    flops = 2 * a.shape[0] * reference_chain.n * k
    return {
        period: {
            "median_us": times[str(period)].median,
            "p10_us": times[str(period)].p10,
            "p90_us": times[str(period)].p90,
            "backlog": times[str(period)].backlog,
            "tflops": flops / times[str(period)].median / 1e6,
            "cost": times[str(period)].median / base - 1,
        }
        for period in chains
    }


def _bits(build, chain: Chain, device: str, size: tuple[int, int, int]) -> Tally:
    m, n, k = size
    a, b, c = inputs.make("normal", m, n, k, device=device, seed=2)
    got, tally = product(build(chain, with_c=True), a, b, c), Tally()
    want = truncation.chain(a, b, c, promote_every=chain.promote_every)
    tally.add(got, want, f"leaf of {chain.promote_every} groups")
    return tally


def _dense(rounds: int, clock) -> dict:
    """Cost of ck.linear's "tree" over "chain" at one long-K shape, or why it has no "tree"."""
    import cute_kernels as ck

    m, k, n = targets.shape_of(DENSE_SHAPE)
    draw = inputs.Draw(5, "cuda")
    x, w = (draw.normal(rows, k).to(torch.bfloat16) for rows in (m, n))
    calls = {}
    for order in ("chain", "tree"):
        calls[order] = lambda _, order=order: ck.linear(x, w, order=order)
        try:
            calls[order](0)
        except ck.errors.CuteKernelsError as error:
            return {"absent": f"order {order!r}: {error}"}
    times = timing.interleave(calls, rounds=rounds, clock=clock)
    medians = {order: stats.median for order, stats in times.items()}
    return {"median_us": medians, "cost": medians["tree"] / medians["chain"] - 1}
