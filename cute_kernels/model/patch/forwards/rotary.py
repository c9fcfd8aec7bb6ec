"""Restore the fp32 frequencies of rotary modules that ``module.to(dtype)`` has rounded."""

from __future__ import annotations

import torch

from ....errors import ArgumentValueError, expected

#: Attribute of a module: buffer name -> the rounded frequencies, which ``ck.unpatch`` puts back.
_ROUNDED = "_cute_kernels_rounded"


def exact_frequencies(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return buffer name -> fp32 frequencies on the CPU, where ``module.to(dtype)`` rounded them.

    They are computed again by the module's class from its config, as a checkpoint that is loaded
    with ``dtype=`` has them.

    Raises:
        ArgumentValueError: the class gives other frequencies than those that were rounded.
    """
    rounded = {
        name: buffer
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and buffer.dtype != torch.float32
    }
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
        if not buffer.is_meta and not torch.equal(exact.to(buffer.dtype), buffer.cpu()):
            actual = f"{buffer.dtype} values that the config does not give"
            raise ArgumentValueError(expected("inv_freq", want, actual))
    return {name: fresh[name] for name in rounded}


def restore_frequencies(
    module: torch.nn.Module, frequencies: dict[str, torch.Tensor] | None = None
) -> None:
    """Give a rotary module back the fp32 frequencies that ``module.to(dtype)`` has rounded.

    frequencies: By `exact_frequencies`; None: computed here.
    """
    if frequencies is None:
        frequencies = exact_frequencies(module)
    for name, exact in frequencies.items():
        rounded = module._buffers[name]
        vars(module).setdefault(_ROUNDED, {})[name] = rounded
        module._buffers[name] = exact.to(rounded.device)


def undo(module: torch.nn.Module) -> None:
    """Give a rotary module the rounded frequencies that it had before ``restore_frequencies``."""
    for name, rounded in vars(module).pop(_ROUNDED, {}).items():
        module._buffers[name] = rounded.to(module._buffers[name].device)
