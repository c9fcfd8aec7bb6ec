"""Soft caps, cap · tanh(z / cap), of attention scores and of logits, and the ops that compute them.

A cap of scores is handed to the attention that the config names; one of logits is applied by the
causal LM's forward, behind its head.
"""

from __future__ import annotations

import inspect

import torch

from ....integrations import causal_lm
from ... import aten
from .. import instance
from ..classes import user_class
from ..report import Left, Replaced

#: Where attention modules of transformers keep the cap that they hand on.
_OF_SCORES = "attn_logit_softcapping"


def of_scores(module: torch.nn.Module) -> float:
    """Return the cap that a module passes to its attention; 0: none.

    Gemma 3's modules keep one that their forward does not read.
    """
    cap = getattr(module, _OF_SCORES, None)
    if not cap:
        return 0.0
    code = getattr(inspect.unwrap(user_class(module).forward), "__code__", None)
    return float(cap) if code is not None and _OF_SCORES in code.co_names else 0.0


def scores(model: torch.nn.Module, attends: set[int]) -> tuple[list[Replaced], list[Left]]:
    """Return the caps of scores in a model; ``attends``: ids of the modules with our attention."""
    replaced, left = [], []
    for name, module in model.named_modules():
        cap = of_scores(module)
        if not cap:
            continue
        part = f"soft cap {cap:g} of scores"
        if instance.around(module, user_class(module)) is None:
            reason = f"{instance.REASON}: whether it caps, and by what, is not known"
            left.append(Left(name, part, reason))
        elif id(module) in attends:
            replaced.append(Replaced(name, part, "attn_implementation='cute_kernels'"))
        else:
            left.append(Left(name, part, "part of the attention, which is left"))
    return replaced, left


def part_of_logits(cls: type, cap: float) -> str:
    """Name of the soft cap of a causal LM's logits in a report."""
    return f"{cls.__name__}: soft cap {cap:g} of logits"


def of_logits_left(name: str, module: torch.nn.Module, cls: type, devices: set[str]) -> list[Left]:
    """Report the cap of logits of a causal LM whose forward is not replaced."""
    cap = causal_lm.softcap(module)
    if not cap:
        return []
    part = part_of_logits(cls, cap)
    if instance.around(module, cls) is None:
        reason = f"{instance.REASON}: whether it caps, and by what, is not known"
        return [Left(name, part, reason)]
    facts = aten.CALLED["tanh"]
    text = f"torch's tanh, in the author's forward: {facts.text}"
    return [Left(name, part, text, facts.applies(devices))]
