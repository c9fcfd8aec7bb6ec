"""Layer of transformers' caches for a gated delta net, whose rows have the bytes of a whole pass.

transformers keeps the state after the last token.  Here it is the state at a multiple of 64 tokens
of a sequence, with the inputs of the tokens since then, and of the few before them that the
convolution reads: a call computes the open chunk again, by the op and with the bytes of training.
Sequences of a batch have grids of their own, so padding counts for nothing.

Imported when a mixer first gets a cache, as it imports transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from transformers import cache_utils

from ..errors import ArgumentValueError, expected
from ..linear_attn.config import DELTA_CHUNK
from .packs import Sequences, take_rows

#: Rows that a cache which records its past can drop at least, whatever was called since.
RESERVE = DELTA_CHUNK


class Rows(NamedTuple):
    """Inputs of a mixer, a row a token: [N, ...], or [B, T, ...] of a call.

    qkv: [N, D], before the convolution.  beta, a: [N, HV].
    """

    qkv: torch.Tensor
    beta: torch.Tensor
    a: torch.Tensor


class Steps(NamedTuple):
    """Steps of a mixer over a pack.

    tail: Rows before a token that the convolution reads.  convolve: (qkv [1, N, D], its sequences)
    -> rows behind the convolution.  apply: (these, beta, a [1, N, HV], offsets [S + 1], states
    [S, HV, K, V] or None) -> (o [1, N, HV, V], the states after them).
    """

    tail: int
    convolve: Callable[[torch.Tensor, Sequences], torch.Tensor]
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor]]


def layer_of(cache: object, index: int) -> GatedDeltaLayer:
    """Return the layer of a mixer in a cache of transformers; a new one takes an empty one's place.

    Raises:
        ArgumentValueError: the cache has no such layer, or another mixer has written to it.
    """
    layers = getattr(cache, "layers", ())
    layer = layers[index] if index < len(layers) else None
    if isinstance(layer, GatedDeltaLayer):
        return layer
    if type(layer) is not cache_utils.LinearAttentionLayer or any(
        layer.has_previous_state.values()
    ):
        want = "a cache that the model made, or one of its config that is empty"
        actual = f"{type(cache).__name__}, layer {index}: {type(layer).__name__}"
        raise ArgumentValueError(expected("past_key_values", want, actual))
    layers[index] = new = GatedDeltaLayer()
    new.record_past = layer.record_past
    return new


class GatedDeltaLayer(cache_utils.LinearAttentionLayer):
    """Cache of one mixer.

    rows: Of each sequence the tail, and the rows since ``state``.  open: how many of the latter, by
    sequence.  state: [B, HV, K, V], fp32; None: zeros.
    """

    is_compileable = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: Rows | None = None
        self.open: list[int] = []
        self.state: torch.Tensor | None = None
        self.tail = 0

    # ---- calls ----------------------------------------------------------------------------------

    def store(self, tail: int, new: Rows, real: torch.Tensor | None) -> None:
        """Append the tokens of a call, which has computed its rows by itself."""
        rows, sizes, _ = self._merged(tail, new, real)
        self._keep(rows, sizes, [0] * len(sizes))

    def extend(self, steps: Steps, new: Rows, real: torch.Tensor | None) -> torch.Tensor:
        """Append the tokens of a call, and return o [B, T, HV, V], zeros at padding.

        new: [B, T, ...].  real: [B, T], 0 where a token is padding; None: none is.
        """
        rows, sizes, places = self._merged(steps.tail, new, real)
        device, opened = new.a.device, [size - steps.tail for size in sizes]
        known = _minus(opened, map(len, places))
        # Of a cache that records its past, rows may be dropped again.
        ready = [max(0, count - RESERVE) for count in known] if self.record_past else opened
        closed = [count // DELTA_CHUNK * DELTA_CHUNK for count in ready]
        sequences = Sequences((1, sum(sizes)), _offsets(sizes, device))
        mixed = steps.convolve(rows.qkv[None], sequences)[0]
        nothing, state, parts = [0] * len(opened), self.state, []
        for first, last in ((nothing, closed), (closed, opened)):
            if last != first:
                out, after = self._applied(steps, rows, mixed, sizes, (first, last), state)
                parts.append(out)
                state = after if last is closed else state
        out = torch.cat(parts)
        self._keep(rows, sizes, closed)
        self.state = None if state is None else state.detach()
        # o holds the closed rows of all sequences, then the open ones.
        ahead, behind = _starts(closed), _starts(_minus(opened, closed))
        spans = []
        for b, (first, end) in enumerate(zip(known, opened, strict=True)):
            middle = max(first, closed[b])
            spans.append((ahead[b] + first, max(0, closed[b] - first)))
            spans.append((ahead[-1] + behind[b] + middle - closed[b], end - middle))
        out = take_rows(out, torch.cat(_spans(*zip(*spans, strict=True))).to(device))
        flat = torch.cat(places).to(device)
        total = out.new_zeros(new.a.shape[0] * new.a.shape[1], *out.shape[1:])
        return total.index_copy(0, flat, out).unflatten(0, new.a.shape[:2])

    def _merged(
        self, tail: int, new: Rows, real: torch.Tensor | None
    ) -> tuple[Rows, list[int], list[torch.Tensor]]:
        """Return (rows of each sequence, old then new; how many; flat places of the new ones)."""
        batch, length = new.a.shape[:2]
        if self.rows is None:
            zeros = [t.new_zeros(batch * tail, *t.shape[2:]) for t in new]
            self.rows, self.open, self.tail = Rows(*zeros), [0] * batch, tail
            self.has_previous_state[0] = True
            self.dtype, self.device = new.qkv.dtype, new.qkv.device
        if len(self.open) != batch:
            want = f"a cache of {batch} sequences, as the call has"
            raise ArgumentValueError(expected("past_key_values", want, len(self.open)))
        flat = torch.arange(batch * length, device="cpu").view(batch, length)
        real = None if real is None else real.cpu() != 0
        places = list(flat) if real is None else [row[real[b]] for b, row in enumerate(flat)]
        held = _spans(_starts(self._sizes())[:-1], self._sizes())
        count = len(self.rows.a)
        order = [part for b, row in enumerate(places) for part in (held[b], row + count)]
        both = zip(self.rows, new, strict=True)
        rows = _taken(Rows(*(torch.cat([old, t.flatten(0, 1)]) for old, t in both)), order)
        return rows, [n + len(row) for n, row in zip(self._sizes(), places, strict=True)], places

    def _sizes(self) -> list[int]:
        return [self.tail + count for count in self.open]

    def _keep(self, rows: Rows, sizes: Sequence[int], closed: Sequence[int]) -> None:
        """Keep the rows behind the closed ones, and the tail before them."""
        starts = [start + skipped for start, skipped in zip(_starts(sizes), closed, strict=False)]
        rows = _taken(rows, _spans(starts, _minus(sizes, closed)))
        self.rows = Rows(*(t.detach() for t in rows))
        self.open = [n - skipped - self.tail for n, skipped in zip(sizes, closed, strict=True)]

    @staticmethod
    def _applied(steps: Steps, rows: Rows, mixed: torch.Tensor, sizes, spans, state):
        """Apply the rule to open rows from the first up to the last of each sequence."""
        first, last = spans
        counts = _minus(last, first)
        starts = [at + steps.tail + skip for at, skip in zip(_starts(sizes), first, strict=False)]
        rows = _taken(Rows(mixed, rows.beta, rows.a), _spans(starts, counts))
        offsets = _offsets(counts, mixed.device)
        out, state = steps.apply(*(t[None] for t in rows), offsets, state)
        return out[0], state

    # ---- what transformers does to layers -------------------------------------------------------

    @property
    def is_croppable(self) -> bool:
        """Whether rows can be dropped: those since the state."""
        return True

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` rows of each sequence.

        Raises:
            ArgumentValueError: not so many are open: call ``activate_past_recording`` before.
        """
        count = -tokens_to_remove
        if count < 0 or count > min(self.open, default=0):
            want = f"0 or a number of tokens from -{min(self.open, default=0)} on"
            raise ArgumentValueError(expected("tokens_to_remove", want, tokens_to_remove))
        if count:
            sizes = self._sizes()
            self.rows = _taken(self.rows, _spans(_starts(sizes)[:-1], [n - count for n in sizes]))
            self.open = [n - count for n in self.open]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order."""
        if self.rows is None:
            return
        chosen, sizes, starts = indices.tolist(), self._sizes(), _starts(self._sizes())
        spans = _spans([starts[i] for i in chosen], [sizes[i] for i in chosen])
        self.rows, self.open = _taken(self.rows, spans), [self.open[i] for i in chosen]
        if self.state is not None:
            self.state = self.state.index_select(0, indices.to(self.state.device))

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self.batch_select_indices(torch.arange(len(self.open)).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget all sequences."""
        self.rows, self.open, self.state = None, [], None
        self.has_previous_state[0] = False

    def offload(self) -> None:
        """Move the tensors to the CPU."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move the tensors back."""
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        if self.rows is not None:
            self.rows = Rows(*(t.to(device, non_blocking=True) for t in self.rows))
        if self.state is not None:
            self.state = self.state.to(device, non_blocking=True)


# ---- places -------------------------------------------------------------------------------------


def _starts(sizes: Iterable[int]) -> list[int]:
    """Return where each part begins, and where the last one ends."""
    return list(itertools.accumulate(sizes, initial=0))


def _minus(a: Iterable[int], b: Iterable[int]) -> list[int]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _spans(starts: Sequence[int], counts: Sequence[int]) -> list[torch.Tensor]:
    pairs = zip(starts, counts, strict=True)
    return [torch.arange(at, at + count, device="cpu") for at, count in pairs]


def _taken(rows: Rows, places: Sequence[torch.Tensor]) -> Rows:
    """Return rows at places, which are all different where a gradient goes through."""
    where = torch.cat(list(places)).to(rows.a.device)
    return Rows(*(take_rows(t, where) for t in rows))


def _offsets(sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(_starts(sizes), dtype=torch.int32).to(device)
