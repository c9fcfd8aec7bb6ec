"""SGLang's layers and attention on our ops, through its plug-in hooks.

    CUTE_KERNELS_SGLANG=1 python -m sglang.launch_server --attention-backend cute_kernels
        --page-size 64 --disable-cuda-graph ...

The entry point (``sglang.srt.plugins``) is called in each of SGLang's processes; without the
setting it changes nothing.  With it, linears, the LM head, RMSNorm, SiLU-mul and rotary embeddings
of SGLang's classes run our ops, in the steps of a patched model, and "cute_kernels" is an
attention backend.  Log-probs are SGLang's own log-softmax of our fp32 logits: they are not those of
``ck.linear_logp``.  Run in SGLang on a CPU: docs/integrations.md says how far.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable

import torch

from .. import settings
from ..errors import ArgumentValueError, PatchError, expected, one_of
from ..gemm import api as gemm
from ..norm import api as norm
from ..rowwise import api as rowwise
from ..rowwise.op import gated_rows
from ..sparse_attn.config import PAGE_SIZES
from ..sparse_attn.paged import api as paged
from .engine_layers import fp32_logits, require, rotate

NAME = "cute_kernels"
#: The release whose classes have these forms.
TESTED = "0.5.23"

_LAYERS = "sglang.srt.layers"
_PLATFORMS = ("forward_native", "forward_cuda", "forward_cpu")
_ORDER = "chain"
#: Frequencies of rotary modules, which belong to SGLang.
_frequencies: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def register() -> None:
    """Entry point: register hooks and the attention backend, if the environment asks for it.

    Raises:
        SettingError: CUTE_KERNELS_SGLANG is neither 0 nor 1.
    """
    if settings.get("SGLANG") == "1":
        activate()


@functools.cache
def activate() -> None:
    """Register hooks, which SGLang applies once all plug-ins are loaded, and the backend's name.

    A second call in a process changes nothing.
    """
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    for target, replacement in hooks().items():
        registry.HookRegistry.register(target, replacement, registry.HookType.REPLACE)
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    for add in (
        choices.add_attention_backend_choices,
        choices.add_deterministic_attention_backend_choices,
        choices.add_radix_supported_deterministic_attention_backend_choices,
    ):
        if NAME not in add.__self__:
            add([NAME])
    attention = importlib.import_module(f"{_LAYERS}.attention.attention_registry")
    attention.register_attention_backend(NAME)(create_backend)


def hooks() -> dict[str, Callable]:
    """Return target in SGLang -> function in its place."""
    linear = f"{_LAYERS}.quantization.unquant.UnquantizedLinearMethod"
    replaced: dict[str, Callable] = {
        f"{linear}.apply": linear_apply,
        f"{linear}.apply_with_addend": linear_with_addend,
        f"{linear}.apply_into": linear_into,
        f"{linear}.process_weights_after_loading": keep_weights,
        f"{_LAYERS}.logits_processor.LogitsProcessor._compute_lm_head": lm_head,
    }
    for cls, function in (
        (f"{_LAYERS}.layernorm.RMSNorm", rms_norm),
        (f"{_LAYERS}.activation.SiluAndMul", silu_and_mul),
        (f"{_LAYERS}.rotary_embedding.base.RotaryEmbedding", rotary),
    ):
        replaced |= {f"{cls}.{method}": function for method in _PLATFORMS}
    return replaced


# ---- layers -------------------------------------------------------------------------------------


def linear_apply(method, layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x Wᵀ + b, from the weight as it was loaded."""
    return gemm.linear(x, layer.weight, bias, order=_ORDER)


def linear_with_addend(method, layer, x, addend, bias=None) -> torch.Tensor:
    """y + addend, each rounded, as a residual is added in a patched model."""
    return linear_apply(method, layer, x, bias).add_(addend)


def linear_into(method, layer, x, output, bias=None) -> torch.Tensor:
    """Write y to ``output``, and return it."""
    return output.copy_(linear_apply(method, layer, x, bias))


def keep_weights(method, layer) -> None:
    """Leave the weight as it is: SGLang repacks it on a CPU."""


def lm_head(processor, hidden_states, head, embedding_bias=None, *, out=None) -> torch.Tensor:
    """Logits in fp32: the sums of ``ck.linear`` before they are rounded.

    Raises:
        PatchError: a head with an adapter, or with quantized weights.
    """
    weight = getattr(head, "weight", None)
    if hasattr(head, "apply_lora") or weight is None or weight.dtype != hidden_states.dtype:
        want = f"a plain weight in {hidden_states.dtype}"
        raise PatchError(expected("lm_head", want, type(head).__name__))
    return fp32_logits(hidden_states, weight, embedding_bias, order=_ORDER)


def rms_norm(module, x, residual=None, post_residual_addition=None, quant_linear=None):
    """Norm of x, or (norm(x + residual), x + residual).

    Raises:
        PatchError: an option by which SGLang's norm computes something else.
    """
    fed = quant_linear or getattr(module, "_quant_linear", None)
    for name, value in (
        ("post_residual_addition", post_residual_addition),
        ("quant_linear", _quantized(fed)),
        ("var_hidden_size", module.variance_size_override),
        ("fp32_residual", module.fp32_residual or None),
        ("override_orig_dtype", module.override_orig_dtype),
    ):
        require("RMSNorm", name, value)
    if not x.numel():
        return x if residual is None else (x, residual)
    weight = module.weight if module.has_weight else None
    return norm.rms_norm(x, weight, module.variance_epsilon, residual=residual)


def _quantized(linear: object) -> object:
    """The layer that a norm feeds, if it takes quantized inputs; None: it takes them as they are.

    SGLang's models name that layer to each of their norms.
    """
    method = type(getattr(linear, "quant_method", None)).__name__
    return None if linear is None or method == "UnquantizedLinearMethod" else linear


def silu_and_mul(module, x: torch.Tensor) -> torch.Tensor:
    """silu(gate), rounded, times up, as in a patched model."""
    return gated_rows(x, "silu")


def rotary(module, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):
    """Rotate q and k [T, heads · head_size] by transformers' formula.

    Raises:
        PatchError: another kind of rotary embedding, or keys that are to be stored as well.
    """
    for name, value in (("offsets", offsets), ("fused_set_kv_buffer_arg", fused_set_kv_buffer_arg)):
        require("RotaryEmbedding", name, None if value is None else "a value")
    whole = module.is_neox_style and module.rotary_dim == module.head_size
    if not whole or positions.dim() != 1 or _scales(module):
        want = "two halves of whole heads, of one position a token, not scaled"
        raise PatchError(expected("rotary embedding", want, type(module).__name__))
    if module not in _frequencies:
        _frequencies[module] = inverse_frequencies(module.base, module.rotary_dim)
    frequencies = _frequencies[module].to(positions.device)
    table = rowwise.rotary_table(positions[None], frequencies, 1.0, query.dtype)
    return rotate(query, key, table, module.head_size)


def inverse_frequencies(base: float, width: int) -> torch.Tensor:
    """Return fp32 [width / 2] on the CPU, as transformers makes them for the plain embedding."""
    steps = torch.arange(0, width, 2, dtype=torch.int64, device="cpu").float() / width
    return 1.0 / (base**steps)


def _scales(module: object) -> bool:
    """Whether a class below RotaryEmbedding has other frequencies or tables."""
    classes = type(module).__mro__
    names = [cls.__name__ for cls in classes]
    if "RotaryEmbedding" not in names:
        return True
    formulas = {"_compute_inv_freq", "_compute_cos_sin_cache"}
    return any(formulas & vars(cls).keys() for cls in classes[: names.index("RotaryEmbedding")])


# ---- attention ----------------------------------------------------------------------------------


def create_backend(runner: object) -> object:
    """Return the attention backend of a model runner of SGLang."""
    base = importlib.import_module(f"{_LAYERS}.attention.base_attn_backend").AttentionBackend
    location = importlib.import_module("sglang.srt.mem_cache.memory_pool").KVWriteLoc
    return type("CuteKernelsBackend", (Paged, base), {})(runner, location)


class Paged:
    """Attention of SGLang's batches over its token pool, seen as pages; without CUDA graphs."""

    def __init__(self, runner: object, location: Callable):
        """Create a backend.

        Args:
            runner: Has ``req_to_token_pool``, ``token_to_kv_pool`` and ``page_size``.
            location: SGLang's ``KVWriteLoc``.

        Raises:
            ArgumentValueError: pages of a size that ``ck.paged_attention`` does not have.
        """
        super().__init__()
        self.page_size = runner.page_size
        if self.page_size not in PAGE_SIZES:
            raise ArgumentValueError(one_of("--page-size", PAGE_SIZES, self.page_size))
        self.tokens = runner.req_to_token_pool.req_to_token
        self.pool, self.location = runner.token_to_kv_pool, location
        self.lists: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def init_forward_metadata(self, batch: object) -> None:
        """Make the block table, the lengths and the starts of a batch's sequences."""
        pages = self.tokens[batch.req_pool_indices][:, :: self.page_size] // self.page_size
        lengths = batch.seq_lens.to(torch.int32)
        if batch.forward_mode.is_decode():
            counts = torch.ones_like(lengths)
        else:
            counts = batch.extend_seq_lens.to(torch.int32)
        starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        self.lists = pages.to(torch.int32).contiguous(), lengths, starts

    def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, **others):
        """Attend a batch of prefills or chunks, or of one token a sequence: [T, Hq · Dv]."""
        require("attention", "is_cross_attention", bool(layer.is_cross_attention), False)
        kind = getattr(layer.attn_type, "value", layer.attn_type)
        require("attention", "attn_type", kind, "decoder")
        for name, value in others.items():
            require("attention", name, value)
        if save_kv_cache and k is not None:
            where = self.location(batch.out_cache_loc, None)
            self.pool.set_kv_buffer(layer, where, k, v)
        buffers = self.pool.get_key_buffer, self.pool.get_value_buffer
        caches = (get(layer.layer_id) for get in buffers)
        k_pages, v_pages = (t.view(-1, self.page_size, *t.shape[1:]) for t in caches)
        window = layer.sliding_window_size
        left = None if window is None or window < 0 else window
        out = paged.paged_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k_pages,
            v_pages,
            *self.lists,
            scale=layer.scaling,
            softcap=float(layer.logit_cap or 0.0),
            window_size=(left, None if left is None else 0),
        )
        return out.view(len(q), -1)

    forward_decode = forward_extend
