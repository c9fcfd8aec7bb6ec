"""Times of a mixed batch over paged caches: python -m perf.attention.mixed

200 decoding sequences of 4096 keys and 4 whole prompts of 2048 tokens in one call, 32 query heads
of 128 over 8 KV heads, bf16, in CUDA graphs, in turns in one process, cold L2: `ck.paged_attention`
with pages of 16, 128 and 256 keys in random order, FA4's varlen forward over pages of 128.  Before
it is timed, every row of ours must have the bytes of the dense forward of its sequence alone, and
FA4's must be as far from them as bf16 allows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

import cute_kernels as ck

from ..core.bits import same_bytes
from ..core.rival import Absent, module
from .paged_page import MIXED, mixed_key
from .paged_records import Inputs, Paged, bodies, common, dense, in_turns, keep, options

#: (queries, keys) of each sequence; every number of keys is a multiple of every page size.
SEQUENCES = [(1, MIXED[1])] * MIXED[0] + [(MIXED[3], MIXED[3])] * MIXED[2]
PAGES = (16, 128, 256)
FA4_PAGE = 128
#: Largest difference of one bf16 output of FA4 from ours; a wrong mask or page is above 0.1.
FAR = 0.03


def fa4(t: Paged) -> Callable:
    """FA4's forward over the same pages."""
    call = module("flash_attn.cute").flash_attn_varlen_func
    return functools.partial(
        call, t.q, t.k_cache, t.v_cache, cu_seqlens_q=t.cu_seqlens_q, seqused_k=t.seqlens_k,
        page_table=t.block_table, max_seqlen_q=max(SEQUENCES)[0], causal=True,
    )  # fmt: skip


def systems(t: Inputs) -> dict[str, Callable]:
    """Calls that are timed, by name."""
    calls = {
        f"page {size}": functools.partial(ck.paged_attention, *Paged.of(t, SEQUENCES, size))
        for size in PAGES
    }
    try:
        return calls | {"fa4": fa4(Paged.of(t, SEQUENCES, FA4_PAGE))}
    except Absent:
        return calls


def require_results(calls: dict[str, Callable], t: Inputs) -> None:
    """Raise if a row of ours is not its row in a dense forward, or FA4's is another result."""
    query_rows, key_rows = (torch.tensor(c).tolist() for c in zip(*SEQUENCES, strict=True))
    parts = [t.q.split(query_rows), t.k.split(key_rows), t.v.split(key_rows)]
    alone = [dense(*(rows[None] for rows in rows_of)) for rows_of in zip(*parts, strict=True)]
    want = torch.cat(alone, dim=1)[0]
    for name, call in calls.items():
        got = call()
        if name == "fa4":
            got = got[0] if isinstance(got, tuple) else got
            far = (got.float() - want.float()).abs().max().item()
            if not far <= FAR:
                raise AssertionError(f"fa4: {far} from ours")
        elif not same_bytes(got, want):
            raise AssertionError(f"{name}: rows differ from the dense forward's")


def main() -> None:
    """Append the records of every system, and print the medians."""
    arguments = options(__doc__)
    first = Inputs.drawn(SEQUENCES, 0)
    calls, nbytes = systems(first), 2 * first.k.nbytes
    require_results(calls, first)
    times = in_turns(calls, lambda seed: systems(Inputs.drawn(SEQUENCES, seed)), nbytes)
    keep(arguments.output, list(bodies(mixed_key(), times, nbytes, common(arguments.commit))))


if __name__ == "__main__":
    main()
