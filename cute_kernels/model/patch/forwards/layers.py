"""Forwards that `patch` gives to modules: each calls one op of ours on the module's tensors.

What a forward reads besides parameters and buffers is in the module's notes, which `patch` wrote.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch.nn.modules.module import _has_any_global_hook

from ....gemm import api as gemm
from ....integrations import experts as interface
from ....integrations import gathering
from ....integrations.sharded_head import Scoring, head_logp
from ....logp import api as logp
from ....moe import api as moe
from ....norm import api as norm
from ....rowwise import api as rowwise
from ....rowwise import op as rowwise_op
from ....rowwise.config import GATES
from ..state import (
    KIND,
    NOTES,
    eps_of,
    is_checked,
    main_grad_of,
    parameter_of,
    restore_frequencies,
    sums_of,
    unchanged,
)
from .modes import by_ours

# ---- experts -------------------------------------------------------------------------------------


def _linears(module: torch.nn.Module) -> interface.Linears:
    """Return the products of experts on one rank, in the order of their notes."""
    order = module._cute_kernels.order
    product = functools.partial(moe.grouped_linear, order=order)
    return interface.Linears(product, product, halves=order == "tree")


def experts_forward(
    cls: type,
    linears_of: Callable[[torch.nn.Module], interface.Linears] = _linears,
) -> Callable:
    """Return the forward of experts that ``use_experts_implementation`` decorates."""
    signature = inspect.signature(cls.forward)

    def activate(module, *parts: torch.Tensor) -> torch.Tensor:
        if module.has_gate and interface.gates_by_default(module):
            # Two roundings, as in a dense MLP.
            gate, up = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
            product = gate_product(module.act_fn, gate, up)
            if product is not None:
                return product
        return _by_author(module, parts[0] if len(parts) == 1 else torch.cat(parts, -1))

    def forward(self, *args, **kwargs):
        if kwargs or len(args) != 3:
            args = tuple(signature.bind(self, *args, **kwargs).arguments.values())[1:]
        return interface.run(self, *args, activate, linears_of(self))

    return forward


@torch.compiler.disable
def _by_author(module: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Compute the author's own gate or activation; a compiled graph breaks there."""
    with by_ours():
        return module._apply_gate(rows) if module.has_gate else module.act_fn(rows)


# ---- products -----------------------------------------------------------------------------------


def linear(self, input: torch.Tensor) -> torch.Tensor:
    """y = x Wᵀ + b."""
    return gemm.linear(input, self.weight, self.bias, **sums_of(self))


def head(
    self,
    input: torch.Tensor,
    target: torch.Tensor | None = None,
    scoring: Scoring | None = None,
) -> torch.Tensor:
    """As `linear`; with a target, log softmax(x Wᵀ + b)[target] without the logits."""
    if target is None:
        return gemm.linear(input, self.weight, self.bias, **sums_of(self))
    return head_scores(self, input, target, scoring, main_grad_of(self, self.weight))


def conv1d(self, x: torch.Tensor) -> torch.Tensor:
    """y = x W + b, W [K, N]: transformers' Conv1D."""
    sums = sums_of(self)
    if sums["main_grad"] is not None:
        sums["main_grad"] = sums["main_grad"].mT
    return gemm.linear(x, self.weight.mT, self.bias, **sums)


# ---- norms and activations ----------------------------------------------------------------------


def rms_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
    """y = x / √(mean(x²) + eps) · (w + offset)."""
    notes = self._cute_kernels
    weight = parameter_of(self, notes.weight)
    into = main_grad_of(self, weight)
    return norm.rms_norm(hidden_states, weight, eps_of(self), offset=notes.offset, main_grad=into)


def layer_norm(self, input: torch.Tensor) -> torch.Tensor:
    """y = (x - mean(x)) / √(var(x) + eps) · w + b."""
    notes = self._cute_kernels
    weight, bias = parameter_of(self, notes.weight), parameter_of(self, notes.bias)
    into = {"main_grad": main_grad_of(self, weight), "bias_main_grad": main_grad_of(self, bias)}
    return norm.layer_norm(input, weight, bias, eps_of(self), **into)


def activation(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    """Return a forward that computes a function of each element."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        unchanged(self, self._cute_kernels.reads)
        return function(input)

    return forward


# ---- look-ups -----------------------------------------------------------------------------------


def embedding(self, input: torch.Tensor) -> torch.Tensor:
    """Rows of the table."""
    unchanged(self, self._cute_kernels.reads)
    into = main_grad_of(self, self.weight)
    return rowwise.embedding(input, self.weight, padding_idx=self.padding_idx, main_grad=into)


class EmbeddingStep(torch.nn.Embedding):
    """Look-up below a subclass's own forward (Gemma's, which scales what it gets)."""

    forward = embedding


class ParallelEmbeddingStep(torch.nn.Embedding):
    """`EmbeddingStep` of a table whose entries are cut over ranks."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up rows of all ranks."""
        return parallel_forwards()["embedding_parallel"](self, input)


@torch.no_grad()
def rotary(
    self,
    x: torch.Tensor,
    position_ids: torch.Tensor,
    layer_type: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin of position · frequency, times the scaling of the table."""
    unchanged(self, self._cute_kernels.reads)
    prefix = "" if layer_type is None else f"{layer_type}_"
    name = f"{prefix}inv_freq"
    of_another_dtype = getattr(self, name).dtype != torch.float32
    if of_another_dtype or not (torch.compiler.is_compiling() or is_checked(self, name)):
        # After the patch, ``model.to(dtype)`` may have rounded them.
        restore_frequencies(self)
    frequencies = getattr(self, name).to(x.device)
    scaling = getattr(self, f"{prefix}attention_scaling", 1.0)
    dtype = x.dtype if self._cute_kernels.follows else torch.float32
    return rowwise.rotary_table(position_ids, frequencies, scaling, dtype)


def parallel_forwards() -> dict[str, Callable]:
    """Return the forwards over ranks; at the first use, as models that are not cut need none."""
    from ...parallel import forwards

    return forwards.FORWARDS


# ---- scores of a head ----------------------------------------------------------------------------


def head_scores(
    head: torch.nn.Module,
    hidden: torch.Tensor,
    target: torch.Tensor,
    scoring: Scoring,
    main_grad: torch.Tensor | None,
) -> torch.Tensor:
    """Compute log p of each target, by a head whose parameters may be held in parts."""
    is_gathered = not torch.compiler.is_compiling() and any(
        map(gathering.is_sharded, head.parameters())
    )
    if is_gathered:
        return head_logp(head, hidden, target, scoring)
    options = scoring.options()
    return logp.linear_logp(hidden, head.weight, target, head.bias, main_grad=main_grad, **options)


def gate_product(
    activation: torch.nn.Module, gate: torch.Tensor, up: torch.Tensor
) -> torch.Tensor | None:
    """f(gate) · up in one launch; None: another activation, or hooks want to see f(gate)."""
    if not is_ours(activation, GATES):
        return None
    unchanged(activation, activation._cute_kernels.reads)
    return rowwise_op.gated(gate, up, vars(type(activation))[KIND], True)


# ---- conditions ----------------------------------------------------------------------------------


def is_ours(module: torch.nn.Module, kinds: tuple[str, ...]) -> bool:
    """Whether a call of a module runs our forward of one of these kinds, and nothing else."""
    kind = vars(type(module)).get(KIND)
    return kind in kinds and NOTES in vars(module) and is_bare(module)


def is_bare(module: torch.nn.Module) -> bool:
    """Whether a call of a module runs its class's forward and nothing else."""
    hooked = (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
        or _has_any_global_hook()
    )
    return not hooked


def is_plain_pair(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an op of two tensors has no broadcast, no promotion and no subclass's own rules."""
    return (
        type(a) is type(b) is torch.Tensor
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.device == b.device
    )
