"""Tensors, a mask and a schedule: one error that names the argument.

Nothing below this file checks again, but for what a schedule must be on its mask (``lowering``).
"""

from __future__ import annotations

import numbers
import operator

import numpy as np
import torch
from torch import Tensor

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
from .pack_gqa import PackedGqa, has_group_masks

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


def attention(q: Tensor, k: Tensor, v: Tensor, *options: object) -> None:
    """Check an op's q [B, Sq, Hq, D], k and v [B, Sk, Hkv, ..], and its last operand, the sinks."""
    if not _plain(q, k, v):
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            _tensor(name, tensor, q)
    # A number, not a size that is traced: tables have its key.
    _shapes(q, k, v, operator.index(q.shape[3]))
    checking.supported("block_sparse_attention", q.device)
    sinks(options[-1], q)


def attention_of_ranges(
    q: Tensor, k: Tensor, v: Tensor, kv_ranges: Tensor, *options: object
) -> None:
    """Check the operands of ``sequence_attention``."""
    attention(q, k, v, *options)
    checking.tensor("kv_ranges", kv_ranges)
    want = [q.shape[0], 1, q.shape[1], 4]
    if kv_ranges.dtype != torch.int32 or list(kv_ranges.shape) != want:
        got = f"{kv_ranges.dtype} {list(kv_ranges.shape)}"
        raise ShapeError(expected("kv_ranges", f"torch.int32 {want}, as q has queries", got))
    if kv_ranges.device.type != "cpu" and kv_ranges.device != q.device:
        want = f"the CPU or {q.device}, where q is"
        raise DeviceError(expected("kv_ranges", want, kv_ranges.device))


def sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Check that ``sinks`` are one number for each query head of ``q`` [.., T, Hq, D]."""
    if sinks is None:
        return
    checking.tensor("sinks", sinks)
    checking.dtype("sinks", sinks.dtype, (torch.float32, *DTYPES))
    checking.same_device("sinks", sinks, "q", q)
    if list(sinks.shape) != [q.shape[-2]]:
        want = f"shape [{q.shape[-2]}], a number for each query head"
        raise ShapeError(expected("sinks", want, list(sinks.shape)))


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: object, window_size: object
) -> tuple[int | None, int | None]:
    """(left, right) of a varlen batch's ``window_size``; check the dimensions of its tensors."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        checking.tensor(name, t)
        checking.rank(name, t, 3, f"[T, {_HEADS[name]}]")
        if t.shape[0] != q.shape[0]:
            want = f"{q.shape[0]} tokens, as q has"
            raise ShapeError(expected(name, want, t.shape[0]))
    offsets(cu_seqlens)
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


def dense_mask(dense: Tensor) -> None:
    """Check that ``dense`` is a bool mask which all heads share."""
    checking.tensor("attention_mask", dense)
    if dense.dtype != torch.bool:
        raise ArgumentTypeError(expected("attention_mask", "a bool tensor", dense.dtype))
    if dense.dim() != 4 or dense.shape[1] != 1:
        want = "shape [B, 1, T, S], one mask for all heads"
        raise ShapeError(expected("attention_mask", want, list(dense.shape)))


def one_sequence(kv_ranges: Tensor) -> None:
    """Check that the ranges of a batch are one row."""
    checking.tensor("kv_ranges", kv_ranges)
    checking.rank("kv_ranges", kv_ranges, 4, "[1, 1, T, 4]")
    if kv_ranges.shape[0] != 1:
        want = "a batch of 1, in which all sequences lie one behind another"
        raise ShapeError(expected("cu_seqlens", want, kv_ranges.shape[0]))


def offsets(cu_seqlens: object) -> None:
    """Check the dtype and the dimensions of cu_seqlens."""
    checking.tensor("cu_seqlens", cu_seqlens)
    checking.rank("cu_seqlens", cu_seqlens, 1, "[N + 1]")
    checking.dtype("cu_seqlens", cu_seqlens.dtype, (torch.int32, torch.int64))
    if cu_seqlens.shape[0] < 1:
        raise ShapeError(expected("cu_seqlens", "at least 1 number", "none"))


def key_buffer(q_offset: object, kv_offset: object, sizes: object) -> None:
    """Check the offsets and the sizes (B, T, S) of a key buffer: numbers below 2**30."""
    for name, value in (("q_offset", q_offset), ("kv_offset", kv_offset)):
        if not isinstance(value, Tensor):
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


def flags(**values: object) -> None:
    """Check for True or False: a text is true whatever it says, so nothing else is taken."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ArgumentTypeError(expected(name, "True or False", repr(value)))


def documents(packed: bool, device: torch.device) -> None:
    """Check that documents are told apart on the CPU."""
    flags(packed=packed)
    if packed and device.type != "cpu":
        raise ArgumentValueError(expected("packed", f"False for kv_ranges on {device}", packed))


@untraced
def on_sm90(device: str) -> bool:
    """Whether the kernels of SM90 are those of a device."""
    return arch.refusal(arch.CUTE_SM90, arch.describe(device)) is None


# A constant of a compiled graph, as `lowering.operands` is.
on_sm90._dynamo_marked_constant = True


def packs_gqa(device: str, mask_heads: int, q_len: int, heads: int, kv_heads: int) -> bool:
    """Whether a backward packs the query heads of a group: SM90, for masks by query head."""
    if not has_group_masks(mask_heads, heads, kv_heads) or not on_sm90(device):
        return False
    if PackedGqa.of_blocks(q_len, heads, kv_heads).rows >= FAR:
        want = f"a length below {FAR * kv_heads // heads}, with a gradient and masks by query head"
        raise ShapeError(expected("q", want, q_len))
    return True


def schedule(schedule: object) -> None:
    """Check the type or the name of a schedule."""
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ArgumentValueError(one_of("schedule", SCHEDULES, schedule))
    elif isinstance(schedule, (list, tuple, np.ndarray, Tensor)):
        if torch.compiler.is_compiling():
            want = "a name or a Schedule under torch.compile (schedulers.permutation makes one)"
            raise ArgumentTypeError(expected("schedule", want, "a column order"))
    elif not isinstance(schedule, Schedule):
        want = "a name, a column order (list, array or tensor) or a Schedule"
        raise ArgumentTypeError(expected("schedule", want, type(schedule).__name__))


def mask(mask: BlockMask, q: Tensor, k: Tensor) -> None:
    """Check that ``mask`` fits q [B, Sq, Hq, D] and k [B, Sk, Hkv, D]."""
    batch, q_len, heads, _ = q.shape
    kv_len = k.shape[1]
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
    if q.device.type != "meta" and mask.device != q.device:
        raise DeviceError(expected("block_mask", f"device {q.device} of q", mask.device))


def _plain(q: object, k: object, v: object) -> bool:
    """Whether `_tensor` would find nothing; it says what, and costs the host more."""
    return (
        type(q) is type(k) is type(v) is Tensor
        and q.dtype is k.dtype is v.dtype
        and q.dtype in DTYPES
        and q.dim() == k.dim() == v.dim() == 4
        and q.layout is k.layout is v.layout is torch.strided
        and q.device == k.device == v.device
        and not (q.is_nested or k.is_nested or v.is_nested or torch._C._is_any_autocast_enabled())
    )


def _tensor(name: str, tensor: object, q: Tensor) -> None:
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


def _shapes(q: Tensor, k: Tensor, v: Tensor, dim: int) -> None:
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


def factors(scale: object, softcap: object) -> tuple[float | None, float]:
    """Check and return (scale, softcap) of scores; a scale of None is 1 / sqrt(D)."""
    if scale is not None:
        _number("scale", scale)
        if not LEAST <= scale <= MOST:
            want = "a finite number above 0, from 2**-40 to 2**40"
            raise ArgumentValueError(expected("scale", want, scale))
    _number("softcap", softcap)
    if softcap != 0 and not LEAST <= softcap <= MOST_SOFTCAP:
        want = "0 (none), or a number of 2^-40 to 1024 (errors are 2^-21 of it)"
        raise ArgumentValueError(expected("softcap", want, softcap))
    return None if scale is None else float(scale), float(softcap)


def _number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(expected(name, "a number", repr(value)))
