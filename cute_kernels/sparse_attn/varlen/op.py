"""The torch ops of a varlen batch: schemas, fakes, autograd.

    pack_offsets             where each sequence begins -> the same, checked, on the CPU
    cut_spans                spans of one sequence, offsets -> spans of each part
    pack_attention           q, k, v [1, T, H, D], offsets, sinks -> out, lse
    pack_attention_backward

Offsets are an operand: one compiled graph serves every pack.  GPUs take a launch a pass for a whole
pack (``passes``), the CPU one for each sequence.  SM90 kernels read offsets on their device, which
the host then never does.
"""

from __future__ import annotations

import torch

from ...arch import CUTE_SM90
from ...errors import ArgumentValueError, DeviceError, expected
from ...runtime import dispatch
from ...runtime.caching import capturing
from ...runtime.dispatch import Implementation
from ...runtime.dynamo import untraced
from ...runtime.torch_ops import define_op
from ..kv_ranges import op as kv_ranges_op
from ..kv_ranges import ranges
from ..op import (
    HALF,
    NAME,
    fake_gradients,
    gradients_of_nothing,
    nothing,
    refuse_double_backward,
    refuse_vmap,
    wanted_gradients,
    with_sinks,
)
from ..tensors import Grads, Saved, shape_of_out
from . import layout, passes

_SYSTEM = __package__.rpartition(".")[0]

for _name, _function in (
    (passes.PACK_NAME, "forward"),
    (f"{passes.PACK_NAME}_backward", "backward"),
):
    dispatch.register(
        _name,
        {
            CUTE_SM90: Implementation(
                f"{_SYSTEM}.launch:{_function}_of_pack",
                HALF,
                planner=f"{_SYSTEM}.launch:plan_{_function}_of_pack",
            )
        },
        contract=NAME,
    )


@untraced
def reads_offsets(device: str) -> bool:
    """Whether the kernels of a device read offsets there."""
    return dispatch.reasons(passes.PACK_NAME, device, torch.bfloat16)[CUTE_SM90] is None and (
        dispatch.backend(NAME, device, torch.bfloat16) == CUTE_SM90
    )


# A constant of a compiled graph, as `lowering.operands` is.
reads_offsets._dynamo_marked_constant = True


def offsets_of(cu_seqlens, q):
    """Offsets as `pack_attention` takes them: on the CPU, unless kernels read them on a GPU."""
    if cu_seqlens.is_cuda and reads_offsets(str(q.device)):
        return cu_seqlens
    return pack_offsets(cu_seqlens, q.shape[1])


def _run_offsets(cu_seqlens, rows):
    if cu_seqlens.is_cuda and capturing():
        want = "a CPU tensor while a CUDA graph is captured"
        raise DeviceError(expected("cu_seqlens", want, cu_seqlens.device))
    return ranges.offsets_of_pack(cu_seqlens, rows)


def _fake_offsets(cu_seqlens, rows):
    return torch.empty(cu_seqlens.shape, dtype=torch.int64, device="cpu")


def _run_cut(spans, offsets):
    if not all(torch.equal(offsets[0], other) for other in offsets):
        want = f"those of the queries, {offsets[0].tolist()}"
        raise ArgumentValueError(expected("cu_seqlens of the keys", want, offsets[1].tolist()))
    return ranges.cut_spans(spans, offsets[0])


def _fake_cut(spans, offsets):
    return torch.empty(spans.shape, dtype=torch.int32, device="cpu")


def _where(q, offsets):
    """Bounds of the sequences for one launch."""
    if passes.in_place(q) and not offsets.is_cuda and capturing():
        want = f"on {q.device} while a CUDA graph is captured, whose replays read it there"
        raise DeviceError(expected("cu_seqlens", want, offsets.device))
    return layout.between(offsets)


def _run(q, k, v, offsets, left, right, scale, softcap, sinks):
    if not q.numel():
        return nothing(q, v, sinks)
    if passes.at_once(q):
        window = left, right
        return passes.forward(_where(q, offsets), window, q, k, v, scale, softcap, sinks)
    spans = ranges.spans_of_pack(offsets, left, right)
    return kv_ranges_op.attend(q, k, v, spans, scale, softcap, sinks)


def _fake(q, k, v, offsets, left, right, scale, softcap, sinks):
    batch, rows, heads, _ = q.shape
    lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
    return q.new_empty(shape_of_out(q, v)), lse


def _run_backward(dout, dlse, q, k, v, out, lse, offsets, left, right, scale, softcap, sinks):
    if not q.numel():
        return gradients_of_nothing(dlse, q, k, v, sinks)
    if passes.at_once(q):
        grads_and_saved = Grads(dout, dlse), Saved(q, k, v, out, lse, sinks)
        gradients = passes.backward(
            _where(q, offsets), (left, right), *grads_and_saved, scale, softcap
        )
        return with_sinks(gradients, q, sinks)
    spans = ranges.spans_of_pack(offsets, left, right)
    return kv_ranges_op.differentiate(dout, dlse, q, k, v, out, lse, spans, scale, softcap, sinks)


def _fake_backward(dout, dlse, q, k, v, out, lse, offsets, left, right, scale, softcap, sinks):
    return fake_gradients(q, k, v, sinks)


def _setup(ctx, inputs, output):
    q, k, v, offsets, *ctx.options, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, offsets, sinks)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    q, k, v, out, lse, offsets, sinks = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    options = *ctx.options, sinks
    grads = pack_attention_backward(dout, dlse, q, k, v, out, lse, offsets, *options)
    return wanted_gradients(ctx, grads, 5)


def _setup_nothing(ctx, inputs, output):
    pass


_OPTIONS = "Tensor offsets, SymInt? left, SymInt? right, float scale, float softcap, Tensor? sinks"
pack_offsets = define_op(
    "pack_offsets(Tensor cu_seqlens, SymInt rows) -> Tensor", _run_offsets, fake=_fake_offsets
)
cut_spans = define_op(
    "cut_spans(Tensor spans, Tensor[] offsets) -> Tensor", _run_cut, fake=_fake_cut
)
pack_attention = define_op(
    f"pack_attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    _run,
    fake=_fake,
    setup=_setup,
    backward=_backward,
    vmap=refuse_vmap,
    autocast_args=(0, 1, 2),
)
pack_attention_backward = define_op(
    "pack_attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    fake=_fake_backward,
    setup=_setup_nothing,
    backward=refuse_double_backward,
    vmap=refuse_vmap,
)
