"""Forward of a base model that tells its attention where no batch holds padding, packs or a cache.

Without position ids transformers makes them, and then looks in them for packed sequences: in eager
mode the host waits for the device's answer, and a compiled graph makes a dense mask, as it cannot
wait, of which our attention has to read the ranges.  Position ids that the model makes have no
packs, so the layers get the mask that says so.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch

from ....integrations import transformers as integration

#: Arguments that say something about the mask.
_OF_MASKS = ("attention_mask", "position_ids", "past_key_values", "cu_seq_lens_q", "cu_seq_lens_k")
#: model_type -> what its base model calls a mask: one for all layers, or one for each type of them.
_ONE, _BY_TYPE = "one", "by type"
_MASKS = {
    "llama": _ONE,
    "mistral": _ONE,
    "phi3": _ONE,
    "olmo2": _ONE,
    "gpt_neox": _ONE,
    "qwen2": _BY_TYPE,
    "qwen3": _BY_TYPE,
    "gemma2": _BY_TYPE,
    "gemma3_text": _BY_TYPE,
}
#: Those of `_ONE` whose mask is a sliding window's where the config has one.
_SLIDING = frozenset({"mistral", "phi3"})


def is_known(model: torch.nn.Module, cls: type) -> bool:
    """Whether a module is the base model of a family whose masks are known."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return model_type in _MASKS and cls.__name__.endswith("Model") and "forward" in vars(cls)


def forward_of(cls: type) -> Callable:
    """Wrap the author's forward, with his signature."""
    author = cls.forward
    names = list(inspect.signature(author).parameters)[1:]

    @functools.wraps(author)
    def forward(self, *args, **kwargs):
        arguments = dict(zip(names, args, strict=False)) | kwargs
        masks = _masks(self, arguments)
        if masks is None:
            return author(self, *args, **kwargs)
        return author(self, **(arguments | {"attention_mask": masks}))

    return forward


def _masks(
    model: torch.nn.Module, arguments: dict[str, object]
) -> torch.Tensor | dict[str, torch.Tensor] | None:
    """Return masks of a call without padding, packs and cache; None: transformers makes them.

    A cache that the model itself makes is empty: all keys are those of the call.
    """
    config = model.config
    causal = (
        arguments.get("is_causal") is not False
        and getattr(config, "is_causal", True) is not False
        and not getattr(config, "use_bidirectional_attention", False)
    )
    ours = config._attn_implementation == integration.NAME
    if not causal or not ours or any(arguments.get(n) is not None for n in _OF_MASKS):
        return None
    window = getattr(config, "sliding_window", None)
    slides = isinstance(window, int) and window > 1
    if _MASKS.get(config.model_type) == _BY_TYPE:
        masks = {"full_attention": integration.whole_sequences()}
        if slides:
            masks["sliding_attention"] = integration.whole_sequences(window)
        return masks if slides or window is None else None
    if config.model_type not in _SLIDING or window is None:
        return integration.whole_sequences()
    return integration.whole_sequences(window) if slides else None
