"""The torch ops of attention at own positions (``ranges``): schemas, fakes, autograd.

    seen_columns         a bool mask -> the columns that each query sees
    sequence_spans       columns, padding, offsets -> spans
    sequence_attention   q, k, v, spans, sinks -> out, lse
    sequence_attention_backward

Spans are an operand: one compiled graph serves every length, padding and cache.  Those on the CPU
are cut into runs, an attention each; on a GPU whole sequences with one window take one launch
instead (``varlen.passes``), with the same bytes.  Making spans of a mask on a GPU waits for it,
once per forward pass and kind of mask.  Those on a GPU are read by the kernels alone: one launch,
or two for one query over a long buffer, which CUDA graphs can hold, and the same bytes; gradients
then come as from those on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...arch import CUTE_SM90
from ...runtime import dispatch, plan_cache
from ...runtime.caching import capturing
from ...runtime.dispatch import Implementation
from ...runtime.dynamo import untraced
from ...runtime.plan_cache import Plan, PlanCache
from ...runtime.torch_ops import define_op
from .. import lowering
from ..op import (
    HALF,
    NAME,
    fake_gradients,
    refuse_double_backward,
    refuse_vmap,
    wanted_gradients,
    with_sinks,
)
from ..tensors import Grads, Saved, shape_of_out
from ..varlen import layout, passes
from . import on_device as ranges_on_device
from . import ranges

SPANS_NAME = "sequence_attention"
_SYSTEM = __package__.rpartition(".")[0]


dispatch.register(
    SPANS_NAME,
    {
        CUTE_SM90: Implementation(
            f"{_SYSTEM}.launch:forward_of_spans",
            HALF,
            planner=f"{_SYSTEM}.launch:plan_forward_of_spans",
        )
    },
    contract=NAME,
)


@untraced
def reads_spans(device: str) -> bool:
    """Whether the kernels of a device read spans themselves."""
    return dispatch.reasons(SPANS_NAME, device, torch.bfloat16)[CUTE_SM90] is None and (
        dispatch.backend(NAME, device, torch.bfloat16) == CUTE_SM90
    )


# A constant of a compiled graph, as `lowering.operands` is.
reads_spans._dynamo_marked_constant = True


def _run_seen(dense, device):
    if device.type == "cpu":
        return ranges.seen_of(dense).cpu()
    # The gaps of a decoding step are those of the pass before it.
    if dense.shape[2] == 1 or torch.cuda.is_current_stream_capturing():
        return ranges_on_device.seen_of(dense)
    return ranges.seen_of(dense)


def _fake_seen(dense, device):
    shape = (*dense.shape[:-1], 2)
    return torch.empty(shape, dtype=torch.int32, device=device)


def _run_spans(seen, padding, q_offset, kv_offset, batch, rows, columns, packed, device):
    sizes = (batch, rows, columns)
    if device.type == "cpu":
        return ranges.spans_of(seen, padding, int(q_offset), int(kv_offset), sizes, packed)
    return ranges_on_device.spans_of(seen, padding, q_offset, kv_offset, sizes, device)


def _fake_spans(seen, padding, q_offset, kv_offset, batch, rows, columns, packed, device):
    return torch.empty((batch, 1, rows, 4), dtype=torch.int32, device=device)


def _plan(q, k, v, spans, scale, softcap, sinks):
    """Plan of ``sequence_attention``: of spans on the CPU the values are read in each call."""
    if not (plan_cache.on_gpu(spans) and q.numel() and k.numel()):
        return Plan(_attend_runs, fresh=False, cacheable=False)
    operands = q, k, v, spans, scale, softcap, sinks
    return dispatch.plan(SPANS_NAME, q.device, q.dtype, *operands)


def attend(*args):
    """(out, lse): run the plan of the op."""
    return _plan(*args).run(*args)


#: Plans of one attention over all queries and keys, for spans on the CPU, by their content.  They
#: keep lists, no longer than the cache does, which waits for all streams before one goes.
_plans = PlanCache(capacity=256)
lowering.cache.on_drop.append(_plans.clear)


def _find(direction: str, spans, scale, softcap, *operands) -> tuple[tuple | None, object]:
    """(name of a plan to `_keep`, None for no such plan; `PlanCache.find` of that plan)."""
    # While a CUDA graph is captured, the cache of lists keeps those that are asked of it.
    if type(spans) is not torch.Tensor or plan_cache.on_gpu(spans) or capturing():
        return None, False
    options = direction, ranges.content_of(spans).name, scale, softcap
    launch = _plans.find(options, *operands)
    return options if launch is None else None, launch


def _attend_all(run, q, k, v, spans, scale, softcap, sinks):
    """(out, lse) of one run that has all queries and keys."""
    options, launch = _find("forward", spans, scale, softcap, q, k, v, sinks)
    if not launch:
        mask_options = lowering.lower(run.mask), scale, softcap
        plan = dispatch.plan(NAME, q.device, q.dtype, q, k, v, *mask_options, sinks)
        run_plan = plan.run

        def launch(q, k, v, sinks):
            return run_plan(q, k, v, *mask_options, sinks)

        if options is not None:
            _keep(options, (q, k, v, sinks), plan, launch, mask_options[0].tensors())
    return launch(q, k, v, sinks)


def _keep(
    options: tuple, operands: tuple, plan: Plan, launch: Callable, lists: Sequence[torch.Tensor]
) -> None:
    """Cache ``launch`` for calls that `_find` knows no plan of, if ``plan`` can be cached.

    ``lists``: the tensors that it keeps; the cache of lists does not keep larger ones.
    """
    fits = sum(t.nbytes for t in lists) <= lowering.cache.limit
    _plans.add(options, operands, launch if fits and plan.cacheable and plan.fresh else None)


def _attend_runs(q, k, v, spans, scale, softcap, sinks):
    """(out, lse) for spans on the CPU, cut into runs."""
    # A cached plan is that of one run with all queries and keys: the spans are read once.
    _, launch = _find("forward", spans, scale, softcap, q, k, v, sinks)
    if launch:
        return launch(q, k, v, sinks)
    pack = _pack(q, k, spans)
    if pack is not None:
        return passes.forward(*pack, q, k, v, scale, softcap, sinks)
    runs = ranges.runs_of(spans, str(q.device))
    if len(runs) == 1 and runs[0].is_all(q, k):
        return _attend_all(runs[0], q, k, v, spans, scale, softcap, sinks)
    results = ((run, _attend_run(run, q, k, v, scale, softcap, sinks)) for run in runs)
    if len(runs) == 1 and runs[0].is_whole(q):
        return next(results)[1]
    out, lse = _fake(q, k, v, spans, scale, softcap, sinks)
    out.zero_()
    lse.fill_(float("-inf"))
    for run, result in results:
        out[run.batch, run.queries], lse[run.batch, :, run.queries] = result
    return out, lse


#: Calls that passed their checks, with spans on a GPU and without sinks, by scale and softcap.
checked = PlanCache()


def _pack(q, k, spans):
    """(where, window) where one launch takes all sequences; else None."""
    pack = None
    if q.shape[1] == k.shape[1] and passes.at_once(q):
        pack = ranges.pack_of(spans)
    if pack is None:
        return None
    return layout.at_places(pack.places), pack.window


def _attend_run(run, q, k, v, scale, softcap, sinks):
    cut = run.cut_queries(q), run.cut_keys(k), run.cut_keys(v)
    launch = dispatch.launcher(NAME, q.device, q.dtype)
    return launch(*cut, lowering.lower(run.mask), scale, softcap, sinks)


def _fake(q, k, v, spans, scale, softcap, sinks):
    batch, q_len, heads, _ = q.shape
    lse = q.new_empty((batch, heads, q_len), dtype=torch.float32)
    return q.new_empty(shape_of_out(q, v)), lse


def differentiate(dout, dlse, q, k, v, out, lse, spans, scale, softcap, sinks):
    """(dq, dk, dv, dsinks) of ``sequence_attention``; its backward runs it."""
    operands = dout, dlse, q, k, v, out, lse, sinks
    _, launch = _find("backward", spans, scale, softcap, *operands)
    if launch:
        return with_sinks(launch(*operands), q, sinks)
    pack = _pack(q, k, spans)
    if pack is not None:
        grads_and_saved = Grads(dout, dlse), Saved(q, k, v, out, lse, sinks)
        return with_sinks(passes.backward(*pack, *grads_and_saved, scale, softcap), q, sinks)
    runs = ranges.runs_of(spans, str(q.device))
    if len(runs) == 1 and runs[0].is_all(q, k):
        tensors = dout, dlse, q, k, v, out, lse
        return with_sinks(
            _differentiate_all(runs[0], *tensors, spans, scale, softcap, sinks), q, sinks
        )
    dq = q.new_zeros(q.shape)
    shared = ranges.share_keys(runs)
    # Where a key is one of several runs, their gradients are added in fp32, in the runs' order.
    wide = torch.float32 if shared else None
    dk, dv = (t.new_zeros(t.shape, dtype=wide) for t in (k, v))
    dsinks = None if sinks is None else sinks.new_zeros(sinks.shape, dtype=torch.float32)
    launch = dispatch.launcher(f"{NAME}_backward", q.device, q.dtype)
    for run in runs:
        of_rows = [None if t is None else t[run.batch, :, run.queries] for t in (dlse, lse)]
        queries, keys, values = run.cut_queries(q), run.cut_keys(k), run.cut_keys(v)
        (batch, q_len, heads, dim), (_, kv_len, kv_heads, _) = queries.shape, keys.shape
        lowered = lowering.lower(run.mask)
        sizes = batch, q_len, kv_len, heads, kv_heads, dim
        order = lowering.order_of(lowered, lowering.OF_SEQUENCES, sizes)
        grads = Grads(run.cut_queries(dout), of_rows[0])
        saved = Saved(queries, keys, values, run.cut_queries(out), of_rows[1], sinks)
        run_grads = launch(grads, saved, lowered, order, scale, softcap, True)
        dq[run.batch, run.queries] = run_grads[0]
        for total, grad in zip((dk, dv), run_grads[1:3], strict=True):
            into, grad = total[run.batch, run.keys], grad[:, run.shift :]
            into.add_(grad) if shared else into.copy_(grad)
        if sinks is not None:
            dsinks += run_grads[3]
    return with_sinks((dq, dk.to(k.dtype), dv.to(v.dtype), dsinks), q, sinks)


def _differentiate_all(run, dout, dlse, q, k, v, out, lse, spans, scale, softcap, sinks):
    """Gradients of one run that has all queries and keys."""
    operands = dout, dlse, q, k, v, out, lse, sinks
    options, launch = _find("backward", spans, scale, softcap, *operands)
    if not launch:
        lowered = lowering.lower(run.mask)
        (batch, q_len, heads, dim), (_, kv_len, kv_heads, _) = q.shape, k.shape
        sizes = batch, q_len, kv_len, heads, kv_heads, dim
        order = lowering.order_of(lowered, lowering.OF_SEQUENCES, sizes)
        plan_options = lowered, order, scale, softcap, True
        tensors = Grads(dout, dlse), Saved(q, k, v, out, lse, sinks)
        plan = dispatch.plan(f"{NAME}_backward", q.device, q.dtype, *tensors, *plan_options)
        run_plan = plan.run

        def launch(dout, dlse, *saved):
            grads = run_plan(Grads(dout, dlse), Saved(*saved), *plan_options)
            # The sum over runs begins with 0, which leaves no -0.
            return *grads[:3], *(t + 0.0 for t in grads[3:])

        if options is not None:
            _keep(options, operands, plan, launch, (*lowered.tensors(), *order))
    return launch(*operands)


def _fake_backward(dout, dlse, q, k, v, out, lse, spans, scale, softcap, sinks):
    return fake_gradients(q, k, v, sinks)


def _setup(ctx, inputs, output):
    q, k, v, spans, *ctx.options, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, spans, sinks)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    q, k, v, out, lse, spans, sinks = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    if not torch.is_grad_enabled():
        # A plan is known where nothing intercepts a call, and all of it is one run.
        operands = dout, dlse, q, k, v, out, lse, sinks
        _, launch = _find("backward", spans, *ctx.options, *operands)
        if launch:
            return wanted_gradients(ctx, with_sinks(launch(*operands), q, sinks), 3)
    options = *ctx.options, sinks
    grads = sequence_attention_backward(dout, dlse, q, k, v, out, lse, spans, *options)
    return wanted_gradients(ctx, grads, 3)


def _setup_nothing(ctx, inputs, output):
    pass


_OPTIONS = "Tensor spans, float scale, float softcap, Tensor? sinks"
seen_columns = define_op(
    "seen_columns(Tensor dense, Device device) -> Tensor", _run_seen, fake=_fake_seen
)
sequence_spans = define_op(
    "sequence_spans(Tensor? seen, Tensor? padding, Tensor q_offset, SymInt kv_offset, "
    "SymInt batch, SymInt rows, SymInt columns, bool packed, Device device) -> Tensor",
    _run_spans,
    fake=_fake_spans,
)
sequence_attention = define_op(
    f"sequence_attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    plan=_plan,
    fake=_fake,
    setup=_setup,
    backward=_backward,
    vmap=refuse_vmap,
    autocast_args=(0, 1, 2),
)
sequence_attention_backward = define_op(
    "sequence_attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, "
    f"Tensor out, Tensor lse, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    differentiate,
    fake=_fake_backward,
    setup=_setup_nothing,
    backward=refuse_double_backward,
    vmap=refuse_vmap,
)
