"""Rows of tokens: their layout in a tensor, and a 128-bit digest of the bytes of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...runtime.caching import ByteCache

#: Bits of a digest.  It is no cryptographic hash.
DIGEST_BITS = 128

#: Arguments and results about columns and the past, not about tokens.
NOT_OF_TOKENS = frozenset(
    ("attention_mask", "cache_position", "past_key_values", "past_key_value", "cache_params")
)

#: (bytes of a row, device) -> keys of each lane.
_keys = ByteCache("keys of an audit's digests", 64 << 20)

#: int64 lanes that are digested at once.
_LANES = 1 << 22

# Odd numbers without a pattern, as int64.
_FIRST, _SECOND, _KEY = -7046029254386353131, -4658895280553007687, -7723592293110705685


@dataclass(frozen=True)
class Layout:
    """Dimensions of a tensor that count sequences and tokens; the others make up a row.

    ``token`` counts the tokens of a sequence; ``batch`` the sequences, None where all share a row.
    With ``flat`` there is one dimension for both, ``token``.  ``rest``: sizes of the others.
    """

    token: int
    batch: int | None
    flat: bool
    rest: tuple[int, ...]


def infer(first: Sequence[int], second: Sequence[int], grids: tuple) -> Layout | None:
    """The layout of a tensor that had these shapes under two grids (B, T); None if it has no rows.

    A size that both grids gave alike is a row's own.  So no size of a model is taken for a count.
    """
    (b, t), (b2, t2) = grids
    if len(first) != len(second):
        return None
    meaning = {(b, b2): "batch", (t, t2): "token", (b * t, b2 * t2): "flat"}
    roles = [
        "row" if sizes[0] == sizes[1] else meaning.get(sizes, "unknown")
        for sizes in zip(first, second, strict=True)
    ]
    counts = sorted(role for role in roles if role != "row")
    if counts not in (["token"], ["batch", "token"], ["flat"]):
        return None
    return Layout(
        token=roles.index(counts[-1]),
        batch=roles.index("batch") if "batch" in counts else None,
        flat=counts == ["flat"],
        rest=tuple(size for size, role in zip(first, roles, strict=True) if role == "row"),
    )


def grid(t: torch.Tensor, layout: Layout, shape: tuple[int, int]) -> torch.Tensor | None:
    """Return a view [B or 1, T, ...] of a tensor; None if its sizes are not those of the layout."""
    counts = [dim for dim in (layout.batch, layout.token) if dim is not None]
    if t.dim() != len(counts) + len(layout.rest):
        return None
    view = t.permute(*counts, *(dim for dim in range(t.dim()) if dim not in counts))
    if layout.flat:
        sizes = (shape[0] * shape[1],)
    else:
        sizes = shape[-len(counts) :]
    if tuple(view.shape) != (*sizes, *layout.rest):
        return None
    if layout.flat:
        return view.unflatten(0, shape)
    return view[None] if layout.batch is None else view


def rows(
    t: torch.Tensor, layout: Layout, shape: tuple[int, int], flat_places: torch.Tensor
) -> torch.Tensor | None:
    """Return the rows at ``flat_places`` b T + t, uint8 [count, bytes of a row]; None as `grid`."""
    view = grid(t.detach(), layout, shape)
    if view is None:
        return None
    batch, tokens = shape
    view = view.expand(batch, *view.shape[1:])
    picked = view[flat_places // tokens, flat_places % tokens]
    return picked.reshape(len(flat_places), -1).contiguous().view(torch.uint8)


def digest(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return int64 [n, 2] for rows of bytes [n, w]: equal for equal bytes of one dtype.

    Sums of whole numbers modulo 2^64: the same on every device and in every order.
    """
    count, width = data.shape
    data = torch.nn.functional.pad(data, (0, -width % 8))
    # Flattened first: a single row may have any stride.
    lanes = data.flatten().view(torch.int64).view(count, -(-width // 8))
    salt, key = _keys.get((width, data.device), lambda: _make_keys(width, data.device))
    digests = torch.empty(count, 2, dtype=torch.int64, device=data.device)
    step = max(1, _LANES // max(1, lanes.shape[1]))
    for start in range(0, count, step):
        # m_j is one-to-one in lane j; h = sum of m_j, g = sum of m_j key_j
        lane_numbers = mixed(lanes[start : start + step] + salt)
        digests[start : start + step, 0] = lane_numbers.sum(1)
        digests[start : start + step, 1] = (lane_numbers * key).sum(1)
    number = int.from_bytes(str(dtype).removeprefix("torch.").encode()[-7:], "little")
    return digests + number


def _make_keys(width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the keys of each lane of a row: its position, and an odd factor."""
    position = torch.arange(1, -(-width // 8) + 1, device=device)
    return mixed(position * _KEY), mixed(position * _FIRST + width) | 1


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Apply a one-to-one map of int64 in which every bit of x moves about half of the bits."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _FIRST
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _SECOND
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def tensors(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) of tokens in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_nested:
            yield path, value
    elif isinstance(value, Mapping):
        yield from _inside(value.items(), path)
    elif isinstance(value, tuple | list):
        yield from _inside(enumerate(value), path)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        yield from _inside(fields, path)


def _inside(items, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in items:
        if name not in NOT_OF_TOKENS:
            yield from tensors(value, f"{path}.{name}" if path else str(name))
