"""``ck.block_sparse_attention``, and what integrations with a key buffer build on."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Literal, overload

import torch

from ..runtime.torch_ops import own_result
from ..schedulers.masks.mask import BlockMask
from ..schedulers.model.selection import Selection
from ..schedulers.order.schedule import Schedule
from . import checks, lowering, op
from .kv_ranges import ranges
from .paged.api import paged_attention as paged_attention
from .paged.api import write_kv_cache as write_kv_cache


@overload
def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask: BlockMask | None = ...,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    softcap: float = ...,
    sinks: torch.Tensor | None = ...,
    schedule: str | Schedule | Selection | Sequence[int] | torch.Tensor = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask: BlockMask | None = ...,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    softcap: float = ...,
    sinks: torch.Tensor | None = ...,
    schedule: str | Schedule | Selection | Sequence[int] | torch.Tensor = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask: BlockMask | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    schedule: str | Schedule | Selection | Sequence[int] | torch.Tensor = "auto",
    deterministic: bool = True,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q kᵀ) v over the allowed (query, key) pairs, with bits that can be relied on.

    Args:
        q: [B, Sq, Hq, D]; bf16 or fp16; any strides.  D is 64, 96, 128, 192 or 256.
        k, v: [B, Sk, Hkv, D], [B, Sk, Hkv, Dv]; the dtype and device of ``q``.  Hkv divides Hq:
            query head h reads KV head h // (Hq / Hkv).  Dv is D, but 128 for D = 192 (DeepSeek's).
        block_mask: The allowed pairs, of lengths Sq and Sk, for one or B batches and one or Hq
            heads, on the device of ``q``; None allows all.  Blocks of any size are cut anew into
            128 x 128, once per mask.
        causal: Also require key <= query + Sk - Sq (the last query sees all).
        scale: Factor of the scores, above 0; None is 1 / sqrt(D).
        softcap: If not 0, a score s is softcap * tanh(s / softcap); from 2**-40 to 1024, more is
            refused: on a GPU a capped score has an absolute error of up to 2**-21 softcap (2.4e-5
            at 50, 4.9e-4 at 1024).
        sinks: [Hq]; fp32, bf16 or fp16: a score of each query head that every row's sum has besides
            its keys', with a value of zeros (attention sinks, arXiv:2309.17453, as gpt-oss learns
            them).  Not scaled and not capped.
        schedule: The order of the backward pass: "auto"; "left_to_right", "spt", "lpt" or another
            of ``schedulers.kinds.KINDS``; a permutation of the key blocks, [Nb] or [heads, Nb] (not
            in a graph of ``torch.compile``); or a ``schedulers.Schedule`` or ``Selection`` for this
            mask in blocks of 128 x 128.  Its heads are the B * Hkv KV heads; the B * Hq query heads
            if the mask has Hq (on SM90 with Hkv < Hq such masks take no Schedule).  Checked before
            anything runs: it must progress with any number of resident CTAs.
        deterministic: False allows dQ to be added in arrival order, where that is faster.
        return_lse: Also return the log-sum-exp of each row; it is differentiable.

    Returns:
        out [B, Sq, Hq, Dv], contiguous, the dtype of ``q``; with ``return_lse`` also lse, fp32
        [B, Hq, Sq], natural logarithm, a sink included.  A row that may see nothing is 0 with an
        lse of -inf, or its sink, and its gradients are 0.

    Guarantees:
        ``run_to_run``, ``schedule_invariant``, and in the forward pass ``batch_invariant``: a row's
        bits depend on its query, its allowed keys at their absolute positions, and their values;
        not on the other rows, batches and heads, on padding, or on how a prefill is cut into
        chunks.  (NaN or Inf in ``v`` may reach any row of a query block that visits its key block.)
        In a backward on a GPU NaN or Inf of a masked row or key is multiplied by a weight of 0,
        which gives NaN: q's of a row reaches dk, dout's dv (on SM90 without softcap also dk and dq
        of the row) of the key blocks that its query block visits, k's of a key reaches dq of the
        query blocks that visit its block.  Padding must be finite there.  On a CPU a row or key
        that a block masks whole reaches nothing of it.
        The gradients' bits also depend on the schedule: dQ adds key blocks in the order of ranks,
        dK and dV add query blocks in the order of visits.  ``Schedule.hash`` names both.  The
        gradient of ``sinks`` is a sum over all rows in fp64: ``run_to_run``.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError: an argument is
            wrong; the message names it.
        ScheduleError: a schedule that does not fit the mask or could wait for ever.
        NondeterministicError: ``deterministic=False`` under torch's determinism flag.
        BackendUnavailable: the device has no backend, or its backend not this head size.

    On SM90, if Hkv < Hq and the mask has Hq heads, a backward copies q, out, dout and dq: the query
    heads of a group become rows of one head (docs/attention.md).
    There a tensor whose strides or pointer TMA cannot address is copied: the bits are the same.

    Masks, schedules and their tensors are built once per content and reused across layers and
    steps; under ``torch.compile`` a new BlockMask object compiles anew.  Lengths and batches of
    zero are valid.

    Example:
        >>> q, k, v = (torch.randn(1, 100, heads, 64).bfloat16() for heads in (8, 2, 2))
        >>> mask = ck.BlockMask.causal(100, 100)
        >>> ck.block_sparse_attention(q, k, v, mask).shape
        torch.Size([1, 100, 8, 64])
    """
    if isinstance(schedule, Selection):
        schedule = schedule.schedule
    # The usual options are asked here: the two checks take 0.8 us of a call's 11.
    if not type(causal) is type(deterministic) is type(return_lse) is bool:
        checks.flags(causal=causal, deterministic=deterministic, return_lse=return_lse)
    if scale is not None or type(softcap) is not float or softcap != 0.0:
        scale, softcap = checks.factors(scale, softcap)
    if not deterministic:
        op.refuse_unordered()
    # A kind that may be unsafe is built here, so that it is refused before the forward runs.
    if block_mask is None and type(schedule) is str and schedule not in checks.MAY_BE_UNSAFE:
        checks.schedule(schedule)
        operands = [], lowering.CAUSAL if causal else lowering.FULL, [], schedule
    else:
        needs_order = torch.is_grad_enabled() and any(
            getattr(t, "requires_grad", False) for t in (q, k, v, sinks)
        )
        operands = lowering.operands(q, k, v, block_mask, causal, schedule, needs_order, sinks)
    options = *operands, deterministic, scale, softcap, sinks
    out, lse = op.block_sparse_attention(q, k, v, *options)
    return (out, lse) if return_lse else out


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`sequence_attention` of whole sequences, which all lie alike: the same bytes without ranges.

    Nothing depends on data, so a graph of ``torch.compile`` has neither a mask nor a host's wait.

    Args:
        q: [B, T, Hq, D]; k: [B, T, Hkv, D]; v: [B, T, Hkv, Dv]; scale, softcap, sinks: as in
            `block_sparse_attention`.
        window: How many keys a query sees, itself included; 0: all up to itself.

    Returns:
        [B, T, Hq, Dv].
    """
    facts, (scale, softcap) = (
        lowering.window(operator.index(window)),
        checks.factors(scale, softcap),
    )
    operands = [], facts, [], lowering.OF_SEQUENCES, True, scale, softcap, sinks
    return op.block_sparse_attention(q, k, v, *operands)[0]


@overload
def block_sparse_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    causal: bool = ...,
    window_size: tuple[int | None, int | None] = ...,
    scale: float | None = ...,
    softcap: float = ...,
    sinks: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def block_sparse_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    causal: bool = ...,
    window_size: tuple[int | None, int | None] = ...,
    scale: float | None = ...,
    softcap: float = ...,
    sinks: torch.Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def block_sparse_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`block_sparse_attention` of sequences packed one behind another, each as if it were alone.

    Args:
        q: [T, Hq, D]; k: [T, Hkv, D]; v: [T, Hkv, Dv]; dtypes, devices, head counts and sizes as
            in `block_sparse_attention`.
        cu_seqlens: int32 or int64 [N + 1], ascending from 0 to T: sequence i is the tokens from
            cu_seqlens[i] to cu_seqlens[i + 1], of which there may be none.  On the CPU, where they
            are looked at; or on a GPU, which SM90 kernels read by themselves, and others wait for.
            What SM90 kernels read is trusted.  It may end before T: tokens behind the last sequence
            see nothing.  Other offsets give wrong results; none make a kernel leave its tensors.
        causal: Also require key <= query.
        window_size: (left, right): how many tokens before and behind itself a query sees; None:
            all of its sequence.
        scale, softcap, sinks: As in `block_sparse_attention`.
        return_lse: Also return the log-sum-exp of each row; it is differentiable.

    Returns:
        out [T, Hq, Dv], contiguous, the dtype of ``q``; with ``return_lse`` also lse, fp32 [Hq, T].

    Guarantees:
        out, lse, dq, dk and dv of a sequence have the bytes that `block_sparse_attention` gives
        for it alone, as a batch of 1 with ``schedule="spt"``: whatever is packed beside it, in
        whichever order.  ``run_to_run`` and ``schedule_invariant`` as there.

    On SM90 a pass is one launch for all sequences, which reads them where they lie, behind a small
    one that says where that is.  With ``cu_seqlens`` on the GPU the host waits for nothing, and a
    CUDA graph may hold both passes: its replays read other offsets of as many sequences.  On other
    GPUs q, k and v are copied, so that each sequence begins at a multiple of 128 rows, and lists
    are made on the host, and kept for packs of the same ``cu_seqlens``.  Under
    ``torch.compile(fullgraph=True)`` cu_seqlens is an operand: no pack compiles anew.

    Raises:
        As `block_sparse_attention`; ArgumentValueError for ``cu_seqlens`` that do not ascend from
        0 to T, where they are looked at, when the op runs; DeviceError while a CUDA graph is
        captured, on SM90 for those on the CPU, elsewhere for those on a GPU.

    Example:
        >>> q, k, v = (torch.randn(30, heads, 64).bfloat16() for heads in (8, 2, 2))
        >>> cu_seqlens = torch.tensor([0, 10, 30], dtype=torch.int32)
        >>> ck.block_sparse_attention_varlen(q, k, v, cu_seqlens, causal=True).shape
        torch.Size([30, 8, 64])
    """
    left, right = checks.varlen(q, k, v, cu_seqlens, window_size)
    checks.flags(causal=causal, return_lse=return_lse)
    scale, softcap = checks.factors(scale, softcap)
    q, k, v = q[None], k[None], v[None]
    offsets = op.offsets_of(cu_seqlens, q)
    options = left, 0 if causal else right, scale, softcap, sinks
    out, lse = op.varlen_attention(q, k, v, offsets, *options)
    out, lse = own_result(out[0]), own_result(lse[0])
    return (out, lse) if return_lse else out


def seen_columns(dense: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """The columns that each query sees, for `kv_ranges`.

    Args:
        dense: bool [B, 1, T, S]; the True columns of a query lie next to each other.
        device: The CPU, or where ``dense`` is.

    Returns:
        int32 [B, 1, T, 2] on ``device``: first and end, equal for a query that sees nothing.

    Raises:
        ArgumentValueError: a query whose columns have gaps; the message names it.  Not for one
            query (T = 1) with ``device`` a GPU, nor while a CUDA graph is captured: neither waits.
    """
    checks.dense_mask(dense)
    return op.seen_columns(dense, torch.device(device))


def kv_ranges_device(device: torch.device | str) -> torch.device:
    """Best device of the ranges for tensors on a device.

    There, if its kernels read them and no gradient is asked for, which needs them on the CPU.
    """
    torch_device = torch.device(device)
    can_read = torch_device.type == "cuda" and not torch.is_grad_enabled()
    reads = can_read and op.reads_keys_on_device(str(torch_device))
    return torch_device if reads else torch.device("cpu")


def kv_ranges(
    seen: torch.Tensor | None,
    padding: torch.Tensor | None,
    q_offset: int | torch.Tensor,
    kv_offset: int,
    sizes: tuple[int, int, int],
    *,
    packed: bool = True,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Compute each query's KV range: its sequence in a key buffer, and the keys that it sees.

    Args:
        seen: What `seen_columns` returned; None: causal.
        padding: bool [B, L], True for the real tokens of each sequence, which lie next to each
            other; None: all are real.  Queries at columns that are not real see nothing.
        q_offset: The column of the first query, counted from the first token ever cached.
        kv_offset: How many of the oldest columns a cache has dropped.
        sizes: (B, T, S): sequences, queries of each, columns of the key buffer.
        packed: Where the queries are all of the buffer and nothing is padding: whether columns
            that see nothing of each other are documents, each with positions of its own.
        device: The CPU, or the GPU of ``seen`` and ``padding``, where nothing waits: gaps are not
            looked for, and documents not told apart (``packed`` has to be False).

    Returns:
        int32 [B, 1, T, 4] on ``device``; see ``sparse_attn.kv_ranges.ranges``.

    Raises:
        ArgumentValueError: a gap in ``padding``; ``packed`` on a GPU; an offset or a size that is
            no number from 0 to 2**30 - 1.  ArgumentTypeError: one that is no integer.
    """
    checks.key_buffer(q_offset, kv_offset, sizes)
    torch_device = torch.device(device)
    checks.documents(packed, torch_device)
    plain = seen is None and padding is None and torch_device.type != "cpu"
    if plain and torch.compiler.is_dynamo_compiling():
        # Additions that inductor fuses, where the op would launch each.
        return ranges.of_sequences(None, None, q_offset, kv_offset, sizes, torch_device)
    if not isinstance(q_offset, torch.Tensor):
        q_offset = torch.full((), q_offset, dtype=torch.int64, device="cpu")
    return op.kv_ranges(seen, padding, q_offset, kv_offset, *sizes, packed, torch_device)


def kv_ranges_from_first_key(seen: torch.Tensor) -> torch.Tensor:
    """Ranges of queries whose positions are counted from the first key that each of them sees.

    A row's bits then depend on its query and the keys it sees, and on no key in front of them: for
    callers who do not know where a buffer's columns lie in their sequences.

    Args:
        seen: What `seen_columns` returned, on the CPU.

    Returns:
        int32 [B, 1, T, 4]; see ``sparse_attn.kv_ranges.ranges``.  Rows whose first keys differ
        by no multiple of 128 take a launch each: under a sliding window up to 128 launches.
    """
    return ranges.anchored(seen)


def cut_kv_ranges(
    kv_ranges: torch.Tensor, cu_seqlens: torch.Tensor, cu_seqlens_k: torch.Tensor | None = None
) -> torch.Tensor:
    """The ranges of sequences packed one behind another, from those of all as one sequence.

    Args:
        kv_ranges: What `kv_ranges` returned for (1, T, T).
        cu_seqlens: As in `block_sparse_attention_varlen`; a GPU is waited for.
        cu_seqlens_k: Those of the keys, where a caller has both; they have to be the same.

    Returns:
        int32 [1, 1, T, 4] on the CPU: a query sees what it did, of its own sequence.

    Raises:
        ShapeError: a batch; ArgumentValueError: ``cu_seqlens`` that do not ascend from 0 to T, that
        are others for the keys, or ranges of a cache.
    """
    checks.one_sequence(kv_ranges)
    offset_tensors = [t for t in (cu_seqlens, cu_seqlens_k) if t is not None]
    for offsets in offset_tensors:
        checks.offsets(offsets)
    return op.cut_kv_ranges(
        kv_ranges, [op.varlen_offsets(t, kv_ranges.shape[2]) for t in offset_tensors]
    )


def sequence_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_ranges: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`block_sparse_attention` of each sequence of a key buffer alone, at its own positions.

    A row has the bits that it has in its sequence alone, whatever stands before, behind or beside
    it in the buffer: padding on either side, other documents of a pack, a cache that dropped the
    oldest keys.  So do the gradients of a sequence that is attended as one run; the order of their
    sums is that of ``schedule="spt"``.

    Args:
        q: [B, T, Hq, D]; k: [B, S, Hkv, D]; v: [B, S, Hkv, Dv]; scale, softcap, sinks: as in
            `block_sparse_attention`.
        kv_ranges: What `kv_ranges` returned for (B, T, S).

    Returns:
        [B, T, Hq, Dv]; rows that see nothing are 0 and have no gradient.

    Guarantees, Raises: as `block_sparse_attention`.  Under ``torch.compile(fullgraph=True)`` ranges
    are an operand: no length, padding or mask compiles anew.
    """
    scale, softcap = checks.factors(scale, softcap)
    return op.sequence_attention(q, k, v, kv_ranges, scale, softcap, sinks)[0]
