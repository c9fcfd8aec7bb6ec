"""Tensors, masks and schedules -> a Problem, a lowered mask and an admitted Schedule, or one error.

Nothing below this file checks again: the op, the launchers and the kernels trust what it returns.
"""

from __future__ import annotations

import hashlib
import math
import numbers
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch

from .. import arch
from ..errors import (
    ArgumentTypeError,
    ArgumentValueError,
    BackendUnavailable,
    DeviceError,
    DtypeError,
    ScheduleError,
    ShapeError,
    expected,
    no_backend,
    one_of,
)
from ..schedulers.kinds import KINDS, permutation
from ..schedulers.mask import BlockMask
from ..schedulers.ranks import block_grid
from ..schedulers.safety import admit
from ..schedulers.schedule import Schedule
from . import config
from .masks import FAR, LoweredMask, group_of_heads

DTYPES = (torch.bfloat16, torch.float16)
DEVICE_TYPES = ("cpu", "cuda", "meta")
AUTO = "auto"

_KEPT = 64
_admitted: OrderedDict[tuple, Schedule] = OrderedDict()


class Problem(NamedTuple):
    """One attention: q [batch, q_len, heads, head_dim], k and v [batch, kv_len, kv_heads, ..]."""

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
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
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _tensor(name, tensor, q)
    batch, q_len, heads, dim = q.shape
    kv_len, kv_heads = k.shape[1], k.shape[2]
    _shapes(q, k, v)
    _device(q.device)
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ArgumentTypeError(expected(name, "True or False", repr(flag)))
    if block_mask is not None:
        _mask(block_mask, batch, heads, q_len, kv_len, q.device)
    _schedule_type(schedule)
    scale = dim**-0.5 if scale is None else _number("scale", scale)
    if scale <= 0:
        raise ArgumentValueError(expected("scale", "a number above 0", scale))
    softcap = _number("softcap", softcap)
    if softcap < 0:
        raise ArgumentValueError(expected("softcap", "0 (none) or a number above 0", softcap))
    return Problem(batch, q_len, kv_len, heads, kv_heads, dim, q.device, scale, softcap)


def gradient(device: str, mask_heads: int, heads: int, kv_heads: int) -> None:
    """That the backend of ``device`` has a backward: the limit of the SM90 kernels."""
    if mask_heads > 1 and kv_heads < heads:
        if arch.refusal(arch.CUTE_SM90, arch.describe(device)):
            return
        want = (
            f"1 head, with a gradient on cute_sm90: {heads // kv_heads} query heads share a KV "
            "head, and one mask (CUTE_KERNELS_BACKEND=triton takes one per query head)"
        )
        raise ShapeError(expected("block_mask", want, f"{mask_heads} heads"))


def admitted(
    lowered: LoweredMask, schedule: object, heads: int, head_dim: int, group: int = 1
) -> Schedule:
    """The checked schedule of a backward pass over ``heads`` (``config.schedule_heads``).

    ``schedule``: "auto", a kind's name, a column order, or a Schedule; ``group``: query heads to
    each of ``heads``.  Kept by mask and request.
    """
    mask = lowered.mask
    sizes = heads, head_dim, group
    key = (mask.block_hash(), str(mask.device), lowered.form, *sizes, _named(schedule))
    if key not in _admitted:
        made = _made(mask, schedule, *sizes)
        if made.heads != heads:
            want = f"{heads}, batch x KV heads (x query heads if the mask is by query head)"
            raise ScheduleError(expected("schedule.heads", want, made.heads))
        admit(made, mask)
        if lowered.form == "bits":
            _lists_of_one_mask(made, mask.shape)
        _admitted[key] = made
    _admitted.move_to_end(key)
    if len(_admitted) > _KEPT:
        _admitted.popitem(last=False)
    return _admitted[key]


def _made(mask: BlockMask, schedule: object, heads: int, head_dim: int, group: int) -> Schedule:
    block_grid(mask, heads)
    if isinstance(schedule, Schedule):
        return schedule
    if not isinstance(schedule, str):
        return permutation(mask, order=schedule, heads=heads)
    if schedule == AUTO:
        return config.auto(mask, heads, head_dim, mask.device.type, group)
    return KINDS[schedule](mask, heads=heads)


def _named(schedule: object) -> str:
    """A name for what was asked: equal names, equal schedules (on one mask)."""
    if isinstance(schedule, str):
        return schedule
    if isinstance(schedule, Schedule):
        return schedule.hash
    rows = schedule.cpu().numpy() if isinstance(schedule, torch.Tensor) else schedule
    try:
        order = np.asarray(rows)
    except ValueError:
        raise ScheduleError(expected("schedule", "a column order", "a ragged list")) from None
    facts = f"{order.dtype} {order.shape}".encode()
    return "order " + hashlib.sha256(facts + order.tobytes()).hexdigest()


def _lists_of_one_mask(schedule: Schedule, shape: tuple[int, int]) -> None:
    """Bits differ by mask even where blocks do not: lists are shared by heads of one mask only."""
    group = group_of_heads(*shape, schedule.heads).numpy()
    pairs = np.unique(np.stack((schedule.list_of_head, group), axis=1), axis=0)
    lists, times = np.unique(pairs[:, 0], return_counts=True)
    if (times > 1).any():
        want = "heads that share a set of lists to share a mask (its bits differ between them)"
        got = f"set {lists[times > 1][0]} used for {times.max()} masks"
        raise ScheduleError(expected("schedule.list_of_head", want, got))


def _schedule_type(schedule: object) -> None:
    if isinstance(schedule, str):
        if schedule != AUTO and schedule not in KINDS:
            raise ArgumentValueError(one_of("schedule", (AUTO, *KINDS), schedule))
    elif not isinstance(schedule, (Schedule, list, tuple, np.ndarray, torch.Tensor)):
        want = "a name, a column order (list, array or tensor) or a Schedule"
        raise ArgumentTypeError(expected("schedule", want, type(schedule).__name__))


def _mask(
    mask: BlockMask, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device
) -> None:
    if not isinstance(mask, BlockMask):
        want = "a cute_kernels.BlockMask or None (BlockMask.from_flex takes FlexAttention's)"
        raise ArgumentTypeError(expected("block_mask", want, type(mask).__name__))
    if (mask.q_len, mask.kv_len) != (q_len, kv_len):
        want = f"lengths {(q_len, kv_len)} of q and k"
        raise ShapeError(expected("block_mask", want, (mask.q_len, mask.kv_len)))
    for i, (name, size) in enumerate((("batch", batch), ("query heads", heads))):
        if mask.shape[i] not in (1, size):
            want = f"1 or {size} {name} like q"
            raise ShapeError(expected("block_mask", want, mask.shape[i]))
    if device.type != "meta" and mask.device != device:
        raise DeviceError(expected("block_mask", f"device {device} of q", mask.device))


def _tensor(name: str, tensor: object, q: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(expected(name, "a torch.Tensor", type(tensor).__name__))
    if tensor.dim() != 4:
        shape = "[B, Sq, Hq, D]" if name == "q" else "[B, Sk, Hkv, D]"
        got = f"{tensor.dim()} (shape {list(tensor.shape)})"
        raise ShapeError(expected(name, f"4 dimensions {shape}", got))
    if tensor.layout != torch.strided:
        raise ArgumentTypeError(expected(name, "a dense (strided) tensor", tensor.layout))
    if tensor.device != q.device:
        raise DeviceError(expected(name, f"device {q.device} of q", tensor.device))
    # Under autocast all three are cast to its dtype, which is then looked at.
    kind = tensor.device.type
    cast = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if cast else tensor.dtype
    if tensor.dtype == torch.float64 or not tensor.is_floating_point():
        dtype = tensor.dtype
    if dtype not in DTYPES:
        raise DtypeError(expected(name, "one of " + ", ".join(map(str, DTYPES)), dtype))
    if not cast and tensor.dtype != q.dtype:
        raise DtypeError(expected(name, f"{q.dtype}, the dtype of q", tensor.dtype))


def _shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if v.shape != k.shape:
        raise ShapeError(expected("v", f"shape {list(k.shape)} like k", list(v.shape)))
    batch, q_len, heads, dim = q.shape
    if k.shape[0] != batch:
        raise ShapeError(expected("k", f"batch {batch} like q", k.shape[0]))
    if dim not in config.HEAD_DIMS:
        raise ShapeError(one_of("head size of q", config.HEAD_DIMS, dim))
    if k.shape[3] != dim:
        raise ShapeError(expected("k", f"head size {dim} like q", k.shape[3]))
    if k.shape[2] == 0 or heads == 0 or heads % k.shape[2]:
        want = f"a number of heads that divides the {heads} query heads"
        raise ShapeError(expected("k", want, k.shape[2]))
    for name, size in (("q", q_len), ("k", k.shape[1])):
        if size >= FAR:
            raise ShapeError(expected(name, f"a length below {FAR}", size))


def _device(device: torch.device) -> None:
    if device.type not in DEVICE_TYPES:
        reasons = dict.fromkeys(("cute_sm90", "triton"), "needs a CUDA or ROCm device")
        reasons["cpu"] = "runs on cpu tensors only"
        raise BackendUnavailable(no_backend("block_sparse_attention", device, reasons))


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(expected(name, "a number", repr(value)))
    if not -math.inf < value < math.inf:
        raise ArgumentValueError(expected(name, "a finite number", value))
    return float(value)
