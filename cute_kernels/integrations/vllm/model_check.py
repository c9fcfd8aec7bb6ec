"""The walk over a built model: every part that sums has to be one of ours."""

from __future__ import annotations

import functools

import torch

from ... import contracts
from ...errors import PatchError, expected
from .. import contract_exchange as exchange
from . import loading

#: Files of vLLM whose models were gone through: their modules only put parts together.
_REVIEWED = frozenset(
    f"vllm.model_executor.models.{name}"
    for name in (
        "gemma3", "granitemoehybrid", "granitemoeshared", "llama", "mistral", "mixtral",
        "nemotron_h", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next",
    )
)  # fmt: skip
_OURS = __package__
#: Attribute of an attention layer: whether one kernel of vLLM's norms and rotates.
_FUSED = "use_fused_qk_norm_rope_gate"
#: Ops that a model needs -> dtype of their operands; None: that of the model.
OPS = {
    **dict.fromkeys(("linear", "embedding", "rms_norm", "silu", "gelu", "rotary_table")),
    **dict.fromkeys(("apply_rotary_pos_emb", "paged_attention", "write_kv_cache")),
    "log_probs": torch.float32,
}
#: Ops that a mixture of experts needs besides.
MIXTURE_OPS = dict.fromkeys(("grouped_linear", "moe", "sigmoid"))
_checked = False


def check_model(model: torch.nn.Module) -> None:
    """Refuse a built model with a part that is not known, and a device without our kernels.

    Raises:
        PatchError: a module that we neither replaced nor reviewed; the message names it.
        BackendUnavailable: the device has no backend of an op; the message says why.
    """
    global _checked
    unknown = find_unknown(model)
    if unknown:
        names, kinds = zip(*unknown, strict=True)
        want = "parts that cute_kernels has exchanged or reviewed"
        raise PatchError(expected(f"model: {names[0]}", want, loading.first_of(kinds)))
    weight = next(model.parameters())
    kinds = {p.kind for m in model.modules() for p in exchange.module_parts(m, weight.dtype)}
    ops = OPS | (MIXTURE_OPS if "experts" in kinds else {})
    for module in model.modules():
        ops |= dict.fromkeys(getattr(module, "cute_kernels_ops", ()))
    contract_ids(weight.device, weight.dtype, ops)
    _checked = True


def contract_ids(
    device: torch.device, dtype: torch.dtype, ops: dict[str, torch.dtype | None] = OPS
) -> dict[str, str]:
    """Contract id of each op of an engine; BackendUnavailable where the device has none."""
    return {op: contracts.contract_id(op, device, own or dtype) for op, own in ops.items()}


def find_unknown(model: torch.nn.Module) -> list[tuple[str, str]]:
    """(name, what it is) of each module that is neither ours nor reviewed."""
    ours: set[int] = set()
    unknown = []
    for name, module in model.named_modules():
        if id(module) in ours:
            continue
        cls = type(module)
        if cls.__module__.startswith(_OURS):
            # What vLLM's class has put into it is not called.
            ours |= {id(child) for child in module.modules()}
        elif what := _why_unknown(module, cls):
            unknown.append((name or "(model)", what))
    return unknown


def _why_unknown(module: torch.nn.Module, cls: type) -> str | None:
    """Describe a module that is unknown; None: it is a known one."""
    text = f"{cls.__module__}.{cls.__qualname__}"
    backend = getattr(module, "attn_backend", None)
    if backend is not None:
        ours = str(getattr(backend, "__module__", "")).startswith(_OURS)
        return None if ours else f"{text} on {backend.__qualname__}"
    if cls in (torch.nn.ModuleList, torch.nn.Identity):
        return None
    if cls.__module__ not in _REVIEWED:
        return text
    parameter_names = [n for n, _ in module.named_parameters(recurse=False)]
    return f"{text} with a parameter {parameter_names[0]}" if parameter_names else None


def require_checked() -> None:
    """Refuse to attend for a model that a loader has built past `check_model`."""
    if not _checked:
        want = "a loader of vLLM's"
        raise PatchError(expected("load_format", want, "one that passes its checks"))


def register() -> None:
    """Check each model that vLLM's loaders build, and what is loaded into it."""
    from vllm.model_executor.model_loader import base_loader

    build, load = base_loader.initialize_model, base_loader.BaseModelLoader.load_model

    @functools.wraps(build)
    def initialize_model(*args, **kwargs):
        model = build(*args, **kwargs)
        for module in model.modules():
            if getattr(module, _FUSED, False):
                setattr(module, _FUSED, False)
        loading.watch(model)
        return model

    @functools.wraps(load)
    def load_model(self, *args, **kwargs):
        model = load(self, *args, **kwargs)
        loading.check_filled(model)
        check_model(model)
        return model

    base_loader.initialize_model = initialize_model
    base_loader.BaseModelLoader.load_model = load_model
