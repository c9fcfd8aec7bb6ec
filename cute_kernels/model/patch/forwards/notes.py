"""Notes of a patched module: what its forward reads besides parameters and buffers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ....integrations.sharded_head import NOTES as NOTES
from .. import checks

#: Attribute of a patched class: the name of its forward in `layers.FORWARDS`.
KIND = "_cute_kernels_kind"


class Notes(NamedTuple):
    """Options that the forward of one module reads.

    order: of linear products.
    main_grad: whether gradients go to the ``main_grad`` of parameters that have one.
    weight, bias: the names of a norm's parameters; None: it has none.
    eps, offset: of a norm.  eps_name: the attribute that its eps is read from at each call; None:
    it is ``eps``.  reads: (attribute, value) that the author's forward reads and ours does not: a
    call with another value is refused.
    follows: whether a rotary table has the dtype of its input, or fp32.
    softcap: of a causal LM's logits, 0: none.  logp: whether its loss is
    ck.linear_logp's; of a head, whether it can score targets.
    """

    order: str = "chain"
    main_grad: bool = False
    weight: str | None = None
    bias: str | None = None
    eps: float = 0.0
    offset: float = 0.0
    follows: bool = True
    softcap: float = 0.0
    logp: bool = False
    eps_name: str | None = None
    reads: tuple[tuple[str, object], ...] = ()


def main_grad_of(module: torch.nn.Module, parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Destination of a parameter's gradient other than its ``grad``, or None."""
    if not (module._cute_kernels.main_grad and torch.is_grad_enabled()):
        return None
    return getattr(parameter, "main_grad", None)


def parameter_of(module: torch.nn.Module, name: str | None) -> torch.Tensor | None:
    """Parameter of a norm; None: the norm has none of this role."""
    return None if name is None else getattr(module, name)


def eps_of(module: torch.nn.Module) -> float:
    """Return the eps of a norm, which may have changed since the patch."""
    notes = module._cute_kernels
    checks.unchanged(module, notes.reads)
    if notes.eps_name is None:
        return notes.eps
    eps = getattr(module, notes.eps_name)
    return torch.finfo(torch.float32).eps if eps is None else eps  # None: nn.RMSNorm's default
