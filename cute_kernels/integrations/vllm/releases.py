"""The vLLM releases that were run, and how their interfaces differ.

0.25.1, on a GPU, torch 2.11     caches [pages, 2, page_size, Hkv, D]; the V2 model runner
0.32.0, on a CPU, torch 2.13     caches [pages, Hkv, page_size, 2 D]; the V1 model runner
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...errors import BackendUnavailable, PatchError, expected


class Release(NamedTuple):
    """One release of vLLM on one kind of device, with the torch that it was run with."""

    vllm: str
    device: str
    torch: str


RELEASES = (Release("0.25.1", "cuda", "2.11"), Release("0.32.0", "cpu", "2.13"))


def device_type() -> str:
    """``"cuda"`` or ``"cpu"``: the platform of this vLLM."""
    from vllm.platforms import current_platform

    return current_platform.device_type


def check() -> None:
    """Refuse a release of vLLM, or of torch, that was not run."""
    import vllm

    check_versions(vllm.__version__, device_type(), torch.__version__)


def check_versions(vllm: str, device: str, torch_version: str) -> None:
    """Refuse versions that no line of `RELEASES` has."""
    known = [r for r in RELEASES if _same(vllm, r.vllm) and r.device == device]
    if not known:
        want = " or ".join(f"{r.vllm} on {r.device}" for r in RELEASES)
        raise BackendUnavailable(expected("vllm", want, f"{vllm} on {device}"))
    if not _same(torch_version, known[0].torch):
        want = f"{known[0].torch}, which vLLM {known[0].vllm} was run with"
        raise BackendUnavailable(expected("torch", want, torch_version))


def _same(version: str, release: str) -> bool:
    """Whether a version such as 2.13.0+cpu is of a release such as 2.13."""
    parts = version.split("+")[0].split(".")
    return parts[: release.count(".") + 1] == release.split(".")


def set_defaults(engine_args) -> None:
    """Set what the user left open: the attention backend, and no torch.compile."""
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    chosen = engine_args.attention_backend or engine_args.attention_config.backend
    if chosen is None and device_type() == "cuda":
        engine_args.attention_backend = AttentionBackendEnum.CUSTOM
    compilation = engine_args.compilation_config
    if compilation.mode is None:
        # Inductor drops roundings between the ops that it fuses.
        compilation.mode = CompilationMode.NONE
        graphs = device_type() == "cuda" and not engine_args.enforce_eager
        if compilation.cudagraph_mode is None and graphs:
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY


def attention_name() -> str:
    """Name of the entry of vLLM's registry that our attention backend takes."""
    # The CPU platform asks for CPU_ATTN, whatever is chosen.
    return "CPU_ATTN" if device_type() == "cpu" else "CUSTOM"


def split_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, str]:
    """(keys, values, layout) of a layer's cache, as `ck.paged_attention` takes them."""
    if kv_cache.dim() == 5:
        return kv_cache[:, 0], kv_cache[:, 1], "NHD"
    dim = kv_cache.shape[-1] // 2
    return kv_cache[..., :dim], kv_cache[..., dim:], "HND"


def register_layer(base: type, ours: type, name: str) -> None:
    """Put a class in the place of a vLLM layer's, of that name."""
    from vllm.model_executor.custom_op import op_registry_oot

    if name in op_registry_oot:
        other = op_registry_oot[name]
        want = f"no other plug-in's class for {name}"
        raise PatchError(expected("vllm.general_plugins", want, f"{other.__module__}"))
    base.register_oot(ours, name=name)
