"""Forward and backward passes of an observation: lengths, batches, padding, a cache, gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn

from .replica import replica as replica
from .watch import Observation, Watch

#: Lengths of sequences; no size of a model is one of them by accident in both passes.
_LENGTHS = (11, 23)


def observe(model: nn.Module, root: nn.Module, devices: set[str]) -> Observation:
    """Run a model of transformers and return what ran.

    Args:
        model: The replica whose modules are named.  It is changed: it is not to be used again.
        root: The model inside that takes ids.
        devices: Types of device that the real model is on.

    Raises whatever the model raises.
    """
    watch = Watch(model, devices)
    accepts = set(inspect.signature(type(root).forward).parameters)
    passes = Passes(root, accepts, watch.end_pass)
    with torch.random.fork_rng(devices=[]), watch.following():
        with torch.no_grad():
            for length in _LENGTHS:
                passes.whole(1, length)
            with watch.steps() as of_one:
                passes.whole(1, _LENGTHS[0])
            with watch.steps() as of_three:
                passes.whole(3, _LENGTHS[0])
            watch.seen.branches |= of_one ^ of_three
            if "attention_mask" in accepts:
                passes.padded()
            if "past_key_values" in accepts:
                passes.cached()
        with torch.enable_grad():
            for length in _LENGTHS:
                passes.gradients(2, length)
    return watch.seen


class Passes:
    """Passes through a model that takes ids [B, T]; ``end`` is called after each."""

    def __init__(self, root: nn.Module, accepts: set[str], end: Callable[[], None]) -> None:
        self._root, self._accepts, self._end = root, accepts, end
        embeddings = root.get_input_embeddings()
        count = getattr(embeddings, "num_embeddings", None) or root.config.vocab_size
        generator = torch.Generator(device="cpu").manual_seed(1)
        self._ids = torch.randint(1, count, (3, _LENGTHS[1]), generator=generator, device="cpu")

    def _call(self, ids: torch.Tensor, **options: object):
        # The balancing loss reads logits of routers over the batch; no row depends on it.
        options["output_router_logits"] = False
        options = {name: value for name, value in options.items() if name in self._accepts}
        return self._root(ids, **options)

    def whole(self, batch: int, length: int) -> None:
        """Run sequences of one length without a cache."""
        self._call(self._ids[:batch, :length], use_cache=False)
        self._end()

    def padded(self) -> None:
        """Run a sequence with padding on its left beside a full one."""
        mask = torch.ones(2, _LENGTHS[1], dtype=torch.int64, device="cpu")
        mask[0, :5] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        options = {"attention_mask": mask, "position_ids": positions}
        self._call(self._ids[:2], use_cache=False, **options)
        self._end()

    def cached(self) -> None:
        """Run a prefill, a chunk and single tokens with the model's own cache."""
        past = None
        for first, last in ((0, 7), (7, 12), (12, 13), (13, 14)):
            ids = self._ids[:2, first:last]
            positions = torch.arange(first, last, dtype=torch.int64, device="cpu").expand(2, -1)
            out = self._call(ids, position_ids=positions, use_cache=True, past_key_values=past)
            self._end()
            past = getattr(out, "past_key_values", None)
            if past is None:
                return

    def gradients(self, batch: int, length: int) -> None:
        """Run forward and backward down to what the embedding gives."""
        embeddings = self._root.get_input_embeddings()
        # Models may write into what the embedding gives: it is no leaf.
        handle = embeddings.register_forward_hook(
            lambda m, a, out: out.detach().requires_grad_().clone()
        )
        try:
            out = self._call(self._ids[:batch, :length], use_cache=False)
            result = out[0]
            result.backward(torch.full_like(result, 0.01))
        finally:
            handle.remove()
        self._end()
