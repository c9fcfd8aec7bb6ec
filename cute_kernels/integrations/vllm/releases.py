"""vLLM releases: what they have to fit, which ones were run, and how their interfaces differ.

A release is taken if `interface.TABLE` fits it.  One that fits and that no line of `RUN` has is
taken with a warning, and a worker's contract says "fits, not run" of it.

Caches of attention:
    up to 0.28      the shape is the backend's: [pages, 2, page_size, Hkv, D]
    from 0.29 on    [pages, Hkv, page_size, 2 D], with any strides
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ...errors import ArgumentValueError, BackendUnavailable, PatchError, expected
from . import interface, refusals


class Release(NamedTuple):
    """A release of vLLM on one kind of device, with the torch that it was run with."""

    vllm: str
    device: str
    torch: str


#: Runs in which no log-prob of the engine differed from the patched trainer's.
RUN = (
    Release("0.25.1", "cuda", "2.11"),
    Release("0.33.0", "cuda", "2.11"),
    Release("0.25.1", "cpu", "2.11"),
    Release("0.26.0", "cpu", "2.11"),
    *(
        Release(vllm, "cpu", "2.13")
        for vllm in ("0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
    ),
)


def device_type() -> str:
    """``"cuda"`` or ``"cpu"``: the platform of this vLLM."""
    from vllm.platforms import current_platform

    return current_platform.device_type


def check() -> None:
    """Refuse a vLLM whose interface is another one; warn of a release that was not run.

    Raises:
        BackendUnavailable: the first place of vLLM that differs, by its name.
    """
    for misfit in interface.find_misfits(device_type()):
        raise BackendUnavailable(misfit)
    if not was_run(here()):
        warnings.warn(f"{statement()}; docs/vllm.md names the releases that were", stacklevel=2)


def here() -> Release:
    """The release of this process."""
    import vllm

    return Release(vllm.__version__, device_type(), torch.__version__)


def was_run(release: Release) -> bool:
    """Whether a line of `RUN` has this release, device and torch."""
    return any(all(map(_is_of, release, run)) for run in RUN)


def _is_of(version: str, release: str) -> bool:
    """Whether a version such as 2.13.0+cpu is of a release such as 2.13."""
    parts = version.split("+")[0].split(".")
    return parts[: release.count(".") + 1] == release.split(".")


def statement() -> str:
    """Text of a worker's contract about this process's vLLM."""
    release = here()
    state = "run" if was_run(release) else "fits, not run"
    return f"vllm {release.vllm} on {release.device} with torch {release.torch}: {state}"


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


def set_hybrid_defaults(config) -> None:
    """Set what the prefix cache of a hybrid needs: blocks end where chunks of its rule do.

    Raises:
        ArgumentValueError: blocks that the user chose do not.
    """
    cache, chunk = config.cache_config, refusals.chunk_of(config)
    if chunk is None or not cache.enable_prefix_caching:
        return
    if cache.mamba_cache_mode == "all":
        cache.mamba_cache_mode = "align"
    # A page holds a state as it is in the record.
    cache.mamba_ssm_cache_dtype = "float32"
    if cache.block_size % chunk:
        if cache.user_specified_block_size:
            raise ArgumentValueError(
                expected("block_size", f"a multiple of {chunk}", cache.block_size)
            )
        # vLLM makes blocks longer by multiples of this.
        cache.block_size, cache.user_specified_block_size = chunk, True


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


def register_layers(replacements: Mapping[type, type]) -> None:
    """Put classes in the place of vLLM's layers of the same name.

    Raises:
        PatchError: another plug-in has replaced a layer already.
    """
    from vllm.model_executor.custom_op import op_registry_oot

    for base, ours in replacements.items():
        other = op_registry_oot.get(base.__name__)
        if other is None:
            base.register_oot(ours, name=base.__name__)
        elif other.__module__ != ours.__module__:  # else: of a call that failed later
            want = f"no other plug-in's class for {base.__name__}"
            raise PatchError(expected("vllm.general_plugins", want, other.__module__))
