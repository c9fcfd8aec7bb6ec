"""Modules that our ops stand in for by their class: linear layers, embeddings, experts."""

from __future__ import annotations

import inspect
import sys

import torch
from torch import nn

from ... import nn as own_modules
from ...integrations import experts
from ...moe.config import MAX_EXPERTS
from ...runtime import data_parallel
from . import reading

#: Dtypes of parameters that our ops read.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Options of nn.Embedding that ck.embedding does not have -> their value where they are not set.
EMBEDDING_OPTIONS = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}


def forward_of(module: nn.Module, cls: type) -> tuple[str, str | None] | None:
    """Return (name of our forward, why it cannot take the module); None: it is none of these."""
    if isinstance(module, nn.Linear):
        return "linear", _why_not_linear(module, cls)
    if _is_conv1d(cls):
        return "conv1d", why_not_parameters(module, "weight")
    if isinstance(module, nn.Embedding):
        kind = "embedding" if cls.forward is nn.Embedding.forward else "embedding_step"
        return kind, _why_not_embedding(module, cls)
    if experts.is_experts(module):
        return "experts", _why_not_experts(module)
    return None


def why_not_parameters(module: nn.Module, *names: str) -> str | None:
    """Why an op of ours cannot read a module's own parameters, or those of names; None: it can."""
    parameters = [getattr(module, n) for n in names] or module.parameters(recurse=False)
    reasons = (_why_not_parameter(parameter) for parameter in parameters)
    return next((reason for reason in reasons if reason is not None), None)


def _why_not_parameter(weight: torch.Tensor) -> str | None:
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "its weight is not initialised yet"
    plain = type(weight) in (nn.Parameter, torch.Tensor) or _sharded_by_fsdp(weight)
    if not plain and not hasattr(weight, "ds_status"):
        return f"its weight is a {type(weight).__name__}, not a plain tensor (quantised, sharded?)"
    if weight.dtype not in _DTYPES:
        return f"its weight is {weight.dtype}; our ops take bfloat16, float16 and float32"
    return None


def _sharded_by_fsdp(weight: torch.Tensor) -> bool:
    """Whether a DTensor is one that fully_shard gathers before the module runs."""
    states = sys.modules.get(data_parallel.FSDP2_STATES)
    if states is None or not hasattr(weight, "full_tensor"):
        return False
    return any(state.sharded_param is weight for state in data_parallel._gathered(states))


def _is_conv1d(cls: type) -> bool:
    library = sys.modules.get("transformers.pytorch_utils")
    return library is not None and cls.forward is library.Conv1D.forward


def _why_not_linear(module: nn.Linear, cls: type) -> str | None:
    if own_modules.kind_of(module) is not None:
        return f"ck.nn.{cls.__name__} has a forward of its own; give the model an nn.Linear"
    if cls.forward is not nn.Linear.forward:
        return "a subclass of nn.Linear with a forward of its own (quantised?)"
    return why_not_parameters(module, "weight")


def _why_not_embedding(module: nn.Embedding, cls: type) -> str | None:
    for option in EMBEDDING_OPTIONS:
        if getattr(module, option):
            return f"{option} is set, which ck.embedding does not have"
    if cls.forward is not nn.Embedding.forward and not _looks_up_by_super(module, cls):
        return "a subclass of nn.Embedding with a forward of its own"
    return why_not_parameters(module, "weight")


def _looks_up_by_super(module: nn.Embedding, cls: type) -> bool:
    """Whether a forward leaves the look-up to super().forward, and calls no known op."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    if code is None or not {"super", "forward"} <= set(code.co_names):
        return False
    return not reading.named(module, cls)


def _why_not_experts(module: nn.Module) -> str | None:
    if module.num_experts > MAX_EXPERTS:
        return f"{module.num_experts} experts; ck.grouped_linear takes at most {MAX_EXPERTS}"
    return experts.why_not(module) or why_not_parameters(module)
