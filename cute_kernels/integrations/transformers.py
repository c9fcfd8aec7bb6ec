"""``attn_implementation="cute_kernels"`` for Hugging Face transformers.

    from cute_kernels.integrations import transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="cute_kernels")

Two functions are registered: one that makes a ``BlockMask`` of a model's mask rule, once per
forward pass, and one that attends with it.  Rows keep their bits under any batch, right padding and
chunked prefill; left padding moves keys to other positions of the buffer, and so to other blocks.
"""

from __future__ import annotations

import functools

import torch

from ..errors import ArgumentTypeError, ArgumentValueError, expected
from ..schedulers.mask import BlockMask
from ..schedulers.mask_rules import Band
from ..sparse_attn.api import block_sparse_attention

NAME = "cute_kernels"

#: Arguments that change the result and that this attention does not know.
_UNKNOWN = ("s_aux", "position_bias", "head_mask")


def register() -> None:
    """Makes the name known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, block_mask)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockMask | torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface.

    Args:
        query: [B, Hq, T, D]; key, value: [B, Hkv, S, D]; bf16 or fp16, D of 64, 96 or 128.
        attention_mask: What ``block_mask`` made, a bool tensor [B or 1, Hq or 1, T, S], or None:
            causal if the module says so and T > 1.
        scaling, softcap: Of the scores.  dropout: 0.

    Returns:
        ([B, T, Hq, D], None): the weights are never formed.

    Raises:
        ArgumentValueError: dropout, or an argument that would change the result (attention sinks).
        ArgumentTypeError: a mask of numbers to add.  And what ``block_sparse_attention`` raises.
    """
    if dropout:
        raise ArgumentValueError(expected("dropout", "0 (dropout is not available)", dropout))
    for name in _UNKNOWN:
        if others.get(name) is not None:
            raise ArgumentValueError(expected(name, "None (it is not available)", "a value"))
    if isinstance(attention_mask, torch.Tensor):
        if attention_mask.dtype != torch.bool:
            want = "a BlockMask or a bool tensor"
            raise ArgumentTypeError(expected("attention_mask", want, attention_mask.dtype))
        attention_mask = BlockMask.from_dense(attention_mask)
    causal = attention_mask is None and query.shape[2] > 1
    out = block_sparse_attention(
        *(t.transpose(1, 2) for t in (query, key, value)),
        attention_mask,
        causal=causal and bool(getattr(module, "is_causal", True)),
        scale=scaling,
        softcap=softcap or 0.0,
    )
    return out, None


def block_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function=None,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **others: object,
) -> BlockMask:
    """transformers' mask interface: the ``BlockMask`` of a mask function and of padding.

    A plain causal mask is made as a rule; any other is evaluated element by element, once per
    forward pass.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    padded = attention_mask is not None and not bool(attention_mask.all())
    if mask_function in (None, causal_mask_function) and not padded:
        return _causal(q_length, kv_length, int(q_offset) - int(kv_offset), str(device))
    dense = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function or causal_mask_function,
        attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=bool(others.get("use_vmap", False)),
        device=device,
    )
    return BlockMask.from_dense(dense.contiguous())


@functools.lru_cache(maxsize=64)
def _causal(q_length: int, kv_length: int, offset: int, device: str) -> BlockMask:
    """Key j is seen by query i if j <= i + offset."""
    return BlockMask.from_rule(Band(None, offset), q_length, kv_length, device=device)
