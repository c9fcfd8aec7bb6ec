"""The torch ops of block-sparse attention: schemas, fakes, autograd.

    block_sparse_attention            q, k, v, sinks -> out, lse
    block_sparse_attention_backward   dout, dlse, q, k, v, out, lse, sinks -> dq, dk, dv, dsinks

A mask and a schedule that are objects come as tensors and numbers (``lowering.operands``); a rule
without tensors and a schedule by name are prepared in here, when the op runs, so that one compiled
graph serves every length.  ``order`` is empty where no gradient is asked for.

A backend's launchers are

    forward(q, k, v, mask, scale, softcap, sinks) -> (out, lse)
    backward(grads, saved, mask, order, scale, softcap, deterministic) -> (dq, dk, dv)
                                                    and, with sinks, their gradient, fp32

with ``Grads``, ``Saved``, a ``LoweredMask``, an ``Order`` and tensors of any strides.
No size is zero there.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from .. import contracts
from ..arch import CPU, CUTE_SM90, TRITON
from ..errors import ArgumentValueError, UnsupportedTransformError, expected
from ..runtime import dispatch
from ..runtime.caching import capturing
from ..runtime.dispatch import Implementation
from ..runtime.plan_cache import Plan, PlanCache
from ..runtime.torch_ops import define_op
from ..schedulers.masks.mask import BlockMask
from . import config, lowering
from .masks import Order
from .tensors import Grads, Saved, shape_of_out

NAME = "block_sparse_attention"
HALF = frozenset({torch.bfloat16, torch.float16})

for _name, _function in ((NAME, "forward"), (f"{NAME}_backward", "backward")):
    dispatch.register(
        _name,
        {
            CUTE_SM90: Implementation(
                f"{__package__}.launch:{_function}",
                HALF,
                planner=f"{__package__}.launch:plan_{_function}",
            ),
            TRITON: Implementation(f"{__package__}.triton.launch:{_function}", HALF),
            CPU: Implementation(f"{__package__}.cpu:{_function}", HALF),
        },
        contract=NAME,
    )

for _name in (NAME, f"{NAME}_varlen"):
    contracts.register(
        contracts.Contract(
            _name,
            config.KEPT,
            config.contract_facts,
            lambda device, dtype: dispatch.backend(NAME, device, dtype),
        )
    )


def _asked_again(plan: Plan, make: Callable[..., Plan], lists: tuple) -> Plan:
    """``plan`` of ``make`` for the cache of an op, whose run looks for a CUDA graph.

    While one is captured, the cache of lists has to be asked for those that replays will read.
    Plans with lists of a caller (``lists``) are not cached: an op knows them by no content.
    """
    if any(lists):
        return replace(plan, cacheable=False)
    if capturing() or not plan.cacheable:
        return plan
    launch = plan.run

    def run(*args):
        return make(*args).run(*args) if capturing() else launch(*args)

    return replace(plan, run=run)


def _plan(*args):
    """Plan of ``block_sparse_attention``."""
    return _asked_again(_plan_forward(*args), _plan_forward, (args[3], args[5]))


def _plan_forward(q, k, v, mask, facts, order, kind, scale, softcap, deterministic, sinks):
    """Plan of a forward pass, which keeps its lists."""
    if q.numel() == 0 or k.numel() == 0:
        return Plan(lambda q, k, v, *rest: nothing(q, v, rest[-1]), cacheable=False)
    lowered = lowering.mask_of_op(mask, facts, q.shape[1], k.shape[1], str(q.device))
    plan = dispatch.plan(NAME, q.device, q.dtype, q, k, v, lowered, scale, softcap, sinks)
    launch = plan.run
    # The cache of masks does not keep what is larger than it.
    fits = sum(t.nbytes for t in (*mask, *order)) <= lowering.cache.limit

    def run(q, k, v, *rest):
        return launch(q, k, v, lowered, scale, softcap, rest[-1])

    return replace(plan, run=run, cacheable=fits)


class Bound(NamedTuple):
    """A cached call of the op: ``call(q, k, v, *rest)``; rest: all its other arguments."""

    call: Callable
    rest: tuple


def bind(q, k, v, rest: tuple) -> Bound | None:
    """The cached call of the op with these arguments; None if it cannot be cached."""
    call = None
    if q.numel() and k.numel():
        call = block_sparse_attention.bind_plan(_plan_forward(q, k, v, *rest))
    return call and Bound(call, rest)


_without_mask = PlanCache(capacity=64)
_of_mask: weakref.WeakKeyDictionary[BlockMask, PlanCache] = weakref.WeakKeyDictionary()
#: Held where a thread adds a cache to them, or lists them.
_of_mask_lock = threading.Lock()


def find(mask: object, options: tuple, q, k, v) -> Bound | bool | None:
    """Apply `PlanCache.find` to the calls with ``mask`` or, for None, without one."""
    # While a CUDA graph is captured, the slow path keeps the lists, which replays read.
    if torch.compiler.is_compiling() or type(options[3]) is not str or capturing():
        return False
    if mask is None or type(mask) is BlockMask:
        return cache_of(mask).find(options, q, k, v)
    return False


def _clear() -> None:
    """Drop all plans: none keeps a tensor longer than the cache, which waits for all streams."""
    with _of_mask_lock:
        caches = _without_mask, *_of_mask.values()
    for cache in caches:
        cache.clear()
    _clear_backwards()
    for op in (block_sparse_attention, block_sparse_attention_backward):
        op.clear_plans()


lowering.cache.on_drop.append(_clear)


def cache_of(mask: BlockMask | None) -> PlanCache:
    """The checked calls with a mask, kept as long as it is; a few without, as they keep lists."""
    if mask is None:
        return _without_mask
    cache = _of_mask.get(mask)
    if cache is None:
        with _of_mask_lock:
            cache = _of_mask.setdefault(mask, PlanCache(capacity=64))
    return cache


def _plan_backward(*args):
    """Plan of ``block_sparse_attention_backward``."""
    return _asked_again(_plan_gradients(*args), _plan_gradients, (args[7], args[9]))


def _plan_gradients(dout, dlse, q, k, v, out, lse, *rest):
    """Plan of a backward pass by the arguments of its op."""
    *options, deterministic, sinks = rest
    if not deterministic:
        refuse_unordered()
    if q.numel() == 0 or k.numel() == 0:
        return Plan(_gradients_of_nothing, cacheable=False)
    plan = _plan_lists(dout, dlse, q, k, v, out, lse, *options, deterministic, sinks)
    run_plan = plan.run

    def run(dout, dlse, q, k, v, out, lse, *rest):
        return run_plan(dout, dlse, q, k, v, out, lse, rest[-1])

    # torch's determinism flag is read at each unordered call.
    return replace(plan, run=run, cacheable=plan.cacheable and deterministic)


def _plan_lists(
    dout, dlse, q, k, v, out, lse, mask, facts, order, kind, scale, softcap, deterministic, sinks
):
    """Plan of a backward pass, which keeps its lists.

    ``run(dout, dlse, q, k, v, out, lse, sinks)`` returns a gradient for each of q, k, v and sinks.
    """
    (batch, q_len, heads, dim), (_, kv_len, kv_heads, _) = q.shape, k.shape
    lowered = lowering.mask_of_op(mask, facts, q_len, kv_len, str(q.device))
    if order:
        turns = Order(*order)
    else:
        turns = lowering.order_of(lowered, kind, (batch, q_len, kv_len, heads, kv_heads, dim))
    options = lowered, turns, scale, softcap, deterministic
    operands = Grads(dout, dlse), Saved(q, k, v, out, lse, sinks)
    plan = dispatch.plan(f"{NAME}_backward", q.device, q.dtype, *operands, *options)
    launch = plan.run

    def run(dout, dlse, q, k, v, out, lse, sinks):
        gradients = launch(Grads(dout, dlse), Saved(q, k, v, out, lse, sinks), *options)
        return with_sinks(gradients, q, sinks)

    return replace(plan, run=run)


#: Plans of backward passes by the ids of the tensors of their mask and order, which they keep, as
#: the caches above: none of these ids is given to another tensor.
_backwards = PlanCache()
#: Bytes of these tensors, by their ids; of at most so many masks and orders.
_kept_bytes: dict[tuple[int, ...], int] = {}
_MOST_KEPT = 256


def _admit(name: tuple[int, ...], lists: tuple[torch.Tensor, ...]) -> bool:
    """Whether plans may keep these tensors; all others go if they are too large together.

    Those that saved_tensors_hooks copied are in no other cache, and new in every pass.
    """
    size, limit = sum(t.nbytes for t in lists), lowering.cache.limit
    if size > limit:
        return False
    if name not in _kept_bytes:
        sizes = list(_kept_bytes.values())
        if len(sizes) >= _MOST_KEPT or sum(sizes) + size > limit:
            _clear_backwards()
    _kept_bytes[name] = size
    return True


def _clear_backwards() -> None:
    _backwards.clear()
    _kept_bytes.clear()


def _find_backward(operands: tuple, mask: list, facts: list, order: list, options: tuple):
    """Find what runs the plan of a backward pass, planned now if it can be cached; else False.

    ``operands``: dout, dlse, q, k, v, out, lse, sinks.  ``options``: kind, scale, softcap,
    deterministic.
    """
    if torch.is_grad_enabled() or not options[-1] or capturing():
        return False
    *tensors, sinks = operands
    lists = *mask, *order
    name = tuple(map(id, lists))
    key = name, tuple(facts), *options
    run = _backwards.find(key, *operands)
    if run is None and _admit(name, lists):
        plan = _plan_lists(*tensors, mask, facts, order, *options, sinks)
        run = plan.run if plan.fresh else None
        _backwards.add(key, operands, run)
    return run


def _gradients_of_nothing(dout, dlse, q, k, v, *rest):
    return gradients_of_nothing(dlse, q, k, v, rest[-1])


def nothing(q, v, sinks):
    """(out, lse) of rows without keys: all of a row's weight is its sink's, if it has one."""
    batch, q_len, heads, _ = q.shape
    lse = q.new_full((batch, heads, q_len), -math.inf, dtype=torch.float32)
    return q.new_zeros(shape_of_out(q, v)), lse if sinks is None else lse.copy_(sinks[:, None])


def gradients_of_nothing(dlse, q, k, v, sinks):
    """The backward of ``nothing``."""
    zeros = tuple(t.new_zeros(t.shape) for t in (q, k, v))
    if sinks is None or dlse is None:
        return with_sinks(
            (*zeros, None if sinks is None else sinks.new_zeros(sinks.shape)), q, sinks
        )
    dsinks = torch.where(sinks == -math.inf, 0.0, dlse.double().sum((0, 2)))
    return with_sinks((*zeros, dsinks), q, sinks)


def with_sinks(made, q, sinks):
    """(dq, dk, dv, dsinks), an empty tensor for none: an op has the same results in every call."""
    dq, dk, dv, *dsinks = made
    return dq, dk, dv, q.new_empty(0) if sinks is None else dsinks[0].to(sinks.dtype)


def refuse_unordered() -> None:
    """Refuse the call if torch's determinism flag is set."""
    contracts.refuse_if_deterministic(
        f"{NAME}(deterministic=False)", f"{NAME}(deterministic=True), the default"
    )


def _fake(q, k, v, mask, facts, order, kind, scale, softcap, deterministic, sinks):
    batch, q_len, heads, _ = q.shape
    lse = q.new_empty((batch, heads, q_len), dtype=torch.float32)
    return q.new_empty(shape_of_out(q, v)), lse


def _fake_backward(
    dout, dlse, q, k, v, out, lse, mask, facts, order, kind, scale, softcap, deterministic, sinks
):
    return fake_gradients(q, k, v, sinks)


def fake_gradients(q, k, v, sinks):
    """Fake of the results of every backward here."""
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return *(t.new_empty(t.shape) for t in (q, k, v)), dsinks


def _setup(ctx, inputs, output):
    q, k, v, mask, ctx.facts, order, *ctx.options, sinks = inputs
    ctx.masks = len(mask)
    ctx.save_for_backward(q, k, v, *output, sinks, *mask, *order)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    q, k, v, out, lse, sinks, *saved_lists = ctx.saved_tensors
    mask, order = saved_lists[: ctx.masks], saved_lists[ctx.masks :]
    if mask and not order and q.numel() and k.numel():
        want = "the tensors of a schedule (a gradient is asked for)"
        raise ArgumentValueError(expected("order", want, "none"))
    dout = torch.zeros_like(out) if dout is None else dout
    operands = dout, dlse, q, k, v, out, lse, sinks
    run = _find_backward(operands, mask, ctx.facts, order, tuple(ctx.options))
    if run:
        grads = run(*operands)
    else:
        lists = mask, ctx.facts, order, *ctx.options
        grads = block_sparse_attention_backward(*operands[:-1], *lists, sinks)
    return wanted_gradients(ctx, grads, 7)


def wanted_gradients(ctx, grads, between: int):
    """Gradients of q, k, v, then None for ``between`` arguments, then that of sinks."""
    needs = *ctx.needs_input_grad[:3], ctx.needs_input_grad[3 + between]
    dq, dk, dv, dsinks = (g if w else None for g, w in zip(grads, needs, strict=True))
    return dq, dk, dv, *(None,) * between, dsinks


def _setup_nothing(ctx, inputs, output):
    pass


def refuse_double_backward(ctx, *grads):
    """Refuse a double backward: a backward has no gradient."""
    raise UnsupportedTransformError(
        f"cute_kernels.{NAME}: no gradient of its gradient (double backward) is available"
    )


def refuse_vmap(info, in_dims, *args):
    """Refuse vmap: the mapped dimension belongs in the batch."""
    raise UnsupportedTransformError(
        f"cute_kernels.{NAME}: torch.func.vmap is not supported; make the mapped dimension part of "
        "the batch, which each output row is independent of"
    )


_OPERANDS = (
    "Tensor[] mask, int[] facts, Tensor[] order, str kind, float scale, float softcap, "
    "bool deterministic, Tensor? sinks"
)
block_sparse_attention = define_op(
    f"{NAME}(Tensor q, Tensor k, Tensor v, {_OPERANDS}) -> (Tensor, Tensor)",
    plan=_plan,
    fake=_fake,
    setup=_setup,
    backward=_backward,
    vmap=refuse_vmap,
    autocast_args=(0, 1, 2),
)
block_sparse_attention_backward = define_op(
    f"{NAME}_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, {_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor)",
    plan=_plan_backward,
    fake=_fake_backward,
    setup=_setup_nothing,
    backward=refuse_double_backward,
    vmap=refuse_vmap,
)
