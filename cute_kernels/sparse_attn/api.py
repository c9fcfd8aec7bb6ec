"""``ck.block_sparse_attention``: the public face of block-sparse attention."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from ..schedulers.mask import BlockMask
from ..schedulers.schedule import Schedule
from . import checks, op


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask: BlockMask | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    schedule: str | Schedule | Sequence[int] | torch.Tensor = "auto",
    deterministic: bool = True,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q kᵀ) v over the allowed (query, key) pairs, with bits that can be relied on.

    Args:
        q: [B, Sq, Hq, D]; bf16 or fp16; any strides.  D is 64, 96 or 128.
        k, v: [B, Sk, Hkv, D]; the dtype and device of ``q``.  Hkv divides Hq: query head h reads
            KV head h // (Hq / Hkv).
        block_mask: The allowed pairs, of lengths Sq and Sk, for one or B batches and one or Hq
            heads, on the device of ``q``; None allows all.  Blocks of any size are cut anew into
            128 x 128, once per mask.
        causal: Also require key <= query + Sk - Sq (the last query sees all).
        scale: Factor of the scores, above 0; None is 1 / sqrt(D).
        softcap: If not 0, a score s is softcap * tanh(s / softcap).
        schedule: The order of the backward pass: "auto"; "left_to_right", "spt", "lpt" or another
            of ``schedulers.kinds.KINDS``; a permutation of the key blocks, [Nb] or [heads, Nb]; or
            a ``schedulers.Schedule`` for this mask in blocks of 128 x 128.  Its heads are the
            B * Hkv KV heads; the B * Hq query heads if the mask has Hq.  Checked before anything
            runs: it must progress with any number of resident CTAs.
        deterministic: False allows dQ to be added in arrival order, where that is faster.
        return_lse: Also return the log-sum-exp of each row; it is differentiable.

    Returns:
        out [B, Sq, Hq, D], contiguous, the dtype of ``q``; with ``return_lse`` also lse, fp32
        [B, Hq, Sq], natural logarithm.  A row that may see nothing is 0 with an lse of -inf, and
        its gradients are 0.

    Guarantees:
        ``run_to_run``, ``schedule_invariant``, and in the forward pass ``batch_invariant``: a row's
        bits depend on its query, its allowed keys at their absolute positions, and their values;
        not on the other rows, batches and heads, on padding, or on how a prefill is cut into
        chunks.  (NaN or Inf in ``v`` reaches every row of a query block that visits its key block.)
        The gradients' bits also depend on the schedule: dQ adds key blocks in the order of ranks,
        dK and dV add query blocks in the order of visits.  ``Schedule.hash`` names both.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError: an argument is
            wrong; the message names it.
        ScheduleError: a schedule that does not fit the mask or could wait for ever.
        NondeterministicError: ``deterministic=False`` under torch's determinism flag.
        BackendUnavailable: the device has no backend.

    On SM90 a gradient needs, if Hkv < Hq, a mask of 1 head; else ShapeError.
    There a tensor whose strides or pointer TMA cannot address is copied: the bits are the same.

    Masks, schedules and their tensors are built once per content and reused across layers and
    steps; under ``torch.compile`` a new BlockMask object compiles anew.  Lengths and batches of
    zero are valid.
    """
    flags = {"causal": causal, "deterministic": deterministic, "return_lse": return_lse}
    given = checks.attention(q, k, v, block_mask, scale, softcap, schedule, flags)
    if not deterministic:
        op.refuse_unordered()
    wants_grad = q.requires_grad or k.requires_grad or v.requires_grad
    needs_order = torch.is_grad_enabled() and wants_grad
    # Plain numbers: a mask and a schedule are for one shape, in dynamic graphs too.
    sizes = tuple(operator.index(size) for size in given[:6])
    mask, facts, order = op.prepared(
        block_mask, causal, schedule, needs_order, sizes, str(given.device)
    )
    out, lse = op.block_sparse_attention(
        q, k, v, mask, facts, order, given.scale, given.softcap, deterministic
    )
    return (out, lse) if return_lse else out
