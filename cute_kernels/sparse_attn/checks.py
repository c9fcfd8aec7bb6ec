"""Tensors, a mask and a schedule -> a Problem, or one error that names the argument.

Nothing below this file checks again, but for what a schedule must be on its mask (``lowering``).
"""

from __future__ import annotations

import numbers
import operator
from typing import NamedTuple

import numpy as np
import torch

from .. import arch
from ..errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DeviceError,
    DtypeError,
    ShapeError,
    expected,
    one_of,
)
from ..runtime import checking
from ..runtime.dynamo import untraced
from ..schedulers.masks.mask import BlockMask
from ..schedulers.order.kinds import KINDS
from ..schedulers.order.schedule import Schedule
from . import config
from .masks import FAR
from .pack_gqa import Sizes, wanted

DTYPES = (torch.bfloat16, torch.float16)
#: Of scale and softcap.  Kernels form scale / softcap and log2(e) times either in fp32, which must
#: neither overflow (infinity times a score of 0 is NaN) nor vanish.
LEAST, MOST = 2.0**-40, 2.0**40
#: A capped score has an absolute error of up to 2^-21 softcap on SM90 and in Triton, whose tanh is
#: 1 - 2 / (1 + e^x), which cancels near 0.  A CPU's tanh does not; it keeps to the same limit, so
#: that a call is taken by all backends or by none.
MOST_SOFTCAP = 1024.0
#: The last two dimensions of each, for messages.
_HEADS = {"q": "Hq, D", "k": "Hkv, D", "v": "Hkv, Dv"}
AUTO = "auto"
#: The schedules that have a name.
SCHEDULES = (AUTO, *KINDS)
#: Of these, the kinds that need several resident CTAs on some masks.
MAY_BE_UNSAFE = frozenset({"shift", "symmetric_shift"})


class Problem(NamedTuple):
    """One attention.

    q [batch, q_len, heads, head_dim], k [batch, kv_len, kv_heads, head_dim], v likewise, value_dim.
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    device: torch.device
    scale: float
    softcap: float


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask: BlockMask | None,
    scale: float | None,
    softcap: float,
    schedule: object,
    flags: dict[str, object],
) -> Problem:
    """The problem of ``block_sparse_attention``; ``flags``: the arguments that are bools."""
    if not _plain(q, k, v):
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            _tensor(name, tensor, q)
    batch, q_len, heads, dim = q.shape
    # A number, not a size that is traced: tables have its key.
    dim = operator.index(dim)
    kv_len, kv_heads = k.shape[1], k.shape[2]
    _shapes(q, k, v, dim)
    checking.supported("block_sparse_attention", q.device)
    for name, value in flags.items():
        flag(name, value)
    if block_mask is not None:
        _mask(block_mask, batch, heads, q_len, kv_len, q.device)
    _schedule_type(schedule)
    scale, softcap = factors(scale, softcap, dim)
    sizes = batch, q_len, kv_len, heads, kv_heads, dim, v.shape[3]
    return Problem(*sizes, q.device, scale, softcap)


def sinks(sinks: torch.Tensor | None, q: torch.Tensor) -> None:
    """Check that ``sinks`` are one number for each query head of ``q`` [.., T, Hq, D]."""
    if sinks is None:
        return
    checking.tensor("sinks", sinks)
    checking.dtype("sinks", sinks.dtype, (torch.float32, *DTYPES))
    checking.same_device("sinks", sinks, "q", q)
    if list(sinks.shape) != [q.shape[-2]]:
        want = f"shape [{q.shape[-2]}], a number for each query head"
        raise ShapeError(expected("sinks", want, list(sinks.shape)))


def pack(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: object, window_size: object
) -> tuple[int | None, int | None]:
    """(left, right) of a pack's ``window_size``; that its tensors have the dimensions of one."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        checking.tensor(name, t)
        checking.rank(name, t, 3, f"[T, {_HEADS[name]}]")
        if t.shape[0] != q.shape[0]:
            want = f"{q.shape[0]} tokens, as q has"
            raise ShapeError(expected(name, want, t.shape[0]))
    cu_seqlens_of_a_pack(cu_seqlens)
    return window(window_size)


def window(window_size: object) -> tuple[int | None, int | None]:
    """(left, right) of a ``window_size``: numbers of tokens, or None."""
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise ArgumentTypeError(expected("window_size", "(left, right)", repr(window_size)))
    for side in window_size:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
            want = "whole numbers or None"
            raise ArgumentTypeError(expected("window_size", want, repr(window_size)))
        if side is not None and not 0 <= side < FAR:
            want = f"numbers from 0 to {FAR - 1}, or None"
            raise ArgumentValueError(expected("window_size", want, repr(window_size)))
    return tuple(window_size)


def dense_mask(dense: torch.Tensor) -> None:
    """Check that ``dense`` is a bool mask which all heads share."""
    checking.tensor("attention_mask", dense)
    if dense.dtype != torch.bool:
        raise ArgumentTypeError(expected("attention_mask", "a bool tensor", dense.dtype))
    if dense.dim() != 4 or dense.shape[1] != 1:
        want = "shape [B, 1, T, S], one mask for all heads"
        raise ShapeError(expected("attention_mask", want, list(dense.shape)))


def spans(spans: torch.Tensor, q: torch.Tensor) -> None:
    """Check that ``spans`` fit the queries ``q`` [B, T, Hq, D], on the CPU or on their device."""
    checking.tensor("spans", spans)
    want = [q.shape[0], 1, q.shape[1], 4]
    if spans.dtype != torch.int32 or list(spans.shape) != want:
        got = f"{spans.dtype} {list(spans.shape)}"
        raise ShapeError(expected("spans", f"torch.int32 {want}, as q has queries", got))
    if spans.device.type != "cpu" and spans.device != q.device:
        want = f"the CPU or {q.device}, where q is"
        raise DeviceError(expected("spans", want, spans.device))


def spans_of_one(spans: torch.Tensor) -> None:
    """Check that a batch is one row."""
    checking.tensor("spans", spans)
    checking.rank("spans", spans, 4, "[1, 1, T, 4]")
    if spans.shape[0] != 1:
        want = "a batch of 1, in which all sequences lie one behind another"
        raise ShapeError(expected("cu_seqlens", want, spans.shape[0]))


def cu_seqlens_of_a_pack(cu_seqlens: object) -> None:
    """Check the dtype and the dimensions of cu_seqlens."""
    checking.tensor("cu_seqlens", cu_seqlens)
    checking.rank("cu_seqlens", cu_seqlens, 1, "[N + 1]")
    checking.dtype("cu_seqlens", cu_seqlens.dtype, (torch.int32, torch.int64))
    if cu_seqlens.shape[0] < 1:
        raise ShapeError(expected("cu_seqlens", "at least 1 number", "none"))


def key_buffer(q_offset: object, kv_offset: object, sizes: object) -> None:
    """Check the offsets and the sizes (B, T, S) of a key buffer: numbers below 2**30."""
    for name, value in (("q_offset", q_offset), ("kv_offset", kv_offset)):
        if not isinstance(value, torch.Tensor):
            _length(name, value)
        elif value.numel() != 1 or value.dtype not in (torch.int32, torch.int64):
            got = f"{value.dtype} {list(value.shape)}"
            raise ArgumentTypeError(expected(name, "an int or a tensor of one", got))
    if not isinstance(sizes, tuple | list) or len(sizes) != 3:
        want = "(B, T, S): sequences, queries of each, columns of the buffer"
        raise ArgumentTypeError(expected("sizes", want, repr(sizes)))
    for i, size in enumerate(sizes):
        _length(f"sizes[{i}]", size)


def _length(name: str, value: object) -> None:
    """Check a count of tokens or of sequences."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise ArgumentTypeError(expected(name, "an int", repr(value)))
    if not 0 <= value < FAR:
        raise ArgumentValueError(expected(name, f"a number from 0 to {FAR - 1}", value))


def flag(name: str, value: object) -> None:
    """Check for True or False: a text is true whatever it says, so nothing else is taken."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(expected(name, "True or False", repr(value)))


def spans_apart(packed: bool, device: torch.device) -> None:
    """Check that the documents of a varlen batch are known on the CPU."""
    flag("packed", packed)
    if packed and device.type != "cpu":
        raise ArgumentValueError(expected("packed", f"False for spans on {device}", packed))


@untraced
def on_sm90(device: str) -> bool:
    """Whether the kernels of SM90 are those of a device."""
    return arch.refusal(arch.CUTE_SM90, arch.describe(device)) is None


# A constant of a compiled graph, as `lowering.operands` is.
on_sm90._dynamo_marked_constant = True


def stacked(device: str, mask_heads: int, q_len: int, heads: int, kv_heads: int) -> bool:
    """Whether a backward stacks the rows of query heads (`stacked`): SM90, for masks by head."""
    if not wanted(mask_heads, heads, kv_heads) or not on_sm90(device):
        return False
    rows = Sizes(q_len, heads, kv_heads).rows
    if rows >= FAR:
        want = f"a length below {FAR * kv_heads // heads}, with a gradient and masks by query head"
        raise ShapeError(expected("q", want, q_len))
    return True


def _schedule_type(schedule: object) -> None:
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ArgumentValueError(one_of("schedule", SCHEDULES, schedule))
    elif isinstance(schedule, (list, tuple, np.ndarray, torch.Tensor)):
        if torch.compiler.is_compiling():
            want = "a name or a Schedule under torch.compile (schedulers.permutation makes one)"
            raise ArgumentTypeError(expected("schedule", want, "a column order"))
    elif not isinstance(schedule, Schedule):
        want = "a name, a column order (list, array or tensor) or a Schedule"
        raise ArgumentTypeError(expected("schedule", want, type(schedule).__name__))


def _mask(
    mask: BlockMask, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device
) -> None:
    if not isinstance(mask, BlockMask):
        want = (
            "a cute_kernels.BlockMask or None (BlockMask.from_dense makes one of a bool tensor, "
            "BlockMask.from_flex of FlexAttention's)"
        )
        # FlexAttention's class has the name of ours.
        got = f"{type(mask).__module__}.{type(mask).__qualname__}".removeprefix("builtins.")
        raise ArgumentTypeError(expected("block_mask", want, got))
    if (mask.q_len, mask.kv_len) != (q_len, kv_len):
        want = f"lengths {(q_len, kv_len)} of q and k"
        raise ShapeError(expected("block_mask", want, (mask.q_len, mask.kv_len)))
    for i, (name, size) in enumerate((("batch", batch), ("query heads", heads))):
        if mask.shape[i] not in (1, size):
            want = f"{f'1 or {size}' if size != 1 else 1} {name} like q"
            raise ShapeError(expected("block_mask", want, mask.shape[i]))
    if device.type != "meta" and mask.device != device:
        raise DeviceError(expected("block_mask", f"device {device} of q", mask.device))


def _plain(q: object, k: object, v: object) -> bool:
    """Whether `_tensor` would find nothing; it says what, and costs the host more."""
    return (
        type(q) is type(k) is type(v) is torch.Tensor
        and q.dtype is k.dtype is v.dtype
        and q.dtype in DTYPES
        and q.dim() == k.dim() == v.dim() == 4
        and q.layout is k.layout is v.layout is torch.strided
        and q.device == k.device == v.device
        and not (q.is_nested or k.is_nested or v.is_nested or torch._C._is_any_autocast_enabled())
    )


def _tensor(name: str, tensor: object, q: torch.Tensor) -> None:
    checking.tensor(name, tensor)
    checking.rank(name, tensor, 4, f"[B, {'Sq' if name == 'q' else 'Sk'}, {_HEADS[name]}]")
    checking.same_device(name, tensor, "q", q)
    # Under autocast all three are cast to its dtype, which is then looked at.
    cast = checking.autocast(tensor.device)
    dtype = torch.get_autocast_dtype(tensor.device.type) if cast else tensor.dtype
    if tensor.dtype == torch.float64 or not tensor.is_floating_point():
        dtype = tensor.dtype
    checking.dtype(name, dtype, DTYPES)
    if not cast and tensor.dtype != q.dtype:
        raise DtypeError(expected(name, f"{q.dtype}, the dtype of q", tensor.dtype))


def _shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dim: int) -> None:
    if v.shape[:3] != k.shape[:3]:
        want = f"{list(k.shape[:3])}, as k has, and a head size"
        raise ShapeError(expected("v", want, list(v.shape)))
    batch, q_len, heads = q.shape[:3]
    if k.shape[0] != batch:
        raise ShapeError(expected("k", f"batch {batch} like q", k.shape[0]))
    if dim not in config.HEAD_DIMS:
        raise ShapeError(one_of("head size of q", config.HEAD_DIMS, dim))
    if k.shape[3] != dim:
        raise ShapeError(expected("k", f"head size {dim} like q", k.shape[3]))
    if v.shape[3] != config.VALUE_DIMS[dim]:
        want = f"head size {config.VALUE_DIMS[dim]} for q of {dim}"
        raise ShapeError(expected("v", want, v.shape[3]))
    if k.shape[2] == 0 or heads == 0 or heads % k.shape[2]:
        want = f"a number of heads that divides the {heads} query heads"
        raise ShapeError(expected("k", want, k.shape[2]))
    for name, size in (("q", q_len), ("k", k.shape[1])):
        if size >= FAR:
            raise ShapeError(expected(name, f"a length below {FAR}", size))


def factors(scale: object, softcap: object, head_dim: int) -> tuple[float, float]:
    """(scale, softcap) of scores, checked; a scale of None is 1 / sqrt(head_dim)."""
    scale = operator.index(head_dim) ** -0.5 if scale is None else _factor("scale", scale)
    return scale, _softcap(softcap)


def _factor(name: str, value: object) -> float:
    _number(name, value)
    if not LEAST <= value <= MOST:
        want = "a finite number above 0, from 2**-40 to 2**40"
        raise ArgumentValueError(expected(name, want, value))
    return float(value)


def _softcap(value: object) -> float:
    _number("softcap", value)
    if value != 0 and not LEAST <= value <= MOST_SOFTCAP:
        want = "0 (none), or a number of 2^-40 to 1024 (errors are 2^-21 of it)"
        raise ArgumentValueError(expected("softcap", want, value))
    return float(value)


def _number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(expected(name, "a number", repr(value)))
