"""Check the arguments of a block mask: return a value, or raise one exception."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.errors import MaskError, MaskTypeError, expected

from .bits import Bits
from .document import SameDocument
from .rules import Band, Dilated, Grid, Prefix, Rule, indices
from .spans import Spans

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
LARGEST = 2**31 - 1


def integer(name: str, value: object, *, least: int = 0, most: int = LARGEST) -> int:
    """Check for an int in [least, most]; bool and float are refused."""
    try:
        if isinstance(value, (bool, Tensor)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise MaskTypeError(expected(name, "an int", repr(value))) from None
    if not least <= number <= most:
        raise MaskError(expected(name, f"{least} <= {name} <= {most}", number))
    return number


def lengths(q_len: object, kv_len: object) -> tuple[int, int]:
    """Check both sequence lengths: whole numbers of at least 0, or MaskError."""
    return integer("q_len", q_len), integer("kv_len", kv_len)


def block_size(value: object) -> tuple[int, int]:
    """Check for an int or a pair (q, kv), each at least 1.  It need not divide the lengths."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        size = integer("block_size", value, least=1)
        return size, size
    if len(value) != 2:
        raise MaskError(expected("block_size", "an int or a pair (q, kv)", repr(value)))
    return tuple(integer(f"block_size[{i}]", size, least=1) for i, size in enumerate(value))


def bound(name: str, value: object, least: int = 0) -> int | None:
    """Check a window side or an end of a band: an int from ``least`` on, or None for no bound."""
    if value is None:
        return None
    try:
        return integer(name, value, least=least)
    except MaskError:
        want = f"an int from {least} to {LARGEST}, or None for no bound"
        raise MaskError(expected(name, want, value)) from None


def flag(name: str, value: object) -> bool:
    """Check for True or False; other types are refused, as every text is true."""
    if not isinstance(value, bool):
        raise MaskTypeError(expected(name, "True or False", repr(value)))
    return value


def window(value: object) -> tuple[int | None, int | None]:
    """Check both sides of a window: each an int that is not negative, or None for no bound."""
    if not isinstance(value, tuple | list):
        raise MaskTypeError(expected("window_size", "a pair (left, right)", repr(value)))
    if len(value) != 2:
        raise MaskError(expected("window_size", "a pair (left, right)", repr(value)))
    return bound("window_size[0]", value[0]), bound("window_size[1]", value[1])


def device(value: torch.device | str | None) -> torch.device:
    """Check for a device whose values can be read: block lists depend on data."""
    try:
        torch_device = torch.get_default_device() if value is None else torch.device(value)
    except (RuntimeError, TypeError):
        raise MaskError(expected("device", "a torch device", repr(value))) from None
    if torch_device.type == "meta":
        raise MaskError(expected("device", "a device that holds data", torch_device))
    return torch_device


def tensor(name: str, value: object, dtypes: Sequence[torch.dtype], dims: Sequence[int]) -> Tensor:
    """Check for a tensor with data, of one of the dtypes, with one of the numbers of dimensions."""
    if not isinstance(value, Tensor):
        raise MaskTypeError(expected(name, "a tensor", type(value).__name__))
    if value.dtype not in dtypes:
        want = " or ".join(str(dtype) for dtype in dtypes)
        raise MaskTypeError(expected(name, f"dtype {want}", value.dtype))
    if value.dim() not in dims:
        want = " or ".join(str(dim) for dim in dims)
        raise MaskError(
            expected(name, f"{want} dimensions", f"{value.dim()} (shape {list(value.shape)})")
        )
    if value.device.type == "meta":
        raise MaskError(expected(name, "a tensor that holds data", "one on device meta"))
    return value


def same_device(names: Sequence[str], tensors: Sequence[Tensor]) -> torch.device:
    """Return the device of all tensors, or raise MaskError naming one that differs."""
    for name, second in zip(names[1:], tensors[1:], strict=True):
        if second.device != tensors[0].device:
            raise MaskError(
                expected(name, f"device {tensors[0].device} like {names[0]}", second.device)
            )
    return tensors[0].device


def extent(a: tuple[int, int], b: tuple[int, int], name: str) -> tuple[int, int]:
    """Return the (batch, head) shape that both broadcast to."""
    for size, theirs in zip(a, b, strict=True):
        if size != theirs and 1 not in (size, theirs):
            raise MaskError(expected(name, f"(batch, heads) that broadcast with {a}", b))
    return max(a[0], b[0]), max(a[1], b[1])


def rule(value: object, grid: Grid) -> tuple[int, int]:
    """Check that a rule fits the lengths and its parts broadcast; return its (batch, heads)."""
    if not isinstance(value, Rule):
        want = (
            "a Rule, as BlockMask.rule holds (BlockMask.from_dense takes a bool tensor, "
            "BlockMask.from_flex a mask of torch's create_block_mask, which takes a mask_mod)"
        )
        raise MaskTypeError(expected("rule", want, type(value).__name__))
    _numbers(value)
    shape = (1, 1)
    for part in getattr(value, "parts", ()):
        shape = extent(shape, rule(part, grid), "rule")
    size = (grid.q_len, grid.kv_len)
    if isinstance(value, SameDocument) and size != (value.ids.shape[1],) * 2:
        want = f"one id for each of the q_len = kv_len = {value.ids.shape[1]} tokens"
        raise MaskError(expected("rule", want, f"lengths {size}"))
    if isinstance(value, Bits) and size != (value.grid.q_len, value.grid.kv_len):
        want = f"lengths {(value.grid.q_len, value.grid.kv_len)} like its bits"
        raise MaskError(expected("rule", want, size))
    tensors = value.tensors()
    if tensors:
        same_device([f"rule operand {i}" for i in range(len(tensors))], tensors)
    return extent(shape, value.extent, "rule")


def _numbers(value: Rule) -> None:
    """Check the fields of one leaf, which a caller may have written by hand."""
    if isinstance(value, Band):
        bound("rule.lo", value.lo, -LARGEST)
        bound("rule.hi", value.hi, -LARGEST)
    elif isinstance(value, Dilated):
        step = integer("rule.step", value.step, least=1)
        integer("rule.phase", value.phase, most=step - 1)
    elif isinstance(value, Prefix):
        tensor("rule.length", value.length, (torch.int32,), (1,))
    elif isinstance(value, SameDocument):
        tensor("rule.ids", value.ids, (torch.int32,), (2,))
    elif isinstance(value, Spans):
        tensor("rule.first", value.first, (torch.int32,), (2,))
        tensor("rule.end", value.end, (torch.int32,), (2,))


def cu_seqlens(value: object) -> Tensor:
    """Check for offsets [D + 1] that start at 0, do not descend and fit into an int32."""
    offsets = tensor("cu_seqlens", value, INTEGERS, (1,))
    if offsets.numel() == 0 or int(offsets[0]) != 0:
        descent = offsets[:1].tolist()
        raise MaskError(expected("cu_seqlens", "offsets that start with 0", descent))
    down = (offsets[1:].long() < offsets[:-1].long()).nonzero()
    if down.numel():
        index = int(down[0])
        descent = f"{int(offsets[index])} then {int(offsets[index + 1])} at {index}"
        raise MaskError(expected("cu_seqlens", "offsets that do not descend", descent))
    if int(offsets[-1]) > LARGEST:
        raise MaskError(expected("cu_seqlens", f"offsets up to {LARGEST}", int(offsets[-1])))
    return offsets


def prefix(value: object, kv_len: int, place: torch.device) -> Tensor:
    """Check for int32 [B or 1], each in [0, kv_len]."""
    if not isinstance(value, Tensor):
        number = integer("prefix", value, most=kv_len)
        return torch.tensor([number], dtype=torch.int32, device=place)
    value = tensor("prefix", value, INTEGERS, (1,))
    bad = ((value < 0) | (value > kv_len)).nonzero()
    if bad.numel():
        index = int(bad[0])
        raise MaskError(
            expected("prefix", f"0 <= prefix <= {kv_len}", f"{int(value[index])} at {index}")
        )
    return value.to(place, torch.int32)


def block_lists(count_name: str, count: object, index_name: str, index: object) -> None:
    """Check for a count int32 [B, H, R] and an index int32 [B, H, R, L] that belong together."""
    count = tensor(count_name, count, (torch.int32,), (3,))
    index = tensor(index_name, index, (torch.int32,), (4,))
    if index.shape[:3] != count.shape:
        want = f"shape [{', '.join(map(str, count.shape))}, L] like {count_name}"
        raise MaskError(expected(index_name, want, list(index.shape)))
    same_device((count_name, index_name), (count, index))


def rows(name: str, count: Tensor, blocks: int, formula: str) -> None:
    """Check that ``count`` has one entry per block row."""
    if count.shape[2] != blocks:
        raise MaskError(expected(name, f"{blocks} rows ({formula})", count.shape[2]))


def block_list_values(
    count_name: str, count: Tensor, index_name: str, index: Tensor, blocks: int
) -> None:
    """Check counts and indices: within the list and [0, blocks), rows ascending, no repeats."""
    length = index.shape[3]
    _refuse(
        count_name,
        (count < 0) | (count > length),
        count,
        f"counts in [0, {length}], the length of {index_name}",
    )
    position = indices(length, index.device)
    valid = position < count[..., None]
    outside = valid & ((index < 0) | (index >= blocks))
    _refuse(index_name, outside, index, f"indices in [0, {blocks})")
    step = index[..., 1:].long() - index[..., :-1].long()
    both = valid[..., 1:]
    _refuse(index_name, both & (step == 0), index[..., 1:], "no repeated index", shift=1)
    _refuse(index_name, both & (step < 0), index[..., 1:], "ascending indices", shift=1)


def _refuse(name: str, bad: Tensor, value: Tensor, want: str, shift: int = 0) -> None:
    if not bool(bad.any()):
        return
    position = bad.nonzero()[0].tolist()
    bad_value = int(value[tuple(position)])
    position[-1] += shift
    raise MaskError(expected(name, want, f"{bad_value} at {position}"))
