"""Sequences of a batch, for layers that carry a state from token to token: padding, and packs.

A batch with padding becomes a pack of its real tokens, in front of all padding: no size follows
the mask, and no host waits for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextvars import ContextVar
from typing import NamedTuple

import torch

from ..errors import ArgumentValueError, ShapeError, expected

#: Attribute of a mask: its `Sequences`, which the layers of a model share.
_OF_MASK = "_cute_kernels_sequences"
#: Keywords of transformers for packs.
OFFSETS, NUMBERS = "cu_seq_lens_q", "seq_idx"


class Sequences(NamedTuple):
    """Sequences among the tokens [B, T] of a batch.

    shape: (B, T).  offsets: [S + 1], where those of a pack begin and the last one ends; None: each
    row of the batch is one.  order: [B T], the flat index of each token of the pack; None: as they
    lie.  inverse: of that.
    """

    shape: tuple[int, int]
    offsets: torch.Tensor | None = None
    order: torch.Tensor | None = None
    inverse: torch.Tensor | None = None

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, T, ...] -> [1, B T, ...], or the rows themselves where each one is a sequence."""
        if self.offsets is None:
            return rows
        flat = rows.flatten(0, 1)
        return (flat if self.order is None else _Take.apply(flat, self.order))[None]

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `pack`."""
        if self.offsets is None:
            return rows
        flat = rows[0] if self.inverse is None else _Take.apply(rows[0], self.inverse)
        return flat.unflatten(0, self.shape)


def sequences_of(
    x: torch.Tensor, mask: torch.Tensor | None, options: Mapping[str, object]
) -> Sequences:
    """Return the sequences of a call with hidden states x [B, T, hidden].

    Raises:
        ArgumentValueError: a pack and a mask, or a pack of several rows by cu_seq_lens_q.
        ShapeError: a mask that is not [B, T].
    """
    shape = tuple(x.shape[:2])
    offsets, numbers = options.get(OFFSETS), options.get(NUMBERS)
    if mask is not None:
        if offsets is not None or numbers is not None:
            name = NUMBERS if offsets is None else OFFSETS
            raise ArgumentValueError(expected(name, "None beside an attention_mask", "a tensor"))
        return _of_mask(mask, shape)
    if offsets is not None:
        if shape[0] != 1:
            raise ArgumentValueError(expected(OFFSETS, "a batch of 1", f"batch {shape[0]}"))
        return Sequences(shape, offsets)
    return Sequences(shape) if numbers is None else _of_numbers(numbers, shape)


def _of_mask(mask: torch.Tensor, shape: tuple[int, int]) -> Sequences:
    if tuple(mask.shape) != shape:
        want = f"[{shape[0]}, {shape[1]}]: 0 where a token is padding"
        raise ShapeError(expected("attention_mask", want, list(mask.shape)))
    # A mask may be written to, and then be given again.
    keep = not (torch.compiler.is_compiling() or mask.is_inference())
    version, sequences = getattr(mask, _OF_MASK, (None, None)) if keep else (None, None)
    if sequences is None or version != mask._version:
        real = mask.flatten() != 0
        counts = real.view(shape).sum(1)
        # Real tokens in their order, then padding.
        padding = counts.sum() + (~real).cumsum(0) - 1
        inverse = torch.where(real, real.cumsum(0) - 1, padding)
        flat = torch.arange(len(inverse), device=mask.device)
        order = torch.empty_like(inverse).scatter_(0, inverse, flat)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        sequences = Sequences(shape, offsets, order, inverse)
        if keep:
            setattr(mask, _OF_MASK, (mask._version, sequences))
    return sequences


@torch.compiler.disable
def _of_numbers(numbers: torch.Tensor, shape: tuple[int, int]) -> Sequences:
    if tuple(numbers.shape) not in {shape, (1, shape[1])}:
        want = f"[{shape[0]}, {shape[1]}]: a number for each sequence"
        raise ShapeError(expected(NUMBERS, want, list(numbers.shape)))
    numbers = numbers.expand(shape)
    first = torch.ones_like(numbers, dtype=torch.bool)
    first[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    starts = first.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(starts, (0, 1), value=numbers.numel())
    return Sequences(shape, offsets.to(torch.int32))


class _Take(torch.autograd.Function):
    """Rows [N, ...] at an index [M] without repeats: the gradient adds nothing."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.count = rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        zeros = g.new_zeros(ctx.count, *g.shape[1:])
        return zeros.index_copy_(0, index, g), None


# ---- packs that are told by positions ------------------------------------------------------------


def with_sequences(self: torch.nn.Module, arguments: dict[str, object]) -> dict[str, object]:
    """Return arguments of a base model whose layers are told of the packs in position_ids.

    Attention finds them by itself, as transformers has it: without a mask and without a cache.

    Raises:
        ArgumentValueError: a mask of more than padding, or a pack without its position_ids.
    """
    kind, cache = getattr(self.config, "model_type", None), arguments.get("past_key_values")
    if kind in _POSITIONS_WITHOUT_PAST and cache is not None:
        arguments = arguments | {"position_ids": _behind(cache, arguments)}
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if isinstance(mask, torch.Tensor) and mask.dim() != 2:
        want = "[B, S] of zeros and ones, as a state has no other masks"
        raise ArgumentValueError(expected("attention_mask", want, list(mask.shape)))
    if cache is not None or not torch.compiler.is_compiling():
        _keep_column(mask, _tokens(arguments))
    if cache is None:
        _check_positions(self, arguments)
    known = any(arguments.get(name) is not None for name in (OFFSETS, NUMBERS, "past_key_values"))
    if mask is not None or known or not isinstance(positions, torch.Tensor):
        return arguments
    numbers = _numbers_of(positions)
    if numbers is None:
        return arguments
    if kind in _MASKS_WITHOUT_POSITIONS:
        arguments = arguments | {"attention_mask": _masks(self.config, positions)}
    return arguments | {NUMBERS: numbers}


#: The last column [B, 1] of a call's mask, where the call has one: transformers gives a state's
#: layers none.
_COLUMN: ContextVar[torch.Tensor | None] = ContextVar("column", default=None)


def column_of_call() -> torch.Tensor | None:
    """Return the mask of a call of one column, [B, 1]; None: it has none, or more columns."""
    return _COLUMN.get()


@torch.compiler.disable
def _keep_column(mask: object, tokens: torch.Tensor | None) -> None:
    """Keep the mask of a call of one column for `column_of_call`; no host waits for it."""
    one = isinstance(mask, torch.Tensor) and tokens is not None and tokens.shape[1] == 1
    _COLUMN.set(mask[:, -1:] if one else None)


def _tokens(arguments: Mapping[str, object]) -> torch.Tensor | None:
    tokens = arguments.get("input_ids")
    return arguments.get("inputs_embeds") if tokens is None else tokens


def _check_positions(self: torch.nn.Module, arguments: Mapping[str, object]) -> None:
    """Check that a pack of a base model with attention comes with its positions."""
    name = next((n for n in (OFFSETS, NUMBERS) if arguments.get(n) is not None), None)
    if name is None or arguments.get("position_ids") is not None:
        return
    if "position_ids" in inspect.signature(type(self).forward).parameters:
        want = "position_ids beside it, which begin again with each sequence: attention reads them"
        raise ArgumentValueError(expected(name, want, "none"))


#: Types whose base model makes its masks without its position_ids, so that attention finds no pack.
_MASKS_WITHOUT_POSITIONS = frozenset({"granitemoehybrid"})


#: Types whose base model counts positions from 0 behind a cache, where it is given none.
_POSITIONS_WITHOUT_PAST = frozenset({"bamba"})


def _behind(cache: object, arguments: dict[str, object]) -> torch.Tensor | None:
    """Return the position_ids of a call with a cache: those given, or behind the cache."""
    positions, tokens = arguments.get("position_ids"), _tokens(arguments)
    if positions is not None or tokens is None:
        return positions
    return (torch.arange(tokens.shape[1], device=tokens.device) + cache.get_seq_length())[None]


@torch.compiler.disable
def _masks(config: object, positions: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Return the masks that such a model would make, with its packs."""
    from transformers.masking_utils import create_causal_mask

    # create_causal_mask reads the shape and the device alone.
    embedded = torch.empty(*positions.shape, 0, device=positions.device)
    mask = create_causal_mask(config, embedded, None, None, position_ids=positions)
    return {"full_attention": mask, "linear_attention": None}


@torch.compiler.disable
def _numbers_of(positions: torch.Tensor) -> torch.Tensor | None:
    """Return the number of each token's sequence, [B, T]; None: each row is one.

    positions: [B, T], or [4, B, T], of which the first are the text's.
    """
    if positions.dim() == 3 and positions.shape[0] == 4:
        positions = positions[0]
    if positions.dim() != 2 or positions.shape[1] < 2:
        return None
    breaks = positions[:, 1:] != positions[:, :-1] + 1
    if not bool(breaks.any()):
        return None
    return torch.nn.functional.pad(breaks.cumsum(1), (1, 0)).to(torch.int32)
