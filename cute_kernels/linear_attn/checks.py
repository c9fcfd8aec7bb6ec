"""Tensors -> nothing, or one exception that names the argument.  Works on meta tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..errors import ArgumentTypeError, ArgumentValueError, ShapeError, expected
from ..runtime import checking
from .config import (
    CONV_WIDTHS,
    DELTA_CHUNK,
    DELTA_GPU_SIZES,
    DELTA_SIZES,
    GATED_ACTIVATIONS,
    L2NORM_WIDTHS,
    MAX_CHANNELS,
    MAX_GROUP,
    MAX_HEADS,
    SELECTIVE_GPU_STATES,
    SELECTIVE_STATES,
    SSD_CHUNK,
    SSD_GPU_SIZES,
)
from .tensors import Conv, DeltaRule, Gate, Gated, StateSpace, StepOptions

STATE_LAYOUTS = ("state_v_first", "transpose_state_layout")
#: Arguments of flash-linear-attention -> what `chunk_gated_delta_rule` has in their place.
DELTA_NAMES = {
    "head_first": "no head_first (shapes are [B, T, H, ...])",
    "cu_seqlens_cpu": "no cu_seqlens_cpu (cu_seqlens= alone)",
    "chunk_size": f"no chunk_size (chunks have {DELTA_CHUNK} rows)",
    "cp_context": "no cp_context (sequences lie on one device)",
    **{name: f"no {name} (states are [K, V])" for name in STATE_LAYOUTS},
    "use_beta_sigmoid_in_kernel": "no use_beta_sigmoid_in_kernel (beta = ck.sigmoid(b))",
}
#: Likewise of `chunk_kda`.
KDA_NAMES = DELTA_NAMES | {
    "safe_gate": "no safe_gate (any gate is safe; lower_bound= bounds that of use_gate_in_kernel)"
}
#: Parameters of the gate of a delta rule.
GATE = "A_log", "dt_bias", "A_log_main_grad", "dt_bias_main_grad", "lower_bound"
#: Arguments of mamba_ssm -> what `mamba_chunk_scan_combined` has in their place.
SSD_NAMES = {
    "seq_idx": "no seq_idx (packs: cu_seqlens=)",
    "return_varlen_states": "no return_varlen_states (with cu_seqlens= return_final_states=True "
    "returns a state of each sequence)",
}

ACTIVATIONS = (None, "silu", "swish")


def conv(operands: Conv, cu_seqlens: torch.Tensor | None, silu: bool) -> None:
    """Check the arguments of `op_conv.causal_conv`, whose rows are [B, D, T]."""
    x, weight, bias, initial_states = operands
    checking.operand("x", x, "[B, D, T]")
    checking.supported("causal_conv1d_fn", x.device)
    channels, on_x = x.shape[1], ("x", x)
    if channels > MAX_CHANNELS:
        raise ShapeError(expected("x", f"a D of at most {MAX_CHANNELS}", channels))
    checking.operand("weight", weight, "[D, W]")
    if weight.shape[0] != channels or weight.shape[1] not in CONV_WIDTHS:
        want = f"shape [{channels}, W], D of x, W one of {', '.join(map(str, CONV_WIDTHS))}"
        raise ShapeError(expected("weight", want, list(weight.shape)))
    checking.same_device("weight", weight, *on_x)
    _optional("bias", bias, "[D]", (channels,), "D of x", on_x)
    states = count_of(cu_seqlens, "x", x), channels, weight.shape[1] - 1
    _optional("initial_states", initial_states, "[sequences, D, W - 1]", states, "", on_x, x.dtype)


def delta_rule(operands: DeltaRule, cu_seqlens: torch.Tensor | None, scale: float | None) -> None:
    """Check the arguments of `op_delta.gated_delta_rule`, whose rows are [B, T, H, ...]."""
    q, k, v, g, beta, initial_state = operands
    queries_and_keys(q, k)
    on_q = "q", q
    checking.operand("v", v, "[B, T, HV, V]", (q.dtype,))
    _multiple("v", "HV, heads,", v.shape[2], q.shape[2], MAX_HEADS)
    _multiple("v", "V", v.shape[3], *DELTA_SIZES)
    _on_gpus("q", "K", q, DELTA_GPU_SIZES)
    _on_gpus("v", "V", v, DELTA_GPU_SIZES)
    _operand("v", v, "[B, T, HV, V]", (*q.shape[:2], *v.shape[2:]), "B and T of q", on_q, q.dtype)
    layout, sizes, whose = "[B, T, HV]", v.shape[:3], "B, T, HV of v"
    if gate_dimensions(g) == 4:
        by_channel = (*sizes, q.shape[3])
        _operand("g", g, "[B, T, HV, K]", by_channel, f"{whose}, K of q", on_q, torch.float32)
    else:
        _operand("g", g, layout, sizes, whose, on_q, torch.float32)
    _operand("beta", beta, layout, sizes, whose, on_q, q.dtype, torch.float32)
    states = count_of(cu_seqlens, "q", q), v.shape[2], q.shape[3], v.shape[3]
    _optional(
        "initial_state", initial_state, "[sequences, HV, K, V]", states, "", on_q, torch.float32
    )
    if scale is not None and not math.isfinite(checking.number("scale", scale)):
        raise ArgumentValueError(expected("scale", "a finite number", scale))


def queries_and_keys(q: torch.Tensor, k: torch.Tensor) -> None:
    """Check q and k of a delta rule, or of the norms before it."""
    checking.operand("q", q, "[B, T, H, K]")
    checking.supported("chunk_gated_delta_rule", q.device)
    _multiple("q", "H, heads,", q.shape[2], 1)
    _multiple("q", "K", q.shape[3], *DELTA_SIZES)
    checking.operand("k", k, "[B, T, H, K]", (q.dtype,))
    checking.same_device("k", k, "q", q)
    checking.shape("k", k, q.shape, "that of q")


def gate_dimensions(g: object) -> int:
    """Dimensions of the gates of a delta rule: 4 of channels [B, T, HV, K], else 3."""
    return 4 if isinstance(g, torch.Tensor) and g.dim() == 4 else 3


def gate(
    in_kernel: object, q: torch.Tensor, g: torch.Tensor, channels: bool, *parameters: object
) -> None:
    """Check what `op_gate.decay_gate` knows by other names, or that nothing of it is given.

    channels: Whether g has them.  parameters: As `GATE` names them.
    """
    checking.flag("use_gate_in_kernel", in_kernel)
    checking.tensor("q", q)
    checking.operand("g", g, "[B, T, HV, K]" if channels else "[B, T, HV]")
    if in_kernel:
        checking.same_device("g", g, "q", q)
        checking.tensor("A_log", parameters[0])
        return
    for name, value in zip(GATE, parameters, strict=True):
        if value is not None:
            want = "None without use_gate_in_kernel=True"
            raise ArgumentTypeError(expected(name, want, type(value).__name__))


def state_space(
    operands: StateSpace,
    cu_seqlens: torch.Tensor | None,
    softplus: bool,
    low: float,
    high: float,
) -> None:
    """Check the arguments of `op_ssd.ssd_scan`, whose rows are [B, T, ...]."""
    x, dt, A, B, C, D, z, dt_bias, initial_states = operands
    checking.operand("x", x, "[B, T, H, P]")
    checking.supported("mamba_chunk_scan_combined", x.device)
    (heads, size), on_x, fp32 = x.shape[2:], ("x", x), torch.float32
    _multiple("x", "H, heads,", heads, 1, MAX_HEADS)
    _multiple("x", "P", size, *DELTA_SIZES)
    _operand("dt", dt, "[B, T, H]", x.shape[:3], "B, T, H of x", on_x)
    _operand("A", A, "[H]", (heads,), "H of x", on_x, fp32)
    checking.operand("B", B, "[B, T, G, N]", (x.dtype,))
    _divisor("B", B.shape[2], "H", heads)
    _multiple("B", "N", B.shape[3], *DELTA_SIZES)
    _on_gpus("x", "P", x, SSD_GPU_SIZES[0])
    _on_gpus("B", "N", B, SSD_GPU_SIZES[1])
    of_B = *x.shape[:2], *B.shape[2:]
    _operand("B", B, "[B, T, G, N]", of_B, "B and T of x", on_x, x.dtype)
    _operand("C", C, "[B, T, G, N]", B.shape, "that of B", on_x, x.dtype)
    if D is not None:
        checking.tensor("D", D)
        layout = "[H]" if D.dim() == 1 else "[H, P]"
        _operand("D", D, layout, x.shape[2 : 2 + D.dim()], "H, or H and P, of x", on_x)
    _optional("z", z, "[B, T, H, P]", x.shape, "that of x", on_x, x.dtype)
    _optional("dt_bias", dt_bias, "[H]", (heads,), "H of x", on_x)
    states = count_of(cu_seqlens, "x", x), heads, size, B.shape[3]
    _optional("initial_states", initial_states, "[sequences, H, P, N]", states, "", on_x, fp32)
    if not low <= high:
        raise ArgumentValueError(expected("dt_limit", "(low, high), low at most high", (low, high)))


def selective_scan(
    operands: StateSpace,
    cu_seqlens: torch.Tensor | None,
    softplus: bool,
    low: float,
    high: float,
) -> None:
    """Check the arguments of `op_selective.selective_scan`, whose rows are [B, ..., T]."""
    u, delta, A, B, C, D, z, delta_bias, initial_state = operands
    checking.operand("u", u, "[B, D, T]")
    checking.supported("selective_scan", u.device)
    channels, on_u, fp32 = u.shape[1], ("u", u), torch.float32
    _multiple("u", "D, channels,", channels, 1, MAX_HEADS)
    checking.operand("A", A, "[D, N]", (fp32,))
    _multiple("A", "N", A.shape[1], 1, SELECTIVE_STATES)
    _on_gpus("A", "N", A, SELECTIVE_GPU_STATES)
    checking.tensor("B", B)
    layout, groups = ("[B, G, N, T]", B.shape[1:2]) if B.dim() == 4 else ("[B, N, T]", ())
    for count in groups:
        _divisor("B", count, "D", channels)
    of_B = len(u), *groups, A.shape[1], u.shape[2]
    _operand("delta", delta, "[B, D, T]", u.shape, "that of u", on_u)
    _operand("A", A, "[D, N]", (channels, A.shape[1]), "D of u, and N", on_u, fp32)
    _operand("B", B, layout, of_B, "B and T of u, N of A", on_u, u.dtype)
    _operand("C", C, layout, B.shape, "that of B", on_u, u.dtype)
    _optional("D", D, "[D]", (channels,), "D of u", on_u)
    _optional("z", z, "[B, D, T]", u.shape, "that of u", on_u, u.dtype)
    _optional("delta_bias", delta_bias, "[D]", (channels,), "D of u", on_u)
    states = count_of(cu_seqlens, "u", u), *A.shape
    _optional("initial_state", initial_state, "[sequences, D, N]", states, "", on_u, fp32)


def step_options(dt_softplus: object, dt_limit: object, name: str = "dt_softplus") -> StepOptions:
    """``dt_softplus``, the argument ``name``, and ``dt_limit`` of a state space scan."""
    checking.flag(name, dt_softplus)
    if not isinstance(dt_limit, tuple | list) or len(dt_limit) != 2:
        raise ArgumentTypeError(expected("dt_limit", "two numbers (low, high)", repr(dt_limit)))
    return StepOptions(dt_softplus, *(checking.number("dt_limit", t) for t in dt_limit))


def chunk_size(size: object) -> None:
    """Check the ``chunk_size`` that mamba_ssm's callers give."""
    if size is not None and checking.integer("chunk_size", size) != SSD_CHUNK:
        want = f"{SSD_CHUNK} (results depend on it)"
        raise ArgumentValueError(expected("chunk_size", want, size))


def l2norm(x: torch.Tensor, eps: float) -> None:
    """Check the arguments of `op_gate.l2norm`."""
    checking.tensor("x", x)
    checking.dtype("x", x.dtype, checking.FLOATS)
    checking.supported("l2norm", x.device)
    step, most = L2NORM_WIDTHS
    if x.dim() < 1 or not (0 < x.shape[-1] <= most and x.shape[-1] % step == 0):
        want = f"a last dimension that is a multiple of {step} up to {most}"
        raise ShapeError(expected("x", want, list(x.shape)))
    if not 2.0**-126 <= checking.number("eps", eps) <= 2.0**40:
        raise ArgumentValueError(expected("eps", "a number from 2^-126 to 2^40", eps))


def decay_gate(operands: Gate, cu_seqlens: torch.Tensor | None, lower_bound: float | None) -> None:
    """Check the arguments of `op_gate.decay_gate`."""
    a, A_log, dt_bias = operands
    of_heads = gate_dimensions(a) == 3
    checking.operand("a", a, "[B, T, H]" if of_heads else "[B, T, H, K]")
    checking.supported("decay_gate", a.device)
    heads, channels = a.shape[2], math.prod(a.shape[2:])
    most = MAX_CHANNELS if of_heads else MAX_HEADS
    if heads > most:
        raise ShapeError(expected("a", f"an H of at most {most}", heads))
    if not of_heads:
        _multiple("a", "K", a.shape[3], *DELTA_SIZES)
    _operand("A_log", A_log, "[H]", (heads,), "H of a", ("a", a))
    layout, whose = ("[H]", "H of a") if of_heads else ("[H K]", "H K of a")
    _optional("dt_bias", dt_bias, layout, (channels,), whose, ("a", a))
    if lower_bound is not None and not -math.inf < checking.number("lower_bound", lower_bound) < 0:
        raise ArgumentValueError(expected("lower_bound", "a number below 0", lower_bound))
    count_of(cu_seqlens, "a", a)


def _operand(
    name: str,
    t: torch.Tensor,
    layout: str,
    sizes: Sequence[int],
    whose: str,
    like: tuple[str, torch.Tensor],
    *dtypes: torch.dtype,
) -> None:
    """Check an argument of these sizes on the device of ``like``, (its name, a tensor).

    whose: What has these sizes; "": the layout says so.  dtypes: By default floats.
    """
    checking.operand(name, t, layout, dtypes or checking.FLOATS)
    checking.shape(name, t, sizes, whose or layout)
    checking.same_device(name, t, *like)


def _optional(name: str, t: torch.Tensor | None, *expectations: object) -> None:
    """Check an argument that may be None, as `_operand` does."""
    if t is not None:
        _operand(name, t, *expectations)


def _divisor(name: str, groups: int, what: str, size: int) -> None:
    """Check that the groups of the argument ``name`` divide a size."""
    if groups < 1 or size % groups:
        raise ShapeError(expected(name, f"G, groups, a divisor of {what} = {size}", groups))


def _multiple(name: str, what: str, size: int, of: int, most: int | None = None) -> None:
    """Check that a size of the argument ``name`` is a positive multiple, and not too large."""
    if size < 1 or size % of or (most is not None and size > most):
        want = f"a multiple of {of} from {of} on" + (f", at most {most}" if most else "")
        raise ShapeError(expected(name, f"{what} {want}", size))


def _on_gpus(name: str, what: str, t: torch.Tensor, sizes: tuple[int, ...]) -> None:
    """Check that the last dimension of an argument on a GPU is one of ``sizes``."""
    if t.device.type == "cuda" and t.shape[-1] not in sizes:
        want = f"{what} one of {', '.join(map(str, sizes))} on a GPU"
        raise ShapeError(expected(name, want, t.shape[-1]))


def count_of(cu_seqlens: torch.Tensor | None, name: str, x: torch.Tensor) -> int:
    """Number of sequences of a batch or a pack, the argument ``name``.

    It checks the offsets, whose values stay on the device.
    """
    if cu_seqlens is None:
        return x.shape[0]
    checking.operand("cu_seqlens", cu_seqlens, "[S + 1]", (torch.int32, torch.int64))
    if cu_seqlens.shape[0] < 2:
        got = list(cu_seqlens.shape)
        raise ShapeError(expected("cu_seqlens", "shape [S + 1] of at least one sequence", got))
    checking.same_device("cu_seqlens", cu_seqlens, name, x)
    if x.shape[0] != 1:
        want = f"batch 1 of {name} (a pack of sequences along T)"
        raise ShapeError(expected("cu_seqlens", want, f"batch {x.shape[0]}"))
    return cu_seqlens.shape[0] - 1


def activation(name: object) -> bool:
    """Whether an ``activation`` is SiLU."""
    if name not in ACTIVATIONS:
        raise ArgumentValueError(expected("activation", "None, 'silu' or 'swish'", repr(name)))
    return name is not None


def slots(name: str, indices: torch.Tensor, sequences: int, of: str, states: torch.Tensor) -> None:
    """Check the slot of each sequence in the argument ``of``, whose first dimension they are."""
    checking.operand(name, indices, "[sequences]", (torch.int32, torch.int64))
    checking.shape(name, indices, (sequences,), "one of each sequence")
    checking.same_device(name, indices, of, states)
    want = f"numbers from 0 to {len(states) - 1}, all different"

    def allowed(s: torch.Tensor) -> torch.Tensor:
        return (s >= 0) & (s < len(states)) & ((s[:, None] == s).sum(1) == 1)

    checking.values(name, indices, allowed, want)


def conv_state(
    conv_state: torch.Tensor, x: torch.Tensor, width: int, indices: torch.Tensor | None
) -> None:
    """Check the state that `causal_conv1d_update` reads and writes, and its slots."""
    checking.operand("conv_state", conv_state, "[slots, D, L]")
    _, channels, length = conv_state.shape
    if channels != x.shape[1] or length < width - 1:
        want = f"shape [slots, {x.shape[1]}, at least {width - 1}]"
        raise ShapeError(expected("conv_state", want, list(conv_state.shape)))
    checking.dtype("conv_state", conv_state.dtype, (x.dtype,))
    checking.same_device("conv_state", conv_state, "x", x)
    if indices is not None:
        slots("conv_state_indices", indices, x.shape[0], "conv_state", conv_state)
    elif len(conv_state) < len(x):
        want = f"at least {len(x)} slots, one of each sequence"
        raise ShapeError(expected("conv_state", want, len(conv_state)))


def gated_norm(
    operands: Gated, activation: str, eps: object, norm_before_gate: bool, group_size: int | None
) -> None:
    """Check the arguments of `op_gated_norm.gated_norm`."""
    x, weight, gate = operands
    checking.tensor("x", x)
    checking.dtype("x", x.dtype, checking.FLOATS)
    if x.dim() < 1 or not x.shape[-1]:
        raise ShapeError(expected("x", "shape [..., D], D at least 1", list(x.shape)))
    checking.supported("gated_rms_norm", x.device)
    width = x.shape[-1]
    _optional("weight", weight, "[D]", (width,), "the D of x", ("x", x))
    checking.tensor("gate", gate)
    checking.dtype("gate", gate.dtype, (x.dtype,))
    checking.shape("gate", gate, x.shape, "that of x")
    checking.same_device("gate", gate, "x", x)
    group = width if group_size is None else group_size
    if group < 1 or width % group:
        raise ShapeError(expected("group_size", f"a factor of {width}, the D of x", group))
    if group > MAX_GROUP:
        raise ShapeError(expected("group_size", f"at most {MAX_GROUP}", group))
    # Below the least normal fp32 a device may take an eps for zero.
    if not (checking.number("eps", eps) == 0 or 2.0**-126 <= eps <= 2.0**40):
        raise ArgumentValueError(expected("eps", "0, or a number from 2^-126 to 2^40", eps))


def gated_norm_options(activation: object, norm_before_gate: object, group_size: object) -> str:
    """Check options of `gated_rms_norm` by type, and return the activation's one name."""
    if not isinstance(activation, str) or activation not in GATED_ACTIVATIONS:
        names = ", ".join(map(repr, GATED_ACTIVATIONS))
        raise ArgumentValueError(expected("activation", f"one of {names}", repr(activation)))
    checking.flag("norm_before_gate", norm_before_gate)
    if group_size is not None:
        checking.integer("group_size", group_size, "an int or None")
    return GATED_ACTIVATIONS[activation]
