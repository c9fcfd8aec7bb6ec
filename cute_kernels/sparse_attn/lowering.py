"""A mask and a schedule -> the tensors that kernels read, built once per content.

    BlockMask  -> whole (the causal rule added) -> LoweredMask
    schedule   -> a checked Schedule            -> Order

One cache holds all of it, by content: layers and steps share what they have in common, and
``ck.info()`` says its size.  A mask or a schedule is searched for and built here and nowhere else.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import ScheduleError, expected
from ..runtime.caching import ByteCache
from ..runtime.dynamo import untraced
from ..schedulers import handles, transforms
from ..schedulers.masks.mask import BlockMask
from ..schedulers.order.kinds import KINDS, permutation, spt
from ..schedulers.order.ranks import block_grid, column_order
from ..schedulers.order.safety import check
from ..schedulers.order.schedule import Schedule
from . import checks, config, masks, pack_gqa
from .masks import LoweredMask, Order
from .pack_gqa import PackedGqa

#: Bytes of masks and orders that are kept for their next use.
cache = ByteCache("attention masks and orders", 256 << 20)

#: The schedule of a sequence by its own positions: "spt", so that it is what kernels of packs make.
OF_SEQUENCES = "spt, heads in flight"

#: ``facts`` of an op whose rule needs no list from outside: every pair, or the causal ones.
#: `window` has those of a sliding window.
FULL, CAUSAL = [0], [1]
_WINDOW = 2

#: (batch, q_len, kv_len, query heads, KV heads, head size)
Sizes = tuple[int, int, int, int, int, int]


def operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask | None,
    causal: bool,
    schedule: object,
    needs_order: bool,
    sinks: torch.Tensor | None,
) -> tuple[list, list, list, str]:
    """(mask, facts, order, kind) of the op for a mask or a schedule that is an object.

    They are kept by the handle of the mask and the shapes of a call, whose checks passed then.
    """

    def make() -> tuple[list, list, list, str]:
        checks.attention(q, k, v, sinks)
        if mask is not None:
            checks.mask(mask, q, k)
        checks.schedule(schedule)
        # Plain numbers: a mask and a schedule are for one shape, in dynamic graphs too.
        (batch, q_len, heads, dim), (_, kv_len, kv_heads, _) = q.shape, k.shape
        sizes = tuple(map(operator.index, (batch, q_len, kv_len, heads, kv_heads, dim)))
        handle = "" if mask is None else mask.handle
        return build_lists(handle, causal, name, needs_order, sizes, str(q.device))

    name = schedule.handle if isinstance(schedule, Schedule) else schedule
    is_plain = type(q) is type(k) is torch.Tensor and type(name) is str
    is_plain = is_plain and (mask is None or type(mask) is BlockMask)
    if torch.compiler.is_dynamo_compiling() or not is_plain:
        return make()
    key = "operands", mask and mask.handle, causal, name, needs_order, q.shape, k.shape, q.device
    return cache.get(key, make)


@untraced
def build_lists(
    block_mask: str,
    causal: bool,
    schedule: object,
    needs_order: bool,
    sizes: Sizes,
    device: str,
) -> tuple[list, list, list, str]:
    """Build the operands: block_mask, a handle or ""; schedule: a name, a handle, a column order.

    Under torch.compile it runs while tracing: the tensors are constants of the graph, which is
    guarded by the handles.
    """
    mask = handles.resolve(block_mask) if block_mask else None
    if isinstance(schedule, str) and schedule not in checks.SCHEDULES:
        schedule = handles.resolve(schedule)
    batch, q_len, kv_len, heads, kv_heads, _ = sizes
    # Lists depend on data: under fake tensors and transforms, too, they are made of true ones.
    # Switching modes off costs 4 us.
    has_modes = torch._C._len_torch_dispatch_stack() or torch.compiler.is_compiling()
    without_modes = _disable_current_modes if has_modes else contextlib.nullcontext
    with transforms.outside(), without_modes():
        # A meta device holds no data.
        full_mask = whole(mask, causal, q_len, kv_len, "cpu" if device == "meta" else device)
        explicit_schedule = not isinstance(schedule, str) or schedule != checks.AUTO
        turns = batch and (needs_order or explicit_schedule)
        if turns and checks.packs_gqa(device, full_mask.shape[1], q_len, heads, kv_heads):
            lowered, order = _packed_gqa(full_mask, schedule, sizes)
        else:
            lowered = lower(full_mask)
            order = order_of(lowered, schedule, sizes) if turns else ()
        tensors = list(order) if needs_order else []
    return lowered.tensors(), lowered.numbers(), tensors, ""


def _packed_gqa(mask: BlockMask, schedule: object, sizes: Sizes) -> tuple[LoweredMask, Order]:
    """A mask by query head, and its order for a kernel whose groups share their lists."""
    batch, q_len, kv_len, heads, kv_heads, head_dim = sizes
    packed, key = PackedGqa.of_blocks(q_len, heads, kv_heads), mask.hash()
    bits = cache.get(("by bits", key, mask.device), lambda: pack_gqa.by_bits(mask))
    by_kv_head = cache.get(("packed", key, kv_heads, mask.device), lambda: packed.mask(bits))
    packed_sizes = batch, packed.rows, kv_len, kv_heads, kv_heads, head_dim
    return lower(bits), order_of(lower(by_kv_head), schedule, packed_sizes)


# As torch.compiler.assume_constant_result does, which imports all of dynamo (2 s, and triton).
build_lists._dynamo_marked_constant = True


def window(size: int) -> list[int]:
    """``facts`` of queries that see themselves and the ``size - 1`` keys before; 0: all before."""
    return [_WINDOW, size] if size else CAUSAL


def mask_of_op(tensors: list, facts: list[int], q_len: int, kv_len: int, device: str):
    """Lowered mask that the ``facts`` and ``tensors`` of an op describe."""
    if tensors:
        return masks.restored(tensors, facts)
    if facts[0] != _WINDOW:
        return lower(whole(None, facts == CAUSAL, q_len, kv_len, device))
    # Aligned at the last query, and without a bound that no query meets.
    left = facts[1] - 1 if facts[1] < kv_len else None

    def make() -> BlockMask:
        return BlockMask.sliding_window(
            q_len, kv_len, left=left, right=0, block_size=masks.BLOCK, device=device
        )

    return lower(cache.get(("window", left, q_len, kv_len, device), make))


def whole(mask: BlockMask | None, causal: bool, q_len: int, kv_len: int, device: str) -> BlockMask:
    """``mask``, and the causal rule if asked for."""
    if mask is not None and not causal:
        return mask

    def make() -> BlockMask:
        rule = BlockMask.causal if causal else BlockMask.full
        size = masks.BLOCK if mask is None else mask.block_size
        rule_mask = rule(q_len, kv_len, block_size=size, device=device)
        return rule_mask if mask is None else mask & rule_mask

    return cache.get(("whole", mask and mask.hash(), causal, q_len, kv_len, device), make)


def lower(mask: BlockMask) -> LoweredMask:
    """Lowered tensors of ``mask``, on its device."""
    return cache.get(("lowered", mask.hash(), mask.device), lambda: masks.lower(mask))


def order_of(lowered: LoweredMask, schedule: object, sizes: Sizes) -> Order:
    """The order of a backward pass, on the mask's device."""
    batch, _, _, heads, kv_heads, head_dim = sizes
    count = config.schedule_heads(lowered.mask.shape[1], batch, heads, kv_heads)
    checked_schedule = admitted(lowered, schedule, count, head_dim, batch * heads // count)
    # Bits differ by mask even where blocks do not.
    content = lowered.mask.hash() if lowered.form == "bits" else ""
    key = "order", checked_schedule.hash, content, lowered.words.device
    return cache.get(key, lambda: masks.order_of(lowered, checked_schedule))


def admitted(
    lowered: LoweredMask,
    schedule: object,
    heads: int,
    head_dim: int,
    group: int = 1,
    device_type: str = "",
) -> Schedule:
    """The checked schedule of a backward pass over ``heads`` (``config.schedule_heads``).

    ``schedule``: "auto", a kind's name, ``OF_SEQUENCES``, a column order, or a Schedule; ``group``:
    query heads to each of ``heads``; ``device_type``: of the pass, if the mask is elsewhere.
    """
    mask, sizes = lowered.mask, (heads, head_dim, group)
    pass_device = device_type or mask.device.type

    def make() -> Schedule:
        candidate = _build_schedule(mask, schedule, *sizes, pass_device)
        if candidate.heads != heads:
            want = f"{heads}, batch x KV heads (x query heads if the mask is by query head)"
            raise ScheduleError(expected("schedule.heads", want, candidate.heads))
        safety = check(candidate, mask)
        if not safety.any_residency:
            want = "an order that ends with any number of resident CTAs"
            got = f"{candidate.name!r}, which needs {safety.residents}"
            raise ScheduleError(expected("schedule", want, got))
        if lowered.form == "bits":
            _lists_of_one_mask(candidate, mask.shape)
        return candidate

    key = ("schedule", mask.block_hash(), lowered.form, mask.shape, pass_device, *sizes)
    return cache.get((*key, _name(schedule)), make)


def _build_schedule(
    mask: BlockMask, schedule: object, heads: int, head_dim: int, group: int, device_type: str
) -> Schedule:
    grid = block_grid(mask, heads)
    if isinstance(schedule, Schedule):
        return schedule
    if not isinstance(schedule, str):
        order = column_order("schedule", schedule, grid.num_kv_blocks, heads)
        return permutation(mask, order=order, heads=heads)
    if schedule == checks.AUTO:
        return config.auto(mask, heads, head_dim, device_type, group)
    if schedule == OF_SEQUENCES:
        return spt(mask, heads=heads, heads_in_flight=config.in_flight(group))
    return KINDS[schedule](mask, heads=heads)


def _name(schedule: object) -> str:
    """Cache name of a schedule argument: equal names, equal schedules (on one mask)."""
    if isinstance(schedule, str):
        return schedule
    if isinstance(schedule, Schedule):
        return schedule.hash
    rows = schedule.cpu().numpy() if isinstance(schedule, torch.Tensor) else schedule
    try:
        order = np.asarray(rows)
    except ValueError:
        raise ScheduleError(expected("schedule", "a column order", "a ragged list")) from None
    facts = f"{order.dtype} {order.shape}".encode()
    return "order " + hashlib.sha256(facts + order.tobytes()).hexdigest()


def _lists_of_one_mask(schedule: Schedule, shape: tuple[int, int]) -> None:
    """Check that lists are shared by heads of one mask only, where masks are bits."""
    group = masks.group_of_heads(*shape, schedule.heads).numpy()
    pairs = np.unique(np.stack((schedule.list_of_head, group), axis=1), axis=0)
    lists, mask_counts = np.unique(pairs[:, 0], return_counts=True)
    if (mask_counts > 1).any():
        want = "heads that share a set of lists to share a mask (its bits differ between them)"
        got = f"set {lists[mask_counts > 1][0]} used for {mask_counts.max()} masks"
        raise ScheduleError(expected("schedule.list_of_head", want, got))
