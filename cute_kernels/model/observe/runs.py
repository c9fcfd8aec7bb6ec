"""Passes through a model: lengths, batches, padding, a cache, gradients; and what runs in them."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import nn

from .replica import replica as replica
from .watch import Observation, Watch

#: Lengths of sequences; no size of a model is one of them by accident in both passes.
_LENGTHS = (11, 23)


def accepted(names: Collection[str], **options: object) -> dict[str, object]:
    """Return those of the options, besides None, that a forward with these parameters takes."""
    return {n: value for n, value in options.items() if n in names and value is not None}


class Passes:
    """Passes through a model of transformers that takes ids [B, T]."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.accepts = frozenset(inspect.signature(type(root).forward).parameters)

    def ids(self, count: int, length: int) -> torch.Tensor:
        """Random ids [count, length], the same for the same sizes."""
        embeddings = self.root.get_input_embeddings()
        known = getattr(embeddings, "num_embeddings", None) or self.root.config.vocab_size
        # Ids at the end may mean something to a model.
        end = max(2, known - known // 8)
        generator = torch.Generator(device="cpu").manual_seed(2)
        return torch.randint(1, end, (count, length), generator=generator, device="cpu")

    def run(self, ids: torch.Tensor, **options: object):
        """Run the model with those of the options that its forward takes."""
        # The balancing loss reads logits of routers over the batch; no row depends on it.
        options = {"use_cache": False, **options, "output_router_logits": False}
        return self.root(ids, **accepted(self.accepts, **options))

    def through_cache(
        self, ids: torch.Tensor, ends: Sequence[int], placed: bool = False
    ) -> Iterator[object]:
        """Yield the results of columns up to each end, with the model's own cache.

        placed: Whether the model is told positions.  It ends early if there is no cache.
        """
        past, options = None, {}
        for first, end in itertools.pairwise((0, *ends)):
            if placed:
                positions = torch.arange(first, end, dtype=torch.int64, device="cpu")
                options["position_ids"] = positions.expand(len(ids), -1)
            options |= {"use_cache": True, "past_key_values": past}
            result = self.run(ids[:, first:end], **options)
            yield result
            past = getattr(result, "past_key_values", None)
            if past is None:
                return

    @contextlib.contextmanager
    def embedded(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Replace what the embedding gives by what ``change`` returns, within the block."""
        embeddings = self.root.get_input_embeddings()
        # Models may write into what the embedding gives: it is no leaf.
        handle = embeddings.register_forward_hook(lambda m, args, out: change(out).clone())
        try:
            yield
        finally:
            handle.remove()


def observe(model: nn.Module, root: nn.Module, devices: set[str]) -> Observation:
    """Run a model of transformers and return what ran.

    Args:
        model: The replica whose modules are named.  It is changed: it is not to be used again.
        root: The model inside that takes ids.
        devices: Types of device that the real model is on.

    Raises whatever the model raises.
    """
    watch, passes = Watch(model, devices), Passes(root)
    ids = passes.ids(3, _LENGTHS[1])

    def run(batch: int, length: int, **options: object) -> torch.Tensor:
        result = passes.run(ids[:batch, :length], **options)
        watch.end_pass()
        return result

    with torch.random.fork_rng(devices=[]), watch.following():
        with torch.no_grad():
            # The first pass makes what a model makes once, like tables of positions.
            run(1, _LENGTHS[1])
            with watch.steps() as of_one:
                run(1, _LENGTHS[0])
            with watch.steps() as of_three:
                run(3, _LENGTHS[0])
            watch.seen.branches |= of_one ^ of_three
            if "attention_mask" in passes.accepts:  # padding on the left
                mask = torch.ones(2, _LENGTHS[1], dtype=torch.int64, device="cpu")
                mask[0, :5] = 0
                positions = (mask.cumsum(-1) - 1).clamp(min=0)
                run(2, _LENGTHS[1], attention_mask=mask, position_ids=positions)
            if "past_key_values" in passes.accepts:  # a prefill, a chunk, single tokens
                for _ in passes.through_cache(ids[:2], (7, 12, 13, 14), placed=True):
                    watch.end_pass()
        with torch.enable_grad(), passes.embedded(lambda out: out.detach().requires_grad_()):
            for length in _LENGTHS:
                result = passes.run(ids[:2, :length])[0]
                result.backward(torch.full_like(result, 0.01))
                watch.end_pass()
    return watch.seen
