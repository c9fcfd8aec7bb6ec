"""Mixtures of experts whose vLLM model was compared with a patched transformers model.

vLLM's models do not read all of a config: what they leave out, or have as a constant, is in
`FIXED`, and another value is refused.  Biases that one side has are `loading`'s.
"""

from __future__ import annotations

from typing import NamedTuple

from ...errors import PatchError, expected
from .. import engine_experts

#: Architecture -> class of transformers that routes.
ROUTERS = {
    "MixtralForCausalLM": "MixtralTopKRouter",
    "OlmoeForCausalLM": "OlmoeTopKRouter",
    "Qwen2MoeForCausalLM": "Qwen2MoeTopKRouter",
    "Qwen3MoeForCausalLM": "Qwen3MoeTopKRouter",
}


class Fixed(NamedTuple):
    """An entry of a config that vLLM's model takes to be this value."""

    name: str
    values: tuple[object, ...]


_SILU = Fixed("hidden_act", ("silu",))
_NO_WINDOW = Fixed("use_sliding_window", (False, None))
#: Architecture -> entries of its config that have one value in vLLM's model.
FIXED = {
    "MixtralForCausalLM": (_SILU,),
    "OlmoeForCausalLM": (
        _SILU,
        Fixed("clip_qkv", (None,)),
        Fixed("norm_topk_prob", (False, None)),
        Fixed("rms_norm_eps", (1e-5,)),
    ),
    "Qwen2MoeForCausalLM": (_SILU, _NO_WINDOW),
    "Qwen3MoeForCausalLM": (
        _SILU,
        _NO_WINDOW,
        Fixed("shared_expert_intermediate_size", (None, 0)),
    ),
}


def rule_of(model_config: object, normalize: bool) -> engine_experts.Rule:
    """Return how the router of this engine's model makes weights.

    Raises:
        PatchError: an architecture that is not of `ROUTERS`.
    """
    names = list(getattr(model_config, "architectures", None) or [""])
    if names[0] not in ROUTERS:
        raise PatchError(expected("model", f"one of {', '.join(ROUTERS)}", names[0]))
    rule = engine_experts.rule_of(ROUTERS[names[0]], normalize)
    assert rule is not None
    return rule
