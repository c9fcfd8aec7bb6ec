"""``experts_implementation="cute_kernels"`` for Hugging Face transformers.

    from cute_kernels.integrations import transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="cute_kernels")

The experts of a mixture run as ``ck.moe.permute``, ``ck.grouped_linear`` and ``ck.moe.combine``: a
token's result does not depend on the other tokens or on the load of its experts.  The router is the
model's own: ``ck.patch(model)`` gives it and the experts our bits, without this name.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..errors import ArgumentTypeError, ArgumentValueError, expected
from ..moe import api as moe
from ..rowwise import api as rowwise
from ..rowwise import gated_steps
from ..runtime import plan_cache

NAME = "cute_kernels"


def register() -> None:
    """Register the name with transformers, where it has an interface for experts."""
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError:  # a version without one
        return
    ExpertsInterface.register(NAME, experts)


def experts(
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Experts interface of transformers.

    An expert has the bytes of a dense MLP of the same weights: f(gate) is rounded before it is
    multiplied with up.  A token's results are added in the order of its experts in fp32 and rounded
    once; transformers' own forms round each product to the dtype of the model.

    Args:
        module: Experts with ``gate_up_proj`` (or ``up_proj``) and ``down_proj``, [E, N, K] or
            transposed, with biases or without.
        hidden_states: [T, D].  top_k_index: [T, k].  top_k_weights: [T, k].

    Returns:
        [T, D], the dtype of ``hidden_states``.

    Raises:
        ArgumentTypeError: ``module`` is not decorated by ``use_experts_implementation``.
        ArgumentValueError: experts cut over ranks, a norm behind each expert; on a CPU, an
            activation or a gate that our ops do not have, outside of ``ck.batch_invariant()``:
            torch's there gives an element other bits at another place.  And what `grouped_linear`,
            `moe.permute` and `moe.combine` raise.
    """
    return run(module, hidden_states, top_k_index, top_k_weights, _activate)


def run(
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    activate: Callable[[nn.Module, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Compute `experts` with ``activate(module, rows)`` between the two products."""
    _check(module)
    rows, permutation = moe.permute(hidden_states, top_k_index, module.num_experts)
    offsets = permutation.offsets
    name = "gate_up_proj" if module.has_gate else "up_proj"
    rows = activate(module, _linear(module, name, rows, offsets))
    rows = _linear(module, "down_proj", rows, offsets)
    return moe.combine(rows, top_k_weights, permutation)


def is_experts(module: nn.Module) -> bool:
    """Whether a module is decorated by transformers' ``use_experts_implementation``."""
    return hasattr(module, "has_gate") and hasattr(module, "_is_expert_parallel")


def why_not(module: nn.Module) -> str | None:
    """Why these experts cannot run here; None: they can."""
    if module._is_expert_parallel:
        return "experts cut over ranks (expert parallelism is not available)"
    if module.has_post_expert_norm:
        return "a norm behind each expert (it is not available)"
    return None


def gates_by_default(module: nn.Module) -> bool:
    """Whether the gate is transformers' f(gate) up of two halves."""
    from transformers.integrations.moe import _default_apply_gate

    return type(module)._apply_gate is _default_apply_gate and hasattr(module, "act_fn")


def _check(module: nn.Module) -> None:
    if not is_experts(module):
        want = "experts decorated by transformers' use_experts_implementation"
        raise ArgumentTypeError(expected("module", want, type(module).__name__))
    reason = why_not(module)
    if reason is not None:
        want = "experts that are whole, without a norm behind each"
        raise ArgumentValueError(expected("module", want, reason))


def _linear(
    module: nn.Module, name: str, rows: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    weight = getattr(module, name)
    weight = weight.mT if module.is_transposed else weight
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    return moe.grouped_linear(rows, weight, offsets, bias)


def _activate(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    if not module.has_gate:
        if activation(module.act_fn) == "silu":
            return rowwise.silu(rows)
        _require_mode("act_fn", type(module.act_fn).__name__, rows)
        return module.act_fn(rows)
    kind = activation(module.act_fn) if gates_by_default(module) else None
    if kind is not None:
        return gated_steps.gate_in_steps(kind, *rows.chunk(2, dim=-1))
    _require_mode("_apply_gate", type(module).__name__, rows)
    return module._apply_gate(rows)


def activation(act: nn.Module) -> str | None:
    """Name of our function of an activation (one of rowwise's GATES); None: there is none."""
    from transformers import activations

    if type(act) in (nn.SiLU, activations.SiLUActivation):
        return "silu"
    exact = type(act) is nn.GELU and act.approximate == "none"
    if exact or (type(act) is activations.GELUActivation and act.act is nn.functional.gelu):
        return "gelu"
    return None


def _require_mode(name: str, what: str, rows: torch.Tensor) -> None:
    """Refuse torch's functions of elements on a CPU, unless `ck.batch_invariant` has them."""
    mode = torch._C._dispatch_tls_is_dispatch_key_included(plan_cache.MODE)
    if rows.device.type == "cpu" and not mode:
        want = "one that ck.silu_mul or ck.gelu_mul computes, or a call in ck.batch_invariant()"
        raise ArgumentValueError(expected(f"module.{name}", want, what))
