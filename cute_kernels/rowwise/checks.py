"""Tensors -> a frozen problem of each op, or one exception that names the argument.

Works on meta tensors, but for ids and gradients, whose values or memory are looked at where they
can be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..errors import (
    AliasError,
    ArgumentTypeError,
    ArgumentValueError,
    CuteKernelsError,
    DeviceError,
    DtypeError,
    NonfiniteError,
    ShapeError,
    expected,
    one_of,
)
from ..runtime import checking
from ..runtime import main_grad as destination
from .config import APPROXIMATE, promoted

DTYPES = checking.FLOATS
_MAX_SIZE = 2**31 - 1


class Lookup(NamedTuple):
    """Options of an embedding: the entry that has no gradient, -1 for none."""

    padding: int


class Turn(NamedTuple):
    """Tables of a rotary embedding, broadcast to the leading dimensions of q and k."""

    cos: torch.Tensor
    sin: torch.Tensor


class Clip(NamedTuple):
    """Gradients to clip, in the order of their parameters."""

    gradients: tuple[torch.Tensor, ...]
    max_norm: float
    largest: bool  # whether the norm is the maximum


def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None,
    main_grad: torch.Tensor | None,
) -> Lookup:
    """Check ``embedding(ids[...], weight[V, D])``."""
    checking.integers("ids", ids)
    _floats("weight", weight)
    checking.rank("weight", weight, 2, "[V, D]")
    checking.same_device("weight", weight, "ids", ids)
    checking.supported("embedding", weight.device)
    vocab = weight.shape[0]
    padding = -1
    if padding_idx is not None:
        padding = checking.integer("padding_idx", padding_idx)
        if not -vocab <= padding < vocab:
            want = f"an entry of weight, {-vocab} to {vocab - 1}, or None"
            raise ArgumentValueError(expected("padding_idx", want, padding))
        padding %= vocab
    if (values := checking.readable(ids)) is not None:
        # Reading values on a GPU would synchronize; there torch's lookup asserts.
        wrong = (values < 0) | (values >= vocab)
        if bool(wrong.any()):
            bad_id = int(values[wrong].flatten()[0])
            raise ArgumentValueError(expected("ids", f"entries of 0 to {vocab - 1}", bad_id))
    if main_grad is not None:
        destination.check(main_grad, weight, ids, "ids")
    if not torch.compiler.is_compiling():
        destination.check_values(ids, weight, None, main_grad, "ids")
    return Lookup(padding)


def row(op: str, x: torch.Tensor, dtype: torch.dtype | None, dim: int) -> torch.dtype:
    """Check ``softmax(x[..., N], dim)``; return the dtype of its result."""
    _floats("x", x)
    checking.supported(op, x.device)
    if x.dim() < 1:
        raise ShapeError(expected("x", "at least 1 dimension [..., N]", "a scalar tensor"))
    if checking.integer("dim", dim) not in (-1, x.dim() - 1):
        want = "-1, the last dimension (of another one: transpose x)"
        raise ArgumentValueError(expected("dim", want, dim))
    return _result_dtype(dtype, x.dtype)


def element(op: str, x: torch.Tensor) -> None:
    """Check a function of each element of ``x``."""
    _floats("x", x)
    checking.supported(op, x.device)


def gelu_kind(approximate: str) -> str:
    """Return the kind of gelu."""
    if not isinstance(approximate, str) or approximate not in APPROXIMATE:
        raise ArgumentValueError(one_of("approximate", tuple(APPROXIMATE), approximate))
    return APPROXIMATE[approximate]


def gated(op: str, gate: torch.Tensor, up: torch.Tensor) -> None:
    """Check ``silu_mul(gate, up)``: one shape, dtype and device."""
    _floats("gate", gate)
    _floats("up", up)
    if gate.shape != up.shape:
        raise ShapeError(expected("up", f"shape {list(gate.shape)}, that of gate", list(up.shape)))
    checking.same_device("up", up, "gate", gate)
    if gate.dtype != up.dtype:
        raise DtypeError(expected("up", f"{gate.dtype}, the dtype of gate", up.dtype))
    checking.supported(op, gate.device)


def rotary_table(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float, dtype: torch.dtype
) -> float:
    """Check ``rotary_table(positions[...], inv_freq[F])``; return the scaling."""
    checking.integers("positions", positions)
    checking.tensor("inv_freq", inv_freq)
    checking.dtype("inv_freq", inv_freq.dtype, (torch.float32,))
    checking.rank("inv_freq", inv_freq, 1, "[D / 2]")
    checking.same_device("inv_freq", inv_freq, "positions", positions)
    checking.supported("rotary_table", positions.device)
    checking.no_gradient("inv_freq", inv_freq)
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(expected("dtype", "a torch.dtype", type(dtype).__name__))
    checking.dtype("dtype", dtype, DTYPES)
    return checking.number("scaling", scaling)


def apply_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int,
    op: str = "apply_rotary",
) -> Turn:
    """Check ``apply_rotary(q[..., D], k[..., D], cos[..., R], sin[..., R])``."""
    for name, t in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        _floats(name, t)
        checking.same_device(name, t, "q", q)
    for name, t in (("q", q), ("k", k)):
        if t.dim() not in (3, 4):
            want = "3 or 4 dimensions, [H, S, D] or [B, H, S, D]"
            raise ShapeError(expected(name, want, f"{t.dim()} (shape {list(t.shape)})"))
    if k.dtype != q.dtype:
        raise DtypeError(expected("k", f"{q.dtype}, the dtype of q", k.dtype))
    checking.supported(op, q.device)
    if cos.dim() < 1 or sin.shape != cos.shape:
        want = f"shape {list(cos.shape)}, that of cos, [..., R]"
        raise ShapeError(expected("sin", want, list(sin.shape)))
    if sin.dtype != cos.dtype:
        raise DtypeError(expected("sin", f"{cos.dtype}, the dtype of cos", sin.dtype))
    for name, t in (("cos", cos), ("sin", sin)):
        checking.no_gradient(name, t)
    dim, most = checking.integer("unsqueeze_dim", unsqueeze_dim), cos.dim() - 1
    if not 0 <= dim <= most:
        want = f"0 to {most}, a dimension before the last of cos"
        raise ArgumentValueError(expected("unsqueeze_dim", want, dim))
    tables = Turn(cos.unsqueeze(dim), sin.unsqueeze(dim))
    for name, t in (("q", q), ("k", k)):
        _check_broadcast(name, t, tables.cos)
    return tables


def rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int,
    dtype: torch.dtype | None,
) -> torch.dtype:
    """Check `apply_rotary_pos_emb`; return the dtype of its results."""
    apply_rotary(q, k, cos, sin, unsqueeze_dim, "apply_rotary_pos_emb")
    # The LLVM of Triton 3.7 makes an fp16 product of one that is rounded to fp16: bf16 overflows.
    if torch.float32 not in (q.dtype, cos.dtype) and q.dtype != cos.dtype:
        want = f"{q.dtype}, the dtype of q, or torch.float32"
        raise DtypeError(expected("cos", want, cos.dtype))
    result = _result_dtype(dtype, promoted(q.dtype, cos.dtype))
    if result not in (q.dtype, torch.float32):
        want = f"{q.dtype}, the dtype of q, torch.float32, or None"
        raise DtypeError(expected("dtype", want, result))
    return result


def is_rotary_pos_emb(*args: object) -> bool:
    """Whether `rotary_pos_emb` passes, with torch's own tensors.

    For callers that otherwise run torch's ops.
    """
    if not {type(t) for t in args[:4]} <= {torch.Tensor, torch.nn.Parameter}:
        return False
    try:
        rotary_pos_emb(*args)
    except CuteKernelsError:
        return False
    return True


def clip(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    main_grad: bool,
) -> Clip:
    """Check ``clip_grad_norm_(parameters, max_norm)``: whole gradients, on one device."""
    for name, flag in (("error_if_nonfinite", error_if_nonfinite), ("main_grad", main_grad)):
        checking.flag(name, flag)
    most = checking.number("max_norm", max_norm)
    if not most >= 0:
        raise ArgumentValueError(expected("max_norm", "a number of 0 or more", max_norm))
    if checking.number("norm_type", norm_type) not in (2.0, math.inf):
        want = "2.0 or inf (other powers have no rounding that a device must keep)"
        raise ArgumentValueError(expected("norm_type", want, norm_type))
    gradients: dict[str, torch.Tensor] = {}
    first, ids = None, set()
    for i, parameter in enumerate(_parameters(parameters)):
        gradient = _gradient(f"parameters[{i}]", parameter, main_grad)
        if gradient is None:
            continue
        if id(gradient) in ids:
            want = "each gradient once (it is scaled in place)"
            raise AliasError(expected(f"parameters[{i}]", want, "one that came before"))
        ids.add(id(gradient))
        gradients[f"parameters[{i}]"] = gradient
        first = gradient if first is None else first
        if gradient.device != first.device:
            want = f"a gradient on {first.device}, where the first one is"
            raise DeviceError(expected(f"parameters[{i}]", want, gradient.device))
    if first is not None:
        checking.supported("clip_grad_norm_", first.device)
    if not torch.compiler.is_compiling():
        _scalable(gradients)
    return Clip(tuple(gradients.values()), most, norm_type == math.inf)


def _scalable(gradients: dict[str, torch.Tensor]) -> None:
    """Refuse, before any gradient is scaled, those that cannot be scaled in place once each."""
    ranges: list[tuple[int, int, str, torch.Tensor]] = []
    for name, gradient in gradients.items():
        t = checking.in_memory(gradient)
        if t is None or t.is_meta or not t.numel():
            continue
        if destination.shares_elements(t):
            want = "elements at distinct addresses (it is scaled in place)"
            raise AliasError(expected(name, want, f"strides {t.stride()}"))
        ranges.append((*destination.addresses(t), name, t))
    ranges.sort(key=lambda entry: entry[0])
    for index, (_, stop, name, t) in enumerate(ranges):
        for start, _, other_name, u in ranges[index + 1 :]:
            if start >= stop:
                break
            if destination.shares_elements(t, u):
                want = f"memory of its own (each gradient is scaled once), not that of {other_name}"
                raise AliasError(expected(name, want, "an overlapping view"))


def finite(total: torch.Tensor) -> None:
    """Check that a norm is finite, if the caller asked; waits for a GPU."""
    if not bool(total.isfinite()):
        want = "gradients whose norm is finite (error_if_nonfinite=True)"
        raise NonfiniteError(expected("parameters", want, float(total)))


# ---- helpers -------------------------------------------------------------------------------------


def _result_dtype(dtype: torch.dtype | None, default: torch.dtype) -> torch.dtype:
    if dtype is None:
        return default
    if not isinstance(dtype, torch.dtype):
        want = "a torch.dtype, or None"
        raise ArgumentTypeError(expected("dtype", want, type(dtype).__name__))
    checking.dtype("dtype", dtype, DTYPES)
    return dtype


def _floats(name: str, t: torch.Tensor) -> None:
    checking.tensor(name, t)
    checking.dtype(name, t.dtype, DTYPES)
    if t.dim() and max(t.shape) > _MAX_SIZE:
        raise ShapeError(expected(name, f"sizes of at most {_MAX_SIZE}", list(t.shape)))


def _check_broadcast(name: str, t: torch.Tensor, table: torch.Tensor) -> None:
    width, columns = table.shape[-1], t.shape[-1]
    if width < 2 or width % 2 or width > columns:
        want = f"an even last dimension of 2 to {columns}, the D of {name}"
        raise ShapeError(expected("cos", want, width))
    rows, lead = t.shape[:-1], table.shape[:-1]
    fits = len(lead) <= len(rows) and all(
        size in (1, extent) for size, extent in zip(reversed(lead), reversed(rows), strict=False)
    )
    if not fits:
        want = f"leading dimensions that go with {list(lead)}, those of cos after unsqueeze_dim"
        raise ShapeError(expected(name, want, list(rows)))


def _parameters(parameters: object) -> list[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    if isinstance(parameters, (str, bytes)) or not isinstance(parameters, Iterable):
        want = "a tensor or an iterable of tensors"
        raise ArgumentTypeError(expected("parameters", want, type(parameters).__name__))
    return list(parameters)


def _gradient(name: str, parameter: torch.Tensor, main_grad: bool) -> torch.Tensor | None:
    checking.tensor(name, parameter)
    _check_whole(name, parameter)
    gradient = parameter.grad
    if main_grad and getattr(parameter, "main_grad", None) is not None:
        if gradient is not None:
            want = "a gradient in main_grad or in grad, not in both"
            raise ArgumentValueError(expected(name, want, "both"))
        name, gradient = f"{name}.main_grad", parameter.main_grad
        checking.tensor(name, gradient)
    if gradient is None:
        return None
    _check_whole(name, gradient)
    checking.tensor(name, gradient)
    checking.dtype(name, gradient.dtype, DTYPES)
    if gradient.is_neg():
        want = "a gradient whose memory holds its values (it is scaled in place)"
        raise ArgumentValueError(expected(name, want, "a negated view"))
    if gradient.is_inference() and not torch.is_inference_mode_enabled():
        want = "a gradient that can be scaled in place"
        raise ArgumentValueError(expected(name, want, "a tensor of torch.inference_mode()"))
    return gradient


def _check_whole(name: str, t: torch.Tensor) -> None:
    """Check that a tensor is not one of the kinds that hold a part of a parameter."""
    kinds = {base.__name__ for base in type(t).__mro__}
    for kind in ("DTensor", "ShardedTensor", "FlatParameter"):
        if kind in kinds:
            want = "a tensor that is whole (a norm over shards needs the group's order of adding)"
            raise ArgumentTypeError(expected(name, want, kind))
    if hasattr(t, "ds_id"):
        want = "a tensor that is whole (a norm over shards needs the group's order of adding)"
        raise ArgumentTypeError(expected(name, want, "a parameter that DeepSpeed has partitioned"))
