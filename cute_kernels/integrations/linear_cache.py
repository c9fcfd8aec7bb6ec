"""Layer of transformers' caches for a mixer: a record of `ck.LinearAttentionCache`.

transformers keeps the state after the last token.  The record has the state at the last whole chunk
of each sequence, and the rows since, so that chunks, single tokens, drafts and padded
batches have the bytes of a whole pass.

Imported when a mixer first gets a cache, as it imports transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from transformers import cache_utils

from ..errors import ArgumentValueError, UnsupportedTransformError, expected
from ..linear_attn.cache import LinearAttentionCache
from .packs import Sequences, column_of_call, sequences_of

#: Tokens that a cache which records its past can drop, whatever was called since.
DRAFTS = 64


#: Inputs of a mixer [B, T, ...], those of its convolution first.
Rows = tuple[torch.Tensor, ...]
#: The rule over rows of sequences, into a record: [B, T, heads, ...].
Mix = Callable[[Rows, Sequences, LinearAttentionCache], torch.Tensor]


def layer_of(cache: object, index: int) -> MixerLayer:
    """Return the layer of a mixer in a cache of transformers; a new one takes an empty one's place.

    Raises:
        ArgumentValueError: the cache has no such layer, or another mixer has written to it.
    """
    layers = getattr(cache, "layers", ())
    layer = layers[index] if index < len(layers) else None
    if isinstance(layer, MixerLayer):
        return layer
    cls = _of_layers().get(type(layer))
    if cls is None or any(layer.has_previous_state.values()):
        want = "a cache that the model made, or one of its config that is empty"
        actual = f"{type(cache).__name__}, layer {index}: {type(layer).__name__}"
        raise ArgumentValueError(expected("past_key_values", want, actual))
    layers[index] = new = cls()
    # Attention that is in the same layer may have written to its part.
    vars(new).update(vars(layer))
    return new


class MixerLayer(cache_utils.LinearAttentionLayer):
    """Cache of one mixer.

    record: What it keeps of its sequences; None: nothing yet.  pending: The rows and the mask of a
    call that the record has not seen.  batch: how many sequences; 0: no token was seen.  recent:
    Tokens that are recorded and were not dropped.  begun: Whether it is known that all sequences
    have a token that is no padding.
    """

    is_compileable = False

    def __init__(self) -> None:
        cache_utils.LinearAttentionLayer.__init__(self)
        self.record: LinearAttentionCache | None = None
        self.pending: tuple[Rows, torch.Tensor | None] | None = None
        self.batch = self.recent = 0
        self.begun = False

    # ---- calls ----------------------------------------------------------------------------------

    def padding(self) -> torch.Tensor | None:
        """Return the mask [B, 1] of a call of one column of which some is padding.

        The mask is read on the host until all sequences have begun: no padding follows.
        """
        column = None if self.begun else column_of_call()
        if column is not None:
            self.begun = bool((column != 0).all())
        return None if self.begun else column

    def store(self, rows: Rows, mask: torch.Tensor | None) -> None:
        """Keep the tokens of a first call, which has computed its rows, for the next one."""
        mask = None if mask is None else mask.clone()  # a user may write to it
        self.pending = tuple(t.detach() for t in rows), mask
        self._count(rows)

    def extend(
        self,
        new_record: Callable[[int, int], LinearAttentionCache],
        mix: Mix,
        rows: Rows,
        sequences: Sequences,
    ) -> torch.Tensor:
        """Append the tokens of a call, and return what the rule gives for them.

        new_record: (slots, drafts) -> a record of the mixer.
        """
        batch, drafts = len(rows[0]), DRAFTS if self.record_past else 0
        if self.batch not in (0, batch):
            want = f"a cache of {batch} sequences, as the call has"
            raise ArgumentValueError(expected("past_key_values", want, self.batch))
        if self.record is None:
            self.record = new_record(batch, drafts)
        elif drafts > self.record[0].drafts:
            self.record = self.record.select(torch.arange(batch), drafts)
        with torch.no_grad():
            if self.pending is not None:
                (before, mask), self.pending = self.pending, None
                mix(before, sequences_of(before[0], mask, {}), self.record)
            out = mix(rows, sequences, self.record)
        self._count(rows)
        tensors = [t for t in rows if t.requires_grad] if torch.is_grad_enabled() else []
        return _WithoutGradient.apply(out, *tensors) if tensors else out

    def _count(self, rows: Rows) -> None:
        self.batch = len(rows[0])
        self.recent += rows[0].shape[1] if self.record_past else 0
        self.has_previous_state[0] = True
        self.dtype, self.device = rows[0].dtype, rows[0].device

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Refuse transformers' own mixer, of an unpatched model: it cannot read the tokens."""
        if self.batch:
            want = "a cache that an unpatched model has filled, as it is one"
            raise ArgumentValueError(expected("past_key_values", want, "one of a patched model"))
        super().lazy_initialization(*args, **kwargs)

    # ---- what transformers does to layers -------------------------------------------------------

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be dropped: those since ``activate_past_recording``."""
        return True

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens of each sequence.

        Raises:
            ArgumentValueError: there are not so many since ``activate_past_recording``, or more
                than `DRAFTS`.
        """
        count, most = -tokens_to_remove, min(self.recent, DRAFTS)
        if not 0 <= count <= most:
            want = f"0 or a number of tokens from -{most} on (call activate_past_recording before)"
            raise ArgumentValueError(expected("tokens_to_remove", want, tokens_to_remove))
        if count:
            self.record.rollback(count)
            self.recent -= count

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order; one may come several times."""
        if self.pending is not None:
            rows, mask = self.pending
            rows = tuple(t[indices.to(t.device)] for t in rows)
            self.pending = rows, None if mask is None else mask[indices.to(mask.device)]
        if self.record is not None:
            self.record, self.recent = self.record.select(indices), 0
        self.batch = len(indices) if self.batch else 0

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget all sequences."""
        self.record, self.pending, self.batch, self.recent = None, None, 0, 0
        self.begun = False
        self.has_previous_state[0] = False


class _BesideAttention(MixerLayer):
    """Cache of a mixer and of attention beside it; a subclass has a class of transformers for both.

    attention: That of its keys and values.
    """

    attention: type[cache_utils.CacheLayerMixin]

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.attention.crop(self, tokens_to_remove)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self.attention.batch_select_indices(self, indices)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().batch_select_indices(beam_idx)
        self.attention.reorder_cache(self, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))
        self.attention.batch_repeat_interleave(self, repeats)

    def reset(self) -> None:
        super().reset()
        self.attention.reset(self)


@functools.cache
def _of_layers() -> dict[type, type[MixerLayer]]:
    """Class of a layer of transformers -> ours that takes its place."""
    both = {
        cache_utils.DynamicLayer: cache_utils.LinearAttentionAndFullAttentionLayer,
        cache_utils.StaticLayer: cache_utils.LinearAttentionAndStaticFullAttentionLayer,
    }
    found: dict[type, type[MixerLayer]] = {cache_utils.LinearAttentionLayer: MixerLayer}
    for attention, cls in both.items():
        names = {"attention": attention, "is_compileable": False}
        found[cls] = type(f"Mixer{cls.__name__}", (_BesideAttention, cls), names)
    return found


class _WithoutGradient(torch.autograd.Function):
    """The rows of a cached call, whose gradient is refused: the record is none of its own."""

    @staticmethod
    def forward(ctx, out: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise UnsupportedTransformError(
            "cute_kernels.LinearAttentionCache: a gradient through tokens behind those of a cache "
            "is not available; give all tokens in one call"
        )
