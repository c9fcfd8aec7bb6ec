"""The public functions of linear attention."""

from __future__ import annotations

import math
from typing import NoReturn

import torch

from ..runtime import checking
from . import checks, op_conv, op_delta, op_gated_norm, op_selective, op_ssd
from .tensors import DeltaRule


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    activation: str | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None,
    bias_main_grad: torch.Tensor | None = None,
    **others: NoReturn,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal depthwise convolution: y[d, t] = act(bias[d] + Σ_w weight[d, w] x[d, t - W + 1 + w]).

    The short convolution before a gated delta rule or a state space, with the names and layouts of
    the causal-conv1d package.  A row is one chain, the oldest input first, and is rounded once,
    after the activation: prefill, parts of one, single rows and packs have the same bytes.

    Args:
        x: [B, D, T]; bf16, fp16 or fp32.  Channel-last memory (rows [B, T, D], transposed) is read
            where it lies; other strides are copied.
        weight: [D, W], W from 2 to 4; bf16, fp16 or fp32.
        bias: [D] or None.
        initial_states: [sequences, D, W - 1]: the inputs before each sequence's first row, of the
            dtype of x; None: zeros.
        return_final_states: Whether to return the last W - 1 inputs of each sequence too.
        activation: None, "silu" or "swish", which is the same.
        cu_seqlens: [S + 1], int32 or int64: a pack.  x has B = 1, and sequence s its columns from
            cu_seqlens[s] up to cu_seqlens[s + 1].  Rows after the last are 0.
        main_grad, bias_main_grad: fp32, of the shape of weight and bias, or None.  If given,
            backward adds the gradient into it in place and ``grad`` stays None, as in `linear`.

    Returns:
        out [B, D, T] in channel-last memory, the dtype of x; (out, final_states) if these are asked
        for.

    Guarantees:
        ``run_to_run``, ``batch_invariant`` for rows of out and dx, and ``schedule_invariant`` on
        GPUs.  dweight and dbias are summed by chunks of 64 rows of a sequence, added one by one:
        ``split_invariant`` into ``main_grad`` for micro-batches cut between sequences.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError, AliasError,
        UnsupportedTransformError, BackendUnavailable: as `linear`.

    Source: Gu and Dao, "Mamba", 2023, section 3.4; the interface of causal-conv1d 1.6.

    Example:
        >>> x, weight = torch.randn(2, 9, 48).mT, torch.randn(48, 4)  # channel-last
        >>> whole = ck.causal_conv1d_fn(x, weight, activation="silu")
        >>> first, state = ck.causal_conv1d_fn(
        ...     x[..., :5], weight, activation="silu", return_final_states=True
        ... )
        >>> last = ck.causal_conv1d_fn(x[..., 5:], weight, None, state, activation="silu")
        >>> bool((torch.cat([first, last], 2) == whole).all())
        True
    """
    if others:
        names = {"seq_idx": "no seq_idx (packs: cu_seqlens=)"}
        checking.no_other_arguments("causal_conv1d_fn", others, names)
    silu = checks.activation(activation)
    checking.flag("return_final_states", return_final_states)
    out = op_conv.causal_conv(
        x, weight, bias, initial_states, cu_seqlens, main_grad, bias_main_grad, silu
    )
    if not return_final_states:
        return out
    return out, op_conv.final_states(x, initial_states, cu_seqlens, weight.shape[1] - 1)


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    **others: NoReturn,
) -> torch.Tensor:
    """The next rows of `causal_conv1d_fn`, whose earlier inputs are in ``conv_state``.

    Args:
        x: [B, D], or [B, D, T] for T rows of each sequence.
        conv_state: [slots, D, L], L at least W - 1, the dtype of x: the last inputs of each
            sequence, the newest last.  Written in place: x is appended.
        weight, bias, activation: As in `causal_conv1d_fn`.
        conv_state_indices: [B], int32 or int64: the slot of each sequence, each one once; None:
            sequence b has slot b.

    Returns:
        out, the shape and dtype of x, with the bytes of `causal_conv1d_fn` for the whole sequence.

    Guarantees, Raises: as `causal_conv1d_fn`.  Not differentiable.

    Source: the interface of causal-conv1d 1.6.

    Example:
        >>> state, weight = torch.zeros(2, 48, 3), torch.randn(48, 4)
        >>> ck.causal_conv1d_update(torch.randn(2, 48), state, weight).shape
        torch.Size([2, 48])
        >>> state[..., :2].abs().max().item(), bool(state[..., 2].any())
        (0.0, True)
    """
    if others:
        names = {"cache_seqlens": "no cache_seqlens (a state holds the newest input last)"}
        checking.no_other_arguments("causal_conv1d_update", others, names)
    rows = x[..., None] if x.dim() == 2 else x
    checks.conv_state(conv_state, rows, weight.shape[1], conv_state_indices)
    with torch.no_grad():
        slots = slice(x.shape[0]) if conv_state_indices is None else conv_state_indices.long()
        state = conv_state[slots]
        tail = weight.shape[1] - 1
        initial = state[..., state.shape[2] - tail :]
        out = causal_conv1d_fn(rows, weight, bias, initial, activation=activation)
        conv_state[slots] = torch.cat([state, rows], 2)[..., -conv_state.shape[2] :]
    return out[..., 0] if x.dim() == 2 else out


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log_main_grad: torch.Tensor | None = None,
    dt_bias_main_grad: torch.Tensor | None = None,
    **others: NoReturn,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated delta rule: S ← e^g S;  S ← S + k (beta (v - Sᵀ k))ᵀ;  o = scale Sᵀ q.

    With the names and layouts of flash-linear-attention.  S [K, V] is a v head's state; sequences
    are cut into chunks of 64 rows, counted from their first row, and S is rounded to fp32 between
    them.  An ``initial_state`` starts a new grid of chunks: a sequence that is cut at multiples of
    64, and goes on from the ``final_state``, has the bytes of the whole; cut elsewhere it is right,
    but may be rounded otherwise.

    Args:
        q, k: [B, T, H, K]; bf16, fp16 or fp32.  K is a multiple of 8 up to 256.
        v: [B, T, HV, V], the dtype of q, HV a multiple of H: a k head serves HV / H consecutive
            v heads.  V as K.
        g: [B, T, HV], fp32: the natural log of the decay, at most 0.
        beta: [B, T, HV], the dtype of q or fp32.
        scale: Of q; None: K ** -0.5.
        initial_state: [sequences, HV, K, V], fp32; None: zeros.
        output_final_state: Whether to return the state after each sequence's last row.
        use_qk_l2norm_in_kernel: Whether rows of q and k are divided by √(Σ x² + 1e-6) before, and
            rounded to their dtype.
        cu_seqlens: [S + 1], int32 or int64: a pack.  q has B = 1, and sequence s its rows from
            cu_seqlens[s] up to cu_seqlens[s + 1].  Rows after the last are 0, and so are their
            gradients, those of norms where the rows are finite.
        use_gate_in_kernel: Whether g is the input of a gate, bf16, fp16 or fp32, and the log of the
            decay is -e^A_log softplus(g + dt_bias).
        A_log, dt_bias: [HV], parameters of the gate; dt_bias may be None.
        A_log_main_grad, dt_bias_main_grad: [HV], fp32, or None.  If given, backward adds the
            gradient into it in place and ``grad`` stays None, as in `linear`.

    Returns:
        (o [B, T, HV, V] of the dtype of q, final_state [sequences, HV, K, V] in fp32 or None).

    Guarantees:
        ``run_to_run``, and ``batch_invariant`` for the rows of o and of the gradients of q, k, v,
        g, beta, and for the states and their gradients: in batches, packs and parts cut at
        multiples of 64.  ``schedule_invariant`` on GPUs.  dA_log and d_dt_bias are summed by chunks
        of 64 rows of a sequence, added one by one: ``split_invariant`` into the main_grads for
        micro-batches cut between sequences.  `fused_recurrent_gated_delta_rule` has the same bytes.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError,
        UnsupportedTransformError, BackendUnavailable: as `linear`.

    Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024, equation 10; the interface
    of flash-linear-attention 0.6.

    Example:
        >>> q, k = (torch.nn.functional.normalize(torch.randn(1, 70, 2, 16), dim=-1) for _ in "qk")
        >>> v, beta = torch.randn(1, 70, 4, 16), torch.rand(1, 70, 4)
        >>> g = -torch.rand(1, 70, 4)
        >>> whole, _ = ck.chunk_gated_delta_rule(q, k, v, g, beta)
        >>> first, last = zip(*(t.split(64, 1) for t in (q, k, v, g, beta)))
        >>> o, state = ck.chunk_gated_delta_rule(*first, output_final_state=True)
        >>> rest, _ = ck.chunk_gated_delta_rule(*last, initial_state=state)
        >>> bool((torch.cat([o, rest], 1) == whole).all())
        True
    """
    if others:
        checking.no_other_arguments("chunk_gated_delta_rule", others, checks.DELTA_NAMES)
    flags = output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel
    gate = A_log, dt_bias, A_log_main_grad, dt_bias_main_grad
    operands = DeltaRule(q, k, v, g, beta, initial_state)
    return op_delta.normed_and_gated(operands, False, cu_seqlens, scale, flags, gate)


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log_main_grad: torch.Tensor | None = None,
    dt_bias_main_grad: torch.Tensor | None = None,
    **others: NoReturn,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`chunk_gated_delta_rule` under the name of single rows: one op, with the same bytes.

    Args, Returns, Guarantees, Raises: as `chunk_gated_delta_rule`.

    Source: the interface of flash-linear-attention 0.6.

    Example:
        >>> q, k, v = (torch.randn(1, 3, 2, 16) for _ in "qkv")
        >>> gates = -torch.rand(1, 3, 2), torch.rand(1, 3, 2)
        >>> rows, _ = ck.fused_recurrent_gated_delta_rule(q, k, v, *gates)
        >>> bool((rows == ck.chunk_gated_delta_rule(q, k, v, *gates)[0]).all())
        True
    """
    return chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        cu_seqlens, A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=use_gate_in_kernel,
        A_log_main_grad=A_log_main_grad, dt_bias_main_grad=dt_bias_main_grad, **others,
    )  # fmt: skip


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    A_log_main_grad: torch.Tensor | None = None,
    dt_bias_main_grad: torch.Tensor | None = None,
    **others: NoReturn,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi delta attention: a gated delta rule whose state decays by channel of k.

        S ← diag(e^g) S;  S ← S + k (beta (v - Sᵀ k))ᵀ;  o = scale Sᵀ q

    `chunk_gated_delta_rule` otherwise, with its chunks of 64 rows; a row depends on no bit of a
    later one, in its chunk either.  Gates of any size are exact: no power of 2 overflows.

    Args:
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        cu_seqlens: As in `chunk_gated_delta_rule`.
        g: [B, T, HV, K], fp32: the natural logs of the decays, at most 0.
        use_gate_in_kernel: Whether g is the input of a gate, bf16, fp16 or fp32, and the log of the
            decay is -e^A_log softplus(g + dt_bias).
        A_log: [HV], a parameter of the gate.
        dt_bias: [HV K], another, or None.
        lower_bound: If given, the gate is lower_bound sigmoid(e^A_log (g + dt_bias)); below 0.
        A_log_main_grad, dt_bias_main_grad: fp32, of their shapes, or None.  If given, backward adds
            the gradient into it in place and ``grad`` stays None, as in `linear`.

    Returns:
        (o [B, T, HV, V] of the dtype of q, final_state [sequences, HV, K, V] in fp32 or None).

    Guarantees, Raises: as `chunk_gated_delta_rule`.  `fused_recurrent_kda` has the same bytes.

    Source: Kimi Team, "Kimi Linear", 2025, equation 1; the interface of flash-linear-attention 0.6.

    Example:
        >>> q, k = (torch.nn.functional.normalize(torch.randn(1, 70, 2, 16), dim=-1) for _ in "qk")
        >>> rows = q, k, torch.randn(1, 70, 2, 16), -torch.rand(1, 70, 2, 16), torch.rand(1, 70, 2)
        >>> whole, _ = ck.chunk_kda(*rows)
        >>> first, last = zip(*(t.split(64, 1) for t in rows))
        >>> o, state = ck.chunk_kda(*first, output_final_state=True)
        >>> rest, _ = ck.chunk_kda(*last, initial_state=state)
        >>> bool((torch.cat([o, rest], 1) == whole).all())
        True
    """
    if others:
        checking.no_other_arguments("chunk_kda", others, checks.KDA_NAMES)
    flags = output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel
    gate = A_log, dt_bias, A_log_main_grad, dt_bias_main_grad
    operands = DeltaRule(q, k, v, g, beta, initial_state)
    return op_delta.normed_and_gated(operands, True, cu_seqlens, scale, flags, gate, lower_bound)


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    A_log_main_grad: torch.Tensor | None = None,
    dt_bias_main_grad: torch.Tensor | None = None,
    **others: NoReturn,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`chunk_kda` under the name of single rows: one op, with the same bytes.

    Args, Returns, Guarantees, Raises: as `chunk_kda`.

    Source: the interface of flash-linear-attention 0.6.

    Example:
        >>> q, k, v, g = (torch.randn(1, 3, 2, 16) for _ in "qkvg")
        >>> gates = -g.abs(), torch.rand(1, 3, 2)
        >>> rows, _ = ck.fused_recurrent_kda(q, k, v, *gates)
        >>> bool((rows == ck.chunk_kda(q, k, v, *gates)[0]).all())
        True
    """
    return chunk_kda(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        cu_seqlens, A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound, A_log_main_grad=A_log_main_grad,
        dt_bias_main_grad=dt_bias_main_grad, **others,
    )  # fmt: skip


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int | None = None,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    A_main_grad: torch.Tensor | None = None,
    D_main_grad: torch.Tensor | None = None,
    dt_bias_main_grad: torch.Tensor | None = None,
    **others: NoReturn,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """State space scan of Mamba-2: S ← e^(A dt) S + dt x Bᵀ;  y = S C + D x.

    With the names and layouts of mamba_ssm.  S [P, N] is a head's state; sequences are cut into
    chunks of 128 rows, counted from their first row, and S is rounded to fp32 between them.
    ``initial_states`` start a new grid of chunks: a sequence that is cut at multiples of 128, and
    goes on from the final states, has the bytes of the whole; cut elsewhere it is right, but may be
    rounded otherwise.

    Args:
        x: [B, T, H, P]; bf16, fp16 or fp32.  P is a multiple of 8 up to 256.  On GPUs bf16, P 16,
            32 or 64, and N 16, 32, 64 or 128.
        dt: [B, T, H]; bf16, fp16 or fp32.  The step of a row is dt + dt_bias, its softplus with
            ``dt_softplus``, and that clamped to ``dt_limit``.
        A: [H], fp32, negative.
        B, C: [B, T, G, N], the dtype of x, H a multiple of G: a group serves H / G consecutive
            heads.  N as P.
        chunk_size: 128, or None, which is the same.
        D: [H] or [H, P]; bf16, fp16 or fp32.  None: no D x.
        z: As x: y silu(z) is returned, rounded once.  None: y.
        dt_bias: [H]; bf16, fp16 or fp32.
        initial_states: [sequences, H, P, N], fp32; None: zeros.
        cu_seqlens: [S + 1], int32 or int64: a pack.  x has B = 1, and sequence s its rows from
            cu_seqlens[s] up to cu_seqlens[s + 1].  Rows after the last are 0, and so are their
            gradients.
        dt_softplus, dt_limit: See dt.
        return_final_states: Whether to return the state after each sequence's last row too.
        A_main_grad, D_main_grad, dt_bias_main_grad: fp32, of their shapes, or None.  If given,
            backward adds the gradient into it in place and ``grad`` stays None, as in `linear`.
            What A is made of gets no gradient then: dA_log is A dA.

    Returns:
        out [B, T, H, P], the dtype of x; (out, final_states [sequences, H, P, N] in fp32) if these
        are asked for.

    Guarantees:
        ``run_to_run``, and ``batch_invariant`` for the rows of out and of the gradients of x, dt,
        B, C, z, and for the states and their gradients: in batches, packs and parts cut at
        multiples of 128.  ``schedule_invariant`` on GPUs.  dA, dD and d_dt_bias are summed by
        chunks of 128 rows of a sequence, added one by one: ``split_invariant`` into the main_grads
        for micro-batches cut between sequences.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError, AliasError,
        UnsupportedTransformError, BackendUnavailable: as `linear`.

    Source: Dao and Gu, "Transformers are SSMs", 2024, section 6; the interface of mamba_ssm 2.2.

    Example:
        >>> x, dt, A = torch.randn(1, 140, 4, 16), torch.rand(1, 140, 4), -torch.rand(4)
        >>> B, C = torch.randn(1, 140, 2, 8), torch.randn(1, 140, 2, 8)
        >>> whole = ck.mamba_chunk_scan_combined(x, dt, A, B, C)
        >>> parts = [t.split(128, 1) for t in (x, dt, B, C)]
        >>> (x0, x1), (dt0, dt1), (B0, B1), (C0, C1) = parts
        >>> y, S = ck.mamba_chunk_scan_combined(x0, dt0, A, B0, C0, return_final_states=True)
        >>> rest = ck.mamba_chunk_scan_combined(x1, dt1, A, B1, C1, initial_states=S)
        >>> bool((torch.cat([y, rest], 1) == whole).all())
        True
    """
    if others:
        checking.no_other_arguments("mamba_chunk_scan_combined", others, checks.SSD_NAMES)
    checks.chunk_size(chunk_size)
    checking.flag("return_final_states", return_final_states)
    out, final, *_ = op_ssd.ssd_scan(
        x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, A_main_grad, D_main_grad,
        dt_bias_main_grad, *checks.step_options(dt_softplus, dt_limit), return_final_states, -1,
    )  # fmt: skip
    return (out, final) if return_final_states else out


def selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    A_main_grad: torch.Tensor | None = None,
    D_main_grad: torch.Tensor | None = None,
    delta_bias_main_grad: torch.Tensor | None = None,
    **others: NoReturn,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Selective scan of Mamba: S ← e^(A step) S + step u Bᵀ;  y = S C + D u, of each channel.

    With the names and layouts of mamba_ssm's ``selective_scan_fn``.  The order is the recurrence
    itself: S [D, N] is fp32 after each row, and n ascends in S C.  So a sequence that is cut
    anywhere, and goes on from the last state, has the bytes of the whole, in both passes.

    Args:
        u: [B, D, T]; bf16, fp16 or fp32.  Channel-last memory (rows [B, T, D], transposed) is read
            where it lies; other strides are copied.
        delta: [B, D, T]; bf16, fp16 or fp32.  The step of a row is delta + delta_bias, and its
            softplus with ``delta_softplus``.
        A: [D, N], fp32, negative.  N up to 256; on GPUs 8, 16 or 32.
        B, C: [B, N, T], or [B, G, N, T] for G groups of D / G consecutive channels; the dtype of u.
        D, delta_bias: [D]; bf16, fp16 or fp32.
        z: As u: y silu(z) is returned.  None: y.
        delta_softplus: See delta.
        return_last_state: Whether to return the state after each sequence's last row too.
        initial_state: [sequences, D, N], fp32; None: zeros.
        cu_seqlens, A_main_grad, D_main_grad, delta_bias_main_grad: As in
            `mamba_chunk_scan_combined`; sequences lie along T.

    Returns:
        out [B, D, T] in channel-last memory, the dtype of u, rounded once; (out, last_state
        [sequences, D, N] in fp32) if that is asked for.

    Guarantees:
        ``run_to_run``, and ``batch_invariant`` for the rows of out and of the gradients of u,
        delta, B, C, z, and for the states and their gradients: in batches, packs and parts cut
        anywhere.  ``schedule_invariant`` on GPUs.  dA, dD and d_delta_bias are summed by chunks of
        32 rows of a sequence, added one by one: ``split_invariant`` into the main_grads for
        micro-batches cut between sequences.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError, AliasError,
        UnsupportedTransformError, BackendUnavailable: as `linear`.

    Source: Gu and Dao, "Mamba", 2023, algorithm 2; the interface of mamba_ssm 2.2.

    Example:
        >>> u, delta, A = torch.randn(1, 24, 50), torch.rand(1, 24, 50), -torch.rand(24, 16)
        >>> B, C = torch.randn(1, 16, 50), torch.randn(1, 16, 50)
        >>> whole = ck.selective_scan(u, delta, A, B, C)
        >>> (u0, u1), (d0, d1), (B0, B1), (C0, C1) = (t.split(37, 2) for t in (u, delta, B, C))
        >>> y, S = ck.selective_scan(u0, d0, A, B0, C0, return_last_state=True)
        >>> rest = ck.selective_scan(u1, d1, A, B1, C1, initial_state=S)
        >>> bool((torch.cat([y, rest], 2) == whole).all())
        True
    """
    if others:
        checking.no_other_arguments("selective_scan", others)
    checking.flag("return_last_state", return_last_state)
    steps = checks.step_options(delta_softplus, (-math.inf, math.inf), "delta_softplus")
    out, last, *_ = op_selective.selective_scan(
        u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens, A_main_grad, D_main_grad,
        delta_bias_main_grad, *steps, return_last_state, -1,
    )  # fmt: skip
    return (out, last) if return_last_state else out


def gated_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    gate: torch.Tensor,
    eps: float,
    *,
    norm_before_gate: bool,
    activation: str = "silu",
    group_size: int | None = None,
    main_grad: torch.Tensor | None = None,
    **others: NoReturn,
) -> torch.Tensor:
    """RMS norm with a gate: x / √(mean(x²) + eps) · weight · act(gate), or of x · act(gate).

    The norm after a gated delta rule (norm before gate, a head a row) and after a state space
    (gate before norm, groups of a row).  A row is rounded once, at the end.

    Args:
        x: [..., D]; bf16, fp16 or fp32; any strides.
        weight: [D] or None (1); bf16, fp16 or fp32.
        gate: As x, with strides of its own.
        eps: Added to the mean of the squares, inside the root.
        norm_before_gate: True: the normalised x is multiplied by act(gate).  False: x · act(gate)
            is normalised.
        activation: "silu" or "swish", which is the same, or "sigmoid".
        group_size: Elements of a row that are normalised together, a factor of D, at most 8192;
            None: D.
        main_grad: fp32 [D] or None.  If given, backward adds dweight into it in place and
            ``weight.grad`` stays None, as in `linear`.

    Returns:
        y [..., D], contiguous, the dtype of x.

    Guarantees:
        ``run_to_run``, ``batch_invariant`` for y, dx and dgate, and ``schedule_invariant`` on GPUs.
        dweight is a sum over rows in parts of `config.group_part_rows(group_size)` (1024 of
        128 elements, 64 from 1024 on, 32 above 4096), added one by one: ``split_invariant`` into
        ``main_grad`` for micro-batches cut there.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError, AliasError,
        UnsupportedTransformError, BackendUnavailable: as `linear`.

    Source: Dao and Gu, "Transformers are SSMs", 2024, section 7; Yang et al., "Gated Delta
    Networks", 2024, section 3.4.

    Example:
        >>> x, gate, weight = torch.randn(5, 4, 64), torch.randn(5, 4, 64), torch.ones(64)
        >>> ck.gated_rms_norm(x, weight, gate, 1e-6, norm_before_gate=True).shape
        torch.Size([5, 4, 64])
    """
    if others:
        checking.no_other_arguments("gated_rms_norm", others)
    kind = checks.gated_norm_options(activation, norm_before_gate, group_size)
    options = kind, eps, norm_before_gate, group_size
    return op_gated_norm.gated_norm(x, weight, gate, main_grad, *options)[0]
