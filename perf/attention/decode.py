"""Times of decode attention: python -m perf.attention.decode

One query for each of so many sequences, 32 query heads of 128 over 8 KV heads, bf16, in CUDA
graphs, in turns in one process, cold L2: `ck.paged_attention` with pages of 16 and of 256 keys in
random order, `ck.block_sparse_attention` over a key buffer, cuDNN's and flash's SDPA, FA4.  Where
ours have two ways of walking keys ("chain": one CTA, "long": all SMs; the op chooses), both over
pages, the first one over a key buffer, and `sequence_attention` over a static cache of as many
slots, with spans on the GPU.  Before it is timed, each of ours must have the bytes of the dense
forward of each sequence alone, in one kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_kernels as ck
from cute_kernels.sparse_attn import api
from cute_kernels.sparse_attn.kv_ranges import launch as key_buffer
from cute_kernels.sparse_attn.paged import launch
from cute_kernels.sparse_attn.tensors import PagedOptions

from ..core.bits import same_bytes
from ..core.rival import Absent, module
from .paged_page import RIVALS, SIZES, key
from .paged_records import WIDTH, Inputs, Paged, bodies, common, dense, in_turns, keep, options

PAGES = (16, 256)
#: Ways of walking keys, whatever the op chooses.
PLANNERS = {"chain": launch.plan_chain, "long": launch.plan_long}


def drawn(batch: int, keys: int, seed: int) -> Inputs:
    """Random inputs on the GPU: queries [B, 1, Hq, D], keys and values [B, S, Hkv, D]."""
    flat = Inputs.drawn([(1, keys)] * batch, seed)
    return Inputs(*(rows.unflatten(0, (batch, -1)) for rows in flat))


def paged(t: Inputs, size: int) -> Paged:
    """Operands of `ck.paged_attention` for the same keys in pages in random order."""
    flat = Inputs(*(rows.flatten(0, 1) for rows in t))
    return Paged.of(flat, [(1, t.k.shape[1])] * len(t.k), size)


def planned(planner: Callable, operands: tuple[torch.Tensor, ...]) -> Callable:
    """Call of one way of walking keys, which returns [B, Hq, D]."""
    operands = *operands, *PagedOptions(WIDTH**-0.5, (None, 0))
    plan = planner(*operands)
    return lambda: plan.run(*operands)[0]


def sdpa(backend: SDPBackend, t: Inputs) -> torch.Tensor:
    """Attention of torch by one backend."""
    with sdpa_kernel(backend):
        heads_first = (x.transpose(1, 2) for x in t)
        return F.scaled_dot_product_attention(*heads_first, enable_gqa=True)


def spans_of(t: Inputs) -> torch.Tensor:
    """Spans of the last slot's query in a static cache, on the GPU."""
    (batch, slots), position = t.k.shape[:2], torch.tensor(t.k.shape[1] - 1, device=t.k.device)
    sizes = batch, 1, slots
    return api.kv_ranges(None, None, position, 0, sizes, packed=False, device=t.k.device)


def systems(t: Inputs) -> dict[str, Callable]:
    """Calls that are timed, by name; ours return [B, Hq, D]."""
    calls: dict[str, Callable] = {}
    for size in PAGES:
        operands = paged(t, size)
        calls[f"page {size}"] = functools.partial(ck.paged_attention, *operands)
        if launch.is_long(operands[0], *operands[1:4]):
            calls |= {f"{name} {size}": planned(f, operands) for name, f in PLANNERS.items()}
    calls["key buffer"] = lambda: ck.block_sparse_attention(*t, causal=True)[:, 0]
    if key_buffer.is_long(*t):
        spans = spans_of(t)
        calls["key buffer, spans"] = lambda: api.sequence_attention(*t, spans)[:, 0]
        calls["chain key buffer"] = lambda: dense(*t)[:, 0]
    calls["cudnn"] = functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION, t)
    calls["flash"] = functools.partial(sdpa, SDPBackend.FLASH_ATTENTION, t)
    try:
        fa4 = module("flash_attn.cute").flash_attn_func
    except Absent:
        return calls
    return calls | {"fa4": functools.partial(fa4, *t, causal=True)}


def require_bytes(calls: dict[str, Callable], t: Inputs) -> None:
    """Raise if a row is not its row in the dense forward of its sequence alone."""
    for name in calls.keys() - set(RIVALS):
        out = calls[name]()
        for n in range(len(t.q)):
            if not same_bytes(out[n], dense(*(x[n : n + 1] for x in t))[0, 0]):
                raise AssertionError(f"{name}: sequence {n} of {len(t.q)} differs")


def main() -> None:
    """Append records of every size, and print its medians."""
    arguments = options(__doc__)
    shared = common(arguments.commit)
    for batch, keys in SIZES:
        first = drawn(batch, keys, 0)
        calls, nbytes = systems(first), 2 * first.k.nbytes
        require_bytes(calls, first)
        more = functools.partial(drawn, batch, keys)
        times = in_turns(calls, lambda seed, more=more: systems(more(seed)), nbytes)
        keep(arguments.output, list(bodies(key((batch, keys)), times, nbytes, shared)))


if __name__ == "__main__":
    main()
