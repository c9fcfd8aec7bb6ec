"""Soft caps, cap · tanh(z / cap), of attention scores and of logits, and the ops that compute them.

A cap of scores is handed to the attention that the config names; one of logits is applied by the
causal LM's forward, behind its head.
"""

from __future__ import annotations

import inspect

import torch

from ...integrations import causal_lm
from .. import aten
from . import instance
from .classes import Part
from .report import Kind, Left, Replaced

_UNKNOWN = f"{instance.REASON}: whether it caps, and by what, is not known"
#: Where attention modules of transformers keep the cap that they hand on.
_OF_SCORES = "attn_logit_softcapping"


def of_scores(module: torch.nn.Module, cls: type) -> float:
    """Return the cap that a module passes to its attention; 0: none.

    Gemma 3's modules keep one that their forward does not read.
    """
    cap = getattr(module, _OF_SCORES, None)
    if not cap:
        return 0.0
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return float(cap) if code is not None and _OF_SCORES in code.co_names else 0.0


def scores(modules: list[Part], attending: set[int]) -> tuple[list[Replaced], list[Left]]:
    """Return the caps of scores in a model; ``attending``: ids of modules with our attention."""
    replaced, left = [], []
    for name, module, cls in modules:
        cap = of_scores(module, cls)
        if not cap:
            continue
        part = f"soft cap {cap:g} of scores"
        if instance.wrapping_forwards(module, cls) is None:
            left.append(Left(name, part, _UNKNOWN, kind=Kind.HIDDEN))
        elif id(module) in attending:
            replaced.append(Replaced(name, part, "attn_implementation='cute_kernels'"))
        else:
            left.append(Left(name, part, "part of the attention, which is left"))
    return replaced, left


def part_of_logits(cls: type, cap: float) -> str:
    """Name of the soft cap of a causal LM's logits in a report."""
    return f"{cls.__name__}: soft cap {cap:g} of logits"


def of_logits_left(lm: Part, devices: set[str]) -> list[Left]:
    """Report the cap of logits of a causal LM whose forward is not replaced."""
    cap = causal_lm.softcap(lm.module)
    if not cap:
        return []
    part = part_of_logits(lm.cls, cap)
    if instance.wrapping_forwards(lm.module, lm.cls) is None:
        return [Left(lm.name, part, _UNKNOWN, kind=Kind.HIDDEN)]
    facts = aten.ELEMENTWISE
    text = f"torch's tanh, in the author's forward: {facts.text}"
    return [Left(lm.name, part, text, facts.applies(devices), Kind.HIDDEN)]
