"""The SM90 launcher of `paged_attention`: one launch, whose grid follows from sizes of the host."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...compile import cache
from ...compile.call import allocator, bind
from ...compile.kernel import Entry, Expect, Kernel
from ...runtime.operands import addressable, is_addressable
from ...runtime.plan_cache import Plan, launcher
from .. import config
from ..config import PagedConfig
from ..masks import band
from ..tensors import PagedOptions

NAME = "paged_attention"
#: Query rows of a tile, and the keys of a load.
ROWS, BOXES = 64, (16, 32, 64, 128)
#: Registers that the certificates allow: two CTAs an SM start with 128 a thread, one with 256.
_REGISTERS = {2: 128, 1: 255}
_SHARED = {64: 107520, 96: 111616, 128: 115712, 192: 189952, 256: 230400}


def plan_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    *options: object,
) -> Plan:
    """Launch plan of (out, lse) of `paged_attention`; the host reads no length.

    k_cache, v_cache: [pages, rows, Hkv, D], any strides that TMA can address.  options:
    `PagedOptions`; ``run`` takes what the plan takes.
    """
    scale, window, softcap, sinks, _ = PagedOptions(*options)
    tokens, heads, dim = q.shape
    rows, kv_heads = k_cache.shape[1:3]
    flags = softcap > 0, sinks is not None
    kernel_config = PagedConfig(config.DTYPE_NAMES[q.dtype], dim, min(rows, 128), *flags)
    device = q.device
    launch = bind(device, paged_kernel(kernel_config))
    tiles = len(seqlens_k) + -(-tokens * (heads // kv_heads) // ROWS)
    scalars = *band(window), *config.factors(scale, softcap), tiles
    new_out = allocator((tokens, heads, v_cache.shape[3]), q.dtype, device)
    new_lse = allocator((heads, tokens), torch.float32, device)
    direct = all(map(is_addressable, (q, k_cache, v_cache)))

    def run(q, k_cache, v_cache, block_table, seqlens_k, cu_seqlens_q, *options):
        *_, sinks, out = PagedOptions(*options)
        if not direct:
            named = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
            q, k_cache, v_cache = (addressable(t, NAME, name) for name, t in named.items())
        out, lse = new_out() if out is None else out, new_lse()
        sinks = None if sinks is None else sinks.float().contiguous()
        lists = block_table, seqlens_k, cu_seqlens_q
        launch(q, k_cache, v_cache, out, lse, *lists, sinks, *scalars)
        return out, lse

    return Plan(run)


paged_attention = launcher(plan_paged)


@functools.cache
def paged_kernel(chosen: PagedConfig) -> Callable:
    """The compiled kernel of a configuration."""
    return cache.get(paged_entry(chosen), "sm_90a")


def paged_entry(chosen: PagedConfig) -> Kernel:
    """Cache entry of one configuration; the catalogue lists it."""
    module = f"{config.__name__.rpartition('.')[0]}.kernel_paged_sm90"
    return Kernel.of("sparse_attn_paged_sm90", module, chosen)


def catalogue() -> Iterator[Entry]:
    """Every kernel that these launchers can ask for."""
    flags = False, True
    keys = itertools.product(config.DTYPE_NAMES.values(), config.HEAD_DIMS, BOXES, flags, flags)
    for chosen in itertools.starmap(PagedConfig, keys):
        dim = chosen.head_dim
        mma = ("64x128x16", f"64x{config.VALUE_DIMS[dim]}x16")
        expect = Expect(mma, _REGISTERS[chosen.ctas_per_sm], _SHARED[dim])
        yield Entry(paged_entry(chosen), "A", expect)
