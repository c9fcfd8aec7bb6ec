"""The SM90 launchers of few query rows a sequence: paged caches, and one query over a key buffer.

One launch each (``kernel_decode_sm90``), whose grid follows from sizes that the host knows.
"""

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
from ..config import DENSE, PAGED, SPANS, DecodeConfig
from ..masks import FAR

NAME = "paged_attention"
#: Query rows of a tile.
ROWS = 64
#: Registers that the certificates allow: two CTAs an SM start with 128 a thread, one with 256.
_REGISTERS = {2: 128, 1: 255}
_SHARED = {64: 107008, 96: 111104, 128: 115200, 192: 189440, 256: 230400}

#: (left, right) of a sliding window, in keys; None: no bound.
Window = tuple[int | None, int | None]


def plan_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    window: Window,
    softcap: float,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Plan:
    """Launch plan of (out, lse) of `paged_attention`; the host reads no length.

    k_cache, v_cache: [pages, rows, Hkv, D], any strides that TMA can address.
    """
    tokens, heads, dim = q.shape
    rows, kv_heads = k_cache.shape[1:3]
    kernel_config = DecodeConfig(
        *(config.DTYPE_NAMES[q.dtype], dim, PAGED, min(rows, 128), softcap > 0, sinks is not None)
    )
    group = heads // kv_heads
    tiles = len(seqlens_k) + -(-tokens * group // ROWS)
    left, right = window
    band = -FAR if left is None else -left, FAR if right is None else right
    run_tiles = _plan(kernel_config, q, v_cache, band, (scale, softcap), tiles)

    def run(
        q, k_cache, v_cache, block_table, seqlens_k, cu_seqlens_q, scale, window, softcap,
        sinks=None, out=None,
    ):  # fmt: skip
        lists = block_table, seqlens_k, cu_seqlens_q, None
        return run_tiles(q, k_cache, v_cache, lists, sinks, out)

    return Plan(run)


paged_attention = launcher(plan_paged)


def plan_one_query(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Tensor | None,
    band: tuple[int, int],
    factors: tuple[float, float],
    has_sinks: bool,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """``run(q, k, v, spans, sinks)`` -> (out [B, Hq, Dv], lse [Hq, B]) of q [B, Hq, D].

    k, v: [B, Sk, Hkv, ..].  spans: int32 [B, 1, 4], contiguous; without them keys in the band,
    of key less query.  factors: scale and softcap.
    """
    source = DENSE if spans is None else SPANS
    kernel_config = DecodeConfig(
        *(config.DTYPE_NAMES[q.dtype], q.shape[2], source, 128, factors[1] > 0, has_sinks)
    )
    run_tiles = _plan(kernel_config, q, v, band, factors, len(q))
    return lambda q, k, v, spans, sinks: run_tiles(q, k, v, (None, None, None, spans), sinks, None)


def _plan(
    kernel_config: DecodeConfig,
    q: Tensor,
    v: Tensor,
    band: tuple[int, int],
    factors: tuple[float, float],
    tiles: int,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """``run(q, k, v, lists, sinks, out)`` of a launch over so many tiles a KV head."""
    device, (tokens, heads, _) = q.device, q.shape
    launch = bind(device, decode_kernel(kernel_config))
    scalars = *band, *config.factors(*factors), tiles
    new_out = allocator((tokens, heads, v.shape[3]), q.dtype, device)
    new_lse = allocator((heads, tokens), torch.float32, device)

    def run(q, k, v, lists, sinks, out):
        if not all(map(is_addressable, (q, k, v))):
            names = zip(("q", "k", "v"), (q, k, v), strict=True)
            q, k, v = (addressable(t, NAME, name) for name, t in names)
        out, lse = new_out() if out is None else out, new_lse()
        sinks = None if sinks is None else sinks.float().contiguous()
        launch(q, k, v, out, lse, *lists, sinks, *scalars)
        return out, lse

    return run


@functools.cache
def decode_kernel(chosen: DecodeConfig) -> Callable:
    """The compiled kernel of a configuration."""
    return cache.get(decode_entry(chosen), "sm_90a")


def decode_entry(chosen: DecodeConfig) -> Kernel:
    """Cache entry of one configuration; the catalogue lists it."""
    module = f"{config.__name__.rpartition('.')[0]}.kernel_decode_sm90"
    return Kernel.of("sparse_attn_decode_sm90", module, chosen)


def catalogue() -> Iterator[Entry]:
    """Every kernel that these launchers can ask for."""
    boxes = [(PAGED, box) for box in (16, 32, 64, 128)] + [(DENSE, 128), (SPANS, 128)]
    flags = False, True
    dtypes = config.DTYPE_NAMES.values()
    for key in itertools.product(dtypes, config.HEAD_DIMS, boxes, flags, flags):
        dtype, dim, (source, box), softcap, sinks = key
        chosen = DecodeConfig(dtype, dim, source, box, softcap, sinks)
        mma = ("64x128x16", f"64x{config.VALUE_DIMS[dim]}x16")
        expect = Expect(mma, _REGISTERS[chosen.ctas_per_sm], _SHARED[dim])
        yield Entry(decode_entry(chosen), "A", expect)
