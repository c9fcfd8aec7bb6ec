"""The SM90 launchers of `paged_attention`: grids follow from sizes of the host, never from lengths.

One launch walks the chain of each row (`plan_chain`).  Where few rows with long contexts would
leave SMs idle two launches share it (`plan_long`), with the same bytes; `plan_paged` chooses.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...compile.call import allocator, bind
from ...compile.kernel import Entry, Expect
from ...runtime.operands import addressable, is_addressable, most_ctas
from ...runtime.plan_cache import Plan, launcher
from .. import config
from ..config import LONG_COLUMNS, PagedConfig, PagedScoresConfig, PagedValuesConfig
from ..entries import entry, kernel
from ..masks import band
from ..tensors import PagedOptions

NAME = "paged_attention"
#: Query rows of a tile, and the most keys of a load.
ROWS, KEYS_PER_LOAD = 64, (16, 32, 64, 128)
#: Registers that the certificates allow: two CTAs an SM start with 128 a thread, one with 256.
_REGISTERS = {2: 128, 1: 255}
_SHARED = {64: 107520, 96: 111616, 128: 115712, 192: 189952, 256: 230400}

#: Query heads of a KV head, least capacity in keys, and most bytes of scores of `plan_long`.
LONG_GROUP, LONG_KEYS, LONG_BYTES = 16, 4096, 512 << 20
#: Keys of a block of scores.
_BLOCK = 128


def plan_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, *rest: object
) -> Plan:
    """Launch plan of (out, lse) of `paged_attention`; the host reads no length.

    k_cache, v_cache: [pages, rows, Hkv, D], any strides that TMA can address.  rest: seqlens_k,
    cu_seqlens_q and `PagedOptions`; ``run`` takes what the plan takes.
    """
    planner = plan_long if is_long(q, k_cache, v_cache, block_table) else plan_chain
    return planner(q, k_cache, v_cache, block_table, *rest)


def is_long(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor) -> bool:
    """Whether `plan_long` is the faster one, by shapes: as many tokens as sequences, and few."""
    (tokens, heads, _), capacity = q.shape, block_table.shape[1] * k_cache.shape[1]
    is_one_each = tokens == len(block_table)
    return is_one_each and shares_keys((tokens, heads), v_cache, capacity, q.device)


def shares_keys(rows: tuple[int, int], values: Tensor, capacity: int, device: torch.device) -> bool:
    """Whether SMs share the keys of each of (tokens, query heads) rows, by shapes.

    values: [.., .., Hkv, Dv]; capacity: the most keys that a sequence may have.
    """
    (tokens, heads), (kv_heads, value_dim) = rows, values.shape[2:]
    scores = tokens * kv_heads * padded_rows(heads // kv_heads) * capacity * 4
    if capacity < LONG_KEYS or scores > LONG_BYTES or heads // kv_heads > LONG_GROUP:
        return False
    return tokens * kv_heads * (value_dim // LONG_COLUMNS[value_dim][1]) <= most_ctas(device)


def padded_rows(group: int) -> int:
    """Rows of scores that are allocated for a KV head: 8 or 16."""
    return -(-group // 8) * 8


def unit_rows(t: Tensor) -> Tensor:
    """``t`` with a last stride of 1, which kernels are compiled for; that of size 1 may be any."""
    return t if t.stride(-1) == 1 else t.as_strided(t.shape, (*t.stride()[:-1], 1))


def plan_chain(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    *options: object,
) -> Plan:
    """Launch plan of one kernel, whose CTAs walk all keys of their rows; see `plan_paged`."""
    scale, window, softcap, *_ = PagedOptions(*options)
    tokens, heads, dim = q.shape
    rows, kv_heads = k_cache.shape[1:3]
    kernel_config = PagedConfig(config.DTYPE_NAMES[q.dtype], dim, min(rows, 128), softcap > 0)
    launch = bind(q.device, kernel(kernel_config))
    tiles = len(seqlens_k) + -(-tokens * (heads // kv_heads) // ROWS)
    scalars = *band(window), *config.factors(scale, softcap), tiles

    def run(q, k_cache, v_cache, out, lse, lists, sinks):
        launch(q, k_cache, v_cache, out, lse, *lists, sinks, *scalars)

    return _plan_call(q, k_cache, v_cache, run)


def plan_long(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, *rest) -> Plan:
    """Launch plan of two kernels, which share the keys of a row between SMs; see `plan_paged`.

    Any batch with at most `LONG_GROUP` query heads for a KV head; each token is a unit of its own.
    Scores of the whole capacity of ``block_table`` are allocated: lengths stay on the device.
    """
    scale, window, softcap, *_ = PagedOptions(*rest[2:])
    rows, dtype, value_dim = k_cache.shape[1], config.DTYPE_NAMES[q.dtype], v_cache.shape[3]
    keys_per_load, blocks = min(rows, _BLOCK), -(-block_table.shape[1] * rows // _BLOCK)
    scores = PagedScoresConfig(dtype, q.shape[2], keys_per_load, softcap > 0)
    values = functools.partial(PagedValuesConfig, dtype, value_dim, keys_per_load=keys_per_load)
    factors = config.factors(scale, softcap)
    run = plan_two_kernels(q, v_cache, blocks, (scores, values), band(window), factors)
    return _plan_call(q, k_cache, v_cache, run)


def plan_two_kernels(
    q: Tensor,
    v: Tensor,
    blocks: int,
    configs: tuple[PagedScoresConfig, Callable[..., PagedValuesConfig]],
    ends: tuple[int, int],
    factors: tuple[float, float],
) -> Callable[..., None]:
    """``run(q, k, v, out, lse, lists, sinks)`` of a kernel of scores, and one of values.

    q: [T, Hq, D]; v: [.., .., Hkv, Dv]; blocks: of scores, for each token and KV head.  configs:
    that of scores, and what makes that of values for ``columns``.  ends: of the band, or of keys.
    """
    (tokens, heads, _), (kv_heads, value_dim), device = q.shape, v.shape[2:], q.device
    (scores, values), units, sms = configs, tokens * kv_heads, most_ctas(device)
    narrow, wide = LONG_COLUMNS[value_dim]
    # Narrow columns where units of wide ones would leave SMs idle.
    columns = narrow if units * value_dim // narrow <= sms else wide
    launch_scores = bind(device, kernel(scores))
    launch_values = bind(device, kernel(values(columns=columns)))
    group, (c, inner), ctas = heads // kv_heads, factors, sms * scores.ctas_per_sm
    new_scores = allocator((units, blocks, padded_rows(group) * _BLOCK), torch.float32, device)
    new_maxima = allocator((units, group, blocks), torch.float32, device)

    def run(q, k, v, out, lse, lists, sinks):
        scratch = new_scores(), new_maxima()
        launch_scores(q, k, *scratch, *lists, *ends, inner, ctas)
        launch_values(v, *scratch, out, lse, *lists, sinks, *ends, c)

    return run


def _plan_call(q: Tensor, k_cache: Tensor, v_cache: Tensor, launch: Callable[..., None]) -> Plan:
    """Plan of ``launch(q, k_cache, v_cache, out, lse, lists, sinks)``: operands that TMA can
    address, lists with unit strides, new results."""
    (tokens, heads, _), device = q.shape, q.device
    new_out = allocator((tokens, heads, v_cache.shape[3]), q.dtype, device)
    new_lse = allocator((heads, tokens), torch.float32, device)
    direct = all(map(is_addressable, (q, k_cache, v_cache)))

    def run(q, k_cache, v_cache, block_table, seqlens_k, cu_seqlens_q, *options):
        *_, sinks, out = PagedOptions(*options)
        if not direct:
            named = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
            q, k_cache, v_cache = (addressable(t, NAME, name) for name, t in named.items())
        out, lse = new_out() if out is None else out, new_lse()
        lists = unit_rows(block_table), unit_rows(seqlens_k), cu_seqlens_q
        launch(q, k_cache, v_cache, out, lse, lists, sinks_or_none(sinks, heads, device))
        return out, lse

    return Plan(run)


paged_attention = launcher(plan_paged)


def sinks_or_none(sinks: Tensor | None, heads: int, device: torch.device) -> Tensor:
    """Sinks [Hq] as kernels read them, fp32; -inf, which weighs nothing, where there are none."""
    return _no_sinks(heads, device) if sinks is None else sinks.float().contiguous()


@functools.cache
def _no_sinks(heads: int, device: torch.device) -> Tensor:
    return torch.full((heads,), -math.inf, dtype=torch.float32, device=device)


def catalogue() -> Iterator[Entry]:
    """Every kernel that these launchers can ask for."""
    flags = False, True
    dtypes = config.DTYPE_NAMES.values()
    for key in itertools.product(dtypes, config.HEAD_DIMS, KEYS_PER_LOAD, flags):
        chosen = PagedConfig(*key)
        dim = chosen.head_dim
        mma = ("64x128x16", f"64x{config.VALUE_DIMS[dim]}x16")
        expect = Expect(mma, _REGISTERS[chosen.ctas_per_sm], _SHARED[dim])
        yield Entry(entry(chosen), "A", expect)
        chosen = PagedScoresConfig(*key)
        yield Entry(entry(chosen), "A", expected_scores(chosen))
    sizes = [(dim, columns) for dim, pair in LONG_COLUMNS.items() for columns in pair]
    for dtype, size, keys_per_load in itertools.product(dtypes, sizes, KEYS_PER_LOAD):
        chosen = PagedValuesConfig(dtype, *size, keys_per_load)
        yield Entry(entry(chosen), "A", expected_values(chosen))


def expected_scores(chosen: PagedScoresConfig) -> Expect:
    """Limits of the machine code of a kernel of scores."""
    return Expect("64x128x16", _REGISTERS[chosen.ctas_per_sm], 232448)


def expected_values(chosen: PagedValuesConfig) -> Expect:
    """Limits of the machine code of a kernel of values."""
    return Expect(f"64x{chosen.columns}x16", 224, 232448)
