"""Restore the fp32 frequencies of rotary modules that ``module.to(dtype)`` has rounded.

A later ``.float()`` leaves the rounded values in fp32, so that values decide, not the dtype alone.
"""

from __future__ import annotations

import torch

from ....errors import ArgumentValueError, expected

#: Attribute of a module: buffer name -> the rounded frequencies, which ``ck.unpatch`` puts back.
_ROUNDED = "_cute_kernels_rounded"
#: Attribute of a module: buffer name -> the frequencies that were looked at last.
_CHECKED = "_cute_kernels_checked"
#: Dtypes that round frequencies, in the order of casts.
_CASTS = (
    (torch.bfloat16,),
    (torch.float16,),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.bfloat16),
)


def exact_frequencies(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return buffer name -> fp32 frequencies on the CPU, where ``module.to(dtype)`` rounded them.

    They are computed again by the module's class from its config, as a checkpoint that is loaded
    with ``dtype=`` has them.

    Raises:
        ArgumentValueError: the class gives other frequencies than those that were rounded.
    """
    rounded = {name: buffer for name, buffer in _frequencies(module) if _is_rounded(buffer)}
    if not rounded:
        return {}
    want = "frequencies in torch.float32 (load the model with dtype=)"
    try:
        with torch.device("cpu"):
            fresh = dict(type(module)(module.config).named_buffers(recurse=False))
    except Exception as error:  # any constructor may run here
        actual = f"those of .to(dtype), and {type(error).__name__} from its class: {error}"
        raise ArgumentValueError(expected("inv_freq", want, actual)) from error
    for name, buffer in rounded.items():
        exact = fresh.get(name)
        if exact is None or exact.dtype != torch.float32:
            raise ArgumentValueError(expected("inv_freq", want, f"{buffer.dtype} by its class"))
        if not _is_unknown(buffer) and not _comes_from(buffer.cpu(), exact):
            actual = "rounded values that the config does not give"
            raise ArgumentValueError(expected("inv_freq", want, actual))
    return {name: fresh[name] for name in rounded}


def restore_frequencies(module: torch.nn.Module) -> None:
    """Give a rotary module back the fp32 frequencies that ``module.to(dtype)`` has rounded."""
    for name, exact in exact_frequencies(module).items():
        rounded = module._buffers[name]
        vars(module).setdefault(_ROUNDED, {})[name] = rounded
        module._buffers[name] = exact.to(rounded.device)
    vars(module)[_CHECKED] = dict(_frequencies(module))


def is_checked(module: torch.nn.Module, name: str) -> bool:
    """Whether a buffer is the one that `restore_frequencies` looked at: no cast came since."""
    return vars(module).get(_CHECKED, {}).get(name) is module._buffers.get(name)


def undo(module: torch.nn.Module) -> None:
    """Give a rotary module the rounded frequencies that it had before ``restore_frequencies``."""
    vars(module).pop(_CHECKED, None)
    for name, rounded in vars(module).pop(_ROUNDED, {}).items():
        module._buffers[name] = rounded.to(module._buffers[name].device)


def _frequencies(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    buffers = module.named_buffers(recurse=False)
    return [(name, buffer) for name, buffer in buffers if name.endswith("inv_freq")]


def _is_rounded(buffer: torch.Tensor) -> bool:
    """Whether frequencies have another dtype than fp32, or values of a smaller one."""
    if buffer.dtype != torch.float32:
        return True
    if _is_unknown(buffer):
        return False
    values = buffer.cpu()
    return any(_same_values(values.to(dtype), values) for dtype in (torch.bfloat16, torch.float16))


def _is_unknown(buffer: torch.Tensor) -> bool:
    """Whether frequencies have no values yet: on meta, or constants in the copy of a model."""
    return buffer.is_meta or (buffer.numel() > 1 and not any(buffer.stride()))


def _comes_from(buffer: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether frequencies are the exact ones, or a rounding of them."""
    if _same_values(buffer, exact):
        return True
    for casts in _CASTS:
        values = exact
        for dtype in casts:
            values = values.to(dtype)
        if _same_values(values, buffer):
            return True
    return False


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of floats have the same numbers, whatever their dtypes."""
    return torch.equal(a.float(), b.float())
