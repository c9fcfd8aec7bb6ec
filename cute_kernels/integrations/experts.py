"""``experts_implementation="cute_kernels"`` for Hugging Face transformers.

    from cute_kernels.integrations import transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="cute_kernels")

The experts of a mixture run as ``ck.moe.permute``, ``ck.grouped_linear`` and ``ck.moe.combine``: a
token's result does not depend on the other tokens or on the load of its experts.  The router is the
model's own: ``ck.batch_invariant()`` around the model gives its product and softmax our bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..errors import ArgumentTypeError, ArgumentValueError, expected
from ..moe import api as moe
from ..rowwise import api as rowwise
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

    A token's results are added in the order of its experts in fp32 and rounded once; transformers'
    own forms round each product to the dtype of the model.

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
    _check(module)
    rows, permutation = moe.permute(hidden_states, top_k_index, module.num_experts)
    offsets = permutation.offsets
    if module.has_gate:
        rows = _gate(module, _linear(module, "gate_up_proj", rows, offsets))
    else:
        rows = _activation(module, _linear(module, "up_proj", rows, offsets))
    rows = _linear(module, "down_proj", rows, offsets)
    return moe.combine(rows, top_k_weights, permutation)


def _check(module: nn.Module) -> None:
    if not hasattr(module, "has_gate"):
        want = "experts decorated by transformers' use_experts_implementation"
        raise ArgumentTypeError(expected("module", want, type(module).__name__))
    if module._is_expert_parallel:
        want = "experts on this rank alone (expert parallelism is not available)"
        raise ArgumentValueError(expected("module", want, "experts cut over ranks"))
    if module.has_post_expert_norm:
        want = "experts without a norm behind each (it is not available)"
        raise ArgumentValueError(expected("module", want, type(module).__name__))


def _linear(
    module: nn.Module, name: str, rows: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    weight = getattr(module, name)
    weight = weight.mT if module.is_transposed else weight
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    return moe.grouped_linear(rows, weight, offsets, bias)


def _gate(module: nn.Module, gate_up: torch.Tensor) -> torch.Tensor:
    from transformers.integrations.moe import _default_apply_gate

    ours = _gated_op(module.act_fn) if hasattr(module, "act_fn") else None
    if type(module)._apply_gate is _default_apply_gate and ours is not None:
        return ours(*gate_up.chunk(2, dim=-1))
    _require_mode("_apply_gate", type(module).__name__, gate_up)
    return module._apply_gate(gate_up)


def _activation(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    if _is_silu(module.act_fn):
        return rowwise.silu(rows)
    _require_mode("act_fn", type(module.act_fn).__name__, rows)
    return module.act_fn(rows)


def _gated_op(act: nn.Module) -> Callable[..., torch.Tensor] | None:
    """Our f(gate) up of an activation; None: there is none."""
    from transformers import activations

    if _is_silu(act):
        return rowwise.silu_mul
    exact = type(act) is nn.GELU and act.approximate == "none"
    if exact or (type(act) is activations.GELUActivation and act.act is nn.functional.gelu):
        return rowwise.gelu_mul
    return None


def _is_silu(act: nn.Module) -> bool:
    from transformers import activations

    return type(act) in (nn.SiLU, activations.SiLUActivation)


def _require_mode(name: str, what: str, rows: torch.Tensor) -> None:
    """Refuse torch's functions of elements on a CPU, unless `ck.batch_invariant` has them."""
    mode = torch._C._dispatch_tls_is_dispatch_key_included(plan_cache.MODE)
    if rows.device.type == "cpu" and not mode:
        want = "one that ck.silu_mul or ck.gelu_mul computes, or a call in ck.batch_invariant()"
        raise ArgumentValueError(expected(f"module.{name}", want, what))
