"""The torch ops of attention: one definition, an op for each operand that says where keys are.

    block_sparse_attention   lists of blocks: mask, facts, order, kind, deterministic
    sequence_attention       ranges of keys, one of each query: kv_ranges [B, 1, T, 4]
    varlen_attention         sequences of one buffer: offsets [N + 1] or bounds [N, 2], left, right

        q, k, v, keys, scale, softcap, sinks                       -> out, lse
        ..._backward(dout, dlse, q, k, v, out, lse, keys, ...)     -> dq, dk, dv, dsinks

    seen_columns, kv_ranges, varlen_offsets, cut_kv_ranges         make the operands

Lists: a mask and a schedule that are objects come as tensors and numbers (``lowering.operands``); a
rule without tensors and a schedule by name are lowered in here, when the op runs, so that one
compiled graph serves every length.  ``order`` is empty where no gradient is asked for.

Ranges and offsets are operands: one compiled graph serves every length, padding and batch.  SM90
kernels read them on their device, which the host then never does: a launch or two a pass, which
CUDA graphs can hold.  Ranges on the CPU are cut into runs, an attention over lists each; those that
are whole sequences with one window are a varlen batch instead, with the same bytes.  Gradients of
ranges on a GPU come as from those on the CPU.  A varlen batch is one attention over lists in
Triton (``varlen.layout``), and the ranges of its sequences on the CPU.

A backend's launchers are

    forward(q, k, v, keys, scale, softcap, sinks) -> (out, lse)
    backward(grads, saved, keys, order, scale, softcap, deterministic) -> (dq, dk, dv)
                                                    and, with sinks, their gradient, fp32

with ``Grads``, ``Saved``, an ``Order`` and tensors of any strides.  Keys are a ``LoweredMask``; the
launchers of SM90 take ranges too and, without an order, a ``Varlen``.  No size is zero there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .. import contracts
from ..arch import BACKENDS, CPU, CUTE_SM90
from ..errors import (
    ArgumentValueError,
    BackendUnavailable,
    DeviceError,
    UnsupportedTransformError,
    expected,
)
from ..runtime import dispatch, plan_cache
from ..runtime.caching import capturing
from ..runtime.dynamo import untraced
from ..runtime.plan_cache import Plan
from ..runtime.torch_ops import define_op, refuse_vmap
from . import checks, config, lowering
from .kv_ranges import ranges
from .masks import Order
from .tensors import Grads, Saved, Varlen, shape_of_out
from .varlen import layout

NAME = "block_sparse_attention"
VARLEN = f"{NAME}_varlen"

for _entry, _function in ((NAME, "forward"), (f"{NAME}_backward", "backward")):
    _dtypes = dict.fromkeys(BACKENDS, dispatch.HALF)
    dispatch.register(_entry, dispatch.named_alike(__package__, _function, _dtypes), contract=NAME)
dispatch.register_contracts((NAME, VARLEN), config.KEPT, config.contract_facts, NAME)


@untraced
def reads_keys_on_device(device: str) -> bool:
    """Whether the kernels of a device read ranges and offsets there."""
    try:
        return dispatch.backend(NAME, device, torch.bfloat16) == CUTE_SM90
    except BackendUnavailable:
        return False


# A constant of a compiled graph, as `lowering.build_lists` is.
reads_keys_on_device._dynamo_marked_constant = True


def is_one_launch(t: Tensor) -> bool:
    """Whether one launch takes all sequences; on the CPU, BLAS has lengths in its bits."""
    return dispatch.backend(NAME, t.device, t.dtype) != CPU


# ---- lists of blocks -----------------------------------------------------------------------------


def _plan_lists(q, k, v, mask, facts, order, kind, deterministic, scale, softcap, sinks):
    lowered = lowering.mask_of_op(mask, facts, q.shape[1], k.shape[1], str(q.device))
    number = config.score_scale(scale, q.shape[3])
    plan = dispatch.plan(NAME, q.device, q.dtype, q, k, v, lowered, number, softcap, sinks)
    launch = plan.run

    def run(q, k, v, mask, facts, order, kind, deterministic, scale, softcap, sinks):
        return launch(q, k, v, lowered, number, softcap, sinks)

    return replace(plan, run=run, holds=(*lowered.tensors(), *order))


def _plan_lists_backward(dout, dlse, q, k, v, out, lse, *options):
    mask, facts, order, kind, deterministic, scale, softcap, sinks = options
    if not deterministic:
        refuse_unordered()
    if mask and not order:
        want = "the tensors of a schedule (a gradient is asked for)"
        raise ArgumentValueError(expected("order", want, "none"))
    lowered = lowering.mask_of_op(mask, facts, q.shape[1], k.shape[1], str(q.device))
    turns = Order(*order) if order else lowering.order_of(lowered, kind, _sizes(q, k))
    numbers = config.score_scale(scale, q.shape[3]), softcap, deterministic
    operands = Grads(dout, dlse), Saved(q, k, v, out, lse, sinks), lowered, turns, *numbers
    plan = dispatch.plan(f"{NAME}_backward", q.device, q.dtype, *operands)
    launch = plan.run

    def run(dout, dlse, q, k, v, out, lse, *rest):
        saved = Saved(q, k, v, out, lse, rest[-1])
        return with_sinks(launch(Grads(dout, dlse), saved, lowered, turns, *numbers), q, rest[-1])

    # torch's determinism flag is read at each unordered call.
    cacheable = plan.cacheable and deterministic
    return replace(plan, run=run, cacheable=cacheable, holds=(*lowered.tensors(), *turns))


def _sizes(q: Tensor, k: Tensor) -> lowering.Sizes:
    (batch, q_len, heads, dim), (_, kv_len, kv_heads, _) = q.shape, k.shape
    return batch, q_len, kv_len, heads, kv_heads, dim


def refuse_unordered() -> None:
    """Refuse the call if torch's determinism flag is set."""
    contracts.refuse_if_deterministic(
        f"{NAME}(deterministic=False)", f"{NAME}(deterministic=True), the default"
    )


# ---- ranges of keys ------------------------------------------------------------------------------


def _plan_ranges(q, k, v, kv_ranges, scale, softcap, sinks):
    """Plan of ``sequence_attention``: ranges that the host reads are read in each call."""
    if not (plan_cache.on_gpu(kv_ranges) and reads_keys_on_device(str(q.device))):
        return Plan(_attend_ranges, fresh=False)
    numbers = config.score_scale(scale, q.shape[3]), softcap
    return dispatch.plan(NAME, q.device, q.dtype, q, k, v, kv_ranges, *numbers, sinks)


def _attend_ranges(q, k, v, kv_ranges, *options):
    """(out, lse) for ranges that the host reads."""
    documents = _documents(q, k, kv_ranges)
    if documents is not None:
        return _attend_documents(documents, q, k, v, *options)
    runs = ranges.runs_of(kv_ranges, str(q.device))
    results = ((run, _attend_run(run, q, k, v, *options)) for run in runs)
    if len(runs) == 1 and runs[0].is_whole(q):
        return next(results)[1]
    out, lse = _fake(q, k, v)
    out.zero_()
    lse.fill_(-math.inf)
    for run, result in results:
        out[run.batch, run.queries], lse[run.batch, :, run.queries] = result
    return out, lse


def _attend_run(run, q, k, v, *options):
    operands = run.cut_queries(q), run.cut_keys(k), run.cut_keys(v)
    return block_sparse_attention(*operands, *_lists(run.lowered), *options)


def _lists(lowered, order=()) -> tuple:
    """Operands of the op of lists, between v and scale."""
    return lowered.tensors(), lowered.numbers(), list(order), "", True


def _differentiate_ranges(dout, dlse, q, k, v, out, lse, kv_ranges, scale, softcap, sinks):
    """(dq, dk, dv, dsinks) for ranges that the host reads."""
    operands, options = (dout, dlse, q, k, v, out, lse), (scale, softcap, sinks)
    documents = _documents(q, k, kv_ranges)
    if documents is not None:
        return _differentiate_documents(documents, *operands, *options)
    runs = ranges.runs_of(kv_ranges, str(q.device))
    # Gradients of sinks are added before their one rounding.
    options = scale, softcap, None if sinks is None else sinks.float()
    results = ((run, _differentiate_run(run, *operands, *options)) for run in runs)
    if len(runs) == 1 and runs[0].is_all(q, k):
        dq, dk, dv, dsinks = next(results)[1]
        # The sum over runs begins with 0, which leaves no -0.
        return with_sinks((dq, dk, dv, dsinks + 0.0), q, sinks)
    dq = q.new_zeros(q.shape)
    shared = ranges.share_keys(runs)
    # Where a key is one of several runs, their gradients are added in fp32, in the runs' order.
    wide = torch.float32 if shared else None
    dk, dv = (t.new_zeros(t.shape, dtype=wide) for t in (k, v))
    dsinks = None if sinks is None else sinks.new_zeros(sinks.shape, dtype=torch.float32)
    for run, run_grads in results:
        dq[run.batch, run.queries] = run_grads[0]
        for total, grad in zip((dk, dv), run_grads[1:3], strict=True):
            into, grad = total[run.batch, run.keys], grad[:, run.shift :]
            into.add_(grad) if shared else into.copy_(grad)
        if sinks is not None:
            dsinks += run_grads[3]
    return with_sinks((dq, dk.to(k.dtype), dv.to(v.dtype), dsinks), q, sinks)


def _differentiate_run(run, dout, dlse, q, k, v, out, lse, *options):
    of_rows = [None if t is None else t[run.batch, :, run.queries] for t in (dlse, lse)]
    queries, keys = run.cut_queries(q), run.cut_keys(k)
    order = lowering.order_of(run.lowered, lowering.OF_SEQUENCES, _sizes(queries, keys))
    return block_sparse_attention_backward(
        *(run.cut_queries(dout), of_rows[0], queries, keys, run.cut_keys(v)),
        *(run.cut_queries(out), of_rows[1]),
        *_lists(run.lowered, order),
        *options,
    )


def _documents(q, k, kv_ranges) -> ranges.Documents | None:
    """The sequences of a batch where one launch takes all of them; else None."""
    if q.shape[1] != k.shape[1] or not is_one_launch(q):
        return None
    return ranges.documents_of(kv_ranges)


def _attend_documents(documents, q, k, v, *options):
    flat, bounds = (t.flatten(0, 1)[None] for t in (q, k, v)), documents.on(_keys_device(q))
    out, lse = varlen_attention(*flat, bounds, *documents.window, *options)
    out, lse = documents.fill_unused_(out, 1), documents.fill_unused_(lse, 2, -math.inf)
    lse = lse[0].unflatten(1, q.shape[:2]).transpose(0, 1)
    return out.view(shape_of_out(q, v)), lse.contiguous()


def _differentiate_documents(documents, dout, dlse, q, k, v, out, lse, *options):
    dlse, lse = (
        None if t is None else t.transpose(0, 1).flatten(1)[None].contiguous() for t in (dlse, lse)
    )
    dout, *flat, out = (t.flatten(0, 1)[None] for t in (dout, q, k, v, out))
    keys = documents.on(_keys_device(q)), *documents.window
    *grads, dsinks = varlen_attention_backward(dout, dlse, *flat, out, lse, *keys, *options)
    pairs = zip(grads, (q, k, v), strict=True)
    return *(documents.fill_unused_(grad, 1).view(t.shape) for grad, t in pairs), dsinks


def _keys_device(q: Tensor) -> torch.device:
    """Device that reads bounds for ``q``: its own, by kernels, or the host."""
    return q.device if reads_keys_on_device(str(q.device)) else torch.device("cpu")


# ---- varlen batches ------------------------------------------------------------------------------


def _bounds(q, offsets) -> Tensor:
    """Bounds of the sequences for a launch that reads them on its device."""
    if not offsets.is_cuda and capturing():
        want = f"on {q.device} while a CUDA graph is captured, whose replays read it there"
        raise DeviceError(expected("cu_seqlens", want, offsets.device))
    return layout.from_offsets(offsets)


def _plan_varlen(q, k, v, offsets, left, right, scale, softcap, sinks):
    if not is_one_launch(q):
        return Plan(_attend_each, fresh=False)
    if not reads_keys_on_device(str(q.device)):
        return Plan(_attend_padded, fresh=False)
    numbers, window = (config.score_scale(scale, q.shape[3]), softcap), (left, right)
    keys = Varlen(_bounds(q, offsets), window)
    plan = dispatch.plan(NAME, q.device, q.dtype, q, k, v, keys, *numbers, sinks)
    launch = plan.run

    def run(q, k, v, offsets, left, right, scale, softcap, sinks):
        return launch(q, k, v, Varlen(_bounds(q, offsets), window), *numbers, sinks)

    return replace(plan, run=run)


def _attend_each(q, k, v, offsets, left, right, *options):
    return _attend_ranges(q, k, v, ranges.of_varlen(offsets, left, right), *options)


def _attend_padded(q, k, v, offsets, left, right, *options):
    rows = layout.layout(layout.from_offsets(offsets), q.shape[1], str(q.device))
    mask = layout.lowered(rows, (left, right), rows.device)
    out, lse = block_sparse_attention(*map(rows.pad, (q, k, v)), *_lists(mask), *options)
    return rows.unpad(out), _turned(rows.unpad(_turned(lse), -math.inf))


def _plan_varlen_backward(dout, dlse, q, k, v, out, lse, offsets, left, right, *options):
    if not is_one_launch(q):
        return Plan(_differentiate_each, fresh=False)
    if not reads_keys_on_device(str(q.device)):
        return Plan(_differentiate_padded, fresh=False)
    scale, softcap, sinks = options
    window, numbers = (left, right), (config.score_scale(scale, q.shape[3]), softcap, True)
    operands = Grads(dout, dlse), Saved(q, k, v, out, lse, sinks)
    keys = Varlen(_bounds(q, offsets), window)
    plan = dispatch.plan(f"{NAME}_backward", q.device, q.dtype, *operands, keys, None, *numbers)
    launch = plan.run

    def run(dout, dlse, q, k, v, out, lse, offsets, *rest):
        saved, keys = Saved(q, k, v, out, lse, rest[-1]), Varlen(_bounds(q, offsets), window)
        grads = launch(Grads(dout, dlse), saved, keys, None, *numbers)
        return with_sinks(grads, q, rest[-1])

    return replace(plan, run=run)


def _differentiate_each(dout, dlse, q, k, v, out, lse, offsets, left, right, *options):
    kv_ranges = ranges.of_varlen(offsets, left, right)
    return _differentiate_ranges(dout, dlse, q, k, v, out, lse, kv_ranges, *options)


def _differentiate_padded(dout, dlse, q, k, v, out, lse, offsets, left, right, *options):
    rows = layout.layout(layout.from_offsets(offsets), q.shape[1], str(q.device))
    window, heads = (left, right), (q.shape[2], k.shape[2])
    mask = layout.lowered(rows, window, rows.device)
    order = layout.order(rows, window, heads, q.shape[3], rows.device)
    dlse = None if dlse is None else _turned(rows.pad(_turned(dlse)))
    # P of a row in a gap is exp2(S - inf) = 0, as of rows behind the last one of a tensor.
    lse = _turned(rows.pad(_turned(lse), math.inf))
    dout, q, k, v, out = map(rows.pad, (dout, q, k, v, out))
    operands = dout, dlse, q, k, v, out, lse, *_lists(mask, order), *options
    *grads, dsinks = block_sparse_attention_backward(*operands)
    return *map(rows.unpad, grads), dsinks


def _turned(t: Tensor) -> Tensor:
    """[B, H, T] as [B, T, H], or back; contiguous."""
    return t.transpose(1, 2).contiguous()


# ---- what all ops share --------------------------------------------------------------------------


def _nothing(q, k, v, *options):
    """(out, lse) of rows without keys: all of a row's weight is its sink's, if it has one."""
    sinks = options[-1]
    out, lse = _fake(q, k, v)
    return out.zero_(), lse.copy_(sinks[:, None]) if sinks is not None else lse.fill_(-math.inf)


def _gradients_of_nothing(dout, dlse, q, k, v, *options):
    """The backward of `_nothing`."""
    sinks, zeros = options[-1], tuple(t.new_zeros(t.shape) for t in (q, k, v))
    if sinks is None or dlse is None:
        return with_sinks((*zeros, None if sinks is None else torch.zeros_like(sinks)), q, sinks)
    return with_sinks(
        (*zeros, torch.where(sinks == -math.inf, 0.0, dlse.double().sum((0, 2)))), q, sinks
    )


def with_sinks(grads, q, sinks):
    """(dq, dk, dv, dsinks), an empty tensor for none: an op has the same results in every call."""
    dq, dk, dv, *dsinks = grads
    return dq, dk, dv, q.new_empty(0) if sinks is None else dsinks[0].to(sinks.dtype)


def _fake(q, k, v, *options):
    batch, q_len, heads, _ = q.shape
    lse = q.new_empty((batch, heads, q_len), dtype=torch.float32)
    return q.new_empty(shape_of_out(q, v)), lse


def _fake_backward(dout, dlse, q, k, v, *options):
    sinks = options[-1]
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return *(t.new_empty(t.shape) for t in (q, k, v)), dsinks


def _setup(ctx, inputs, output):
    q, k, v, *options, sinks = inputs
    # Lists are constants, which caches hold: hooks of saved tensors copy none.
    tensors = [option for option in options if isinstance(option, Tensor)]
    ctx.options = options[len(tensors) :]
    ctx.save_for_backward(q, k, v, *output, sinks, *tensors)
    ctx.set_materialize_grads(False)


def _refuse_double_backward(ctx, *grads):
    raise UnsupportedTransformError(
        f"cute_kernels.{NAME}: no gradient of its gradient (double backward) is available"
    )


_refuse_vmap = refuse_vmap(
    NAME,
    "is not supported; make the mapped dimension part of the batch, which each output row is "
    "independent of",
)


def _define(
    name: str,
    keys: str,
    plans: tuple[Callable[..., Plan], Callable[..., Plan]],
    check: Callable[..., None] = checks.attention,
) -> tuple[Callable, Callable]:
    """Define the op of attention over one kind of keys, and its backward.

    keys: Their schema; a tensor is the first of them.  plans: of the op, and of its backward.
    """
    plan, plan_backward = plans
    options = f"{keys}, float? scale, float softcap, Tensor? sinks"

    def plan_any(*args):
        if args[0].numel() and args[1].numel():
            return plan(*args)
        return Plan(_nothing, cacheable=False)

    def plan_any_backward(*args):
        if args[2].numel() and args[3].numel():
            return plan_backward(*args)
        return Plan(_gradients_of_nothing, cacheable=False)

    def backward(ctx, dout, dlse):
        q, k, v, out, lse, sinks, *tensors = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        options = *tensors, *ctx.options
        grads = backward_op(dout, dlse, q, k, v, out, lse, *options, sinks)
        needs = *ctx.needs_input_grad[:3], ctx.needs_input_grad[3 + len(options)]
        dq, dk, dv, dsinks = (g if w else None for g, w in zip(grads, needs, strict=True))
        return dq, dk, dv, *(None,) * len(options), dsinks

    backward_op = define_op(
        f"{name}_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
        f"Tensor lse, {options}) -> (Tensor, Tensor, Tensor, Tensor)",
        plan=plan_any_backward,
        fake=_fake_backward,
        setup=lambda ctx, inputs, output: None,
        backward=_refuse_double_backward,
        vmap=_refuse_vmap,
    )
    op = define_op(
        f"{name}(Tensor q, Tensor k, Tensor v, {options}) -> (Tensor, Tensor)",
        plan=plan_any,
        check=check,
        fake=_fake,
        setup=_setup,
        backward=backward,
        vmap=_refuse_vmap,
        autocast_args=(0, 1, 2),
    )
    return op, backward_op


block_sparse_attention, block_sparse_attention_backward = _define(
    NAME,
    "Tensor[] mask, int[] facts, Tensor[] order, str kind, bool deterministic",
    (_plan_lists, _plan_lists_backward),
)
sequence_attention, sequence_attention_backward = _define(
    "sequence_attention",
    "Tensor kv_ranges",
    (_plan_ranges, lambda *operands: Plan(_differentiate_ranges, fresh=False)),
    check=checks.attention_of_ranges,
)
varlen_attention, varlen_attention_backward = _define(
    "varlen_attention",
    "Tensor offsets, SymInt? left, SymInt? right",
    (_plan_varlen, _plan_varlen_backward),
)


# ---- ops that make the operands ------------------------------------------------------------------


def offsets_of(cu_seqlens, q):
    """Offsets as `varlen_attention` takes them: on the CPU, unless kernels read them on a GPU."""
    if cu_seqlens.is_cuda and reads_keys_on_device(str(q.device)):
        return cu_seqlens
    return varlen_offsets(cu_seqlens, q.shape[1])


def _run_offsets(cu_seqlens, rows):
    if cu_seqlens.is_cuda and capturing():
        want = "a CPU tensor while a CUDA graph is captured"
        raise DeviceError(expected("cu_seqlens", want, cu_seqlens.device))
    return ranges.varlen_offsets(cu_seqlens, rows)


def _run_cut(kv_ranges, offsets):
    if not all(torch.equal(offsets[0], other) for other in offsets):
        want = f"those of the queries, {offsets[0].tolist()}"
        raise ArgumentValueError(expected("cu_seqlens of the keys", want, offsets[1].tolist()))
    return ranges.cut(kv_ranges, offsets[0])


def _run_seen(dense, device):
    if device.type == "cpu":
        return ranges.seen_of(dense).cpu()
    # The gaps of a decoding step are those of the pass before it.
    if dense.shape[2] == 1 or torch.cuda.is_current_stream_capturing():
        return ranges.ends_of(dense)
    return ranges.seen_of(dense)


def _run_kv_ranges(seen, padding, q_offset, kv_offset, batch, rows, columns, packed, device):
    sizes = (batch, rows, columns)
    if device.type == "cpu":
        return ranges.kv_ranges(seen, padding, int(q_offset), int(kv_offset), sizes, packed)
    return ranges.of_sequences(seen, padding, q_offset, kv_offset, sizes, device)


def _fake_kv_ranges(seen, padding, q_offset, kv_offset, batch, rows, columns, packed, device):
    return torch.empty((batch, 1, rows, 4), dtype=torch.int32, device=device)


varlen_offsets = define_op(
    "varlen_offsets(Tensor cu_seqlens, SymInt rows) -> Tensor",
    _run_offsets,
    fake=lambda cu_seqlens, rows: torch.empty(cu_seqlens.shape, dtype=torch.int64, device="cpu"),
)
cut_kv_ranges = define_op(
    "cut_kv_ranges(Tensor kv_ranges, Tensor[] offsets) -> Tensor",
    _run_cut,
    fake=lambda kv_ranges, offsets: torch.empty(kv_ranges.shape, dtype=torch.int32, device="cpu"),
)
seen_columns = define_op(
    "seen_columns(Tensor dense, Device device) -> Tensor",
    _run_seen,
    fake=lambda dense, device: dense.new_empty(
        (*dense.shape[:-1], 2), dtype=torch.int32, device=device
    ),
)
kv_ranges = define_op(
    "kv_ranges(Tensor? seen, Tensor? padding, Tensor q_offset, SymInt kv_offset, "
    "SymInt batch, SymInt rows, SymInt columns, bool packed, Device device) -> Tensor",
    _run_kv_ranges,
    fake=_fake_kv_ranges,
)
