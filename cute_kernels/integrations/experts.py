"""``experts_implementation="cute_kernels"`` for Hugging Face transformers.

    from cute_kernels.integrations import transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="cute_kernels")

The experts of a mixture run as ``ck.moe.permute``, ``ck.grouped_linear`` and ``ck.moe.combine``: a
token's result does not depend on the other tokens or on the load of its experts.  The router is the
model's own: ``ck.patch(model)`` gives it and the experts our bits, without this name.

Experts are cut over ranks by ``DistributedConfig(ep_size=, ep_implementation="cute_kernels")``
(expert_parallel.py), or by `shard_experts` where a model is not loaded so; both run as
``ck.moe.dispatch``, ``ck.grouped_linear`` and ``ck.moe.combine``.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from ..errors import ArgumentTypeError, ArgumentValueError, expected
from ..moe import api as moe
from ..rowwise import api as rowwise
from ..rowwise import op as rowwise_op
from ..runtime import plan_cache, process_groups

NAME = "cute_kernels"


class Linears(NamedTuple):
    """The products of experts, each (rows, weight, offsets, bias) -> rows.

    up, down: the first and the second one.  read: a parameter of the module -> the tensor that is
    multiplied.  halves: whether the gate and up of a default gate are products of their own, whose
    gradients of the rows are two sums, as those of a dense MLP: ranks cut both.
    """

    up: Callable[..., torch.Tensor] = moe.grouped_linear
    down: Callable[..., torch.Tensor] = moe.grouped_linear
    read: Callable[[torch.Tensor], torch.Tensor] = lambda parameter: parameter
    halves: bool = False


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
        ArgumentValueError: experts that transformers' own ``ep_implementation``s cut over ranks, a
            norm behind each expert; on a CPU, an
            activation or a gate that our ops do not have, outside of ``ck.batch_invariant()``:
            torch's there gives an element other bits at another place.  And what `grouped_linear`,
            `moe.permute` and `moe.combine` raise.
    """
    return run(module, hidden_states, top_k_index, top_k_weights, _activate, Linears())


def run(
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    activate: Callable[..., torch.Tensor],
    linears: Linears,
) -> torch.Tensor:
    """Compute `experts` with ``activate`` between the two products ``linears``.

    activate: ``activate(module, rows)``, or ``activate(module, gate, up)`` of two halves.
    """
    _check(module)
    if is_cut(module):
        want = f"experts on this rank alone, or ep_implementation={NAME!r}"
        raise ArgumentValueError(expected("module", want, "experts cut over ranks"))
    rows, permutation = moe.permute(hidden_states, top_k_index, module.num_experts)
    rows = _products(module, rows, permutation.offsets, activate, linears)
    return moe.combine(rows, top_k_weights, permutation)


def parallel_experts(
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    group: object,
    verify: bool = True,
) -> torch.Tensor:
    """`experts` of which every rank of ``group`` has a contiguous part, and tokens of its own.

    Args:
        module: This rank's experts; ``module.num_experts`` is their number.
        hidden_states, top_k_index, top_k_weights: As in `experts`, with indices of all experts.
        group, verify: As in ``ck.moe.dispatch``.

    Raises:
        ArgumentValueError: the model's ``experts_implementation`` is another one.  Others: as
            `experts` and ``ck.moe.dispatch``.
    """
    _check(module)
    implementation = module.config._experts_implementation
    if implementation != NAME:
        want = f"{NAME!r} for experts that it cut over ranks"
        raise ArgumentValueError(expected("experts_implementation", want, repr(implementation)))
    total = module.num_experts * process_groups.group_of(group, "group").size()
    rows, dispatch = moe.dispatch(hidden_states, top_k_index, total, group=group, verify=verify)
    rows = _products(module, rows, dispatch.offsets, _activate, Linears())
    return moe.combine(rows, top_k_weights, dispatch)


def shard_experts(model: nn.Module, group: object, *, verify: bool = True) -> list[str]:
    """Keep this rank's part of the experts of a model that every rank has whole.

    Rank r of R keeps the experts r E / R to (r + 1) E / R - 1.  Every rank calls the model with
    tokens of its own, and equally often.  Parameters become new ones, so call it before an
    optimizer or ``fully_shard`` sees the model.  Leave them out of ``fully_shard``
    (``ignored_params``), or give their modules a mesh of the ranks that hold the same experts.

    Args:
        model: Model of transformers with ``experts_implementation="cute_kernels"``.
        group, verify: As in ``ck.moe.dispatch``.

    Returns:
        Names of the modules whose experts were cut.

    Raises:
        ArgumentTypeError: experts that are in parts already (DTensors).
        ArgumentValueError: no module has experts that transformers decorates; a number of experts
            that is no multiple of the ranks; and what `experts` raises for its module.
    """
    size = process_groups.group_of(group, "group").size()
    named = [(name, m) for name, m in model.named_modules() if is_experts(m)]
    if not named:
        want = "modules decorated by transformers' use_experts_implementation"
        raise ArgumentValueError(expected("model", want, "none"))
    for name, module in named:
        _check(module)
        _check_whole(name, module, size)
    for _, module in named:
        _keep_part(module, group, verify)
    return [name for name, _ in named]


def _check_whole(name: str, module: nn.Module, ranks: int) -> None:
    if is_cut(module):
        want = "experts that are not cut over ranks yet"
        raise ArgumentValueError(expected(name, want, "experts cut over ranks"))
    if module.num_experts % ranks:
        want = f"a number of experts that is a multiple of {ranks}, the ranks of group"
        raise ArgumentValueError(expected(name, want, module.num_experts))
    for key, parameter in module.named_parameters():
        if hasattr(parameter, "to_local"):
            want = "a whole parameter (call shard_experts before fully_shard)"
            raise ArgumentTypeError(expected(f"{name}.{key}", want, "a DTensor"))
        if parameter.shape[:1] != (module.num_experts,):
            want = f"a first dimension of {module.num_experts}, the experts"
            raise ArgumentValueError(expected(f"{name}.{key}", want, list(parameter.shape)))


def _keep_part(module: nn.Module, group: object, verify: bool) -> None:
    ranks = process_groups.group_of(group, "group")
    module.num_experts //= ranks.size()
    first = ranks.rank() * module.num_experts
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = parameter.detach()[first : first + module.num_experts].clone()
        setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    module._is_expert_parallel = True

    def forward(self, hidden_states, top_k_index, top_k_weights):
        inputs = hidden_states, top_k_index, top_k_weights
        return parallel_experts(self, *inputs, group=group, verify=verify)

    # The class's forward would follow the config to other implementations.
    module.forward = types.MethodType(forward, module)


def _products(
    module: nn.Module,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    activate: Callable[..., torch.Tensor],
    linears: Linears,
) -> torch.Tensor:
    """Both products of each row with its expert, and the gate or activation between them."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    weight, bias = _operands(module, name, linears.read)
    if linears.halves and module.has_gate and gates_by_default(module):
        biases = (None, None) if bias is None else bias.chunk(2, 1)
        halves = zip(weight.chunk(2, 1), biases, strict=True)
        parts = [linears.up(rows, half, offsets, of_half) for half, of_half in halves]
    else:
        parts = [linears.up(rows, weight, offsets, bias)]
    weight, bias = _operands(module, "down_proj", linears.read)
    return linears.down(activate(module, *parts), weight, offsets, bias)


def is_experts(module: nn.Module) -> bool:
    """Whether a module is decorated by transformers' ``use_experts_implementation``."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def is_cut(module: nn.Module) -> bool:
    """Whether ranks share the experts; releases such as 5.17 do not know of it."""
    return getattr(module, "_is_expert_parallel", False)


def has_norm(module: nn.Module) -> bool:
    """Whether a norm follows each expert; releases such as 5.19 do not know of it."""
    return getattr(module, "has_post_expert_norm", False)


def why_not(module: nn.Module) -> str | None:
    """Why these experts cannot run here; None: they can."""
    if is_cut(module):
        return "experts cut over ranks"
    if has_norm(module):
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
    if has_norm(module):
        want = "experts without a norm behind each (it is not available)"
        raise ArgumentValueError(expected("module", want, type(module).__name__))


def _operands(
    module: nn.Module, name: str, read: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(weight [E, N, K], bias [E, N] or None) of one product."""
    weight = read(getattr(module, name))
    weight = weight.mT if module.is_transposed else weight
    return weight, read(getattr(module, f"{name}_bias")) if module.has_bias else None


def _activate(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    if not module.has_gate:
        if activation(module.act_fn) == "silu":
            return rowwise.silu(rows)
        _require_mode("act_fn", type(module.act_fn).__name__, rows)
        return module.act_fn(rows)
    kind = activation(module.act_fn) if gates_by_default(module) else None
    if kind is not None:
        return rowwise_op.gated(*rows.chunk(2, dim=-1), kind, True)
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
