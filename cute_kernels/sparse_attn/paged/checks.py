"""Checks of paged caches, and of the lists that say where a sequence's keys are."""

from __future__ import annotations

import functools
import itertools
import operator

import torch
from torch import Tensor

from ...errors import (
    AliasError,
    ArgumentValueError,
    DtypeError,
    ShapeError,
    expected,
    one_of,
)
from ...runtime import checking
from ...runtime.main_grad import addresses, overlaps_itself
from .. import checks, config
from ..masks import FAR

#: Query heads that share a KV head; their rows are in one tile of 64 on SM90.
MOST_GROUP = 64
#: Layout of a cache -> its dimensions, for messages.
LAYOUTS = {"NHD": "[pages, page_size, Hkv, {}]", "HND": "[pages, Hkv, page_size, {}]"}
#: Layout -> positions of page_size and Hkv.
_AXES = {"NHD": (1, 2), "HND": (2, 1)}


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    *options: object,
) -> None:
    """Check the operands of the op `paged_attention`."""
    *_, sinks, layout = options
    caches(k_cache, v_cache, layout)
    queries(q, k_cache, layout)
    lists(block_table, seqlens_k, cu_seqlens_q, q, k_cache.shape[_AXES[layout][0]])
    checks.sinks(sinks, q)


def caches(k_cache: Tensor, v_cache: Tensor, layout: str) -> None:
    """Check the layout's name, and the two caches of a layer against each other."""
    if layout not in tuple(LAYOUTS):
        raise ArgumentValueError(one_of("layout", tuple(LAYOUTS), layout))
    for name, t, last in (("k_cache", k_cache, "D"), ("v_cache", v_cache, "Dv")):
        checking.tensor(name, t)
        checking.rank(name, t, 4, LAYOUTS[layout].format(last))
        checking.dtype(name, t.dtype, checks.DTYPES)
        _dense_rows(name, t)
    checking.same_device("v_cache", v_cache, "k_cache", k_cache)
    if v_cache.dtype != k_cache.dtype:
        raise DtypeError(
            expected("v_cache", f"{k_cache.dtype}, the dtype of k_cache", v_cache.dtype)
        )
    if v_cache.shape[:3] != k_cache.shape[:3]:
        want = f"{list(k_cache.shape[:3])}, as k_cache has, and a head size"
        raise ShapeError(expected("v_cache", want, list(v_cache.shape)))
    # Numbers, not sizes that are traced: tables have their keys.
    dim, page_size = map(operator.index, (k_cache.shape[3], k_cache.shape[_AXES[layout][0]]))
    if page_size not in config.PAGE_SIZES:
        raise ShapeError(
            one_of(f"page size of k_cache (layout {layout})", config.PAGE_SIZES, page_size)
        )
    if dim not in config.HEAD_DIMS:
        raise ShapeError(one_of("head size of k_cache", config.HEAD_DIMS, dim))
    if v_cache.shape[3] != config.VALUE_DIMS[dim]:
        want = f"head size {config.VALUE_DIMS[dim]} for k_cache of {dim}"
        raise ShapeError(expected("v_cache", want, v_cache.shape[3]))


def _dense_rows(name: str, t: Tensor) -> None:
    if t.stride(-1) != 1:
        want = "a stride of 1 in the last dimension (a cache is never copied for its rows)"
        raise ArgumentValueError(expected(name, want, tuple(t.stride())))


def queries(q: Tensor, k_cache: Tensor, layout: str) -> None:
    """Check q [T, Hq, D] against the caches; under autocast it is cast, the caches are not."""
    checking.tensor("q", q)
    checking.rank("q", q, 3, "[T, Hq, D]")
    checking.same_device("k_cache", k_cache, "q", q)
    cast = checking.autocast(q.device) and q.is_floating_point() and q.dtype != torch.float64
    dtype = torch.get_autocast_dtype(q.device.type) if cast else q.dtype
    checking.dtype("q", dtype, checks.DTYPES)
    if k_cache.dtype != dtype:
        raise DtypeError(expected("k_cache", f"{dtype}, the dtype of q", k_cache.dtype))
    tokens, heads, dim = q.shape
    if dim != k_cache.shape[3]:
        raise ShapeError(expected("q", f"head size {k_cache.shape[3]} like k_cache", dim))
    kv_heads = k_cache.shape[_AXES[layout][1]]
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        want = f"a number of heads that divides the {heads} query heads"
        raise ShapeError(expected("k_cache", want, kv_heads))
    if heads // kv_heads > MOST_GROUP:
        want = f"at most {MOST_GROUP} query heads for each of the {kv_heads} KV heads"
        raise ShapeError(expected("q", want, f"{heads // kv_heads}"))
    if tokens >= FAR // MOST_GROUP:
        raise ShapeError(expected("q", f"fewer than {FAR // MOST_GROUP} tokens", tokens))
    checking.supported("paged_attention", q.device)


def lists(
    block_table: Tensor, seqlens_k: Tensor, cu_seqlens_q: Tensor, q: Tensor, page_size: int
) -> None:
    """Check dtypes, devices and shapes of the three lists; `values` looks at their numbers."""
    named = {"block_table": block_table, "seqlens_k": seqlens_k, "cu_seqlens_q": cu_seqlens_q}
    shapes = "[N, P]", "[N]", "[N + 1]"
    for (name, t), shape in zip(named.items(), shapes, strict=True):
        checking.tensor(name, t)
        checking.rank(name, t, 1 + (name == "block_table"), shape)
        checking.dtype(name, t.dtype, (torch.int32,))
        checking.same_device(name, t, "q", q)
        if t.numel() > 1 and t.shape[-1] > 1 and t.stride(-1) != 1:
            want = "a stride of 1 in the last dimension"
            raise ArgumentValueError(expected(name, want, tuple(t.stride())))
    count = len(block_table)
    for name, t, size in (
        ("seqlens_k", seqlens_k, count),
        ("cu_seqlens_q", cu_seqlens_q, count + 1),
    ):
        if len(t) != size:
            want = f"{size} numbers for the {count} rows of block_table"
            raise ShapeError(expected(name, want, len(t)))
    if block_table.shape[1] * page_size >= FAR:
        want = f"rows of fewer than {FAR // page_size} pages of {page_size} keys"
        raise ShapeError(expected("block_table", want, block_table.shape[1]))


def out(out: Tensor | None, q: Tensor, value_dim: int, dtype: torch.dtype, *inputs: Tensor) -> None:
    """Check a tensor that the result is written to: it shares no memory with the inputs."""
    if out is None:
        return
    checking.tensor("out", out)
    want = [*q.shape[:2], value_dim]
    if list(out.shape) != want:
        raise ShapeError(expected("out", f"shape {want}", list(out.shape)))
    if out.dtype != dtype:
        raise DtypeError(expected("out", f"{dtype}, the dtype of the result", out.dtype))
    checking.same_device("out", out, "q", q)
    if not out.is_contiguous():
        raise ArgumentValueError(expected("out", "a contiguous tensor", tuple(out.stride())))
    _positive("out", out)
    if any(_share_memory(out, t) for t in inputs):
        raise AliasError(expected("out", "memory of its own", "memory of an input"))


def _positive(name: str, t: Tensor) -> None:
    if not torch.compiler.is_compiling() and t.is_neg():
        want = "a tensor whose memory holds its values (it is written in place)"
        raise ArgumentValueError(expected(name, want, "a negated view"))


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether the address ranges of two tensors overlap; tensors of a trace have none."""
    first, second = _in_memory(a), _in_memory(b)
    if first is None or second is None or not (first.numel() and second.numel()):
        return False
    (begin, end), (other_begin, other_end) = addresses(first), addresses(second)
    return begin < other_end and other_begin < end


def _in_memory(t: Tensor) -> Tensor | None:
    """The tensor that has the memory of ``t``; None in a trace and on the meta device."""
    if torch.compiler.is_compiling() or t.is_meta:
        return None
    return checking.in_memory(t)


def _distinct(k_cache: Tensor, v_cache: Tensor) -> None:
    """Check that no two elements of two caches, which are written, are at one address."""
    k, v = _in_memory(k_cache), _in_memory(v_cache)
    if k is None or v is None:
        return
    for name, t in (("k_cache", k), ("v_cache", v)):
        _positive(name, t)
        if overlaps_itself(t):
            want = "elements at distinct addresses (it is written in place)"
            raise AliasError(expected(name, want, f"strides {tuple(t.stride())}"))
    offset = (v.data_ptr() - k.data_ptr()) // k.itemsize
    if k.numel() and v.numel() and _meet(offset, _layout(k), _layout(v)):
        raise AliasError(expected("v_cache", "memory of its own", "memory of k_cache"))


#: (stride, size) of dimensions, strides descending.
Layout = tuple[tuple[int, int], ...]


def _layout(t: Tensor) -> Layout:
    pairs = zip(t.stride(), t.shape, strict=True)
    return tuple(sorted((pair for pair in pairs if pair[1] > 1), reverse=True))


def _reach(layout: Layout) -> int:
    """One more than the offset of the last element."""
    return 1 + sum(s * (n - 1) for s, n in layout)


@functools.lru_cache(maxsize=1024)
def _meet(offset: int, first: Layout, second: Layout) -> bool:
    """Whether two layouts, the second one ``offset`` elements further, have an element in common.

    A layout has no address twice.  Layouts that interleave at unequal strides count as meeting.
    """
    if offset >= _reach(first) or offset + _reach(second) <= 0:
        return False
    if not first or not second or first[0][0] != second[0][0]:
        return True
    (step, count), (_, other_count) = first[0], second[0]
    # Of rows whose indices differ by d only those less than a step apart can meet.
    nearest = -(offset // step)
    return any(
        _meet(offset + d * step, first[1:], second[1:])
        for d in (nearest, nearest - 1)
        if -count < d < other_count
    )


def first_seen(keys: int, queries: int, left: int | None) -> int:
    """Position of the first key that a window lets the last ``queries`` of a sequence see."""
    return 0 if left is None else max(0, keys - queries - left)


def values(
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    tokens: int,
    pages: tuple[int, int],
    left: int | None,
) -> tuple[list[list[int]], list[int], list[int]]:
    """The lists of a CPU call as numbers: pages of each sequence, its keys, its first query.

    pages: (number of pages of a cache, page size).  left: See `first_seen`, in whose page those of
    a sequence begin.
    """
    starts, keys = cu_seqlens_q.tolist(), seqlens_k.tolist()
    ascending = all(a <= b for a, b in itertools.pairwise(starts))
    if starts[0] != 0 or not ascending or starts[-1] > tokens:
        want = f"numbers that ascend from 0 to at most {tokens}, the tokens of q"
        raise ArgumentValueError(expected("cu_seqlens_q", want, starts))
    (count, page_size), rows = pages, []
    most = block_table.shape[1] * page_size
    for n, length in enumerate(keys):
        queries = starts[n + 1] - starts[n]
        if not queries <= length <= most:
            want = f"{queries} (its queries) to {most} (its row of block_table) for sequence {n}"
            raise ArgumentValueError(expected("seqlens_k", want, length))
        first = first_seen(length, queries, left) // page_size
        row = block_table[n, first : -(-length // page_size)].tolist()
        for page in row:
            if not 0 <= page < count:
                some = f"pages from 0 to {count - 1} for sequence {n}"
                want = some if count else "no page (the caches have none)"
                raise ArgumentValueError(expected("block_table", want, page))
        rows.append(row)
    return rows, keys, starts


def written(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, layout: str
) -> None:
    """Check the operands of `write_kv_cache`; `slots` looks at the numbers."""
    kv_heads = k_cache.shape[_AXES[layout][1]]
    for name, t, cache, last in (("key", key, k_cache, "D"), ("value", value, v_cache, "Dv")):
        checking.tensor(name, t)
        checking.rank(name, t, 3, f"[T, Hkv, {last}]")
        checking.same_device(name, t, "k_cache", k_cache)
        if t.dtype != cache.dtype:
            raise DtypeError(expected(name, f"{cache.dtype}, the dtype of the caches", t.dtype))
        want = [len(key), kv_heads, cache.shape[3]]
        if list(t.shape) != want:
            raise ShapeError(expected(name, f"shape {want}, as the caches have", list(t.shape)))
        if any(_share_memory(t, each) for each in (k_cache, v_cache)):
            raise AliasError(expected(name, "memory of its own", "memory of a cache"))
    checking.tensor("slot_mapping", slots)
    checking.rank("slot_mapping", slots, 1, "[T]")
    checking.dtype("slot_mapping", slots.dtype, (torch.int32, torch.int64))
    checking.same_device("slot_mapping", slots, "k_cache", k_cache)
    if len(slots) != len(key):
        want = f"{len(key)} numbers, one for each row of key"
        raise ShapeError(expected("slot_mapping", want, len(slots)))
    checking.supported("write_kv_cache", k_cache.device)
    _distinct(k_cache, v_cache)


def slots(slot_mapping: Tensor, capacity: int) -> None:
    """Check the slots of a CPU call: below the capacity of a cache, none twice."""
    used = slot_mapping[slot_mapping >= 0]
    if len(used) and int(used.max()) >= capacity:
        want = f"slots below {capacity}, the pages times their size, or negative ones to skip"
        raise ArgumentValueError(expected("slot_mapping", want, int(used.max())))
    distinct, counts = used.unique(return_counts=True)
    if len(distinct) != len(used):
        twice = int(distinct[counts > 1][0])
        want = "each slot at most once"
        raise ArgumentValueError(expected("slot_mapping", want, f"{twice} several times"))
